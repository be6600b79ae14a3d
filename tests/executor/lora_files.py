"""Adapters made by peft itself, and what peft's own forward gives with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixkv.testing import tiny_model

TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "qwen2": ["q_proj", "k_proj", "gate_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gemma2": ["o_proj", "up_proj", "lm_head"],
}


def save_adapter(folder: Path, family: str, seed: int, **options: Any) -> Path:
    """A random adapter for ``tiny_model(family)``, both halves far from zero."""
    import peft

    whole_layers = options.pop("save_embedding_layers", False)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[family], **options}
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(tiny_model(family).model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
    model.save_pretrained(str(folder), save_embedding_layers=whole_layers)
    return folder


def peft_logits(folder: Path | None, family: str, token_ids: list[int]) -> torch.Tensor:
    """``[num_tokens, vocab]`` of a plain forward by ``PeftModel``, or by the base model alone."""
    import peft

    model: Any = tiny_model(family).model
    model.set_attn_implementation("eager")  # sdpa of older transformers leaves soft caps out
    if folder is not None:
        model = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 97, num_tokens).tolist()
    return ids
