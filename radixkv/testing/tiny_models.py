"""Tiny random models of every family: seconds to build, no files, the same numbers every time."""

from __future__ import annotations

from typing import Any

import torch

from radixkv.errors import ConfigError
from radixkv.executor.loaded_model import LoadedModel, spec_from_config

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2")
VOCAB_SIZE = 97
MAX_POSITIONS = 512
SLIDING_WINDOW = 7
"""Short, so that tests look past it."""


def tiny_model(family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> LoadedModel:
    """A random model of ``family`` (one of ``FAMILIES``), without a tokenizer.

    2 to 4 layers, 4 query heads, 2 K/V heads (GPT-2: 4), heads of 8 or 16, vocabulary of 97. Weights are
    larger than a trained model's, so that a wrong K or V shows in the logits. ``overrides`` go to
    transformers' configuration. Torch's own random state is left as it was.

    Raises ``ConfigError`` for an unknown family.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**_settings(family), **overrides}
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    spec = spec_from_config(config, name=f"tiny-{family}", dtype=dtype)
    return LoadedModel(model=model.eval(), tokenizer=None, spec=spec)


def _settings(family: str) -> dict[str, Any]:
    if family == "gpt2":
        return {
            "vocab_size": VOCAB_SIZE, "n_positions": MAX_POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4,
            "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": 2,
        }  # fmt: skip
    common = {
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "llama": {"num_hidden_layers": 3, "tie_word_embeddings": True},
        "qwen2": {},
        "qwen3": {"head_dim": 16},
        "mistral": {"sliding_window": SLIDING_WINDOW},
        "gemma2": {
            "sliding_window": SLIDING_WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,
        },
        "gemma3_text": {
            "num_hidden_layers": 4, "head_dim": 16, "sliding_window": SLIDING_WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    }  # fmt: skip
    if family not in own:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return {**common, **own[family]}
