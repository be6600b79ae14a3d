"""Policies: the order in which waiting requests are tried. Pure functions; fairness is the scheduler's.

Two kinds. ``fcfs``, ``lof``, ``priority`` and ``random`` give each sequence a key that stays as it is while
it waits, so that the queue can be kept in that order. ``lpm`` and ``dfs-weight`` depend on what the cache
holds; they arrange the first ``max_candidates`` arrivals anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from radixkv.config import PolicyName
from radixkv.sched.branches import Branch, branches_of
from radixkv.sequence import Sequence

Order: TypeAlias = Callable[[Iterable[Sequence], Mapping[int, int], float], list[Sequence]]
"""``order(waiting, hits, now)``: ``waiting`` in order of arrival, ``hits`` the cached tokens by request id,
``now`` the clock in seconds. Returns all of ``waiting``, first to try first; changes nothing."""
Key: TypeAlias = Callable[[Sequence], tuple[int, ...]]
"""Lower goes first; no two sequences have the same, and a sequence keeps its own while it waits."""

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1
MAX_BOOSTS = 3
"""So many times a preempted sequence goes back to the front; after that it waits like the others."""


def is_boosted(seq: Sequence) -> bool:
    """Whether ``seq``, which waits, was preempted and may go before others for it."""
    return 0 < seq.num_preemptions <= MAX_BOOSTS


def by_arrival(seq: Sequence) -> tuple[int, ...]:
    return (seq.number,)


def by_output(seq: Sequence) -> tuple[int, ...]:
    return (-seq.request.sampling.max_tokens, seq.number)


def by_priority(seq: Sequence) -> tuple[int, ...]:
    return (-seq.request.priority, not is_boosted(seq), seq.number)


def at_random(seed: int) -> Key:
    """A pure function of ``seed`` and the number of arrival (the finaliser of splitmix64 over both; Steele,
    Lea and Flood, 2014): the same run gives the same order."""

    def key(seq: Sequence) -> tuple[int, ...]:
        word = (seed + seq.number * _GOLDEN) & _WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        return (word ^ (word >> 31), seq.number)

    return key


def fcfs(waiting: Iterable[Sequence], hits: Mapping[int, int], now: float) -> list[Sequence]:
    """First come, first served. Does not look at ``hits``."""
    return sorted(waiting, key=by_arrival)


def lof(waiting: Iterable[Sequence], hits: Mapping[int, int], now: float) -> list[Sequence]:
    """Longest output first, by ``max_tokens``; ties in order of arrival. What takes longest does not start
    last, so the end of a run of known requests has less idle room. Does not look at ``hits``."""
    return sorted(waiting, key=by_output)


def priority(waiting: Iterable[Sequence], hits: Mapping[int, int], now: float) -> list[Sequence]:
    """Highest ``Request.priority`` first; of equals the preempted, then in order of arrival. Does not look at
    ``hits``."""
    return sorted(waiting, key=by_priority)


def lpm(waiting: Iterable[Sequence], hits: Mapping[int, int], now: float) -> list[Sequence]:
    """Longest cached prefix first; ties in order of arrival. Visits the tree's hot branches before they are
    evicted, which for requests known ahead comes close to depth-first order (Zheng et al., 2024)."""
    return sorted(waiting, key=lambda seq: -hits[seq.request.request_id])  # sorted() keeps ties in order


def dfs_weight(waiting: Iterable[Sequence], hits: Mapping[int, int], now: float) -> list[Sequence]:
    """The cached prefixes in depth-first order, at each branch the one first that more requests wait below
    (ties: that of the earliest arrival); a request comes after those whose prefix goes on from its own, and
    what has no hit comes last. SGLang's policy of this name (Zheng et al., 2024), from the hits alone: a
    branch of the tree at which the waiting requests do not part makes no difference."""
    order: list[Sequence] = []
    stack: list[tuple[Branch, bool]] = [(branches_of(waiting, hits), False)]
    while stack:
        branch, is_done = stack.pop()
        if is_done:
            order += sorted(branch.members, key=by_arrival)
            continue
        stack.append((branch, True))
        # Pushed last, popped first: the heaviest child.
        lightest_first = sorted(branch.children, key=lambda child: (child.weight, -child.earliest))
        stack += [(child, False) for child in lightest_first]
    return order


def order_of(policy: PolicyName, seed: int) -> Order:
    """The function that a policy's name stands for. ``seed`` is that of ``random``."""
    if policy == "random":
        key = at_random(seed)
        return lambda waiting, hits, now: sorted(waiting, key=key)
    orders: dict[PolicyName, Order] = {
        "fcfs": fcfs, "lpm": lpm, "dfs-weight": dfs_weight, "lof": lof, "priority": priority,
    }  # fmt: skip
    return orders[policy]


def key_of(policy: PolicyName, seed: int) -> Key:
    """The order in which the queue is kept: the policy's own where it has a key, else that of arrival."""
    keys: dict[PolicyName, Key] = {"lof": by_output, "priority": by_priority, "random": at_random(seed)}
    return keys.get(policy, by_arrival)


def needs_hits(policy: PolicyName) -> bool:
    """Whether the policy reads ``hits``; otherwise nobody needs to look them up."""
    return policy in ("lpm", "dfs-weight")
