"""EvictionQueue: candidates for eviction by sort key, at most one valid entry per page."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from radixkv.kv.invariant import require

_PAGE_BITS = 31
_PAGE_MASK = (1 << _PAGE_BITS) - 1
_SPARE = 64


class EvictionQueue:
    """A heap of ``(key, page)``, corrected lazily.

    An entry's key may lag behind the page's (while a page is in the tree its key only grows), never run
    ahead; ``pop`` compares the first entry with the page's present key and, if it lags, puts the page where
    it belongs. So a cache hit costs the queue nothing, and taking the first page costs O(log n) amortised:
    one correction at most for each time a page was used.

    A page that left the tree and came back may have a smaller key than its entry; ``push`` then makes a new
    entry, and the old one is dropped when met. The heap is rebuilt before such entries outnumber the valid
    ones, so it never outgrows the pool by more than a constant factor.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []  # key and page in one int: compared at a third of a tuple's cost
        self._entry_of: dict[int, int] = {}
        self._num_replaced = 0  # entries in the heap that another one of the same page stands for

    def __len__(self) -> int:
        return len(self._entry_of)

    def key_of(self, page: int) -> int | None:
        """The key under which ``page`` is a candidate; ``None`` if it is none."""
        entry = self._entry_of.get(page)
        return None if entry is None else entry >> _PAGE_BITS

    def push(self, page: int, key: int) -> None:
        """Make ``page`` a candidate; does nothing if it is one already with a key no larger."""
        entry = key << _PAGE_BITS | page
        known = self._entry_of.get(page)
        if known is not None:
            if known <= entry:
                return
            self._num_replaced += 1
            if self._num_replaced > len(self._entry_of) + _SPARE:
                self._heap = [other for other in self._entry_of.values() if other != known]
                heapify(self._heap)
                self._num_replaced = 0
        self._entry_of[page] = entry
        heappush(self._heap, entry)

    def pop(
        self, is_tail: NDArray[np.bool_], ref_count: NDArray[np.int32], keys: NDArray[np.int64]
    ) -> int | None:
        """Remove and return the page to evict next: the one of the smallest key (then of the smallest id)
        that ends a leaf and is idle, all three arrays by page id; ``None`` when there is none. Entries of
        other pages that come before it are dropped on the way."""
        heap, entry_of = self._heap, self._entry_of
        while heap:
            entry = heap[0]
            page = entry & _PAGE_MASK
            if self._num_replaced and entry_of.get(page) != entry:
                heappop(heap)
                self._num_replaced -= 1
                continue
            if ref_count.item(page) != 1 or not is_tail.item(page):
                heappop(heap)
                del entry_of[page]
                continue
            present = keys.item(page) << _PAGE_BITS | page
            if present != entry:
                heapreplace(heap, present)
                entry_of[page] = present
                continue
            heappop(heap)
            del entry_of[page]
            return page
        return None

    def first_key(self) -> int | None:
        """A lower bound of the keys of all candidates; ``None`` when there is none."""
        return self._heap[0] >> _PAGE_BITS if self._heap else None

    def clear(self) -> None:
        self._heap.clear()
        self._entry_of.clear()
        self._num_replaced = 0

    def check(self) -> None:
        """Every entry of the heap is a page's, or counted as replaced (T5). Raises ``InternalError``."""
        expected = len(self._entry_of) + self._num_replaced
        require(len(self._heap) == expected, "T5", f"{len(self._heap)} entries, {expected} expected")
