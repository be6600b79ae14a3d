"""TailCopy: a sequence's last page begins with tokens that stand on somebody else's page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CopyState(Enum):
    """How far a copy has come."""

    MATCHED = "matched"
    """The source is held; there is no page to copy to yet."""
    PENDING = "pending"
    """The source is held, the destination is in the table, the copy is in no batch yet."""
    TAKEN = "taken"
    """In a built batch; the source is let go. Done once the sequence has computed beyond it."""


@dataclass
class TailCopy:
    """The first ``num_tokens`` slots of ``source`` are to become those of the table's page
    ``page_index``. At most one per sequence; the manager counts the reference on ``source``."""

    source: int
    page_index: int
    num_tokens: int
    state: CopyState
