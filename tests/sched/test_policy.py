from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.config import POLICIES, PolicyName
from radixkv.errors import InternalError
from radixkv.sampling import SamplingParams
from radixkv.sched.policy import (
    MAX_BOOSTS,
    dfs_weight,
    fcfs,
    key_of,
    lof,
    lpm,
    needs_hits,
    order_of,
    priority,
)
from radixkv.sched.waiting import WaitingQueue
from radixkv.sequence import Request, Sequence


def sequence(ids: list[int], number: int, max_tokens: int = 4, **request: Any) -> Sequence:
    """Request ids run against the order of arrival, so that neither can stand for the other."""
    asked = Request(
        request_id=100 - number,
        prompt_ids=np.array(ids, np.int32),
        sampling=SamplingParams(max_tokens=max_tokens),
        **request,
    )
    return Sequence(asked, 16, float(number), number)


def sequences(count: int) -> list[Sequence]:
    return [sequence([1], number) for number in range(count)]


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


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_each_once_and_changes_nothing(policy: PolicyName) -> None:
    waiting = sequences(5)
    given = list(waiting)
    hits = {seq.request.request_id: 0 for seq in waiting}
    order = order_of(policy, 3)(waiting, hits, 0.0)
    assert sorted(seq.number for seq in order) == [0, 1, 2, 3, 4]
    assert waiting == given
    if policy != "random":
        assert order == given  # nothing tells them apart but their arrival
    keys = [key_of(policy, 3)(seq) for seq in waiting]
    assert len(set(keys)) == 5
    if not needs_hits(policy):
        assert order == sorted(waiting, key=key_of(policy, 3))


def test_lof_takes_the_longest_output_first() -> None:
    a, b, c = (sequence([1], i, max_tokens=n) for i, n in enumerate((5, 9, 9)))
    assert lof([a, b, c], {}, 0.0) == [b, c, a]


def test_priority_takes_the_highest_first_and_of_equals_the_preempted() -> None:
    a, b, c, d = (sequence([1], i, priority=p) for i, p in enumerate((0, 3, 3, -1)))
    assert priority([a, b, c, d], {}, 0.0) == [b, c, a, d]
    c.num_preemptions = 1
    assert priority([a, b, c, d], {}, 0.0) == [c, b, a, d]
    c.num_preemptions = MAX_BOOSTS + 1
    assert priority([a, b, c, d], {}, 0.0) == [b, c, a, d]
    d.num_preemptions = 1
    assert priority([a, b, c, d], {}, 0.0) == [b, c, a, d]  # a boost does not outweigh a priority


def test_random_is_a_pure_function_of_seed_and_arrival() -> None:
    waiting = sequences(40)
    first, again, other = (order_of("random", seed)(waiting, {}, 0.0) for seed in (7, 7, 8))
    assert first == again != other
    assert first != waiting and sorted(first, key=lambda seq: seq.number) == waiting
    # Who else waits makes no difference to two requests.
    assert order_of("random", 7)(waiting[10:], {}, 5.0) == [seq for seq in first if seq.number >= 10]


def hits_of(waiting: list[Sequence], cached: list[list[int]]) -> dict[int, int]:
    """Cached tokens of each, where the cache holds every beginning of ``cached``."""

    def agree(ids: list[int], known: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), min(len(ids), len(known))
        )

    return {
        seq.request.request_id: max(agree(seq.token_ids.tolist(), known) for known in cached)
        for seq in waiting
    }


def test_dfs_weight_goes_down_the_heaviest_branch_first() -> None:
    """The cache: 1 2 3 and 1 2 4 5, and 9 9. Three wait below 1 2 4, two at 1 2 3, one at 9 9."""
    prompts = [
        [7, 7],
        [9, 9, 1],
        [1, 2, 3, 8],
        [1, 2, 4, 5, 1],
        [1, 2, 8],
        [1, 2, 4, 5, 2],
        [1, 2, 3, 9],
        [1, 2, 4, 8],
    ]
    waiting = [sequence(ids, number) for number, ids in enumerate(prompts)]
    hits = hits_of(waiting, [[1, 2, 3], [1, 2, 4, 5], [9, 9]])
    order = [seq.number for seq in dfs_weight(waiting, hits, 0.0)]
    # 1 2 4 5 (twice), then 1 2 4 itself, then the two at 1 2 3, then 1 2 itself; 9 9; no hit at all.
    assert order == [3, 5, 7, 2, 6, 4, 1, 0]


