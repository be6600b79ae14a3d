"""Turns: one call at a time, whoever makes it, and Ctrl-C only where it does no harm."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from radixkv.errors import MisuseError
from radixkv.interrupt import InterruptsHeld


class Turns:
    """Calls of several threads wait for each other. They belong to the process that made this: in a forked
    copy the threads that compute are not there, nor is the thread that may have held the lock."""

    def __init__(self, owner: str) -> None:
        """``owner``: what the messages call it, as in "this LLM"."""
        self._owner = owner
        self._lock = threading.RLock()
        self._busy = False
        self._interrupts = InterruptsHeld()
        self._process_id = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a child process."""
        return os.getpid() != self._process_id

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn, then hold Ctrl-C back to its end, but inside a forward and where somebody asks
        (E3).

        Raises ``MisuseError`` in a forked copy, or from inside another turn of the same thread.
        """
        if self.is_forked:
            raise MisuseError(
                f"{self._owner} belongs to process {self._process_id}, and this is its fork: open one here"
            )
        with self._lock, InterruptsHeld() as interrupts:
            if self._busy:
                raise MisuseError(f"{self._owner} was called from inside one of its own calls")
            self._busy, self._interrupts = True, interrupts
            try:
                yield
            finally:
                self._busy = False

    @property
    def interrupted(self) -> bool:
        """Whether a Ctrl-C waits for the end of this turn."""
        return self._interrupts.noted

    def raise_if_interrupted(self) -> None:
        """Raise that Ctrl-C now."""
        self._interrupts.raise_if_noted()
