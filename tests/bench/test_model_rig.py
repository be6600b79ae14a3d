"""The harness over a tiny random model: what a real executor measures, scores and computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_rig import encode

from radixkv.bench.arm import parse_arms
from radixkv.bench.comparison import judge, run_interleaved, summarise
from radixkv.bench.equality import Fork
from radixkv.bench.harness import Settings, score_gaps
from radixkv.bench.model_rig import rig_of
from radixkv.bench.rig import Rig
from radixkv.bench.workloads import Workload, arithmetic_workload, cut_prefix
from radixkv.testing.tiny_models import VOCAB_SIZE, tiny_model

SETTINGS = Settings(max_batch_tokens=64)


def _tiny_encode(text: str) -> list[int]:
    return [3 + token_id % (VOCAB_SIZE - 3) for token_id in encode(text)]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return rig_of(tiny_model("llama"), _tiny_encode, lambda ids: "", attention="reference")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return cut_prefix(arithmetic_workload(_tiny_encode, num_questions=5, max_tokens=4), 100)


def test_arms_are_equal_and_every_part_is_measured(rig: Rig, workload: Workload) -> None:
    arms = parse_arms("no-cache,radix,radix-p1", page_size=16)
    runs = run_interleaved(arms, workload, rig, SETTINGS, repeats=1, num_peer_requests=1)
    comparison = judge(arms, workload, runs, lambda forks: score_gaps(forks, rig, SETTINGS))
    assert comparison.equal_outputs is True
    assert rig.measure_floor is not None
    result = summarise(comparison, rig.measure_floor(64, 5))
    for arm in result["arms"].values():
        parts = {"matmul", "attention", "sampling", "forward_rest", "scheduler", "ledger", "outside"}
        assert set(arm["shares"]) == parts
        assert arm["shares"]["matmul"] > 0.0
        assert arm["shares"]["attention"] > 0.0
        assert 0.0 < arm["floor_s"] == pytest.approx(arm["wall_s"] / arm["wall_over_floor"])
    assert result["arms"]["radix"]["share_of_optimum"] >= 0.99
    assert result["arms"]["no-cache"]["floor_s"] > result["arms"]["radix"]["floor_s"]


def test_gaps_are_differences_of_log_probabilities(workload: Workload) -> None:
    loaded = tiny_model("llama")
    contexts = [workload.prompts[0], workload.prompts[1][:40]]
    expected = []
    with torch.inference_mode():
        for ids in contexts:
            logits = loaded.model(torch.tensor(ids[None]).long(), use_cache=False).logits[0, -1]
            expected.append(float(logits[7] - logits[11]))
    rig = rig_of(loaded, _tiny_encode, lambda ids: "", attention="reference")
    forks = [Fork(number, 0, np.asarray(ids), 7, 11) for number, ids in enumerate(contexts)]
    assert score_gaps(forks, rig, SETTINGS) == pytest.approx(expected, abs=1e-3)
