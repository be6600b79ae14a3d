"""LedgerModel: what a machine over the manager knows, and all that must hold between two operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from radixkv.config import EvictionPolicyName
from radixkv.kv.events import Cleared, Removed, ReplayedPage, replay
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_pool import PagePool
from radixkv.kv.pins import Pin
from radixkv.kv.radix_tree import RadixTree
from radixkv.sequence import Sequence
from radixkv.testing.canary_store import CanaryStore, Hashes, PrefixHasher
from radixkv.testing.page_oracle import OracleNode, PageOracle
from radixkv.types import Namespace, PageIds, TokenIds

EVICTION_MEMORY = 48
MAX_EVENT_PAGES = 10_000
COMPARE_EVERY = 4

Content: TypeAlias = dict[int, tuple[Namespace, int, tuple[int, ...]]]


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class WatchedPool(PagePool):
    """Tells of each page at the very moment that it becomes free."""

    def __init__(self, num_pages: int, on_free: Callable[[PageIds], None]) -> None:
        super().__init__(num_pages)
        self._on_free = on_free

    def decref(self, pages: PageIds) -> None:
        super().decref(pages)
        self._on_free(pages[self.ref_count[pages] == 0])


@dataclass(eq=False)
class Row:
    """One sequence and what the machine expects of it."""

    seq: Sequence
    held: bool = False
    admitting: bool = False
    """Acquired for the first time, and not reserved yet."""
    is_hit_counted: bool = False
    """Acquired, and not reserved since: to be acquired again is no other hit."""
    num_reserved: int = 0
    """Tokens that may be written from ``num_computed`` on."""
    source: int | None = None
    """Page held for a copy that is in no built batch yet."""
    source_tokens: int = 0
    copy: PageCopy | None = None
    """What ``take_copies`` must return for this row."""
    copy_of: str = ""
    """The transition that the copy counts as."""
    stale: bool = False
    """Acquired before the last flush."""

    def forget_copy(self) -> None:
        self.source, self.source_tokens, self.copy, self.copy_of = None, 0, None, ""


class LedgerModel:
    """Manager, oracle and canary side by side; ``verify`` compares them."""

    make_tree: Callable[[int, EvictionPolicyName], RadixTree | NullTree] = RadixTree
    make_oracle: Callable[[int, EvictionPolicyName], PageOracle] = PageOracle
    merges_every_chain = True
    """False where edges are too long to be merged."""

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        max_pinned_pages: int = 0,
        eviction_policy: EvictionPolicyName = "lru",
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_pinned_pages = max_pinned_pages
        self.clock = FakeClock()
        self.tree = self.make_tree(page_size, eviction_policy)
        self.kv = KVCacheManager(
            WatchedPool(num_pages, self.not_in_a_table), self.tree,
            max_pinned_pages=max_pinned_pages, eviction_memory=EVICTION_MEMORY,
            max_event_pages=MAX_EVENT_PAGES, clock=self.clock,
        )  # fmt: skip
        self.replayed: dict[int, ReplayedPage] = {}
        """What the events so far say that the tree holds."""
        self.store = CanaryStore(num_pages, page_size)
        self.oracle = self.make_oracle(page_size, eviction_policy)
        self.rows: list[Row] = []
        self.pins: dict[int, Pin] = {}
        """Live pins, with the pages that they must hold now."""
        self.evicted: list[tuple[Namespace, tuple[int, ...]]] = []
        """Prefixes of evicted pages, oldest first."""
        self.num_forgotten = 0
        self.counts: Counter[str] = Counter()
        self.num_steps = 0
        self.next_id = 0
        self._node_hashes: WeakKeyDictionary[OracleNode, Hashes] = WeakKeyDictionary()
        self._content: Content = {}
        self._version = self.kv.version

    @property
    def epoch(self) -> int:
        return self.counts["flush"]

    def holders(self) -> NDArray[np.int64]:
        """``[num_pages]`` how many holders each page must have (M1), from what the machine knows."""
        held: list[int] = [node.page_id for _, node in self.oracle.nodes()]
        for row in self.rows:
            if row.held:
                held += row.seq.page_table.pages.tolist()
            if row.source is not None:
                held.append(row.source)
        for pin in self.pins.values():
            held += pin.pages
        return np.bincount(np.array(held, np.int64), minlength=self.num_pages)

    def not_in_a_table(self, freed: PageIds) -> None:
        """No table shows a free page, not even for a moment: tables let go before the pool does."""
        for row in self.rows:
            still = np.intersect1d(freed, row.seq.page_table.pages)
            assert len(still) == 0, f"pages {still} are freed while a table shows them"

    def is_idle(self) -> Callable[[int], bool]:
        counts = self.holders()
        return lambda page_id: bool(counts[page_id] == 1)

    def verify(self) -> None:
        """Everything that must hold between two operations. Counts as one step."""
        self.num_steps += 1
        kv = self.kv
        kv.check([row.seq for row in self.rows if row.held])
        counts = self.holders()
        wrong = np.flatnonzero(kv.pool.ref_count != counts)
        assert len(wrong) == 0, f"M1: pages {wrong} count {kv.pool.ref_count[wrong]}, held {counts[wrong]}"
        content = tree_content(self.tree)
        assert content == self.oracle.content(), f"tree {content}, oracle {self.oracle.content()}"
        assert content == self._content or kv.version != self._version, "content changed, version did not"
        self.verify_events(
            content, has_changed=kv.version != self._version, compare=self.num_steps % COMPARE_EVERY == 0
        )
        self._content, self._version = content, kv.version
        num_edges = self.oracle.num_edges()
        assert self.tree.num_nodes >= num_edges
        assert self.tree.num_nodes == num_edges or not self.merges_every_chain, "chains are not merged"
        idle = self.oracle.idle_pages(lambda page_id: bool(counts[page_id] == 1))
        num_free = int(np.count_nonzero(counts == 0))
        stats = kv.stats()
        assert (stats["num_pages_free"], stats["num_pages_idle"]) == (num_free, len(idle))
        assert stats["num_pages_used"] == self.num_pages - num_free - len(idle)
        assert kv.num_available == num_free + len(idle)
        assert kv.num_pinned_pages == len({page for pin in self.pins.values() for page in pin.pages})
        assert {pin.pin_id: pin.pages for pin in kv.pins} == {i: p.pages for i, p in self.pins.items()}
        self.store.poison(np.flatnonzero(counts == 0).astype(np.int32))
        self.read_everything()

    def verify_events(self, content: Content, *, has_changed: bool, compare: bool = True) -> None:
        """The events, applied one after the other, say exactly what the tree holds; so does ``content``."""
        events = self.kv.take_events()
        if not has_changed:
            assert not events, f"nothing changed, but {events}"
            return
        for event in events:
            if isinstance(event, Removed):
                self.counts[f"event: {event.reason}"] += 1
            elif isinstance(event, Cleared):
                self.counts["event: cleared"] += 1
        replay(events, self.page_size, self.replayed)
        assert len(self.replayed) == len(content), "the events do not give the tree's number of pages"
        if not compare:
            return
        held = {page: (name[:-1], before, own) for page, (name, before, own) in content.items()}
        told = {
            key: (page.namespace, -1 if page.parent is None else page.parent, page.token_ids)
            for key, page in self.replayed.items()
        }
        assert prefixes(told) == prefixes(held), "the events do not give the tree"
        assert replay(self.kv.content(), self.page_size) == self.replayed, "content() does not give the tree"

    def read_everything(self) -> None:
        """Every computed position of every sequence and every page of the tree holds its own prefix."""
        for row in self.rows:
            if row.held:
                self.read_row(row)
        slots: list[NDArray[np.int64]] = []
        expected: list[Hashes] = []
        for namespace, node in self.oracle.nodes():
            first = node.page_id * self.page_size
            slots.append(np.arange(first, first + len(node.token_ids), dtype=np.int64))
            expected.append(self._hashes_of_node(namespace, node))
        if slots:
            self.store.read_check_hashes(np.concatenate(slots), np.concatenate(expected))

    def read_row(self, row: Row) -> None:
        """Read what is computed; where a copy is still due, its tokens are read from the source."""
        seq = row.seq
        if seq.num_computed == 0:
            return
        hashes = self.hashes_of(seq.token_ids[: seq.num_computed], seq.namespace)
        here = seq.num_computed - row.source_tokens
        slots = seq.page_table.slot_mapping(0, here)
        if row.source is not None:
            first = row.source * self.page_size
            slots = np.concatenate([slots, np.arange(first, first + row.source_tokens, dtype=np.int64)])
        self.store.read_check_hashes(slots, hashes)

    def hashes_of(self, token_ids: TokenIds, namespace: Namespace) -> Hashes:
        """The namespace counts: the same tokens have another K/V in another one, or after a flush."""
        return self.store.hasher.extend(PrefixHasher.seed(*namespace), token_ids)

    def _hashes_of_node(self, namespace: Namespace, node: OracleNode) -> Hashes:
        known = self._node_hashes.get(node)
        if known is None:
            path = node.path
            hashes = self.hashes_of(np.array(prefix_of(node), np.int32), namespace)
            known = self._node_hashes[node] = hashes[(len(path) - 1) * self.page_size :]
        return known


def prefix_of(node: OracleNode) -> tuple[int, ...]:
    """All tokens up to and including this page's."""
    return tuple(token for page in node.path for token in page.token_ids)


def prefixes(content: Content) -> list[tuple[Namespace, tuple[int, ...]]]:
    """The namespace and all tokens up to each page's end, in no order of meaning."""
    found = []
    for namespace, before, tokens in content.values():
        while before != -1:
            name, before, earlier = content[before]
            assert name == namespace
            tokens = earlier + tokens
        found.append((namespace, tokens))
    return sorted(found, key=repr)


def tree_content(tree: RadixTree | NullTree) -> Content:
    """The tree's pages as ``PageOracle.content`` gives them, read from its nodes."""
    found: Content = {}
    if isinstance(tree, NullTree):
        return found
    todo = [(namespace, -1, root) for namespace, root in tree._roots.items()]
    while todo:
        namespace, before, node = todo.pop()
        tokens = np.frombuffer(node.tokens, np.int32).tolist()
        for index, page in enumerate(node.pages.tolist()):
            own = tokens[index * tree.page_size : (index + 1) * tree.page_size]
            found[page] = (namespace, before, tuple(own))
            before = page
        todo += [(namespace, before, child) for child in (node.children or {}).values()]
    return found
