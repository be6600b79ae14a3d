"""StopMatcher: looks for stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Gives text on as soon as it cannot be part of a stop string, and nothing from a stop string on.

    What is found does not depend on how the text was cut into pieces: the stop string that is complete first
    wins, and of those that end at the same character the longest. One automaton per stop string (Knuth,
    Morris and Pratt, 1977), so a character costs the same however long the strings are. What is held back is
    at most one character shorter than the longest stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        """For each stop string, how many of its characters the text ends with."""
        self._held = ""
        self.found: str | None = None

    def copy(self) -> StopMatcher:
        """Another one that has come as far as this."""
        twin = StopMatcher(())
        twin._stops, twin._matched = self._stops, list(self._matched)
        twin._held, twin.found = self._held, self.found
        return twin

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Text that is free to go. Once ``found`` is set nothing comes any more. While not ``armed``, a stop
        string that is completed is passed over as plain text."""
        if self.found is not None or not self._stops:
            return text if self.found is None else ""
        pending = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            hit = self._advance(char)
            if hit is not None and armed:
                self.found, self._held = hit, ""
                return pending[: at - len(hit)]
        free = len(pending) - max(self._matched)
        self._held = pending[free:]
        return pending[:free]

    def _advance(self, char: str) -> str | None:
        """The longest stop string that ``char`` completes."""
        hit: str | None = None
        for i, (stop, borders) in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                if hit is None or length > len(hit):
                    hit = stop
                length = borders[length - 1]
            self._matched[i] = length
        return hit

    def end(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``, the length of the longest shorter beginning that it ends with."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = borders[length - 1]
        if stop[length] == stop[i]:
            length += 1
        borders[i] = length
    return borders
