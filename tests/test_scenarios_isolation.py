"""Scenarios over the whole engine: flushes under load, and very many namespaces.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.errors import InternalError, InvalidRequestError
from radixkv.namespace import namespace_of
from radixkv.sched.batch import Batch, StepResult
from radixkv.sequence import Request


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b088_flush_under_load_says_what_it_freed_and_what_is_held(page_size: int) -> None:
    """Three requests, one of them at work. Faults seen: ``flush`` does not raise the epoch; ``_is_stale``
    says no."""
    h = Harness(num_pages=1024 // page_size, page_size=page_size, max_running=1)
    h.generate(random_ids(9, 2 * page_size + 1), 1)
    prompts = [random_ids(seed, 3 * page_size) for seed in range(3)]
    ids = [h.add(prompt, 8) for prompt in prompts]
    h.step()
    assert [seq.request.request_id for seq in h.engine.scheduler.running] == ids[:1]
    report = h.engine.kv.flush()
    assert (report.num_pages_freed, report.num_pages_held) == (3, 3)
    h.run()
    h.assert_as_oracle()
    hits = [h.engine.kv.peek(h.requests[request_id]) for request_id in ids]
    assert hits == [0, 3 * page_size - 1, 3 * page_size - 1]


def test_b083_very_many_namespaces_share_nothing_and_leave_nothing_behind() -> None:
    """Fault seen: ``RadixTree._drop_empty_root`` does nothing."""
    h = Harness(num_pages=32, page_size=4, check_every=50)
    prompt = random_ids(1, 9)
    for i in range(400):
        assert h.generate(prompt, 1, namespace=namespace_of(cache_salt=f"{i}")).usage.cached_tokens == 0
    stats = h.engine.kv.stats()
    assert stats["tree_num_namespaces"] == -(-32 // 3) == stats["tree_num_nodes"]
    h.engine.kv.flush()
    assert h.engine.kv.stats()["tree_num_namespaces"] == 0


def test_an_adapter_has_namespaces_of_its_own() -> None:
    ids = np.array([1, 2, 3], np.int32)
    own = [
        Request(request_id=1, prompt_ids=ids, adapter=1, namespace=name).namespace for name in ((), ("x",))
    ]
    assert len({(), ("x",), *own}) == 4
    with pytest.raises(InvalidRequestError, match="adapter must lie in"):
        Request(request_id=1, prompt_ids=ids, adapter=-1, namespace=("x",))


@pytest.mark.parametrize("fault", ["missing", "nan", "no top", "nan top", "score"])
def test_an_executor_that_leaves_out_logprobs_has_failed(fault: str) -> None:
    """Fault seen: ``_refuse_missing_logprobs`` looks at the first row only."""
    h = Harness(num_pages=64, page_size=4)
    inner = h.executor.execute

    def execute(batch: Batch) -> StepResult:
        result = inner(batch)
        fields = dict(vars(result))
        if fault == "missing":
            fields["sampled_logprobs"] = np.empty(0, np.float32)
        elif fault == "nan":
            fields["sampled_logprobs"][-1] = np.nan
        elif fault == "no top":
            fields["top_logprobs"] = np.empty((0, 0), np.float32)
        elif fault == "nan top":
            fields["top_logprobs"][-1, 0] = np.nan
        elif len(batch.score_rows):
            fields["score_logprobs"][-1] = np.nan
        return StepResult(**fields)

    h.executor.execute = execute  # type: ignore[method-assign]
    ids = [h.add(random_ids(seed, 10), 3, logprobs=2, prompt_logprobs=0) for seed in range(2)]
    h.run()
    for request_id in ids:
        assert isinstance(h.finals[request_id].error, InternalError)
        assert "log-probabilities" in str(h.finals[request_id].error)
    h.assert_nothing_held()
