"""A scored request that was preempted after the weights had changed left the old model's log-probabilities
beside the new one's pages: whoever scored that prompt later was given them."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.testing import FakeExecutor
from radixkv.types import TokenIds

PROMPT: TokenIds = np.arange(1, 41, dtype=np.int32)


class OtherScores(FakeExecutor):
    """Other weights give other log-probabilities."""

    def _score(self, prefix_hash: int, target: int) -> float:
        return super()._score(prefix_hash, target) - self.weights_version


def run(engine: Engine) -> dict[int, list[float]]:
    """The prompt's log-probabilities by request."""
    scores = {}
    while engine.has_work:
        for output in engine.step():
            engine.check()
            assert output.error is None
            if output.finish_reason is not None and output.prompt_logprobs:
                scores[output.request_id] = [entry.logprob for entry in output.prompt_logprobs]
    return scores


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_scores_of_before_an_update_are_found_by_nobody(
    page_size: int, num_steps: int, num_samples: int
) -> None:
    """Fault seen: ``acquire`` that leaves ``num_old_logprobs`` at 0."""
    num_pages = 256 // page_size
    executor = OtherScores(num_pages=num_pages, page_size=page_size)
    config = EngineConfig(
        num_pages=num_pages, page_size=page_size, max_batch_tokens=8, policy="priority", max_running=2
    )
    engine = Engine.build(config, executor)
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0, n=num_samples, temperature=1.0, seed=1)
    engine.add(Request(request_id=1, prompt_ids=PROMPT, sampling=sampling))
    for _ in range(num_steps):
        engine.step()
    executor.update_weights(None)
    both = SamplingParams(max_tokens=1, n=2, temperature=1.0, seed=1)
    engine.add(Request(request_id=2, prompt_ids=PROMPT[6:8], priority=5, sampling=both))
    run(engine)
    assert engine.scheduler.stats()["num_priority_preemptions"] == 1
    engine.add(Request(request_id=3, prompt_ids=PROMPT, sampling=sampling))
    scores = run(engine)
    engine.add(Request(request_id=4, prompt_ids=PROMPT, sampling=sampling))
    scores.update(run(engine))
    cold = [entry.logprob for entry in executor.expected_token_logprobs(PROMPT.tolist(), 1, 0)]
    assert scores[3] == cold and scores[4] == cold
    assert engine.kv.stats()["num_logprobs_reused"] > 0  # those of the new weights are
