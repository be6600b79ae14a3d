"""Scenarios: recursion and cost. Work is counted in executed lines, never timed.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from radixkv.config import EvictionPolicyName
from radixkv.kv.events import replay
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request, Sequence
from radixkv.types import TokenIds

DEPTH = 5000


@contextmanager
def shallow_stack(num_frames: int = 200) -> Iterator[None]:
    """As if the recursion limit were 200 from here on."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + num_frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of Python ``work`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def new_sequence(token_ids: TokenIds, number: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=1)
    return Sequence(Request(request_id=number, prompt_ids=token_ids, sampling=sampling), 1)


def use_up(kv: KVCacheManager, tokens: TokenIds) -> None:
    """Everything that walks a tree, and then its end."""
    assert kv.tree.peek(tokens, (0,)) == kv.tree.match(tokens, (0,)).num_tokens == len(tokens)
    assert kv.explain(tokens).reason == "whole"
    assert str(kv.tree) and kv.stats()["tree_num_pages"] == kv.tree.num_pages
    kv.check([])
    num_pages = kv.tree.num_pages
    assert len(replay(kv.content(), 1)) == num_pages
    gone = kv.tree.evict(num_pages, kv.pool.ref_count)
    assert len(gone) == num_pages
    kv.pool.decref(gone)
    kv.check([])


def test_b098_5000_requests_each_one_token_longer() -> None:
    """Fault seen: ``check`` walks by recursion."""
    kv = KVCacheManager(PagePool(2 * DEPTH), RadixTree(1))
    tokens = np.arange(DEPTH, dtype=np.int32)
    with shallow_stack():
        for length in range(1, DEPTH + 1):
            seq = new_sequence(tokens[:length], length)
            kv.acquire(seq)
            assert seq.num_computed == length - 1
            kv.reserve(seq, 1)
            seq.num_computed = length
            kv.release(seq)
        use_up(kv, tokens)


def test_b098_a_long_prompt_in_chunks_of_one() -> None:
    """Fault seen: ``_nodes`` walks by recursion, with ``_MERGED_BYTES`` at 0."""
    kv = KVCacheManager(PagePool(DEPTH), RadixTree(1))
    tokens = np.arange(DEPTH, dtype=np.int32)
    seq = new_sequence(tokens)
    with shallow_stack():
        kv.acquire(seq)
        for computed in range(1, DEPTH):
            kv.reserve(seq, 1)
            seq.num_computed = computed
            kv.commit(seq)
        kv.release(seq)
        use_up(kv, tokens[: DEPTH - 1])


def test_b098_a_comb_with_a_branch_at_every_token() -> None:
    """No chain can be merged here. Fault seen: ``_nodes`` walks by recursion."""
    kv = KVCacheManager(PagePool(2 * DEPTH), RadixTree(1))
    trunk = np.arange(DEPTH, dtype=np.int32)
    with shallow_stack():
        pages = kv.pool.allocate(DEPTH)
        kv.tree.insert(trunk, pages, 0, (0,))
        for length in range(1, DEPTH):
            branch = np.append(trunk[:length], np.int32(DEPTH + 1))
            kv.tree.insert(branch, np.append(pages[:length], kv.pool.allocate(1)), length, (0,))
        assert kv.tree.num_nodes == 2 * (DEPTH - 1) + 1
        use_up(kv, trunk)
        del kv
        gc.collect()


def full_tree(num_leaves: int, policy: EvictionPolicyName = "lru") -> tuple[RadixTree, PagePool]:
    tree, pool = RadixTree(16, policy), PagePool(num_leaves)
    for number in range(num_leaves):
        tree.insert(np.full(16, number, np.int32), pool.allocate(1))
    return tree, pool


def evict_one_by_one(tree: RadixTree, pool: PagePool, num_pages: int) -> None:
    for _ in range(num_pages):
        assert len(tree.evict(1, pool.ref_count)) == 1


@pytest.mark.parametrize("share_held", [0.0, 0.25])
def test_b099_evicting_one_page_costs_the_same_among_ten_times_as_many(share_held: float) -> None:
    """A quarter of the leaves, the oldest, may be held: meeting them is paid once, and then they are out of
    the way. Fault seen: ``evict`` looks through all tails for the oldest one."""
    work = []
    for num_leaves in (2_000, 20_000):
        tree, pool = full_tree(num_leaves)
        held = np.arange(int(num_leaves * share_held), dtype=np.int32)
        pool.incref(held)
        evict_one_by_one(tree, pool, 1)
        work.append(lines_of(lambda tree=tree, pool=pool: evict_one_by_one(tree, pool, 1000)))  # type: ignore[misc]
    assert work[1] < 1.2 * work[0], f"lines for 500 evictions: {work}"
    assert work[1] < 500 * 250


@pytest.mark.parametrize("policy", ["lfu", "slru", "fifo", "priority", "cost"])
def test_b099_under_every_policy(policy: EvictionPolicyName) -> None:
    """Every second leaf was hit. Fault seen: ``next_victim`` looks through all tails for the smallest key."""
    work = []
    for num_leaves in (600, 6_000):
        tree, pool = full_tree(num_leaves, policy)
        for number in range(0, num_leaves, 2):
            tree.match(np.full(16, number, np.int32))
        evict_one_by_one(tree, pool, 1)
        work.append(lines_of(lambda tree=tree, pool=pool: evict_one_by_one(tree, pool, 250)))  # type: ignore[misc]
    assert work[1] < 1.5 * work[0], f"lines for 250 evictions: {work}"


def test_b099_a_match_costs_nodes_not_tokens() -> None:
    """Fault seen: ``agreement`` counts in a Python loop."""
    work = []
    for num_tokens in (1024, 4096):
        tree = RadixTree(16)
        tokens = np.arange(num_tokens, dtype=np.int32)
        tree.insert(tokens, np.arange(-(-num_tokens // 16), dtype=np.int32))
        tokens = tokens[:-1]  # the match ends inside the last page
        tree.match(tokens)
        work.append(lines_of(lambda tree=tree, tokens=tokens: tree.match(tokens)))  # type: ignore[misc]
    assert work[0] == work[1]
