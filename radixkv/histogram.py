"""Histogram: how often values of each size were seen, in fixed buckets that grow by a constant factor."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike, NDArray

from radixkv.errors import InternalError

BUCKETS_PER_DOUBLING = 4
"""A bucket ends 19 % above where it begins: a quantile is at most that far off."""
QUANTILES = (0.5, 0.9, 0.99)


class Histogram:
    """Counts values of at least 0. Memory is fixed: values are not kept.

    ``bounds`` are ``lowest * 2 ** (k / 4)`` up to the first that is at least ``highest``. Bucket ``k`` holds
    the values above ``bounds[k - 1]`` and up to ``bounds[k]``; the first one all up to ``lowest``, 0 too, and
    one more bucket all above the last bound.

    H1: the buckets hold ``count`` values together, ``smallest`` and ``largest`` lie in the first and the last
    that is not empty, and ``sum`` lies between ``count`` times the one and the other.
    """

    def __init__(self, lowest: float, highest: float) -> None:
        """``0 < lowest < highest``, in the unit of the values: what is to be told apart."""
        assert 0.0 < lowest < highest < math.inf, (lowest, highest)
        num_steps = math.ceil(BUCKETS_PER_DOUBLING * math.log2(highest / lowest) - 1e-9)
        self.bounds: tuple[float, ...] = tuple(
            lowest * 2.0 ** (k / BUCKETS_PER_DOUBLING) for k in range(num_steps + 1)
        )
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0
        self.smallest = math.inf
        self.largest = 0.0

    def record(self, value: float, times: int = 1) -> None:
        """Count ``value`` (at least 0, finite) ``times`` times (at least 1). Costs O(log of the buckets)."""
        assert 0.0 <= value < math.inf and times >= 1, (value, times)
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def record_many(self, values: ArrayLike) -> None:
        """Count each of ``values`` (any shape; at least 0, finite) once; as ``record`` for each."""
        array: NDArray[np.float64] = np.asarray(values, np.float64).ravel()
        if len(array) == 0:
            return
        assert np.all((array >= 0.0) & np.isfinite(array)), "values must be at least 0 and finite"
        buckets, counts = np.unique(np.searchsorted(self.bounds, array), return_counts=True)
        for bucket, times in zip(buckets.tolist(), counts.tolist(), strict=True):
            self._counts[bucket] += times
        self.count += len(array)
        self.sum += float(array.sum())
        self.smallest = min(self.smallest, float(array.min()))
        self.largest = max(self.largest, float(array.max()))

    def quantile(self, share: float) -> float:
        """A value that about ``share`` (0..1) of those seen do not exceed: the end of the bucket in which the
        last of them lies, but never outside ``smallest .. largest``. 0.0 before any value."""
        assert 0.0 <= share <= 1.0, share
        if self.count == 0:
            return 0.0
        wanted = max(1, math.ceil(share * self.count - 1e-9))
        seen = 0
        for bound, times in zip((*self.bounds, math.inf), self._counts, strict=True):
            seen += times
            if seen >= wanted:
                return min(max(bound, self.smallest), self.largest)
        raise InternalError(f"H1 does not hold: buckets hold {seen} of {self.count} values")

    @property
    def mean(self) -> float:
        """0.0 before any value."""
        return self.sum / self.count if self.count else 0.0

    def buckets(self) -> list[tuple[float, int]]:
        """``(bound, how many values are at most that)``, the last bound being infinity: what a scraper of
        metrics expects. Costs O(buckets)."""
        running = 0
        cumulated = []
        for bound, times in zip((*self.bounds, math.inf), self._counts, strict=True):
            running += times
            cumulated.append((bound, running))
        return cumulated

    def stats(self) -> dict[str, int | float]:
        """``count``, ``sum``, ``mean``, ``p50``, ``p90``, ``p99``, ``max``; all 0 before any value."""
        quantiles = {f"p{share * 100:.0f}": self.quantile(share) for share in QUANTILES}
        return {"count": self.count, "sum": self.sum, "mean": self.mean, **quantiles, "max": self.largest}

    def check(self) -> None:
        """H1. Raises ``InternalError``. Costs O(buckets)."""
        holds = min(self._counts) >= 0 and sum(self._counts) == self.count
        if holds and self.count:
            filled = [k for k, times in enumerate(self._counts) if times]
            slack = 1e-9 * (1.0 + abs(self.sum))  # sums of floats
            holds = (
                bisect_left(self.bounds, self.smallest) == filled[0]
                and bisect_left(self.bounds, self.largest) == filled[-1]
                and self.count * self.smallest - slack <= self.sum <= self.count * self.largest + slack
            )
        if not holds:
            raise InternalError(
                f"H1 does not hold: count {self.count}, sum {self.sum}, {self.smallest} .. {self.largest}, "
                f"buckets {self._counts}"
            )
