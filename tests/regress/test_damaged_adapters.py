"""A damaged adapter raised whatever Python makes of it, was taken in part, or for a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixkv.errors import ModelLoadError, UnsupportedModelError
from radixkv.executor.lora import read_lora

pytestmark = [pytest.mark.needs_peft, pytest.mark.filterwarnings("ignore")]  # peft warns of what it drops

Weights: TypeAlias = dict[str, torch.Tensor]
LAYER = "model.layers.0.self_attn.q_proj"
SHAPES = {LAYER: (6, 8)}
A = f"base_model.model.{LAYER}.lora_A.weight"
B = f"base_model.model.{LAYER}.lora_B.weight"
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    save_file({A: torch.ones(2, 8), B: torch.ones(6, 2)}, str(tmp_path / "adapter_model.safetensors"))
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **changes}))


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    path = folder / "adapter_model.safetensors"
    weights = change(load_file(str(path)))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, str(path))


def test_the_whole_one_is_read(folder: Path) -> None:
    assert read_lora(folder, SHAPES)[LAYER].scale == 2.0
    configure(folder, use_rslora=True, new_feature_2030=False, another_one=None)  # off is as good as unknown
    assert read_lora(folder, SHAPES)[LAYER].scale == pytest.approx(4 / 2**0.5)


@pytest.mark.parametrize("alpha", ["16", None, [1], True, float("nan"), float("inf")])
def test_the_scale_is_a_number(folder: Path, alpha: object) -> None:
    configure(folder, lora_alpha=alpha)
    with pytest.raises(ModelLoadError, match="lora_alpha must be a finite number"):
        read_lora(folder, SHAPES)


@pytest.mark.parametrize("rank", ["2", None, 0, -1, 2.5, True])
def test_the_rank_is_a_number(folder: Path, rank: object) -> None:
    configure(folder, r=rank)
    with pytest.raises(ModelLoadError, match="adapter"):
        read_lora(folder, SHAPES)


@pytest.mark.parametrize(
    ("name", "value"), [("use_rslora", "false"), ("use_rslora", 1), ("rank_pattern", ["q"])]
)
def test_settings_of_another_kind_are_refused(folder: Path, name: str, value: object) -> None:
    configure(folder, **{name: value})
    with pytest.raises(ModelLoadError, match=f"{name} must be|no readable adapter"):
        read_lora(folder, SHAPES)


def test_what_peft_does_not_know_is_refused_by_name(folder: Path) -> None:
    """Fault seen: peft drops it with a warning, and nobody looks at the file itself."""
    configure(folder, new_feature_2030=True)
    with pytest.raises(UnsupportedModelError, match="new_feature_2030=True"):
        read_lora(folder, SHAPES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {**w, A: torch.tensor(1.0)}, "must be a matrix of floats"),
        (lambda w: {**w, A: torch.ones(8)}, "must be a matrix of floats"),
        (lambda w: {**w, A: torch.ones(2, 8, 1)}, "must be a matrix of floats"),
        (lambda w: {**w, A: torch.ones(2, 8, dtype=torch.complex64)}, "must be a matrix of floats"),
        (lambda w: {**w, A: torch.ones(2, 8, dtype=torch.int64)}, "must be a matrix of floats"),
        (lambda w: {A: torch.ones(0, 8), B: torch.ones(6, 0)}, "has an adapter of"),
        (lambda w: {**w, A.removeprefix("base_model.model."): torch.ones(2, 8)}, "two weights lora_A"),
    ],
)
def test_weights_that_fit_nowhere_are_refused(
    folder: Path, change: Callable[[Weights], Weights], message: str
) -> None:
    """Fault seen: each check of ``_pairs`` left out."""
    rewrite(folder, change)
    with pytest.raises(UnsupportedModelError, match=message):
        read_lora(folder, SHAPES)
