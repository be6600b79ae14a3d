"""EvictionMemory: what was evicted lately, for ``explain``. It keeps no K/V and decides nothing."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

from radixkv.types import Namespace

Anchor: TypeAlias = int | Namespace
"""What a page hung under: the serial of the page before it, or its namespace."""


class Ghost(NamedTuple):
    """One evicted page: what it hung under, its tokens as int32 bytes, its serial, the how-manieth it was."""

    anchor: Anchor
    tokens: bytes
    serial: int
    number: int


class EvictionMemory:
    """The last ``max_pages`` evicted pages, each findable from the page it hung under.

    A page has a serial for as long as the tree holds it, and a page that comes back gets a new one; so
    the ghosts of its old children are found through its own ghost. Tokens are compared, nothing is hashed
    to decide equality.
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_evicted = 0
        """Pages evicted since the beginning, remembered or not."""
        self._ghosts: deque[Ghost] = deque()
        self._under: dict[Anchor, deque[Ghost]] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    def record(self, anchor: Anchor, tokens: bytes, serial: int) -> None:
        """Remember one evicted page; forgets the oldest one when full."""
        self.num_evicted += 1
        if self.max_pages == 0:
            return
        if len(self._ghosts) == self.max_pages:
            oldest = self._ghosts.popleft()
            siblings = self._under[oldest.anchor]
            siblings.popleft()
            if not siblings:
                del self._under[oldest.anchor]
        ghost = Ghost(anchor, tokens, serial, self.num_evicted)
        self._ghosts.append(ghost)
        self._under.setdefault(anchor, deque()).append(ghost)

    def skip(self, num_pages: int) -> None:
        """Count evicted pages that would be forgotten at once."""
        self.num_evicted += num_pages

    def under(self, anchor: Anchor) -> tuple[Ghost, ...]:
        """Remembered pages that hung under ``anchor``, oldest first."""
        return tuple(self._under.get(anchor, ()))

    def clear(self) -> None:
        """Forget all: after a flush nothing that was evicted before could have been a hit."""
        self._ghosts.clear()
        self._under.clear()
