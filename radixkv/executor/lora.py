"""LoRA adapters in peft's format: read by peft's own loaders, refused where they ask for more than LoRA."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from radixkv.errors import ModelLoadError, UnsupportedModelError
from radixkv.executor.adapter_shelf import LoraPair
from radixkv.plain import plain_real, plain_whole, shown

_PREFIX = "base_model.model."
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_HANDLED = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "rank_pattern", "init_lora_weights",
        # where the adapter is, which its weights say themselves
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        # for training, or for a kind of layer that is not ours
        "lora_dropout", "eva_config", "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config",
        "inference_mode", "ensure_weight_tying", "qalora_group_size", "loftq_config",
        # labels
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    }
)  # fmt: skip
"""Fields of peft's configuration that may have any value; every other one must have its default."""
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Initialisations that leave the base weights alone; others train against changed ones."""


def read_lora(path: str | os.PathLike[str], shapes: Mapping[str, tuple[int, int]]) -> dict[str, LoraPair]:
    """The adapter in folder ``path``, by layer. ``shapes``: ``(out_features, in_features)`` of the model's
    linear layers, by name. Looks nowhere but in that folder.

    Raises ``ModelLoadError`` where peft is not installed or the folder holds no readable adapter, and
    ``UnsupportedModelError`` for what is more than plain LoRA (DoRA, trained biases, ``modules_to_save`` and
    so on, by name), or does not fit the model.
    """
    folder = Path(path)
    if not (folder / "adapter_config.json").is_file() or not any(
        (folder / f).is_file() for f in _WEIGHT_FILES
    ):
        raise ModelLoadError(
            f"{folder} holds no adapter: adapter_config.json and {' or '.join(_WEIGHT_FILES)} are needed"
        )
    try:
        from peft import LoraConfig, PeftConfig
        from peft.utils import load_peft_weights
    except ImportError as error:
        raise ModelLoadError(f"adapters need peft (pip install 'radixkv[lora]'): {error}") from error
    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # whatever a damaged file makes of peft and safetensors
        raise ModelLoadError(f"{folder} holds no readable adapter: {error}") from error
    _refuse_unknown(folder, config)
    if not isinstance(config, LoraConfig):
        raise UnsupportedModelError(
            f"{folder}: an adapter of type {config.peft_type}, only LoRA is supported"
        )
    _refuse_by_name(folder, config)
    _refuse_odd_values(folder, config)
    return _pairs(folder, config, weights, shapes)


def _refuse_by_name(folder: Path, config: Any) -> None:
    unusual = []
    for field in fields(config):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value = getattr(config, field.name)
        if field.name not in _HANDLED and value != default and value:
            unusual.append(f"{field.name}={value!r}")
    start = config.init_lora_weights
    if isinstance(start, str) and start not in _PLAIN_STARTS:
        unusual.append(f"init_lora_weights={start!r} (it changes the base weights)")
    if unusual:
        raise UnsupportedModelError(f"{folder}: not supported in an adapter: {', '.join(unusual)}")


def _refuse_unknown(folder: Path, config: Any) -> None:
    """peft drops, with a warning, what it does not know: a newer kind of adapter would pass for plain."""
    try:
        given = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder} holds no readable adapter: {error}") from error
    known = {field.name for field in fields(config)}
    unknown = [f"{name}={shown(value)}" for name, value in given.items() if name not in known and value]
    if unknown:
        raise UnsupportedModelError(
            f"{folder}: not supported in an adapter, and not known to this peft: {', '.join(unknown)}"
        )


def _refuse_odd_values(folder: Path, config: Any) -> None:
    """peft takes any value for any field."""
    rank, alpha, pattern = plain_whole(config.r), plain_real(config.lora_alpha), config.rank_pattern
    allowed = {
        "r must be a whole number of at least 1": rank is not None and rank >= 1,
        "lora_alpha must be a finite number": alpha is not None and math.isfinite(alpha),
        "use_rslora must be true or false": isinstance(config.use_rslora, bool),
        "rank_pattern must be a table": pattern is None or isinstance(pattern, dict),
    }
    wrong = [what for what, holds in allowed.items() if not holds]
    if wrong:
        raise ModelLoadError(f"{folder}: damaged adapter_config.json: {', '.join(wrong)}")


def _pairs(
    folder: Path, config: Any, weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, LoraPair]:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, weight in weights.items():
        if ".base_layer." in key:
            raise UnsupportedModelError(
                f"{folder}: {key} is a weight of the base model; save the adapter without it "
                "(save_embedding_layers=False)"
            )
        name, _, half = key.removeprefix(_PREFIX).rpartition(".lora_")
        if half not in ("A.weight", "B.weight") or name not in shapes:
            raise UnsupportedModelError(f"{folder}: {key} fits no linear layer of the model")
        both = halves.setdefault(name, {})
        if half[0] in both:
            raise UnsupportedModelError(f"{folder}: {name} has two weights lora_{half[0]}, one is {key}")
        if weight.dim() != 2 or not weight.is_floating_point():
            raise UnsupportedModelError(
                f"{folder}: {key} must be a matrix of floats, got {weight.dtype} of {tuple(weight.shape)}"
            )
        both[half[0]] = weight
    if not halves:
        raise UnsupportedModelError(f"{folder}: the adapter has no weights")
    pairs = {}
    for name, both in halves.items():
        if both.keys() != {"A", "B"}:
            raise UnsupportedModelError(f"{folder}: {name} has only one half, lora_{next(iter(both))}")
        a, b = both["A"], both["B"]
        rank, (out_features, in_features) = a.shape[0], shapes[name]
        if rank == 0 or a.shape != (rank, in_features) or b.shape != (out_features, rank):
            raise UnsupportedModelError(
                f"{folder}: {name} has an adapter of {tuple(a.shape)} and {tuple(b.shape)}, the layer goes "
                f"from {in_features} to {out_features} features"
            )
        if rank != config.r and not config.rank_pattern:
            raise UnsupportedModelError(
                f"{folder}: {name} has rank {rank}, the configuration says {config.r}"
            )
        if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise UnsupportedModelError(f"{folder}: {name} has weights that are not finite")
        pairs[name] = LoraPair(a, b, config.lora_alpha / (rank**0.5 if config.use_rslora else rank))
    return pairs
