"""SteadyClock: a caller's clock that never goes back, and always gives a number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_STEADY: tuple[Callable[[], float], ...] = (time.monotonic, time.perf_counter)


class SteadyClock:
    """Seconds. Where the clock below goes back, this one goes on from where it was; where it says NaN or
    infinity, no time passes. So whoever came first has waited longest, and no waiting time is negative."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._ahead = 0.0
        """Of the clock below, seconds."""

    def __call__(self) -> float:
        now = self._clock()
        if not math.isfinite(now):
            return 0.0 if self._last is None else self._last
        now += self._ahead
        if self._last is not None and now < self._last:
            self._ahead += self._last - now
            now = self._last
        self._last = now
        return now


def steady(clock: Callable[[], float]) -> Callable[[], float]:
    """``clock`` itself where it is known to be steady, so that nothing is paid for it."""
    return clock if clock in _STEADY or isinstance(clock, SteadyClock) else SteadyClock(clock)
