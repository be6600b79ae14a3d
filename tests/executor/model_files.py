"""Tiny model files for the loader's tests: a tokenizer, a Hugging Face folder, a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.testing.tiny_models import VOCAB_SIZE, tiny_model

CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
ROPE_THETA = 500.0
"""Not the default, so that a lost setting shows."""
SPECIALS = ["<unk>", "</s>", "<s>"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words ``w3 .. w96`` and three special tokens; white space splits."""
    vocab = {word: index for index, word in enumerate([*SPECIALS, *(f"w{i}" for i in range(3, VOCAB_SIZE))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", bos_token="<s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_folder(folder: Path, family: str = "llama") -> Any:
    """A Hugging Face folder of a tiny random model; returns the model."""
    model = tiny_model(family).model
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


BYTES = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
"""The printable part of GPT-2's byte alphabet; the rest follows from 256 on."""


def gguf_tokens() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary (every byte, three merges behind the specials) and its merges."""
    alphabet = BYTES + [chr(256 + i) for i in range(256 - len(BYTES))]
    merges = ["Ċ Ċ", "a b", "1 2"]
    return [*SPECIALS, *alphabet, *(merge.replace(" ", "") for merge in merges)], merges


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    pre: str = "smollm",
    architecture: str | None = None,
    extra_tensor: str | None = None,
    eot_token_id: int | None = None,
) -> Any:
    """A float32 GGUF of a tiny random model, laid out as llama.cpp's converter does; returns the model."""
    tokens, merges = gguf_tokens()
    overrides: dict[str, Any] = {"vocab_size": len(tokens)}
    if family != "gpt2":
        overrides["rope_parameters"] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    model = tiny_model(family, **overrides).model
    writer = gguf.GGUFWriter(str(path), architecture or family)
    _write_settings(writer, model.config, family)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    if eot_token_id is not None:
        writer.add_eot_token_id(eot_token_id)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[family], model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        stem, suffix = name.rsplit(".", 1)
        value = _as_llama_cpp(family, name, parameter.detach().numpy(), model.config)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(value))
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_settings(writer: Any, config: Any, family: str) -> None:
    heads = config.num_attention_heads
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    if family == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(ROPE_THETA)


def _as_llama_cpp(family: str, name: str, value: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """What the converters of llama.cpp do to a weight, each the other way round from the loader's."""
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        rows = value.shape[0] // heads
        order = [
            head * rows + half * (rows // 2) + pair
            for head in range(heads)
            for pair in range(rows // 2)
            for half in range(2)
        ]
        return value[order]
    if family == "gpt2" and (".c_attn.weight" in name or ".c_proj.weight" in name or ".c_fc.weight" in name):
        return value.T
    return value


def same_weights(one: Any, other: Any) -> bool:
    mine, yours = dict(one.named_parameters()), dict(other.named_parameters())
    return mine.keys() == yours.keys() and all(torch.allclose(mine[n], yours[n], atol=1e-6) for n in mine)
