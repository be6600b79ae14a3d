"""Situations that broke real systems, on the whole engine over FakeExecutor: abort, preemption, fairness.

Each says which one-line fault it was seen failing against.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.config import POLICIES
from radixkv.sched.batch import Batch

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
every_policy = pytest.mark.parametrize("policy", POLICIES)


def test_b056_cancelling_one_stream_never_disturbs_the_others() -> None:
    """Fault seen: a batch is built without its page copies; ``_end`` leaves a waiting one in the queue."""
    rng = np.random.default_rng(56)
    h = Harness(num_pages=60, page_size=4, max_batch_tokens=24, decode_reserve_tokens=4, check_every=10)
    shared = random_ids(1, 18)

    def send() -> int:
        return h.add([*shared[: int(rng.integers(0, 19))], int(rng.integers(1, 1000))], 12)

    streams = [send() for _ in range(8)]
    cancelled = 0
    while cancelled < 500:
        h.step()
        victim = int(rng.integers(0, 8))
        if h.abort(streams[victim]) is not None:
            cancelled += 1
        streams[victim] = send()
        streams = [stream if stream not in h.finals else send() for stream in streams]
    h.run()
    assert h.stats["num_aborted"] == 500 and h.stats["num_finished"] > 100
    h.assert_as_oracle()


@every_page_size
def test_b057_an_abort_in_the_step_of_the_end_token(page_size: int) -> None:
    """Fault seen: ``_advance`` does not look at ``_abort_later``."""
    h = Harness(num_pages=400 // page_size, page_size=page_size)
    prompt = random_ids(1, 40)
    a = h.add(prompt, 9)
    h.executor.force(a, 42, 0)  # the third output is the end token

    def abort_in_flight(batch: Batch) -> None:
        if int(batch.positions[-1]) == 41:
            assert h.engine.abort(a) == ()

    h.executor.after = abort_in_flight
    while a not in h.finals:
        h.step()
    assert h.finals[a].finish_reason == "abort" and len(h.tokens[a]) == 2
    assert h.abort(a) is None
    assert h.num_finals[a] == 1
    h.assert_nothing_held()


@every_policy
def test_b064_a_queued_request_that_is_cancelled_never_prefills(policy: str) -> None:
    """Fault seen: ``_end`` leaves a waiting sequence in the queue."""
    h = Harness(num_pages=100, page_size=4, max_running=2, policy=policy)
    for i in range(2):
        h.add(random_ids(i, 10), 6)
    h.step()
    queued, behind = h.add(random_ids(5, 10), 3), h.add(random_ids(6, 10), 3)
    h.step()
    output = h.abort(queued)
    assert output is not None and output.finish_reason == "abort" and output.new_token_ids == ()
    h.run()
    assert all(queued not in batch.request_ids for batch in h.executor.batches)
    assert h.finals[behind].finish_reason == "length"
    assert h.num_finals[queued] == 1
    h.assert_as_oracle()


@every_page_size
def test_b071_cached_tokens_are_counted_at_first_admission_only(page_size: int) -> None:
    """Fault seen: ``num_cached`` is set at every ``acquire``."""
    h = Harness(num_pages=800 // page_size, page_size=page_size)
    shared = random_ids(1, 65)
    h.generate(shared, 1)
    a = h.add([*shared, *random_ids(2, 20)], 12)
    for _ in range(3):
        h.step()
        h.step()
        (seq,) = h.engine.scheduler.running
        h.engine.scheduler._preempt(seq)
        h.engine.check()
    h.run()
    final = h.finals[a]
    assert h.stats["num_preemptions"] == 3
    assert final.usage.cached_tokens == 65 and h.stats["cached_tokens"] == 65
    assert h.stats["prompt_tokens"] == 65 + 85
    h.assert_as_oracle()


@every_page_size
def test_b071_a_preempted_request_finds_its_own_tokens_again(page_size: int) -> None:
    """Fault seen: ``_preempt`` cuts ``num_computed`` down to whole pages before it releases."""
    h = Harness(num_pages=800 // page_size, page_size=page_size)
    a = h.add(random_ids(2, 50), 12)
    for _ in range(5):
        h.step()
    h.engine.scheduler._preempt(h.engine.scheduler.running[0])
    h.step()
    assert h.grants == {a: 1}  # everything else is a hit, outputs and partial last page included
    h.run()
    h.assert_as_oracle()


def one_cold_among_hot(policy: str, **config: Any) -> tuple[Harness, int]:
    """A hot prefix in the tree, a queue of hot requests, and one cold request behind the first of them."""
    h = Harness(num_pages=200, page_size=4, max_running=2, policy=policy, **config)
    hot = random_ids(1, 40)
    h.generate(hot, 1)
    for i in range(3):
        h.add([*hot, i + 1], 2)
    cold = h.add(random_ids(2, 60), 2)
    return h, cold


def feed_until_started(h: Harness, cold: int, max_steps: int) -> int:
    """Two more hot requests in every step; returns how many later arrivals started before ``cold``."""
    hot = random_ids(1, 40)
    for step in range(max_steps):
        for i in range(2):
            h.add([*hot, step % 900 + 10, i + 1], 2)
        h.clock.now += 1.0
        h.step()
        if cold in h.grants:
            started = {int(seq_id) for batch in h.executor.batches for seq_id in batch.request_ids}
            return sum(1 for seq_id in started if seq_id > cold and seq_id not in h.grants)
    raise AssertionError(f"not started within {max_steps} steps")


@every_policy
@pytest.mark.parametrize("max_candidates", [4, 128])
def test_b102_at_most_max_skips_later_arrivals_overtake(policy: str, max_candidates: int) -> None:
    """Fault seen: ``_may_not_be_overtaken`` is always false; ``num_overtakers`` counts one too few."""
    h, cold = one_cold_among_hot(policy, max_skips=6, max_wait_s=1e9, max_candidates=max_candidates)
    overtakers = feed_until_started(h, cold, 30)
    assert overtakers <= 6
    if policy == "lpm" and max_candidates == 128:
        assert overtakers >= 5  # the bound was what started it, not luck
    h.run()
    h.assert_as_oracle()


@every_policy
def test_b102_after_max_wait_nobody_overtakes(policy: str) -> None:
    """Fault seen: ``_may_not_be_overtaken`` does not look at the clock."""
    h, cold = one_cold_among_hot(policy, max_skips=10**6, max_wait_s=8.0)
    feed_until_started(h, cold, 12)
    h.run()
    h.assert_as_oracle()


@every_policy
def test_b102_a_large_request_is_not_nibbled_away_by_small_ones(policy: str) -> None:
    """Fault seen: ``_admit`` goes on to the next candidate where one finds no pages."""
    h = Harness(num_pages=30, page_size=4, max_running=8, policy=policy, max_skips=4, decode_reserve_tokens=4)
    small = [h.add(random_ids(i, 12), 6) for i in range(6)]
    h.step()
    large = h.add(random_ids(50, 100), 3)
    for step in range(60):
        small.append(h.add(random_ids(100 + step, 12), 6))
        later = [request_id for request_id in small if request_id > large and h.tokens[request_id]]
        h.step()
        if large in h.grants:
            break
    assert large in h.grants
    assert len(later) <= 4
    h.run()
    h.assert_as_oracle()


def test_b102_a_follower_that_may_not_be_overtaken_keeps_its_hit() -> None:
    """It waits for its leader still, and the others wait with it, instead of computing all again.

    Fault seen: ``_admit`` starts a follower that may not be overtaken instead of waiting with it.
    """
    shared = random_ids(1, 120)
    h = Harness(num_pages=100, page_size=4, max_batch_tokens=64, max_skips=0)
    h.add([*shared, 1], 2)
    b = h.add([*shared, 2], 2)
    c = h.add(random_ids(3, 4), 2)
    h.step()
    h.step()
    assert list(h.grants) == [0]  # c had room, but may not overtake b
    h.step()
    assert h.grants.keys() == {0, b, c}
    assert h.finals.get(b) is None and h.engine.scheduler._live[b].samples[0].num_cached == 120
    h.run()
    h.assert_as_oracle()


def test_b105_a_preempted_request_resumes_before_an_earlier_arrival_that_waits() -> None:
    """Fault seen: ``MAX_BOOSTS = 0``."""
    hot = random_ids(1, 16)
    h = Harness(num_pages=30, page_size=4, max_running=1, max_skips=1)
    h.generate(hot, 1)
    b = h.add(random_ids(2, 16), 4)
    a = h.add([*hot, 5], 20)  # arrives later, but the longest prefix goes first
    h.step()
    assert list(h.grants) == [a]
    for times in range(1, 5):
        h.engine.scheduler._preempt(h.engine.scheduler.running[0])
        h.step()
        assert list(h.grants) == ([a] if times <= 3 else [b]), times  # not for ever
    h.run()
    h.assert_as_oracle()


def test_b105_a_victim_is_not_the_next_victim_again() -> None:
    """Fault seen: the victim is the latest arrival, whatever it suffered before."""
    h = Harness(num_pages=13, page_size=4, decode_reserve_tokens=0)
    a, b, c = (h.add(random_ids(i, 12), 14) for i in range(3))  # 9 pages at first, 7 each at the end
    h.step()
    h.engine.scheduler._preempt(h.engine.scheduler.running[2])
    h.step()
    assert h.grants.keys() == {a, b, c}  # c has come back
    while h.stats["num_preemptions"] == 1:
        h.step()
    assert [seq.request.request_id for seq in h.engine.scheduler._queue] == [b]
    h.run()
    h.assert_as_oracle()


@every_page_size
@pytest.mark.parametrize("reserve", [0, 1, 32])
def test_b144_two_requests_that_fit_only_one_after_the_other_both_finish(
    page_size: int, reserve: int
) -> None:
    """Fault seen: a running sequence that finds no pages fails while there is another to preempt."""
    h = Harness(
        num_pages=7, page_size=page_size, decode_reserve_tokens=reserve * page_size, max_batch_tokens=4096
    )
    a = h.add(random_ids(1, 4 * page_size), page_size + 1)
    b = h.add(random_ids(2, 3 * page_size), page_size + 1)
    h.run()
    assert [h.finals[i].finish_reason for i in (a, b)] == ["length", "length"]
    assert (h.stats["num_preemptions"] > 0) == (reserve == 0)
    h.assert_as_oracle()


@every_page_size
def test_many_requests_through_a_pool_that_holds_two_all_finish(page_size: int) -> None:
    """Progress whatever is preempted: every output token is kept."""
    h = Harness(
        num_pages=9,
        page_size=page_size,
        decode_reserve_tokens=0,
        max_batch_tokens=2 * page_size + 8,
        check_every=5,
    )
    rng = np.random.default_rng(4)
    for i in range(50):
        h.add(
            random_ids(i % 7, int(rng.integers(1, 4 * page_size + 1))),
            int(rng.integers(1, 2 * page_size + 2)),
        )
    h.run()
    assert {final.finish_reason for final in h.finals.values()} == {"length"}
    h.assert_as_oracle()
