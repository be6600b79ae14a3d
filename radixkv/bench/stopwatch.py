"""Stopwatch: seconds by part, where a part inside another is taken off the outer one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Charges each moment to the innermost part that is running. One thread only.

    With ``time.thread_time`` as the clock it measures CPU seconds of this thread, with
    ``time.perf_counter`` wall seconds. One wrapped call costs about a microsecond.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._running: list[str] = []
        self._since = 0.0

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time charged to ``part``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._running.pop()

        return timed

    def wrap_methods(self, part: str, owner: object, names: tuple[str, ...]) -> None:
        """Replace bound methods of one object by timed ones; the class stays as it is."""
        for name in names:
            setattr(owner, name, self.wrap(part, getattr(owner, name)))

    def _charge(self) -> None:
        now = self._clock()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now
