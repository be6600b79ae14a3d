"""Chat: a conversation whose turns are not encoded twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from radixkv.errors import InvalidRequestError
from radixkv.namespace import NO_SCOPE, Scope
from radixkv.outputs import Output, PromptExplanation
from radixkv.plain import shown
from radixkv.sampling import SamplingParams
from radixkv.text import Tokenizer
from radixkv.transcript import ChatPrompt, Message, Transcript

if TYPE_CHECKING:
    from radixkv.llm import LLM


def open_transcript(
    tokenizer: Tokenizer | None, system: str | None, messages: Sequence[Mapping[str, str]]
) -> Transcript:
    """A conversation's beginning. Raises ``InvalidRequestError`` where there is no chat template, or where
    ``system`` is no text."""
    if tokenizer is None or not tokenizer.has_chat_template:
        raise InvalidRequestError("a chat needs a tokenizer with a chat template")
    if system is not None and not isinstance(system, str):
        raise InvalidRequestError(
            f"system must be text or None, got {shown(system)}: what was said before goes into messages="
        )
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidRequestError(f"messages must be a list of messages, got {shown(messages)}")
    first = [] if system is None else [{"role": "system", "content": system}]
    return Transcript(tokenizer, [*first, *messages])


def user(content: str) -> Message:
    """What the user says, as a message."""
    return {"role": "user", "content": content}


def refuse_several(sampling_params: SamplingParams | None) -> None:
    """Raise ``InvalidRequestError`` where more than one reply is asked for."""
    if isinstance(sampling_params, SamplingParams) and sampling_params.n > 1:
        raise InvalidRequestError(f"a chat takes one reply: n must be 1, got {sampling_params.n}")


class Chat:
    """A conversation over an ``LLM``: ``chat.send("Hello")`` gives the reply's ``Output``.

    The next turn's prompt begins with the very ids of this one, prompt and reply, so everything that was
    computed is found again. ``messages`` may be read and edited, at any time: ``del chat.messages[2:]`` goes
    back. A turn that fails, or is aborted, leaves the conversation as it was.
    """

    def __init__(self, llm: LLM, transcript: Transcript, scope: Scope = NO_SCOPE) -> None:
        self._llm = llm
        self._scope = scope
        self._transcript = transcript

    @property
    def messages(self) -> list[Message]:
        """What was said, ``{"role": ..., "content": ...}`` each."""
        return self._transcript.messages

    def send(
        self,
        content: str,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        queue_timeout_s: float | None = None,
    ) -> Output:
        """Say something as the user, and wait for the reply; ``priority`` and ``queue_timeout_s`` as in
        ``LLM.generate``. A turn that waited too long leaves the conversation as it was."""
        with self._transcript.turn():
            refuse_several(sampling_params)
            prompt = self._prompt(content)
            output = self._llm.generate(
                prompt.token_ids,
                sampling_params,
                cache_salt=self._scope.cache_salt,
                adapter=self._scope.adapter,
                priority=priority,
                queue_timeout_s=queue_timeout_s,
            )
            if output.finish_reason not in ("abort", "timeout"):
                reply = self._llm.between_calls(lambda: self._transcript.reply(output))
                self._transcript.record(prompt, reply)
            return output

    def explain(self, content: str) -> PromptExplanation:
        """How much of the next turn's prompt is cached, were this sent, and where and why that ends: behind
        what was said so far, or where the template rewrites it."""
        token_ids = self._prompt(content).token_ids
        return self._llm.explain(token_ids, cache_salt=self._scope.cache_salt, adapter=self._scope.adapter)

    def _prompt(self, content: str) -> ChatPrompt:
        return self._llm.between_calls(lambda: self._transcript.prompt(user(content)))
