"""Events: what entered and left the tree, so that somebody else can keep a copy of its content."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from radixkv.kv.invariant import require
from radixkv.types import Namespace, TokenIds

RemovalReason: TypeAlias = Literal["evicted", "replaced", "taken_over"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """Pages that the tree holds from now on: consecutive ones of one prefix.

    A page is named by its key, a number that is given once and never again, whatever becomes of the page:
    the key stands for the tokens up to the page's end.
    """

    namespace: Namespace
    """The requests' namespace."""
    parent: int | None
    """Key of the page before the first one; ``None`` where the prefix begins."""
    page_keys: tuple[int, ...]
    token_ids: TokenIds
    """The pages' tokens, flat int32: ``page_size`` for each, but for the last one, which may have fewer."""


@dataclass(frozen=True, kw_only=True)
class Removed:
    """Pages that the tree let go, deepest first, all of one path.

    ``evicted``: room was needed. ``replaced``: a fuller page with the same beginning came; its ``Stored``
    follows. ``taken_over``: the pool had no page for a copy, so that a sequence writes on this one.
    """

    page_keys: tuple[int, ...]
    reason: RemovalReason


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """A flush: the tree is empty."""

    num_pages: int
    """How many pages it held."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The buffer was full: the ``num_events`` oldest events, which stood here, are lost. Begin anew with what
    ``KVCacheManager.content()`` says."""

    num_events: int


MAX_EVENT_PAGES = 2**18
"""An engine's bound of ``EventLog``."""

Event: TypeAlias = Stored | Removed | Cleared | Lost


class EventLog:
    """Events in order, until taken. Bounded: what is lost is counted.

    The tree adds while it works; the manager publishes at the end of each verb, when the pages that were let
    go have been freed. Only what was published can be taken.

    X1: the buffer holds at most ``max_pages`` entries (an event counts 1, and 1 for each of its pages).
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_events = 0
        """Published since the beginning, lost or not."""
        self.num_lost = 0
        self._staged: list[Event] = []
        self._ready: deque[Event] = deque()
        self._num_entries = 0
        self._lost_now = 0

    def add(self, event: Event) -> None:
        self._staged.append(event)

    def publish(self) -> None:
        """What was added can be taken from now on."""
        for event in self._staged:
            self._ready.append(event)
            self._num_entries += _num_entries(event)
        self.num_events += len(self._staged)
        self._staged.clear()
        while self._num_entries > self.max_pages:
            self._num_entries -= _num_entries(self._ready.popleft())
            self.num_lost += 1
            self._lost_now += 1

    def take(self) -> tuple[Event, ...]:
        """All published events, oldest first, each once; a ``Lost`` stands for those that are missing."""
        lost = (Lost(num_events=self._lost_now),) if self._lost_now else ()
        events = (*lost, *self._ready)
        self._ready.clear()
        self._num_entries = self._lost_now = 0
        return events

    def check(self) -> None:
        """Raises ``InternalError``."""
        counted = sum(map(_num_entries, self._ready))
        require(counted == self._num_entries <= self.max_pages, "X1", f"{counted} of {self.max_pages}")

    def stats(self) -> dict[str, int]:
        return {
            "num_events": self.num_events,
            "num_events_lost": self.num_lost,
            "num_events_waiting": len(self._ready),
        }


def _num_entries(event: Event) -> int:
    return 1 + (len(event.page_keys) if isinstance(event, (Stored, Removed)) else 0)


@dataclass(frozen=True)
class ReplayedPage:
    """What a consumer knows of a page."""

    namespace: Namespace
    parent: int | None
    token_ids: tuple[int, ...]


def replay(
    events: Iterable[Event], page_size: int, pages: dict[int, ReplayedPage] | None = None
) -> dict[int, ReplayedPage]:
    """The tree's content after ``events``, by page key; ``pages`` is the content before them (it is changed
    and returned). Raises ``ValueError`` at a ``Lost``: begin anew with ``KVCacheManager.content()``."""
    known = {} if pages is None else pages
    for event in events:
        if isinstance(event, Stored):
            known.update(_pages_of(event, page_size))
        elif isinstance(event, Removed):
            for key in event.page_keys:
                del known[key]
        elif isinstance(event, Cleared):
            known.clear()
        else:
            raise ValueError(f"{event.num_events} events are lost: begin anew")
    return known


def _pages_of(event: Stored, page_size: int) -> Iterator[tuple[int, ReplayedPage]]:
    parent = event.parent
    tokens = event.token_ids.tolist()
    for index, key in enumerate(event.page_keys):
        own = tuple(tokens[index * page_size : (index + 1) * page_size])
        yield key, ReplayedPage(event.namespace, parent, own)
        parent = key
