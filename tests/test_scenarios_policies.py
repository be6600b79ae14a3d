"""Situations that broke real systems, on the whole engine over FakeExecutor: priorities, limits of the queue,
timeouts, tight pools under every policy.

Each says which one-line fault it was seen failing against.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.config import POLICIES, EngineConfig, PolicyName
from radixkv.errors import QueueFullError
from radixkv.llm import LLM
from radixkv.sampling import SamplingParams
from radixkv.sched.policy import MAX_BOOSTS
from radixkv.sequence import Sequence
from radixkv.testing.fake_executor import FakeExecutor

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
every_policy = pytest.mark.parametrize("policy", POLICIES)


@every_page_size
@pytest.mark.parametrize("way", ["abort", "timeout", "exception", "shutdown"])
def test_b019_dropped_between_match_and_pages_it_holds_nothing(
    way: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that hits, but finds no pages for the rest, however it goes.

    Fault seen: ``_try_admit`` does not release where ``_find_pages`` found none, or where it raised.
    """
    h = Harness(num_pages=12, page_size=page_size, max_batch_tokens=4096, decode_reserve_tokens=0)
    shared = random_ids(1, 3 * page_size)
    h.generate(shared, 1)
    h.add(random_ids(2, 6 * page_size), 2 * page_size)
    h.step()
    dropped = h.add([*shared, *random_ids(3, 4 * page_size)], 2, queue_timeout_s=5.0)
    h.step()  # matched, short of pages, let go
    assert dropped not in h.grants
    running = h.engine.scheduler.running
    if way == "exception":

        def reserve(seq: Sequence, num_tokens: int) -> None:
            if seq.request.request_id == dropped:
                raise RuntimeError("no")
            original(seq, num_tokens)

        original = h.engine.kv.reserve
        monkeypatch.setattr(h.engine.kv, "reserve", reserve)
        h.take(h.engine.step())
        assert h.engine.is_dead and h.finals.keys() == h.requests.keys()
        h.engine.kv.check(running)  # every count is explained by those that ran
        return
    if way == "timeout":
        h.clock.now += 6.0
        h.step()
        h.run()
    else:
        for request_id in (dropped,) if way == "abort" else tuple(h.requests):
            h.abort(request_id)
        h.run()
    assert h.finals[dropped].finish_reason == ("timeout" if way == "timeout" else "abort")
    assert h.finals[dropped].usage.cached_tokens == 0  # it was never admitted
    h.assert_as_oracle()


