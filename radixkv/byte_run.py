"""ByteRun: tokens of one byte each, as long as they are UTF-8."""

from __future__ import annotations

import codecs

from radixkv.stop_strings import StopMatcher


class ByteRun:
    """The characters of a run of byte tokens, and what a matcher would find in them, were the run to end
    after the last byte. Costs the same for each byte, however long the run is."""

    def __init__(self, matcher: StopMatcher | None) -> None:
        """``matcher``: one that has come to the run's beginning; ``None`` looks for nothing."""
        self.matcher = matcher
        self.free = ""
        """What ``matcher`` lets go."""
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    def push(self, byte: int, *, armed: bool) -> str:
        """The character that this byte completes. None where the run is no UTF-8, from there on."""
        if self._decoder is None:
            return ""
        try:
            char = self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._decoder = self.matcher = None
            return ""
        if self.matcher is not None:
            self.free += self.matcher.feed(char, armed=armed)
        return char
