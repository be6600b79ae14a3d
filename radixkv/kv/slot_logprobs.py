"""SlotLogprobs: the log-probability of the token in each slot, where some request has asked for it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from radixkv.kv.invariant import require
from radixkv.kv.page_copy import PageCopy
from radixkv.types import PageIds, SlotMapping


class SlotLogprobs:
    """One float32 per slot; NaN is "not known". Like the K and V in the slot, the number is a pure function
    of the tokens up to the slot's own, so it may be shared wherever the page is.

    Nothing is allocated before the first number comes, so that an engine which never scores pays nothing;
    from then on it is 4 bytes per slot, whatever the model.

    L1: a slot that a match reaches is NaN, or holds the log-probability of its token after the prefix that
    its page stands for. Behind what a match reaches it may hold what was: whoever goes on writing on such a
    page forgets that first.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._values: NDArray[np.float32] | None = None  # [num_pages, page_size]
        self.num_noted = 0
        self.num_reused = 0
        """Numbers that a request took over instead of having them computed."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever noted."""
        return self._values is None

    def note(self, slots: SlotMapping, logprobs: Seq[float]) -> None:
        """Set ``slots`` (``[n]``)."""
        if self._values is None:
            self._values = np.full((self._num_pages, self._page_size), np.nan, np.float32)
        self._values.reshape(-1)[slots] = logprobs
        self.num_noted += len(slots)

    def known_run(self, slots: SlotMapping) -> list[float]:
        """Numbers of the first ``slots`` (``[n]``), up to the first that is not known."""
        if self._values is None:
            return []
        values = self._values.reshape(-1)[slots]
        unknown = np.flatnonzero(np.isnan(values))
        run: list[float] = (values[: unknown[0]] if len(unknown) else values).tolist()
        return run

    def forget(self, pages: PageIds, from_offset: int = 0) -> None:
        """These pages (``[n]``) come to stand for other tokens from ``from_offset`` on."""
        if self._values is not None:
            self._values[pages, from_offset:] = np.nan

    def copy(self, copies: Seq[PageCopy]) -> None:
        """What the K/V store does, all sources read before any is written (C2)."""
        if self._values is None:
            return
        read = [self._values[copy.src, : copy.num_tokens].copy() for copy in copies]
        for copy, values in zip(copies, read, strict=True):
            self._values[copy.dst, : copy.num_tokens] = values

    def check(self) -> None:
        """L1, as far as the numbers themselves show it: no infinity, nothing above 0 but for rounding."""
        if self._values is not None:
            known = self._values[~np.isnan(self._values)]
            require(bool(np.isfinite(known).all()), "L1", "an infinite log-probability")
            require(
                float(known.max(initial=0.0)) < 1e-3, "L1", f"a log-probability of {known.max(initial=0.0)}"
            )

    def stats(self) -> dict[str, int]:
        return {"num_logprobs_noted": self.num_noted, "num_logprobs_reused": self.num_reused}
