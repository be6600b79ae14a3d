"""EvictionMemory: what was evicted lately, for ``explain``. It keeps no K/V and decides nothing."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

from radixkv.kv.token_bytes import TOKEN_BYTES, page_agreement
from radixkv.types import Namespace

Anchor: TypeAlias = int | Namespace
"""What a page hung under: the serial of the page before it, or its namespace."""


class Ghost(NamedTuple):
    """One evicted page: what it hung under, its tokens as int32 bytes, its serial, the how-manieth it was."""

    anchor: Anchor
    tokens: bytes
    serial: int
    number: int


class _Run(NamedTuple):
    """Pages of one path that were evicted together, the last one first."""

    anchor: Anchor
    tokens: bytes
    serials: list[int]
    first_number: int
    """The how-manieth the last page was."""


class EvictionMemory:
    """The last ``max_pages`` evicted pages, each findable from the page it hung under.

    A page has a serial for as long as the tree holds it, and a page that comes back gets a new one; so
    the ghosts of its old children are found through its own ghost. Tokens are compared, nothing is hashed
    to decide equality. What is evicted together is kept as it came; ghosts are made of it when somebody
    asks, so that evicting, which happens all the time, pays little for ``explain``, which is rare.
    """

    def __init__(self, max_pages: int, page_bytes: int = 4) -> None:
        """``page_bytes``: bytes of a full page's token ids."""
        self.max_pages = max_pages
        self.num_evicted = 0
        """Pages evicted since the beginning, remembered or not."""
        self._page_bytes = page_bytes
        self._runs: deque[_Run] = deque()
        self._num_pages = 0
        """Pages of all runs, those of the first run that are forgotten already included."""
        self._num_forgotten = 0
        """Pages of the first run that are forgotten: those at its end."""
        self._num_found = 0
        """So many runs, from the first on, have their ghosts in ``_under``."""
        self._under: dict[Anchor, deque[Ghost]] = {}

    def __len__(self) -> int:
        return self._num_pages - self._num_forgotten

    def record(self, anchor: Anchor, tokens: bytes, serials: list[int]) -> None:
        """Remember pages evicted together, in position order, each hanging under the one before it and the
        first under ``anchor``; ``tokens`` are those of all. Forgets the oldest ones beyond ``max_pages``."""
        first_number = self.num_evicted + 1
        self.num_evicted += len(serials)
        if self.max_pages == 0:
            return
        self._runs.append(_Run(anchor, tokens, serials, first_number))
        self._num_pages += len(serials)
        while (excess := self._num_pages - self._num_forgotten - self.max_pages) > 0:
            self._forget(excess)

    def _forget(self, num_pages: int) -> None:
        """Forget up to ``num_pages`` pages of the first run, in the order in which they were evicted."""
        run = self._runs[0]
        left = len(run.serials) - self._num_forgotten
        num = min(num_pages, left)
        if self._num_found:
            for index in range(left - 1, left - 1 - num, -1):
                anchor = run.serials[index - 1] if index else run.anchor
                siblings = self._under[anchor]
                siblings.popleft()
                if not siblings:
                    del self._under[anchor]
        if num < left:
            self._num_forgotten += num
            return
        self._runs.popleft()
        self._num_pages -= len(run.serials)
        self._num_forgotten = 0
        self._num_found = max(self._num_found - 1, 0)

    def _find(self) -> None:
        """Make the ghosts of the runs that have none yet."""
        width = self._page_bytes
        for place in range(self._num_found, len(self._runs)):
            run = self._runs[place]
            num_pages = len(run.serials)
            known = num_pages if place else num_pages - self._num_forgotten
            for index in range(known - 1, -1, -1):
                anchor = run.serials[index - 1] if index else run.anchor
                tokens = run.tokens[index * width : (index + 1) * width]
                ghost = Ghost(anchor, tokens, run.serials[index], run.first_number + num_pages - 1 - index)
                self._under.setdefault(anchor, deque()).append(ghost)
        self._num_found = len(self._runs)

    def under(self, anchor: Anchor) -> tuple[Ghost, ...]:
        """Remembered pages that hung under ``anchor``, oldest first."""
        self._find()
        return tuple(self._under.get(anchor, ()))

    def evictions_ago(self, namespace: Namespace, path: list[int], key: bytes, hit: int) -> int | None:
        """How many pages were evicted since the one, itself included, that would make a hit longer than
        ``hit`` tokens; of several the longest, of equal ones the latest. ``None`` where no such page is
        remembered. ``path``: serials of the whole pages that are found; ``key``: all tokens."""
        if not len(self):
            return None
        width = self._page_bytes
        anchors: set[Anchor] = {namespace}
        for index, serial in enumerate(path):
            tokens = key[index * width : (index + 1) * width]
            ghosts = {g.serial for a in anchors for g in self.under(a) if g.tokens == tokens}
            anchors = {serial, *ghosts}
        rest = key[len(path) * width : (len(path) + 1) * width]
        found_tokens = len(path) * width // TOKEN_BYTES
        best, number = hit, 0
        for ghost in (g for a in anchors for g in self.under(a)):
            length = found_tokens + page_agreement(ghost.tokens, rest)
            if length > best or (number and length == best and ghost.number > number):
                best, number = length, ghost.number
        return self.num_evicted - number + 1 if number else None

    def clear(self) -> None:
        """Forget all: after a flush nothing that was evicted before could have been a hit."""
        self._runs.clear()
        self._num_pages = self._num_forgotten = self._num_found = 0
        self._under.clear()
