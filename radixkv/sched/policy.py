"""Policies: the order in which waiting requests are tried. Pure functions; fairness is the scheduler's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from radixkv.config import PolicyName
from radixkv.sequence import Sequence

Order: TypeAlias = Callable[[Iterable[Sequence], Mapping[int, int], float], list[Sequence]]
"""``order(waiting, hits, now)``: ``waiting`` in order of arrival, ``hits`` the cached tokens by request id,
``now`` the clock in seconds. Returns all of ``waiting``, first to try first; changes nothing."""


def fcfs(waiting: Iterable[Sequence], hits: Mapping[int, int], now: float) -> list[Sequence]:
    """First come, first served. Does not look at ``hits``."""
    return list(waiting)


def lpm(waiting: Iterable[Sequence], hits: Mapping[int, int], now: float) -> list[Sequence]:
    """Longest cached prefix first; ties in order of arrival. Visits the tree's hot branches before they are
    evicted, which for requests known ahead comes close to depth-first order (Zheng et al., 2024)."""
    return sorted(waiting, key=lambda seq: -hits[seq.request.request_id])  # sorted() keeps ties in order


def order_of(policy: PolicyName) -> Order:
    """The function that a policy's name stands for."""
    return {"fcfs": fcfs, "lpm": lpm}[policy]


def needs_hits(policy: PolicyName) -> bool:
    """Whether the policy reads ``hits``; otherwise nobody needs to look them up."""
    return policy != "fcfs"
