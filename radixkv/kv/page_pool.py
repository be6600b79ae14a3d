"""PagePool: which pages are free, and how many holders each page has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixkv.config import MAX_SETTING
from radixkv.errors import ConfigError, MisuseError, OutOfPages
from radixkv.kv.invariant import require
from radixkv.plain import plain_whole, shown
from radixkv.types import PageIds

_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_FEW = 128
"""Up to here lists and sets are quicker than numpy."""
BYTES_PER_PAGE = 12
"""Three int32 for each page: its count, its place on the free stack, and a mark."""


def has_twice(pages: PageIds, mark: NDArray[np.int32]) -> bool:
    """Whether an id stands twice in ``pages``. ``mark`` is scratch: one int32 for each possible id."""
    num = len(pages)
    if num <= _FEW:
        return num > 1 and len(set(pages.tolist())) < num
    order = np.arange(num, dtype=np.int32)
    mark[pages] = order
    return bool((mark[pages] != order).any())


class PagePool:
    """Owns every reference count. A page is an int; what a holder is, the pool does not know.

    P1: a page's count is 0 exactly when it stands on the free stack, once.
    P2: ``incref`` and ``decref`` act on live pages only.
    P3: the ids within one call are distinct (numpy would count a repeated id once).

    The K/V store has one page more than the pool, for padding; the pool does not know it. Misuse raises
    ``MisuseError`` before anything was changed.
    """

    def __init__(self, num_pages: int) -> None:
        """Takes ``BYTES_PER_PAGE`` bytes for each page. Raises ``ConfigError`` when ``num_pages`` is no whole
        number in ``1..MAX_SETTING``, or when that much memory cannot be had."""
        number = plain_whole(num_pages)
        if number is None or number < 1:
            raise ConfigError(f"num_pages must be a whole number of at least 1, got {shown(num_pages)}")
        if number > MAX_SETTING:
            raise ConfigError(f"num_pages must be at most {MAX_SETTING}, got {shown(number)}")
        self.num_pages = number
        try:
            self._count = np.zeros(number, np.int32)
            self._stack = np.arange(number - 1, -1, -1, dtype=np.int32)
            self._mark = np.zeros(number, np.int32)  # scratch of the P3 test, no state
        except MemoryError as error:
            raise ConfigError(
                f"num_pages={number} needs {number * BYTES_PER_PAGE} bytes of memory, which cannot be had"
            ) from error
        self._num_free = number
        self._is_claimed = False
        self._ref_count = self._count.view()
        self._ref_count.flags.writeable = False

    def claim(self) -> None:
        """A manager begins to work with it. Raises ``MisuseError`` where one does already, for two would
        count the same pages apart."""
        if self._is_claimed:
            raise MisuseError("a manager works with this pool already: two cannot share it")
        self._is_claimed = True

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    @property
    def ref_count(self) -> NDArray[np.int32]:
        """``[num_pages]`` holders of each page; a read-only view that follows the pool."""
        return self._ref_count

    def allocate(self, num_pages: int) -> PageIds:
        """``num_pages`` free pages, each with one holder now: all or nothing.

        Raises ``OutOfPages`` when fewer are free; nothing is changed then.
        """
        if num_pages < 0:
            raise MisuseError(f"cannot allocate {num_pages} pages")
        if num_pages > self._num_free:
            raise OutOfPages(num_pages, self._num_free)
        top = self._num_free
        pages = self._stack[top - num_pages : top][::-1].copy()
        self._num_free = top - num_pages
        self._count[pages] = 1
        return pages

    def incref(self, pages: PageIds) -> None:
        """One holder more for each of ``pages``, which are live (P2) and distinct (P3)."""
        if len(pages) == 1:
            page, count = self._one_of(pages)
            self._count[page] = count + 1
        elif len(pages):
            self._count[pages] = self._counts_of(pages) + 1

    def decref(self, pages: PageIds) -> None:
        """One holder less for each of ``pages``; those without a holder are free again."""
        if len(pages) == 0:
            return
        if len(pages) == 1:
            page, count = self._one_of(pages)
            self._count[page] = count - 1
            if count == 1:
                self._stack[self._num_free] = page
                self._num_free += 1
            return
        left = self._counts_of(pages) - 1
        self._count[pages] = left
        freed = pages[left == 0]
        if len(freed):
            top = self._num_free
            self._stack[top : top + len(freed)] = freed[::-1]
            self._num_free = top + len(freed)

    def _one_of(self, pages: PageIds) -> tuple[int, int]:
        """The one page and its count, once P2 is known to hold: as ``_counts_of``, at a third of the cost."""
        if pages.dtype != _INT32 or pages.ndim != 1:
            self._counts_of(pages)
        page = pages.item()
        if not 0 <= page < self.num_pages or (count := self._count.item(page)) == 0:
            self._counts_of(pages)
        return page, count

    def _counts_of(self, pages: PageIds) -> NDArray[np.int32]:
        """Counts of ``pages``, of which there is at least one, once P2 and P3 are known to hold."""
        if pages.dtype != _INT32 or pages.ndim != 1:
            raise MisuseError(f"page ids are a flat int32 array, got {pages.dtype} of shape {pages.shape}")
        try:
            counts: NDArray[np.int32] = self._count[pages.view(_UINT32)]  # unsigned: none counts from behind
        except IndexError:
            raise MisuseError(f"page ids must lie in 0..{self.num_pages - 1}, got {_some(pages)}") from None
        num = len(pages)
        if 0 in counts.tolist() if num <= _FEW else np.count_nonzero(counts) < num:
            raise MisuseError(f"P2: page {int(pages[counts.argmin()])} is free already")
        if has_twice(pages, self._mark):
            raise MisuseError(f"P3: a page stands twice in one call: {_some(pages)}")
        return counts

    def check(self) -> None:
        """Verify P1 from scratch; raises ``InternalError``."""
        free = self._stack[: self._num_free]
        require(0 <= self._num_free <= self.num_pages, "P1", self.stats)
        require(bool((self._count >= 0).all()), "P2", "negative counts:", self._count)
        on_stack = np.zeros(self.num_pages, np.bool_)
        on_stack[free] = True
        require(np.count_nonzero(on_stack) == len(free), "P1", "a page is on the free stack twice:", free)
        wrong = np.flatnonzero(on_stack != (self._count == 0))
        require(len(wrong) == 0, "P1", "count and free stack disagree on pages", wrong[:16])

    def stats(self) -> dict[str, int]:
        return {
            "num_pages": self.num_pages,
            "num_free": self._num_free,
            "num_live": self.num_pages - self._num_free,
            "num_references": int(self._count.sum()),
        }


def _some(pages: NDArray[np.integer]) -> list[int]:
    return [int(page) for page in pages[:16]]
