"""NullTree: the tree of an engine without a cache. Finds nothing, adopts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import MisuseError
from radixkv.kv.arguments import as_page_size
from radixkv.kv.events import EventLog, Stored
from radixkv.kv.explanation import Explanation, Reason
from radixkv.kv.finding import Finding
from radixkv.kv.match import Insertion, Match
from radixkv.types import Namespace, PageIds, TokenIds


class NullTree:
    """Same methods as ``RadixTree``. Each sequence keeps its own K/V and frees it at its end."""

    def __init__(self, page_size: int) -> None:
        """Raises ``ConfigError`` unless ``page_size`` is a power of two up to 256."""
        self.page_size = as_page_size(page_size)
        self.version = 0
        """Never changes."""
        self._is_claimed = False

    def claim(self) -> None:
        """A manager begins to work with it. Raises ``MisuseError`` where one does already, for two would
        count the same pages apart."""
        if self._is_claimed:
            raise MisuseError("a manager works with this tree already: two cannot share it")
        self._is_claimed = True

    @property
    def num_pages(self) -> int:
        return 0

    @property
    def num_nodes(self) -> int:
        return 0

    @property
    def held_pages(self) -> PageIds:
        return np.empty(0, np.int32)

    def num_idle(self, ref_count: NDArray[np.int32]) -> int:
        return 0

    def peek(self, token_ids: TokenIds, namespace: Namespace = ()) -> int:
        return 0

    def find(self, token_ids: TokenIds, namespace: Namespace = ()) -> Finding:
        return Finding(0, self.version, 0, namespace, 0, b"")

    def still_finds(self, found: Finding) -> bool:
        return True

    def lookup(self, token_ids: TokenIds, namespace: Namespace = ()) -> Match:
        return Match(np.empty(0, np.int32), None, 0, 0)

    def match(
        self, token_ids: TokenIds, namespace: Namespace = (), priority: int = 0, *, is_retry: bool = False
    ) -> Match:
        return self.lookup(token_ids, namespace)

    def num_tokens_of(self, page: int) -> int:
        return 0

    def insert(
        self,
        token_ids: TokenIds,
        pages: PageIds,
        num_known: int = 0,
        namespace: Namespace = (),
        priority: int = 0,
    ) -> Insertion:
        canonical = np.array(pages[: len(token_ids) // self.page_size], np.int32)
        return Insertion(canonical, np.empty(0, np.int32), None)

    def take(self, page: int) -> None:
        raise MisuseError(f"page {page} is not in the tree: a null tree holds none")

    def became_idle(self, pages: PageIds) -> None:
        """Nothing to do: no page is the tree's."""

    def evict(self, num_pages: int, ref_count: NDArray[np.int32]) -> PageIds:
        return np.empty(0, np.int32)

    def clear(self) -> PageIds:
        return np.empty(0, np.int32)

    def record_events(self, log: EventLog) -> None:
        """Nothing ever enters or leaves."""

    def content(self) -> Iterator[Stored]:
        return iter(())

    def remember_evictions(self, max_pages: int) -> None:
        """Nothing is ever evicted."""

    def explain(
        self,
        token_ids: TokenIds,
        namespace: Namespace = (),
        *,
        visible: Callable[[Namespace], bool] | None = None,
    ) -> Explanation:
        reason: Reason = "absent" if len(token_ids) else "whole"
        return Explanation(hit_tokens=0, reason=reason, position=0)

    def check(self, ref_count: NDArray[np.int32] | None = None) -> None:
        """Holds always: there is no state."""

    def stats(self) -> dict[str, int]:
        return {"num_pages": 0, "num_nodes": 0, "num_namespaces": 0, "num_candidates": 0, "version": 0}
