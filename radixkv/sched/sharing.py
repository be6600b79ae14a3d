"""In-batch sharing: who waits for whose prompt, and where a cut chunk ends. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixkv.sequence import Sequence
from radixkv.types import TokenIds


def leader_of(follower: Sequence, hit: int, running: Iterable[Sequence], min_tokens: int) -> Sequence | None:
    """The first running sequence that will compute at least ``min_tokens`` tokens of ``follower``'s prompt
    that are not cached yet; ``None``: it waits for nobody.

    ``hit`` is how many of its tokens the cache holds now, ``running`` those that are not stale (what they
    compute goes to the tree). Costs O(1) for each that does not share.
    """
    limit = follower.max_hit_tokens
    ids = follower.token_ids
    for leader in running:
        begin = leader.num_computed
        if begin < hit:
            begin = hit
        end = begin + min_tokens  # all tokens up to here must agree, and be the leader's to compute
        if end > limit or end > leader.num_tokens:
            continue
        other = leader.token_ids
        if (
            ids.item(end - 1) == other.item(end - 1)
            and follower.request.namespace == leader.request.namespace
            and np.array_equal(ids[begin:end], other[begin:end])
            and np.array_equal(ids[:begin], other[:begin])
        ):
            return leader
    return None


def end_of_chunk(leader: Sequence, end: int, waiting: Iterable[Sequence], min_tokens: int) -> int:
    """Where ``leader``'s chunk, cut by the budget at ``end``, should end instead.

    A cut that leaves fewer than ``min_tokens`` of a prompt shared with a waiting request would let that
    request start now and compute those few itself, and so would everyone who shares it. Ending the chunk a
    little earlier keeps them waiting for one step more, after which they find it all. Returns ``end`` where
    nobody shares, or where the chunk would become empty.
    """
    ids = leader.token_ids
    begin = leader.num_computed
    first = ids.item(begin)
    shared_ends: list[int] = []
    for follower in waiting:
        if follower.num_tokens <= begin or follower.token_ids.item(begin) != first:
            continue
        limit = min(follower.max_hit_tokens, leader.num_tokens, end + min_tokens)
        if limit <= begin or follower.request.namespace != leader.request.namespace:
            continue
        other = follower.token_ids
        shared_ends.append(common_prefix(ids[:limit], other[:limit]))
    for shared in sorted(shared_ends, reverse=True):
        if end < shared < end + min_tokens:
            if shared - min_tokens <= leader.num_computed:
                break
            end = shared - min_tokens
    return end


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many leading tokens of two arrays of the same length agree."""
    differs = np.flatnonzero(left != right)
    return int(differs[0]) if len(differs) else len(left)
