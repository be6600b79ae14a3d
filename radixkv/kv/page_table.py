"""PageTable: one sequence's pages in position order. The only place that turns positions into slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixkv.kv.hold import Hold
from radixkv.kv.invariant import require
from radixkv.types import PageIds, SlotMapping

_MIN_CAPACITY = 64


def slots_of(
    pages: PageIds, positions: NDArray[np.int64], page_size: int, first_page: NDArray[np.int64] | int = 0
) -> SlotMapping:
    """Slots of ``positions``, ``[n]`` int64 (B1). ``pages`` may hold the tables of several sequences on end;
    ``first_page`` then says where each position's table begins in it."""
    return pages[first_page + positions // page_size] * np.int64(page_size) + positions % page_size


class PageTable:
    """B1: position ``i`` lives in slot ``pages[i // page_size] * page_size + i % page_size``.
    B2: each entry is one held reference. The table itself counts nothing."""

    __slots__ = ("_buffer", "hold", "is_hit_counted", "num_pages", "page_size")

    def __init__(self, page_size: int, pages: PageIds | None = None) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.hold: Hold | None = None
        """Whose the table is; ``None`` where no manager holds pages for it."""
        self.is_hit_counted = False
        """The sequence was acquired and has reserved nothing since. If it is released and acquired again, as
        one that waits for pages may be in every step, that is the same hit."""
        self._buffer = np.empty(_MIN_CAPACITY, np.int32)
        if pages is not None:
            self.extend(pages)

    @property
    def pages(self) -> PageIds:
        """``[num_pages]`` int32; a view, do not keep it."""
        return self._buffer[: self.num_pages]

    @property
    def num_slots(self) -> int:
        """Tokens that fit into the pages held."""
        return self.num_pages * self.page_size

    def extend(self, pages: PageIds) -> None:
        need = self.num_pages + len(pages)
        if need > len(self._buffer):
            grown = np.empty(max(need, 2 * len(self._buffer)), np.int32)
            grown[: self.num_pages] = self.pages
            self._buffer = grown
        self._buffer[self.num_pages : need] = pages
        self.num_pages = need

    def replace(self, start: int, pages: PageIds) -> None:
        """Overwrite the entries from index ``start`` on with ``pages``; the length stays."""
        assert start + len(pages) <= self.num_pages
        self._buffer[start : start + len(pages)] = pages

    def pop_from(self, start: int) -> PageIds:
        """Cut the table down to ``start`` entries; returns a copy of what was cut."""
        assert 0 <= start <= self.num_pages
        cut = self.pages[start:].copy()
        self.num_pages = start
        return cut

    def slot_mapping(self, start: int, stop: int) -> SlotMapping:
        """Slots of positions ``start..stop-1`` as ``[stop - start]`` int64 (B1)."""
        assert 0 <= start <= stop <= self.num_slots
        positions = np.arange(start, stop, dtype=np.int64)
        return slots_of(self._buffer, positions, self.page_size)

    def check(self) -> None:
        """B2: no page stands twice; raises ``InternalError``."""
        pages = self.pages
        require(len(set(pages.tolist())) == len(pages), "B2", "a page stands twice in a table:", pages)
        require(pages.min(initial=0) >= 0, "B2", "a table holds a negative page id:", pages)

    def stats(self) -> dict[str, int]:
        return {"num_pages": self.num_pages, "num_slots": self.num_slots}
