"""Transcript: what was said in a chat, as messages and as the very token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from radixkv.errors import InvalidRequestError, MisuseError
from radixkv.outputs import Output
from radixkv.plain import shown
from radixkv.text import Tokenizer
from radixkv.types import TokenIds

Message = dict[str, str]


@dataclass(frozen=True)
class _Mark:
    """The first ``num_chars`` of the text are the first ``num_tokens`` of the ids."""

    num_chars: int
    num_tokens: int


@dataclass(frozen=True)
class ChatPrompt:
    """The next turn's prompt. ``num_kept`` of its ids are those of earlier turns, as they were sent and
    sampled; the rest is newly encoded. ``new``: the messages that the turn begins with."""

    new: tuple[Message, ...]
    token_ids: TokenIds
    num_kept: int
    text: str
    mark: _Mark


@dataclass(frozen=True)
class Reply:
    """What was answered: ``text`` as the caller has seen it, of which ``token_ids`` are the beginning
    ``said``."""

    text: str
    token_ids: tuple[int, ...]
    said: str


class Transcript:
    """Keeps the ids of earlier turns, so that no turn is encoded twice: encoded anew, text that a model wrote
    often gives other tokens, and the cache would end there.

    What a prompt may be is the chat template's decision alone: all messages go through it every time. Ids are
    kept as far as its text begins with the text that they stand for. Where the template rewrites the past (it
    may leave out an earlier turn's thinking), the ids from the last turn's border before that place on are
    the encoded text of the template.

    ``messages`` is a plain list, always the same one, and may be edited: ``del transcript.messages[2:]`` goes
    back to the first exchange. What is changed while a reply is awaited stands: the turn's two messages come
    to the end of what the list is then.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]] = ()) -> None:
        self.messages: list[Message] = [_message(message) for message in messages]
        self._tokenizer = tokenizer
        self._text = ""
        self._token_ids = np.empty(0, np.int32)
        self._marks = [_Mark(0, 0)]
        self._is_busy = False

    def prompt(self, *new: Mapping[str, str]) -> ChatPrompt:
        """The ids of all messages and ``new`` ones, with the template's beginning of a reply. Changes
        nothing. Raises ``InvalidRequestError`` where the template refuses them."""
        said = tuple([_message(message) for message in new])
        messages = [*[_message(message) for message in tuple(self.messages)], *said]
        text = self._tokenizer.chat_text(messages)
        mark = next(mark for mark in reversed(self._marks) if text.startswith(self._text[: mark.num_chars]))
        kept = self._token_ids[: mark.num_tokens]
        rest = text[mark.num_chars :]
        added = self._tokenizer.encode_behind(rest) if mark.num_tokens else self._encode(rest)
        return ChatPrompt(said, np.concatenate([kept, added]), mark.num_tokens, text, mark)

    def _encode(self, text: str) -> TokenIds:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """As ``begin_turn`` and ``end_turn``."""
        self.begin_turn()
        try:
            yield
        finally:
            self.end_turn()

    def begin_turn(self) -> None:
        """One turn at a time: raises ``MisuseError`` while another goes on."""
        if self._is_busy:
            raise MisuseError(
                "this chat waits for a reply already (a stream that was left early is ended by its aclose)"
            )
        self._is_busy = True

    def end_turn(self) -> None:
        self._is_busy = False

    def reply(self, output: Output) -> Reply:
        """``output`` as the past will have it. Changes nothing. Of the sampled ids those count that lie
        within the text that the caller has seen, up to the first special token: an end token, or one in the
        midst of the text, which neither ``messages`` nor the template knows of. What belongs to a stop string
        does not count either."""
        ids = list(takewhile(lambda token_id: not self._tokenizer.is_silent(token_id), output.token_ids))
        while ids and not output.text.startswith(self._tokenizer.decode(ids)):
            ids.pop()
        return Reply(output.text, tuple(ids), self._tokenizer.decode(ids))

    def record(self, prompt: ChatPrompt, reply: Reply) -> None:
        """Both become the past. Uses no tokenizer."""
        self.messages += [*prompt.new, {"role": "assistant", "content": reply.text}]
        self._marks = [mark for mark in self._marks if mark.num_chars <= prompt.mark.num_chars]
        self._marks.append(_Mark(len(prompt.text), len(prompt.token_ids)))
        num_tokens = len(prompt.token_ids) + len(reply.token_ids)
        self._marks.append(_Mark(len(prompt.text) + len(reply.said), num_tokens))
        self._text = prompt.text + reply.said
        self._token_ids = np.concatenate([prompt.token_ids, np.array(reply.token_ids, np.int32)])


def _message(message: object) -> Message:
    """A copy. Raises ``InvalidRequestError`` for what is no message of texts."""
    if not isinstance(message, Mapping) or not all(
        isinstance(part, str) for pair in message.items() for part in pair
    ):
        raise InvalidRequestError(f"a message maps texts to texts (role, content), got {shown(message)}")
    if "role" not in message or "content" not in message:
        raise InvalidRequestError(f"a message needs role and content, got {shown(message)}")
    return dict(message)
