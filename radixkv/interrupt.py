"""Ctrl-C at the places that can bear it, instead of between any two lines."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptsHeld:
    """While entered, Ctrl-C is only noted; leaving raises it (unless something else is being raised). By this
    E3 is kept.

    Between ``open`` and ``shut`` it is raised at once, but only the first: that one shuts the gate, so that
    whatever cleans up after it is not interrupted in turn. One inside another hands all of this to the outer
    one, and so does not raise when it is left. It works on the main thread, where Python's own handler is in
    place; elsewhere nobody raises, and it changes nothing.
    """

    def __init__(self) -> None:
        self._gate = self
        self._noted = False
        self._is_open = False
        self._installed = False

    def __enter__(self) -> InterruptsHeld:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            outer = getattr(handler, "__self__", None)
            if handler is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
            elif isinstance(outer, InterruptsHeld):
                self._gate = outer
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._noted and error is None:
            raise KeyboardInterrupt

    @property
    def noted(self) -> bool:
        """Whether a Ctrl-C is waiting to be raised."""
        return self._gate._noted

    def raise_if_noted(self) -> None:
        """Raise the Ctrl-C that was noted, if one was."""
        if self._gate._noted:
            self._gate._noted = False
            raise KeyboardInterrupt

    def open(self) -> None:
        """From here on Ctrl-C is raised at once; one that was noted is raised now. Call it inside the
        ``try`` whose ``finally`` calls ``shut``."""
        self._gate._is_open = True
        if self._gate._noted:
            self._gate._noted = self._gate._is_open = False
            raise KeyboardInterrupt

    def shut(self) -> None:
        """From here on Ctrl-C is noted again."""
        self._gate._is_open = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_open:
            self._is_open = False
            raise KeyboardInterrupt
        self._noted = True
