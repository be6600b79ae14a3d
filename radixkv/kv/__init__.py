"""The ledger: which K/V pages hold which token prefix, and who holds each page.

It stands alone, without torch: see ``examples/embed_cache.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.kv.events import Cleared, Event, Lost, Removed, ReplayedPage, Stored, replay
from radixkv.kv.explanation import Explanation
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.match import Insertion, Match
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_pool import PagePool
from radixkv.kv.page_table import PageTable
from radixkv.kv.pins import FlushReport, Pin
from radixkv.kv.radix_tree import RadixTree

if TYPE_CHECKING:
    from radixkv.sequence import Request, Sequence

__all__ = [
    "Cleared", "Event", "Explanation", "FlushReport", "Insertion", "KVCacheManager", "Lost", "Match",
    "NullTree", "PageCopy", "PagePool", "PageTable", "Pin", "RadixTree", "Removed", "ReplayedPage", "Request",
    "Sequence", "Stored", "replay",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """``Request`` and ``Sequence`` stand above this package and import its table: they come when asked."""
    if name in ("Request", "Sequence"):
        from radixkv import sequence

        return getattr(sequence, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
