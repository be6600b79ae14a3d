"""Match and Insertion: what the tree answers."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.types import PageIds


class Match(NamedTuple):
    """The longest known beginning of a token sequence."""

    page_ids: PageIds
    """Whole pages, in position order."""
    partial_page: int | None
    """A page whose first ``partial_tokens`` tokens come next; ``None`` when ``partial_tokens`` is 0."""
    partial_tokens: int
    num_tokens: int
    """All of it: ``len(page_ids) * page_size + partial_tokens``."""


class Insertion(NamedTuple):
    """What an insert did."""

    canonical: PageIds
    """The tree's page for each whole page given: one's own where adopted, another's where it was known."""
    adopted: PageIds
    """Pages that the tree holds from now on, a partial last one included."""
    replaced: tuple[int, int] | None
    """``(old, new)``: a partial page that the tree let go because ``new`` has the same beginning and more."""
