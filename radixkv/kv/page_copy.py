"""PageCopy: one copy-on-write, to be done before the forward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageCopy:
    """Copy the first ``num_tokens`` slots of page ``src`` to page ``dst``, in every layer, K and V.

    C2: destinations of a batch are distinct; all sources are read before any is written, and all of it
    happens before the forward.
    """

    src: int
    dst: int
    num_tokens: int
