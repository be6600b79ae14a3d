"""Tokenizer: text to token ids and back. Text exists nowhere below this file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from radixkv.errors import InvalidRequestError
from radixkv.plain import shown
from radixkv.sampling import MAX_TOKEN_ID, whole_within
from radixkv.types import TokenIds

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A thin wrapper over a tokenizer of transformers (anything with its ``__call__`` and ``decode``).

    Special tokens: ``encode`` adds what the tokenizer itself adds (a beginning-of-text token, where it has
    that rule) unless told not to; text that goes on from something else (a continuation, a chat template's
    output) is encoded without. Special tokens that stand in the text are recognised either way.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._silent_ids: frozenset[int] | None = None
        self._special_texts: frozenset[str] | None = None
        self._bytes: dict[int, int | None] = {}
        self._adds_blank: bool | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; the model's own ``vocab_size`` may be larger (padding)."""
        return len(self.backend)

    @property
    def bos_token_id(self) -> int | None:
        return _id_or_none(getattr(self.backend, "bos_token_id", None))

    @property
    def eos_token_id(self) -> int | None:
        return _id_or_none(getattr(self.backend, "eos_token_id", None))

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """Every id that ``decode`` leaves out by default, in order."""
        added = getattr(self.backend, "added_tokens_decoder", {})
        marked = {int(token_id) for token_id, token in added.items() if token.special}
        return tuple(sorted(marked.union(map(int, self.backend.all_special_ids))))

    @property
    def special_texts(self) -> frozenset[str]:
        """What the special tokens are called: text that ``decode`` leaves out."""
        if self._special_texts is None:
            added = getattr(self.backend, "added_tokens_decoder", {})
            marked = {str(token.content) for token in added.values() if token.special}
            self._special_texts = frozenset(
                marked.union(map(str, getattr(self.backend, "all_special_tokens", ())))
            )
        return self._special_texts

    def is_silent(self, token_id: int) -> bool:
        """Whether ``decode`` leaves this id out: a special token."""
        if self._silent_ids is None:
            self._silent_ids = frozenset(self.special_token_ids)
        return token_id in self._silent_ids or token_id >= self.vocab_size

    def byte_of(self, token_id: int) -> int | None:
        """The byte that this id stands for, one of a character that has no token (byte fallback); ``None``
        where it is no such id."""
        if token_id not in self._bytes:
            name = getattr(self.backend, "convert_ids_to_tokens", str)(token_id)
            is_byte = isinstance(name, str) and BYTE_TOKEN.fullmatch(name) is not None
            self._bytes[token_id] = int(name[3:5], 16) if is_byte else None
        return self._bytes[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """``[num_tokens]`` int32; may be empty. Raises ``InvalidRequestError`` for what is no text: see
        ``refuse_no_text``."""
        refuse_no_text(text)
        encoded = self.backend(text, add_special_tokens=add_special_tokens, verbose=False)
        return np.asarray(encoded["input_ids"], np.int32)

    def decode(self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = True) -> str:
        """The text of these ids, exactly as the model wrote it: spaces are not tidied. An id that
        the tokenizer does not know (a model's padding) gives nothing. Raises ``InvalidRequestError`` for what
        is no list of ids."""
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable):
            raise InvalidRequestError(f"token ids must be a list, got {shown(token_ids)}")
        ids = [
            whole_within(f"token id at position {position}", token_id, 0, MAX_TOKEN_ID)
            for position, token_id in enumerate(token_ids)
        ]
        return self.decode_window(ids, skip_special_tokens=skip_special_tokens)

    def decode_window(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """``decode`` for ids that are known to be ids: of a detokenizer, once for every token."""
        text = self.backend.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def encode_behind(self, text: str) -> TokenIds:
        """Ids of ``text`` where it goes on from other text: without added special tokens, nor the blank that
        some tokenizers put before a text's first word. May be empty."""
        if self._adds_blank is None:
            letter = self.encode("a", add_special_tokens=False).tolist()
            self._adds_blank = self.decode_window(letter * 2) != "aa"
        if self._adds_blank:
            head = self.encode("\n", add_special_tokens=False)
            ids = self.encode("\n" + text, add_special_tokens=False)
            if np.array_equal(ids[: len(head)], head):
                return ids[len(head) :]
        return self.encode(text, add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.backend, "chat_template", None))

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> TokenIds:
        """Ids of ``[{"role": ..., "content": ...}, ...]`` under the model's chat template, which writes the
        special tokens itself. Raises ``InvalidRequestError`` where the tokenizer has no template or the
        template refuses the messages."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The text of which ``encode_chat`` gives the ids; raises as it does."""
        if not self.has_chat_template:
            raise InvalidRequestError("this tokenizer has no chat template")
        try:
            text = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error
        return str(text)


def refuse_no_text(text: object) -> None:
    """Raise ``InvalidRequestError`` unless ``text`` is a ``str`` that UTF-8 can hold. Half a surrogate pair,
    which ``str`` allows and no tokenizer takes, comes from cutting UTF-16, or from bytes decoded with
    ``surrogateescape``, as Python decodes the command line."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"must be text, got {shown(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair, U+{ord(text[error.start]):04X} at position {error.start}"
        raise InvalidRequestError(f"the text does not fit into UTF-8: {half}") from None


def _id_or_none(value: Any) -> int | None:
    return None if value is None else int(value)