@every_policy
def test_every_policy_starts_through_the_front(policy: PolicyName) -> None:
    config = EngineConfig(num_pages=40, page_size=4, policy=policy, max_running=2)
    executor = FakeExecutor(num_pages=40, page_size=4)
    llm = LLM.from_executor(executor, config=config)
    prompts = [random_ids(i % 3, 10 + i) for i in range(6)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == executor.expected_output(np.array(prompt, np.int32), 5)
    llm.close()


# Timeouts and limits


@every_page_size
def test_b064_a_queued_request_that_times_out_never_prefills(page_size: int) -> None:
    """Fault seen: ``overdue`` is looked at after the admissions of the step."""
    h = Harness(num_pages=800 // page_size, page_size=page_size, max_running=1, queue_timeout_s=10.0)
    a = h.add(random_ids(1, 20), 3)
    h.step()
    late = h.add(random_ids(2, 20), 3)
    patient = h.add(random_ids(3, 20), 3, queue_timeout_s=100.0)
    hasty = h.add(random_ids(4, 20), 3, queue_timeout_s=1.0)
    h.clock.now = 2.0
    h.step()
    assert h.finals.keys() == {hasty}
    h.clock.now = 10.5  # a's place becomes free in this step, and late would get it in the next
    h.step()
    assert h.finals.keys() == {hasty, late, a}
    h.run()
    for timed_out in (late, hasty):
        final = h.finals[timed_out]
        assert final.finish_reason == "timeout" and final.error is None and h.tokens[timed_out] == []
        assert (final.usage.cached_tokens, final.usage.completion_tokens) == (0, 0)
        assert all(timed_out not in batch.request_ids for batch in h.executor.batches)
    assert h.finals[patient].finish_reason == "length"
    assert h.stats["num_timed_out"] == 2 and h.stats["prompt_tokens"] == 40
    h.assert_as_oracle()


def test_b064_what_was_preempted_never_times_out() -> None:
    """Fault seen: ``_has_deadline`` does not look at the preemptions."""
    h = Harness(num_pages=100, page_size=4, max_running=1, queue_timeout_s=5.0, policy="priority")
    low = h.add(random_ids(1, 20), 6)
    h.step()
    h.add(random_ids(2, 20), 6, priority=1)
    h.step()
    assert low not in h.grants
    h.clock.now += 100.0
    h.run()
    assert {final.finish_reason for final in h.finals.values()} == {"length"}
    h.assert_as_oracle()


@every_policy
def test_b129_the_surplus_is_refused_at_once_with_both_numbers(policy: str) -> None:
    """Fault seen: ``refuse_if_full`` compares with ``>`` instead of ``>=``."""
    h = Harness(num_pages=100, page_size=4, max_running=1, max_waiting=2, policy=policy)
    h.add(random_ids(0, 10), 5)
    h.step()
    num_steps = h.num_steps
    for i in range(1, 11):
        if i <= 2:
            h.add(random_ids(i, 10), 5)
            continue
        with pytest.raises(QueueFullError, match="2 requests wait, max_waiting is 2") as caught:
            h.add(random_ids(i, 10), 5)
        assert (caught.value.num_waiting, caught.value.max_waiting) == (2, 2)
    assert h.num_steps == num_steps
    assert (h.stats["num_refused"], h.stats["num_queue_full"], h.stats["num_added"]) == (8, 8, 3)
    h.run()
    assert len(h.finals) == 3
    h.add(random_ids(20, 10), 5)  # there is room again
    h.run()
    h.assert_as_oracle()


# Tight pools


@every_policy
@pytest.mark.parametrize("reserve", [0, None])
def test_b070_fifty_requests_through_a_tight_pool_all_finish(policy: str, reserve: int | None) -> None:
    """Steps do not overlap in this engine; the pool is tight all the same.

    Fault seen: a running sequence that finds no pages fails while there is another to preempt.
    """
    h = Harness(
        num_pages=24, page_size=4, policy=policy, decode_reserve_tokens=reserve, max_batch_tokens=64,
        check_every=20,
    )  # fmt: skip
    rng = np.random.default_rng(70)
    for i in range(50):
        prompt = [*random_ids(i % 5, int(rng.integers(1, 30))), i + 1]
        h.add(prompt, int(rng.integers(1, 60)), priority=int(rng.integers(-2, 3)))
    h.run(4000)
    assert {final.finish_reason for final in h.finals.values()} == {"length"}
    h.assert_as_oracle()


# Priorities


@every_page_size
def test_b103_a_request_of_higher_priority_runs_in_the_next_step(page_size: int) -> None:
    """Fault seen: ``weaker_than`` returns nobody; its order is turned round."""
    h = Harness(num_pages=1600 // page_size, page_size=page_size, max_running=4, policy="priority")
    low = [h.add(random_ids(i, 20), 12, priority=p) for i, p in enumerate((1, 0, 0, 1))]
    h.step()
    assert h.grants.keys() == set(low)
    high = h.add(random_ids(9, 30), 3, priority=5)
    h.step()
    assert h.grants.keys() == {high, low[0], low[1], low[3]}  # of the lowest the latest arrival
    assert h.stats["num_priority_preemptions"] == h.stats["num_preemptions"] == 1
    h.run()
    assert h.finals[low[2]].usage.cached_tokens == 0
    h.assert_as_oracle()


@every_page_size
def test_b103_pages_are_taken_from_no_more_than_it_needs(page_size: int) -> None:
    """Fault seen: ``_find_pages`` lets all that are weaker make way; ``num_available_without`` forgets the
    pages that the tree holds too.
    """
    h = Harness(
        num_pages=15 if page_size == 1 else 12,
        page_size=page_size,
        policy="priority",
        max_batch_tokens=4096,
        decode_reserve_tokens=0,
    )
    low = [h.add(random_ids(i, 3 * page_size), 2 * page_size + 2) for i in range(3)]
    h.step()
    h.step()  # each holds 4 pages, and all that there are in the next step: 4, or 5 of one token
    high = h.add(random_ids(9, 6 * page_size), 1, priority=1)
    h.step()
    assert h.grants.keys() == {high, low[0]}
    h.run()
    h.assert_as_oracle()


def test_b103_nobody_makes_way_in_vain() -> None:
    """Fault seen: ``_find_pages`` lets its victims go before it knows that they are enough."""
    h = Harness(num_pages=12, page_size=4, policy="priority", decode_reserve_tokens=0)
    strong = h.add(random_ids(0, 16), 12, priority=9)
    low = h.add(random_ids(1, 8), 4)
    h.step()
    high = h.add(random_ids(9, 36), 1, priority=1)  # 9 pages, of which strong has 4 and will want more
    h.step()
    assert h.grants.keys() == {strong, low} and h.stats["num_preemptions"] == 0
    h.run()
    assert high in h.finals
    h.assert_as_oracle()


def test_b103_a_long_prompt_of_low_priority_does_not_keep_the_budget() -> None:
    """Fault seen: ``take`` leaves the grants of the others as they are."""
    h = Harness(num_pages=200, page_size=4, policy="priority", max_batch_tokens=16)
    low = h.add(random_ids(1, 200), 2)
    h.step()
    assert h.grants == {low: 16}
    high = h.add(random_ids(2, 10), 2, priority=1)
    h.step()
    assert h.grants == {low: 6, high: 10}
    higher = h.add(random_ids(3, 40), 2, priority=2)
    h.step()
    assert h.grants == {low: 1, high: 1, higher: 14}
    h.run()
    h.assert_as_oracle()


def test_b103_without_preemption_it_is_only_the_next_to_start() -> None:
    """Fault seen: ``_makes_way`` does not look at ``priority_preemption``."""
    h = Harness(num_pages=100, page_size=4, max_running=2, policy="priority", priority_preemption=False)
    a, b = h.add(random_ids(0, 10), 4), h.add(random_ids(1, 10), 6)
    h.step()
    waits, high = h.add(random_ids(2, 10), 4), h.add(random_ids(3, 10), 4, priority=1)
    h.step()
    assert h.grants.keys() == {a, b}
    while a not in h.finals:
        h.step()
    h.step()
    assert high in h.grants and waits not in h.grants and h.stats["num_preemptions"] == 0
    h.run()
    h.assert_as_oracle()


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "priority"])
def test_b103_other_policies_do_not_look_at_the_priority(policy: str) -> None:
    """Fault seen: ``_makes_way`` does not look at the policy."""
    h = Harness(num_pages=100, page_size=4, max_running=1, policy=policy)
    a = h.add(random_ids(0, 10), 4)
    h.step()
    h.add(random_ids(1, 10), 4, priority=5)
    h.step()
    assert h.grants.keys() == {a}
    h.run()
    h.assert_as_oracle()


def stream_of_high(h: Harness, low: int, max_steps: int) -> list[int]:
    """A new request of high priority in each step until ``low`` has ended; their ids."""
    high = []
    for step in range(max_steps):
        high.append(h.add(random_ids(100 + step, 8), 2, priority=5))
        h.step()
        if low in h.finals:
            return high
    raise AssertionError(f"not ended within {max_steps} steps")


@pytest.mark.parametrize(("max_skips", "max_wait_s"), [(3, 1e9), (0, 1e9), (10**6, 20.0)])
def test_b103_a_stream_of_high_priority_does_not_starve_what_it_preempts(
    max_skips: int, max_wait_s: float
) -> None:
    """Fault seen: ``weaker_than`` does not look at the preemptions; it does not look at D4, and the two
    change places in every step.
    """
    h = Harness(
        num_pages=100, page_size=4, max_running=1, policy="priority", max_skips=max_skips,
        max_wait_s=max_wait_s, check_every=10,
    )  # fmt: skip
    low = h.add(random_ids(1, 8), 12)
    h.step()
    advance = h.step

    def step_of_a_second() -> Any:
        h.clock.now += 1.0
        return advance()

    h.step = step_of_a_second  # type: ignore[method-assign]
    stream_of_high(h, low, 200)
    assert h.stats["num_priority_preemptions"] <= MAX_BOOSTS
    assert (h.stats["num_priority_preemptions"] > 0) == (max_skips > 0)
    h.run()
    h.assert_as_oracle()


@every_page_size
def test_b102_priority_starts_a_low_request_within_the_bound(page_size: int) -> None:
    """Fault seen: under ``priority`` nobody is put first by D4."""
    h = Harness(
        num_pages=1600 // page_size, page_size=page_size, max_running=1, policy="priority", max_skips=4
    )
    h.add(random_ids(1, 8), 3, priority=5)
    h.step()
    low = h.add(random_ids(2, 8), 3)
    high = stream_of_high(h, low, 60)
    first = next(i for i, batch in enumerate(h.executor.batches) if low in batch.request_ids)
    started = {int(i) for batch in h.executor.batches[:first] for i in batch.request_ids}
    assert len(started & set(high)) == 4
    h.run()
    h.assert_as_oracle()


def test_b105_of_equal_priority_nobody_makes_way_and_the_preempted_resumes_first() -> None:
    """Fault seen: ``weaker_than`` compares with ``<=``."""
    h = Harness(num_pages=100, page_size=4, max_running=1, policy="priority")
    a = h.add(random_ids(1, 10), 8, priority=1)
    h.step()
    b = h.add(random_ids(2, 10), 8)  # arrives before c
    c = h.add(random_ids(3, 10), 8, priority=1)
    h.step()
    assert h.grants.keys() == {a}
    h.abort(a)
    h.step()
    assert h.grants.keys() == {c}
    high = h.add(random_ids(4, 10), 2, priority=2)
    h.step()
    assert h.grants.keys() == {high}
    later = h.add(random_ids(5, 10), 2, priority=1)
    while high not in h.finals:
        h.step()
    h.step()
    assert h.grants.keys() == {c}  # of its own priority the first, before b and later
    h.run()
    assert list(h.finals)[-2:] == [later, b]
    h.assert_as_oracle()


def test_b105_when_pages_run_out_the_lowest_priority_goes_but_not_for_ever() -> None:
    """Fault seen: ``victim_for_pages`` does not look at the priority."""
    h = Harness(
        num_pages=14, page_size=4, policy="priority", decode_reserve_tokens=0, priority_preemption=False
    )
    low = h.add(random_ids(0, 12), 30)
    h.step()
    for i in range(1, 12):
        h.add(random_ids(i, 12), 30, priority=1)
    while h.stats["num_preemptions"] == 0:
        h.step()
    suffered = h.engine.scheduler._live[low].samples[0].num_preemptions
    assert suffered == 1  # though it arrived first
    while low not in h.finals:
        h.step()
        live = h.engine.scheduler._live.get(low)
        suffered = max(suffered, live.samples[0].num_preemptions if live is not None else 0)
    assert 1 <= suffered <= MAX_BOOSTS + 1
    h.run()
    h.assert_as_oracle()
