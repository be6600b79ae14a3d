"""Ctrl-C after a few lines instead of between any two of them."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptsHeld:
    """While entered, Ctrl-C is only noted; leaving raises it (unless something else is being raised).

    For short stretches that change shared state. It works on the main thread, where Python's own handler
    is in place; elsewhere nobody raises, and it changes nothing.
    """

    def __init__(self) -> None:
        self._noted = False
        self._installed = False

    def __enter__(self) -> InterruptsHeld:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._noted and error is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
