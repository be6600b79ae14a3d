"""SteadyClock: a caller's clock that never goes back, and always gives a number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_STEADY: tuple[Callable[[], float], ...] = (time.monotonic, time.perf_counter)


class SteadyClock:
    """Seconds. While the clock below has gone back, or says NaN or infinity, no time passes: whoever came
    first has waited longest, and a waiting time is never negative."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None

    def __call__(self) -> float:
        now = self._clock()
        if math.isfinite(now) and (self._last is None or now > self._last):
            self._last = now
        elif self._last is None:
            self._last = 0.0
        return self._last


def steady(clock: Callable[[], float]) -> Callable[[], float]:
    """``clock`` itself where it is known to be steady, so that nothing is paid for it."""
    return clock if clock in _STEADY or isinstance(clock, SteadyClock) else SteadyClock(clock)
