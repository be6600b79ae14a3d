"""Random programs against the oracle: any mix of prompts, chunks, pools, aborts, preemptions, interrupts."""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import PAGE_SIZES, Harness
from numpy.typing import NDArray

from radixkv.sched.batch import Batch
from radixkv.types import PageIds


def interrupt(h: Harness, when: int) -> None:
    """Ctrl-C in the next forward, before or after its work, or none."""

    def raise_it(batch: Batch) -> None:
        h.executor.before = h.executor.after = None
        raise KeyboardInterrupt

    h.executor.before = raise_it if when == 0 else None
    h.executor.after = raise_it if when == 1 else None


def random_program(seed: int) -> dict[str, int]:
    """One engine with random settings and a handful of requests from a small alphabet; returns its stats.

    Long because the draws belong to one generator, in one order.
    """
    rng = np.random.default_rng(seed)

    def between(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    page_size = PAGE_SIZES[between(0, 3)]
    longest = {1: 20, 4: 30, 16: 44, 64: 140}[page_size]  # tokens of a prompt
    h = Harness(
        num_pages=-(-(longest + 6) // page_size) + between(0, 2 * longest) // page_size,
        page_size=page_size,
        max_batch_tokens=(between(1, 4) * max(2, page_size // 4), between(10, 40), 1000)[between(0, 2)],
        max_running=between(1, 6),
        decode_reserve_tokens=(0, 4, 32)[between(0, 2)],
        policy=("fcfs", "lpm")[between(0, 1)],
        max_skips=(0, 2, 64)[between(0, 2)],
        min_wait_tokens=(0, 4, 32)[between(0, 2)],
        prefix_cache=between(0, 9) > 0,
        check_every=11,
        fake={"vocab_size": (4, 50)[between(0, 1)], "eos_one_in": 9},
    )
    evict = h.engine.kv.tree.evict
    num_evicted = 0

    def counting_evict(num_pages: int, ref_count: NDArray[np.int32]) -> PageIds:
        nonlocal num_evicted
        num_evicted += num_pages
        return evict(num_pages, ref_count)

    h.engine.kv.tree.evict = counting_evict  # type: ignore[method-assign]
    prompts = [rng.integers(1, 4, longest).tolist() for _ in range(2)]
    left = between(3, 6)
    while left or h.engine.has_work:
        while left and between(0, 1) == 0:
            left -= 1
            prompt = prompts[between(0, 1)][: between(1, longest)]
            h.add(
                prompt,
                between(0, 7),
                namespace=("x",) if between(0, 5) == 0 else (),
                logprob_start=between(0, len(prompt) - 1) if between(0, 4) == 0 else None,
            )
        interrupt(h, between(0, 19))
        try:
            h.step()
        except KeyboardInterrupt:
            h.engine.check()
        if between(0, 7) == 0 and h.requests:
            h.abort(between(0, len(h.requests) - 1))
        running = h.engine.scheduler.running
        if running and between(0, 5) == 0:
            h.engine.scheduler._preempt(running[between(0, len(running) - 1)])
        if between(0, 19) == 0:
            h.engine.kv.flush()
    h.assert_as_oracle()
    for request_id, request in h.requests.items():
        if request.logprob_start is not None and h.finals[request_id].finish_reason != "abort":
            expected = h.executor.expected_logprobs(request.prompt_ids, request.logprob_start)
            assert list(h.finals[request_id].logprobs) == expected
    kv = h.engine.kv.stats()
    return {
        "hits": h.stats["cached_tokens"] > 0,
        "interrupts": h.stats["num_undone_steps"],
        "aborts": h.stats["num_aborted"],
        "preemptions": h.stats["num_preemptions"],
        "stops": sum(final.finish_reason == "stop" for final in h.finals.values()),
        "partial_copies": kv["num_partial_copies"],
        "evictions": num_evicted,
    }


@pytest.mark.parametrize("part", range(8))
def test_b045_random_programs_equal_the_oracle(part: int, long_run: bool) -> None:
    """2,000 programs in all.

    Fault seen: a batch leaves out its first page copy; ``_abandon`` preempts nobody; scores begin
    anew after a preemption; ``commit`` inserts what a flush made stale.
    """
    num_programs = 5000 if long_run else 250
    totals: dict[str, int] = {}
    for seed in range(part * num_programs, (part + 1) * num_programs):
        try:
            stats = random_program(seed)
        except BaseException:
            print(f"program {seed} failed")
            raise
        for name, value in stats.items():
            totals[name] = totals.get(name, 0) + value
    assert min(totals.values()) >= 25, totals  # nothing that matters was left out
