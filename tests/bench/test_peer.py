"""transformers' arm: what it is asked, what counts as an answer, and its place among the other arms."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fake_rig import FakeRig, encode

from radixkv.bench.arm import Arm, parse_arms
from radixkv.bench.comparison import run_interleaved
from radixkv.bench.harness import Settings
from radixkv.bench.peer import PeerResult, TransformersPeer
from radixkv.bench.workloads import Workload, arithmetic_workload
from radixkv.errors import ConfigError, InternalError

WORKLOAD = arithmetic_workload(encode, num_questions=3, max_tokens=4)


@dataclass
class Answer:
    generated_tokens: list[int]
    created_time: float
    timestamps: list[float]
    error: str | None = None


@dataclass
class FakeModel:
    """Answers request ``i`` with the tokens ``i, i, ...`` from second ``10 + i`` on."""

    num_tokens: int = 4
    num_answers: int = 3
    error: str | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    attention: str = ""

    def set_attn_implementation(self, name: str) -> None:
        self.attention = name

    def generate_batch(self, prompts: list[list[int]], **options: Any) -> dict[str, Answer]:
        self.asked = {"prompts": prompts, **options}
        return {
            f"req_{i}": Answer([i] * self.num_tokens, 10.0 + i, [11.0 + i, 12.0 + i, 13.0 + i], self.error)
            for i in range(self.num_answers)
        }


def peer_of(model: FakeModel) -> TransformersPeer:
    return TransformersPeer(model, max_batch_tokens=64, max_requests=2)


def test_it_is_asked_for_all_tokens_of_every_prompt_and_times_count_from_the_start() -> None:
    model = FakeModel()
    result = peer_of(model).run(WORKLOAD)
    assert model.attention == "sdpa"
    assert model.asked["prompts"] == [prompt.tolist() for prompt in WORKLOAD.prompts]
    generation, batching = model.asked["generation_config"], model.asked["continuous_batching_config"]
    assert (generation.max_new_tokens, generation.do_sample, generation.eos_token_id) == (4, False, -1)
    longest = max(map(len, WORKLOAD.prompts)) + 4
    assert batching.num_blocks >= 3 * -(-longest // TransformersPeer.PAGE_SIZE)
    assert (batching.max_batch_tokens, batching.max_requests_per_batch) == (64, 2)
    assert result.outputs == ((0,) * 4, (1,) * 4, (2,) * 4)
    assert result.ttft_s == (1.0, 2.0, 3.0)
    assert result.finished_s == (3.0, 4.0, 5.0) and result.wall_s == 5.0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FakeModel(num_tokens=3), "request 0 failed"),
        (FakeModel(error="out of blocks"), "request 0 failed: out of blocks"),
        (FakeModel(num_answers=2), "answered 2 of 3"),
    ],
)
def test_a_request_that_failed_or_is_missing_stops_the_run(model: FakeModel, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        peer_of(model).run(WORKLOAD)


def test_it_runs_once_and_only_the_first_requests() -> None:
    runs_of: list[int] = []

    class Peer:
        def run(self, workload: Workload) -> PeerResult:
            runs_of.append(len(workload.prompts))
            count = len(workload.prompts)
            return PeerResult(((1,) * 4,) * count, (0.1,) * count, (0.2,) * count, 0.2)

    rig = replace(FakeRig()(Namespace()), open_peer=lambda small: Peer())
    arms = parse_arms("transformers,radix", page_size=16)
    runs = run_interleaved(arms, WORKLOAD, rig, Settings(), repeats=2, num_peer_requests=2)
    assert runs_of == [2]
    assert [len(runs[arm.name]) for arm in arms] == [1, 2]
    (run,) = runs["transformers"]
    assert np.shape(run.outputs) == (2, 4) and run.wall_s == 0.2


@pytest.mark.parametrize(("names", "repeats"), [("transformers", 1), ("radix", 0)])
def test_what_cannot_run_is_refused_before_any_work(names: str, repeats: int) -> None:
    arms: list[Arm] = list(parse_arms(names, page_size=16))
    rig = FakeRig()(Namespace())
    with pytest.raises(ConfigError, match=r"needs a real model|at least 1, got 0"):
        run_interleaved(arms, WORKLOAD, rig, Settings(), repeats=repeats, num_peer_requests=1)
