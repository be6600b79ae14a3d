"""TextStream: one output's tokens as text, up to its first stop string."""

from __future__ import annotations

from radixkv.detokenizer import Detokenizer
from radixkv.sampling import SamplingParams
from radixkv.stop_strings import StopMatcher
from radixkv.text import Tokenizer


class TextStream:
    """Without a tokenizer there is no text. After a stop string nothing comes any more: the text ends before
    it, or behind it with ``include_stop_str_in_output``.

    A stop string counts from the ``min_tokens``-th token on: one that is complete earlier is plain text.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._matcher = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._includes_stop = sampling.include_stop_str_in_output
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.found

    def push(self, token_id: int) -> str:
        """The text that is free to go after this token."""
        self._num_tokens += 1
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        return self._feed(self._detokenizer.push(token_id))

    def end(self) -> str:
        """What is left once the last token was pushed. A stop string may still be found in it."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        return self._feed(self._detokenizer.end()) + self._matcher.end()

    def _feed(self, text: str) -> str:
        free = self._matcher.feed(text, armed=self._num_tokens >= self._min_tokens)
        if self.stopped_by is not None and self._includes_stop:
            return free + self.stopped_by
        return free
