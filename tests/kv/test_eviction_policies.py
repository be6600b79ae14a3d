"""Every policy against the page-per-node oracle: the whole order of eviction, page by page."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.config import EvictionPolicyName
from radixkv.kv.radix_tree import RadixTree
from radixkv.testing.page_oracle import PageOracle
from radixkv.types import Namespace, PageIds

POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)
NUM_PAGES = 24


@dataclass
class Pair:
    """A tree and its oracle, always told the same."""

    policy: EvictionPolicyName
    page_size: int

    def __post_init__(self) -> None:
        self.tree = RadixTree(self.page_size, self.policy)
        self.oracle = PageOracle(self.page_size, self.policy)
        self.counts = np.ones(NUM_PAGES, np.int32)
        self.free = list(range(NUM_PAGES))

    def match(self, tokens: list[int], namespace: Namespace = (), priority: int = 0) -> None:
        found = self.oracle.lookup(_ids(tokens), namespace)
        self.oracle.touch(found.path, priority)
        assert self.tree.match(_ids(tokens), namespace, priority).num_tokens == found.num_tokens

    def insert(self, tokens: list[int], namespace: Namespace = (), priority: int = 0) -> None:
        num = -(-len(tokens) // self.page_size)
        if num > len(self.free):
            self.evict(num - len(self.free))
        if num > len(self.free):
            return
        pages = self.free[:num]
        done = self.oracle.insert(_ids(tokens), pages, namespace, priority)
        said = self.tree.insert(_ids(tokens), _ids(pages), 0, namespace, priority)
        assert said.canonical.tolist() == list(done.canonical[: len(tokens) // self.page_size])
        taken = [pages[index] for index in done.adopted]
        assert said.adopted.tolist() == taken
        if done.replaced is not None:
            self.free.append(done.replaced[0])
        self.free = [page for page in self.free if page not in taken]

    def evict(self, num_pages: int) -> list[int]:
        expected = [n.page_id for n in self.oracle.evict(num_pages, lambda page: self.counts[page] == 1)]
        assert self.tree.evict(num_pages, self.counts).tolist() == expected
        self.free += expected
        self.check()
        return expected

    def hold(self, tokens: list[int]) -> PageIds:
        """Hold the whole pages of a path."""
        pages = _ids(list(self.oracle.lookup(_ids(tokens)).page_ids))
        self.counts[pages] += 1
        return pages

    def let_go(self, pages: PageIds) -> None:
        self.counts[pages] -= 1
        self.tree.became_idle(pages[self.counts[pages] == 1])

    def check(self) -> None:
        self.oracle.check()
        self.tree.check(self.counts)


def _ids(values: list[int]) -> PageIds:
    return np.array(values, np.int32)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15)
@given(rng=st.randoms(use_true_random=False))
def test_order_of_eviction_is_the_oracles(policy: EvictionPolicyName, page_size: int, rng: Random) -> None:
    """Fault seen: ``lfu`` without the last use; ``EvictionQueue.push`` keeps the entry that a page had when
    it was in the tree before."""
    pair = Pair(policy, page_size)
    held: list[PageIds] = []
    for _ in range(40):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * page_size))]
        namespace: Namespace = rng.choice([(), (), ("1",)])
        priority = rng.choice([0, 0, -3, 7])
        action = rng.random()
        if action < 0.45:
            pair.insert(tokens, namespace, priority)
        elif action < 0.8:
            pair.match(tokens, namespace, priority)
        elif action < 0.9:
            pair.evict(rng.randrange(1, 6))
        elif held and (action < 0.95 or len(held) > 2):
            pair.let_go(held.pop(rng.randrange(len(held))))
        else:
            held.append(pair.hold(tokens))
    for pages in held:
        pair.let_go(pages)
    pair.evict(NUM_PAGES)
    assert pair.tree.num_pages == 0
