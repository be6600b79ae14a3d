from __future__ import annotations

import numpy as np
import pytest

from radixkv.config import POLICIES
from radixkv.errors import InternalError
from radixkv.sched.policy import fcfs, lpm, needs_hits, order_of
from radixkv.sched.waiting import MAX_BOOSTS, WaitingQueue
from radixkv.sequence import Request, Sequence


def sequences(count: int) -> list[Sequence]:
    """Request ids run against the order of arrival, so that neither can stand for the other."""
    requests = [Request(request_id=100 - i, prompt_ids=np.array([1], np.int32)) for i in range(count)]
    return [Sequence(request, 16, float(i), i) for i, request in enumerate(requests)]


def test_fcfs_keeps_the_order_of_arrival() -> None:
    waiting = sequences(4)
    assert fcfs(waiting, {}, 0.0) == waiting
    assert not needs_hits("fcfs")


def test_lpm_takes_the_longest_hit_first_and_the_earliest_of_equals() -> None:
    a, b, c, d = waiting = sequences(4)
    hits = {100: 16, 99: 48, 98: 16, 97: 0}
    assert lpm(waiting, hits, 0.0) == [b, a, c, d]
    assert waiting == [a, b, c, d]
    assert needs_hits("lpm")


def test_every_policy_has_an_order() -> None:
    waiting = sequences(3)
    hits = {seq.request.request_id: 0 for seq in waiting}
    for policy in POLICIES:
        assert order_of(policy)(waiting, hits, 0.0) == waiting  # type: ignore[arg-type]


def test_overtakers_are_counted_once_each() -> None:
    queue = WaitingQueue()
    a, b, c, d = sequences(4)
    for seq in (a, b, c, d):
        queue.add(seq)
    queue.admit(c)
    assert [queue.num_overtakers(seq) for seq in (a, b, d)] == [1, 1, 0]
    queue.admit(d)
    assert [queue.num_overtakers(seq) for seq in (a, b)] == [2, 2]
    c.num_preemptions = 1
    queue.add(c)
    assert queue.num_overtakers(c) == 1  # d came later and was admitted
    queue.admit(c)
    assert [queue.num_overtakers(seq) for seq in (a, b)] == [2, 2]  # c counts once
    queue.admit(a)
    assert queue.num_overtakers(b) == 2
    queue.check()


def test_a_request_that_leaves_overtook_nobody() -> None:
    queue = WaitingQueue()
    a, b, c = sequences(3)
    for seq in (a, b, c):
        queue.add(seq)
    queue.remove(b)
    assert queue.num_overtakers(a) == 0
    assert list(queue) == [a, c] and queue.earliest is a
    queue.check()


def test_a_preempted_sequence_goes_first_for_a_bounded_number_of_times() -> None:
    queue = WaitingQueue()
    a, b = sequences(2)
    queue.add(a)
    for times in range(1, MAX_BOOSTS + 2):
        b.num_preemptions = times
        queue.add(b)
        assert queue.boosted() == ([b] if times <= MAX_BOOSTS else [])
        assert queue.ordinary(10) == ([a] if times <= MAX_BOOSTS else [a, b])
        queue.check()
        queue.admit(b)


def test_the_window_is_the_first_by_arrival() -> None:
    queue = WaitingQueue()
    waiting = sequences(5)
    for seq in reversed(waiting):
        queue.add(seq)
    assert queue.ordinary(3) == waiting[:3]
    assert list(queue) == waiting and len(queue) == 5


def test_check_sees_a_sequence_filed_wrongly() -> None:
    queue = WaitingQueue()
    (a,) = sequences(1)
    queue.add(a)
    a.num_preemptions = 1
    with pytest.raises(InternalError, match="Q1"):
        queue.check()
