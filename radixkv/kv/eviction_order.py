"""EvictionOrder: what is known of each page's use, and which page goes next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixkv.config import EvictionPolicyName
from radixkv.histogram import Histogram
from radixkv.kv.eviction_policy import PathUse, key_of, lru
from radixkv.kv.eviction_queue import EvictionQueue
from radixkv.kv.invariant import require
from radixkv.types import PageIds

_LOWEST = -(2**63)
_BATCH = 4096
_LONGEST_USES = 2**32


class EvictionOrder:
    """Arrays by page id, written when a path is used, and the queue of candidates.

    The tree tells it what happened (``matched``, ``opened``, ``closed``, ``evicted``) and asks it who goes
    next (``next_victim``, ``num_victims``); nothing else of the tree knows a policy. Another order, one whose
    keys may fall or that keeps several queues, is another class with these methods.

    T5: what is kept per page never rises along a path; a candidate's entry in the queue is never ahead of
        its key.
    """

    def __init__(self, policy: EvictionPolicyName, page_size: int) -> None:
        self.policy: EvictionPolicyName = policy
        self.now = 0
        """The number of the last use."""
        self._key = key_of(policy)
        self._is_lru = self._key is lru
        self._page_size = page_size
        self._floor = 0
        self._queue = EvictionQueue()
        self._is_tail = np.zeros(0, np.bool_)
        self._last_use = np.zeros(0, np.int64)
        self._hits = np.zeros(0, np.int64)
        self._priorities = np.zeros(0, np.int64)
        self._keys = self._last_use if self._is_lru else np.zeros(0, np.int64)
        self._ages = Histogram(1.0, _LONGEST_USES)
        self._gaps = Histogram(1.0, _LONGEST_USES)
        self._new_gaps: list[int] = []
        self._new_ages: list[int] = []

    def __len__(self) -> int:
        """Candidates, those included that are held and not met yet."""
        return len(self._queue)

    def make_room(self, num_pages: int) -> None:
        """Ids up to ``num_pages - 1`` can be told of from now on."""
        more = num_pages - len(self._is_tail)
        self._is_tail = np.concatenate((self._is_tail, np.zeros(more, np.bool_)))
        self._last_use = np.concatenate((self._last_use, np.zeros(more, np.int64)))
        if self._is_lru:
            self._keys = self._last_use
            return
        self._hits = np.concatenate((self._hits, np.zeros(more, np.int64)))
        self._priorities = np.concatenate((self._priorities, np.zeros(more, np.int64)))
        self._keys = np.concatenate((self._keys, np.zeros(more, np.int64)))

    # ---- told by the tree -------------------------------------------------------------------------------

    def matched(
        self, pages: PageIds, partial_page: int | None, priority: int, *, is_retry: bool = False
    ) -> None:
        """A match found these pages, a path from a root; ``is_retry``: again, for the same use."""
        self.now = now = self.now + 1
        last_use, gaps = self._last_use, self._new_gaps
        if partial_page is None and len(pages) == 0:
            return
        if not is_retry:
            gaps.append(now - last_use.item(pages.item(-1) if partial_page is None else partial_page))
            if len(gaps) >= _BATCH:
                self._record()
        last_use[pages] = now
        if partial_page is not None:
            last_use[partial_page] = now
        if not self._is_lru:
            path = pages if partial_page is None else np.append(pages, np.int32(partial_page))
            self._hits[path] += not is_retry
            self._use(path, 0, priority)

    def inserted(self, pages: PageIds, partial_page: int | None, num_new: int, priority: int) -> None:
        """An insert used these pages, a path from a root; the last ``num_new`` of it are new."""
        self.now += 1
        self._last_use[pages] = self.now
        if partial_page is not None:
            self._last_use[partial_page] = self.now
        if not self._is_lru:
            path = pages if partial_page is None else np.append(pages, np.int32(partial_page))
            new = path[len(path) - num_new :]
            self._hits[new] = 0
            self._priorities[new] = _LOWEST
            self._keys[new] = _LOWEST
            self._use(path, num_new, priority)

    def _use(self, path: PageIds, num_new: int, priority: int) -> None:
        self._floor += 1
        self._priorities[path] = np.maximum(self._priorities[path], priority)
        use = PathUse(
            self.now, num_new, self._hits[path], self._priorities[path], self._page_size, self._floor
        )
        self._keys[path] = np.maximum(self._keys[path], self._key(use))

    def opened(self, page: int) -> None:
        """``page`` ends a leaf from now on."""
        self._is_tail[page] = True
        self._queue.push(page, self._keys.item(page))

    def closed(self, page: int) -> None:
        """``page`` ends no leaf any more, or has left the tree."""
        self._is_tail[page] = False

    def became_idle(self, pages: PageIds) -> None:
        """The tree alone holds these from now on. Those that end no leaf are passed over."""
        try:
            tails = pages[self._is_tail[pages]]
        except IndexError:  # ids that it was never told of
            pages = pages[pages < len(self._is_tail)]
            tails = pages[self._is_tail[pages]]
        for page in tails.tolist():
            self._queue.push(page, self._keys.item(page))

    def evicted_one(self, page: int) -> None:
        """This one goes now."""
        self._new_ages.append(self.now - self._last_use.item(page))
        if len(self._new_ages) >= _BATCH:
            self._record()
        if not self._is_lru:
            self._floor = max(self._floor, self._keys.item(page))

    def evicted(self, pages: PageIds) -> None:
        """These go now, in this order; at least one."""
        age = self.now - self._last_use.item(pages.item(0))
        if age == self.now - self._last_use.item(pages.item(-1)):  # of all between, too (T5)
            self._ages.record(age, len(pages))
        else:
            self._ages.record_many(self.now - self._last_use[pages])
        if not self._is_lru:  # the last one's key is the highest (T5)
            self._floor = max(self._floor, self._keys.item(pages.item(-1)))

    def clear(self) -> None:
        """No page is in the tree any more."""
        self._queue.clear()
        self._is_tail[:] = False

    # ---- asked by the tree ------------------------------------------------------------------------------

    def next_victim(self, ref_count: NDArray[np.int32]) -> int | None:
        """The idle page to go next, which ends a leaf; ``None`` when there is none. It is no candidate any
        more: evict it. Held pages are dropped when met; ``became_idle`` and ``opened`` put them back."""
        return self._queue.pop(self._is_tail, ref_count, self._keys)

    def num_victims(self, tail: PageIds, ref_count: NDArray[np.int32]) -> int:
        """How many of ``tail``, which are a leaf's last pages from the end on, come next: idle ones that go
        before every other candidate. The first is known to be the next victim."""
        others = self._queue.first_key()
        keys = self._keys
        low, high, probe = 1, len(tail), len(tail) - 1  # often all go
        while low < high:  # towards the root keys and counts never fall (T5, M2)
            page = tail.item(probe)
            if ref_count.item(page) == 1 and (others is None or keys.item(page) < others):
                low = probe + 1
            else:
                high = probe
            probe = (low + high) // 2
        return low

    # ---- reports ----------------------------------------------------------------------------------------

    def _record(self) -> None:
        self._gaps.record_many(self._new_gaps)
        self._ages.record_many(self._new_ages)
        self._new_gaps.clear()
        self._new_ages.clear()

    def check_tails(self, tails: PageIds) -> None:
        """``tails``, ascending, are the last pages of all leaves."""
        self._queue.check()
        require(np.array_equal(np.flatnonzero(self._is_tail), tails), "T5", "tails of leaves are not marked")

    def check_path(self, pages: PageIds, before: int | None) -> None:
        """These stand on one path, behind the page ``before``."""
        path = pages if before is None else np.append(np.int32(before), pages)
        everything = (self._last_use, self._keys, self._hits, self._priorities)
        for kept in everything[:1] if self._is_lru else everything:
            values = kept[path]
            if (values[1:] > values[:-1]).any():
                require(False, "T5", f"pages {path.tolist()}, {values.tolist()}")
        require(int(self._last_use[path[0]]) <= self.now, "T5", f"page {path[0]} was used in the future")

    def check_candidate(self, page: int) -> None:
        """``page`` is idle and ends a leaf."""
        key = self._queue.key_of(page)
        present = int(self._keys[page])
        require(key is not None, "T5", f"an idle leaf cannot be evicted: its last page is {page}")
        require(
            key is not None and key <= present, "T5", f"page {page} stands at {key}, belongs at {present}"
        )

    def stats(self) -> dict[str, dict[str, int | float]]:
        """Histograms, in uses of the tree (matches and inserts): ``age_at_eviction_uses``, of each evicted
        page since its last use; ``reuse_gap_uses``, of each hit since the last use of its deepest page."""
        self._record()
        return {"age_at_eviction_uses": self._ages.stats(), "reuse_gap_uses": self._gaps.stats()}
