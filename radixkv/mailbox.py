"""Mailbox: what one thread has for the tasks of another thread's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Mailbox:
    """Calls are put in one by one and handed over together: one ``call_soon_threadsafe`` for all that was put
    in since the loop last looked, so a loop that is slow gets more at once, not more often. It holds as much
    as the loop leaves lying; nobody ever waits for the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.num_sent = 0
        """How often the loop was called."""
        self._lock = threading.Lock()
        self._calls: list[tuple[Callable[[], None], Callable[[BaseException], None]]] = []
        self._is_due = False
        """Whether the loop has been called and has not looked yet."""

    def put(self, call: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """Leave ``call`` for the loop's thread; ``send`` makes it look. What it raises goes to ``fail``, so
        that whoever waits for it is told, and the others' calls are made."""
        with self._lock:
            self._calls.append((call, fail))

    def send(self) -> bool:
        """Call the loop, if there is anything for it and it has not been called. False where it is closed:
        then nobody will ever look."""
        with self._lock:
            if self._is_due or not self._calls:
                return not self.loop.is_closed()
            self._is_due = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return False
        self.num_sent += 1
        return True

    def _deliver(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
            self._is_due = False
        for call, fail in calls:
            try:
                call()
            except Exception as error:
                fail(error)