def test_dfs_weight_keeps_namespaces_apart() -> None:
    a = sequence([1, 2, 3], 0, namespace=("x",))
    b = sequence([1, 2, 3], 1, namespace=("y",))
    c = sequence([1, 2, 3], 2, namespace=("x",))
    d = sequence([1, 2, 3], 3, namespace=("y",))
    e = sequence([1, 5, 3], 4, namespace=("y",))
    hits = {100: 2, 99: 2, 98: 2, 97: 2, 96: 1}
    order = dfs_weight([a, b, c, d, e], hits, 0.0)
    assert order == [b, d, e, a, c]  # three wait in y
    assert dfs_weight([a, b, c, d], hits, 0.0) == [a, c, b, d]  # of equals the earliest arrival's


def walk(branch_of: dict[int, tuple[int, ...]], prefix: tuple[int, ...]) -> list[int]:
    """The oracle: depth-first over a tree with one node per token."""
    below: dict[tuple[int, ...], list[int]] = {}
    for number, hit in branch_of.items():
        if len(hit) > len(prefix) and hit[: len(prefix)] == prefix:
            below.setdefault(hit[: len(prefix) + 1], []).append(number)
    order: list[int] = []
    for child in sorted(below, key=lambda child: (-len(below[child]), min(below[child]))):
        order += walk(branch_of, child)
    return order + sorted(number for number, hit in branch_of.items() if hit == prefix)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.integers(0, 8)), max_size=14)
)
def test_dfs_weight_is_a_walk_over_the_tree_of_tokens(asked: list[tuple[list[int], int]]) -> None:
    waiting = [sequence(ids, number) for number, (ids, _) in enumerate(asked)]
    hits = {
        seq.request.request_id: min(hit, seq.num_tokens) for seq, (_, hit) in zip(waiting, asked, strict=True)
    }
    branch_of = {seq.number: tuple(seq.token_ids[: hits[seq.request.request_id]].tolist()) for seq in waiting}
    assert [seq.number for seq in dfs_weight(waiting, hits, 0.0)] == walk(branch_of, ())


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


def test_the_window_is_the_first_by_the_key_and_arrival_stays_known() -> None:
    queue = WaitingQueue(key_of("lof", 0))
    waiting = [sequence([1], number, max_tokens=n) for number, n in enumerate((3, 9, 5, 9))]
    for seq in waiting:
        queue.add(seq)
    assert [seq.number for seq in queue.ordinary(3)] == [1, 3, 2]
    assert list(queue) == waiting and queue.earliest is waiting[0]
    queue.remove(waiting[1])
    queue.check()
    assert [seq.number for seq in queue.ordinary(9)] == [3, 2, 0]


def test_only_what_was_never_admitted_is_overdue() -> None:
    queue = WaitingQueue(timeout_s=5.0)
    a, b, c, d = waiting = [
        sequence([1], number, queue_timeout_s=limit) for number, limit in enumerate((None, 2.0, 9.0, None))
    ]  # they arrive at 0, 1, 2 and 3
    d.num_preemptions = 1
    for seq in waiting:
        queue.add(seq)
    queue.check()
    assert queue.overdue(3.0) == []  # not longer than it may
    assert queue.overdue(3.5) == [b] and b in queue
    queue.remove(b)
    assert queue.overdue(100.0) == [a, c]
    queue.admit(a)
    a.num_preemptions = 1
    queue.add(a)
    queue.check()
    assert queue.overdue(100.0) == [c]
    queue.clear()
    assert queue.overdue(100.0) == [] and len(queue) == 0
    queue.check()


def test_check_sees_a_deadline_that_stayed_behind() -> None:
    queue = WaitingQueue(timeout_s=5.0)
    (a,) = sequences(1)
    queue.add(a)
    queue._deadlines.clear()
    with pytest.raises(InternalError, match="Q3"):
        queue.check()
