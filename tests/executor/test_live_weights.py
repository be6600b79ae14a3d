"""Weights replaced while the model is loaded: packed or not, tied or not, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.executor.hf import HFExecutor
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.testing import tiny_model

IDS = np.arange(3, 40, dtype=np.int32)


def executor_of(family: str, seed: int, pack: bool) -> HFExecutor:
    return HFExecutor(tiny_model(family, seed=seed), num_pages=16, page_size=4, pack=pack, num_threads=1)


def logits_of(executor: HFExecutor) -> torch.Tensor:
    seq = ProbeSeq(0, IDS, 0, len(IDS), np.arange(10, dtype=np.int32))
    return executor.logits(probe_batch(4, [seq], vocab_size=executor.spec.vocab_size))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2"])
def test_new_weights_make_it_the_other_model(family: str, pack: bool) -> None:
    """llama's head is tied to its embedding, GPT-2 keeps weights the other way round. Faults seen: tied
    weights are written once only; ``is_transposed`` is not asked."""
    executor, other = executor_of(family, 0, pack), executor_of(family, 7, pack)
    expected = logits_of(other)
    assert not torch.allclose(logits_of(executor), expected, atol=1e-2)
    weights = tiny_model(family, seed=7).model.state_dict()
    if family == "llama":
        del weights["lm_head.weight"]
    executor.update_weights(weights)
    assert executor.weights_version == 1
    assert torch.equal(logits_of(executor), expected)


@pytest.mark.parametrize("pack", [False, True])
def test_a_function_sees_the_weights_and_returns_some(pack: bool) -> None:
    executor = executor_of("llama", 0, pack)
    original = tiny_model("llama").model.state_dict()
    before = logits_of(executor)
    name = "model.layers.1.mlp.up_proj.weight"

    def doubled(weights: Mapping[str, Any]) -> dict[str, Any]:
        assert {key: tuple(weight.shape) for key, weight in weights.items()} == {
            key: tuple(weight.shape) for key, weight in original.items()
        }
        assert all(torch.equal(weights[key], original[key]) for key in original)
        weights["model.norm.weight"].zero_()  # a copy: changes nothing
        return {name: (weights[name] * 2).numpy()}

    executor.update_weights(doubled)
    changed = logits_of(executor)
    assert not torch.equal(before, changed)
    executor.update_weights({name: original[name]})
    assert torch.equal(logits_of(executor), before)
    assert executor.weights_version == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"no.such.weight": torch.zeros(1)}, "no weight of the name 'no.such.weight'"),
        ({3: torch.zeros(1)}, "no weight of the name 3"),
        ({"model.norm.weight": torch.zeros(5)}, r"must be of shape \(32,\), got \(5,\)"),
        ({"model.norm.weight": "text"}, "must be a tensor or an array"),
        ({"model.norm.weight": torch.full((32,), float("nan"))}, "not finite"),
        (
            {"lm_head.weight": torch.zeros(97, 32), "model.embed_tokens.weight": torch.ones(97, 32)},
            "are one weight",
        ),
        (["not", "a", "mapping"], "must map names to tensors"),
    ],
)
def test_bad_weights_change_nothing(bad: Any, message: str) -> None:
    executor = executor_of("llama", 0, True)
    before = logits_of(executor)
    good = {"model.layers.0.mlp.up_proj.weight": torch.zeros(48, 32)}
    with pytest.raises(ConfigError, match=message):
        executor.update_weights({**good, **bad} if isinstance(bad, dict) else bad)
    assert executor.weights_version == 0
    assert torch.equal(logits_of(executor), before)
