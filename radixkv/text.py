"""Tokenizer: text to token ids and back. Text exists nowhere below this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from radixkv.errors import InvalidRequestError
from radixkv.types import TokenIds


class Tokenizer:
    """A thin wrapper over a tokenizer of transformers (anything with its ``__call__`` and ``decode``).

    Special tokens: ``encode`` adds what the tokenizer itself adds (a beginning-of-text token, where it has
    that rule) unless told not to; text that goes on from something else (a continuation, a chat template's
    output) is encoded without. Special tokens that stand in the text are recognised either way.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend

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
        return tuple(sorted({int(token_id) for token_id in self.backend.all_special_ids}))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """``[num_tokens]`` int32; may be empty."""
        encoded = self.backend(text, add_special_tokens=add_special_tokens, verbose=False)
        return np.asarray(encoded["input_ids"], np.int32)

    def decode(self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = True) -> str:
        """The text of these ids, exactly as the model wrote it: spaces are not tidied."""
        ids = [int(token_id) for token_id in token_ids]
        text = self.backend.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> TokenIds:
        """Ids of ``[{"role": ..., "content": ...}, ...]`` under the model's chat template, which writes the
        special tokens itself. Raises ``InvalidRequestError`` where the tokenizer has no template or the
        template refuses the messages."""
        if not getattr(self.backend, "chat_template", None):
            raise InvalidRequestError("this tokenizer has no chat template")
        try:
            text = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error
        return self.encode(str(text), add_special_tokens=False)


def _id_or_none(value: Any) -> int | None:
    return None if value is None else int(value)
