"""Detokenizer: token ids one by one, their text as soon as it is certain."""

from __future__ import annotations

from radixkv.text import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 4
"""Tokens kept before what is new. A character of UTF-8 has at most four bytes, and a token at least one."""
WINDOW_TOKENS = 8
"""Where the window is cut back to its context."""


class Detokenizer:
    """The pieces that ``push`` and ``end`` give, joined, are ``tokenizer.decode`` of all ids.

    No piece ends in half a character. Only a window of the last few ids is decoded each time, so a token
    costs the same however many came before it; the ids kept at the window's front serve those decoders that
    treat the first token of a text differently. Two things are held back:

    - a replacement character at the end of the window: a byte-level tokenizer has written the first bytes of
      a character there, and the next token may bring the others;
    - a run of byte tokens (``<0xE4>``) until it has ended: a decoder with byte fallback turns all bytes of a
      run into replacement characters if the run as a whole is no UTF-8.

    Special tokens, and ids that the tokenizer does not know, give nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_given = 0
        """Characters of the window's text that are out."""
        self._max_window = WINDOW_TOKENS
        self.held = ""
        """What the last token that is no byte left uncertain, as it would stand, were this the end."""

    def push(self, token_id: int) -> str:
        """The text that became certain by this token; often that of the token before."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.byte_of(token_id) is not None:
            return ""
        text = self._tokenizer.decode_window(self._window)
        certain = len(text) - 1 if text.endswith(REPLACEMENT) else len(text)
        new = text[self._num_given : certain]
        self.held = text[certain:]
        self._num_given = max(self._num_given, certain)
        if len(self._window) >= self._max_window:
            self._cut(text)
        return new

    def end(self) -> str:
        """All that was held back, a broken character as what the tokenizer makes of it. A second call gives
        nothing."""
        new = self.rest()
        self._num_given += len(new)
        return new

    def rest(self) -> str:
        """What ``end`` would give. Changes nothing."""
        text = self._tokenizer.decode_window(self._window) if self._window else ""
        return text[self._num_given :]

    def _cut(self, text: str) -> None:
        """Forget the front of the window, whose text is ``text``, where what is left decodes to its end."""
        tail = self._window[-CONTEXT_TOKENS:]
        tail_text = self._tokenizer.decode_window(tail)
        num_given = len(tail_text) - (len(text) - self._num_given)
        if self._num_given == len(text) or (num_given >= 0 and text.endswith(tail_text)):
            self._window, self._num_given, self._max_window = tail, num_given, WINDOW_TOKENS
        else:
            self._max_window = 2 * len(self._window)  # seldom enough that a token's share stays bounded
