"""EvictionQueue: candidates for eviction in order of recency, at most one entry per page."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

_PAGE_BITS = 31
_PAGE_MASK = (1 << _PAGE_BITS) - 1


class EvictionQueue:
    """A heap of ``(recency, page)``, corrected lazily.

    An entry's recency may lag behind the page's (recency only grows), never run ahead; ``pop`` compares the
    first entry with the page's present recency and, if it lags, puts the page where it belongs. So a
    cache hit costs the queue nothing, and taking the least recent page costs O(log n) amortised: one
    correction at most for each time a page was used. Each page has one entry at most, so the heap never
    outgrows the pool.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []  # recency and page in one int: compared at a third of a tuple's cost
        self._queued: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, page: int) -> bool:
        return page in self._queued

    def push(self, page: int, recency: int) -> None:
        """Make ``page`` a candidate; does nothing if it is one already."""
        if page not in self._queued:
            self._queued.add(page)
            heappush(self._heap, recency << _PAGE_BITS | page)

    def pop(
        self, is_tail: NDArray[np.bool_], ref_count: NDArray[np.int32], recency: NDArray[np.int64]
    ) -> int | None:
        """Remove and return the page to evict next: the least recently used one that ends a leaf and is
        idle, all three arrays by page id; ``None`` when there is none. Entries of other pages that come
        before it are dropped on the way."""
        heap, queued = self._heap, self._queued
        while heap:
            entry = heap[0]
            page = entry & _PAGE_MASK
            if ref_count.item(page) != 1 or not is_tail.item(page):
                heappop(heap)
                queued.remove(page)
                continue
            present = recency.item(page) << _PAGE_BITS | page
            if present != entry:
                heapreplace(heap, present)
                continue
            heappop(heap)
            queued.remove(page)
            return page
        return None

    def first_recency(self) -> int | None:
        """Recency of the first entry; ``None`` when there is none."""
        return self._heap[0] >> _PAGE_BITS if self._heap else None

    def clear(self) -> None:
        self._heap.clear()
        self._queued.clear()
