"""TextStream: one output's tokens as text, up to its first stop string."""

from __future__ import annotations

from radixkv.byte_run import ByteRun
from radixkv.detokenizer import Detokenizer
from radixkv.sampling import SamplingParams
from radixkv.stop_strings import StopMatcher
from radixkv.text import Tokenizer


class TextStream:
    """Without a tokenizer there is no text. After a stop string nothing comes any more: the text ends before
    it, or behind it with ``include_stop_str_in_output``.

    A stop string counts from the ``min_tokens``-th token on: one that is complete earlier is plain text. A
    character is complete with the token after which it stands in the text of all tokens so far, though it may
    be held back for longer, because the next token could still change it.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._matcher = StopMatcher(sampling.stop)
        self._has_stops = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._includes_stop = sampling.include_stop_str_in_output
        self._num_tokens = 0
        self._held: list[tuple[str, int]] = []
        """Characters that are held back, each with the number of the token that completed it."""
        self._run: ByteRun | None = None
        """While the last token was a byte."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.found

    def push(self, token_id: int) -> str:
        """The text that is free to go after this token."""
        self._num_tokens += 1
        if self._tokenizer is None or self._detokenizer is None or self.stopped_by is not None:
            return ""
        text = self._detokenizer.push(token_id)
        if not self._has_stops or self._tokenizer.is_silent(token_id):
            return text
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            return self._push_byte(byte, self._detokenizer)
        self._run = None
        return self._feed(text, self._detokenizer.held)

    def end(self) -> str:
        """What is left once the last token was pushed. A stop string may still be found in it."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        return self._feed(self._detokenizer.end(), "") + self._matcher.end()

    def _feed(self, text: str, held: str) -> str:
        """``text`` is certain now; ``held`` stands behind it and is not."""
        ages = [self._num_tokens] * (len(text) + len(held))
        for place, (char, age) in enumerate(self._held):
            if (text + held)[place : place + 1] != char:
                break
            ages[place] = age
        self._held = list(zip(held, ages[len(text) :], strict=True))
        num_early = sum(age < self._min_tokens for age in ages[: len(text)])
        free = self._matcher.feed(text[:num_early], armed=False) + self._matcher.feed(text[num_early:])
        return free + self._stop_to_show()

    def _push_byte(self, byte: int, detokenizer: Detokenizer) -> str:
        """Nothing is certain before the run of bytes has ended, unless it ends here, by a stop string."""
        if self._run is None:
            self._run = ByteRun(None if self._held else self._matcher.copy())
        char = self._run.push(byte, armed=self._num_tokens >= self._min_tokens)
        self._held += [(char, self._num_tokens)] if char else []
        if self._run.matcher is None or self._run.matcher.found is None:
            return ""
        if detokenizer.rest() != "".join(char for char, _ in self._held):  # a decoder that does more to bytes
            self._run.matcher = None
            return ""
        self._matcher = self._run.matcher
        return self._run.free + self._stop_to_show()

    def _stop_to_show(self) -> str:
        return self.stopped_by if self.stopped_by is not None and self._includes_stop else ""
