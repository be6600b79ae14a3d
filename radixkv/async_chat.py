"""AsyncChat: a conversation over an ``AsyncLLM``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from radixkv.chat import refuse_several, user
from radixkv.chat_stream import ChatStream
from radixkv.generation import Generation
from radixkv.namespace import NO_SCOPE, Scope
from radixkv.outputs import Output, PromptExplanation
from radixkv.sampling import SamplingParams
from radixkv.transcript import ChatPrompt, Message, Transcript
from radixkv.urgency import Urgency

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM


class AsyncChat:
    """As ``Chat``: ``await chat.send("Hello")``, or ``async for delta in chat.stream("Hello")``. A turn whose
    task is cancelled, or whose stream is left before its end, leaves the conversation as it was; whoever left
    the loop by ``break`` may say the next thing at once."""

    def __init__(self, llm: AsyncLLM, transcript: Transcript, scope: Scope = NO_SCOPE) -> None:
        self._llm = llm
        self._scope = scope
        self._transcript = transcript
        self._stream: weakref.ref[ChatStream] | None = None

    @property
    def messages(self) -> list[Message]:
        """What was said, ``{"role": ..., "content": ...}`` each."""
        return self._transcript.messages

    async def send(
        self,
        content: str,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        queue_timeout_s: float | None = None,
    ) -> Output:
        """Say something as the user, and wait for the reply; ``priority`` and ``queue_timeout_s`` as in
        ``LLM.generate``. A turn that waited too long leaves the conversation as it was. Raises
        ``MisuseError`` while another task waits for one."""
        self._leave_stream()
        with self._transcript.turn():
            prompt, generation = await self._start(
                content, sampling_params, Urgency(priority, queue_timeout_s)
            )
            output = await generation
            await self._record(prompt, output)
            return output

    def stream(
        self,
        content: str,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        queue_timeout_s: float | None = None,
    ) -> ChatStream:
        """Say something as the user, and get the reply piece by piece: ``async for delta in ...``."""

        async def begin(stream: ChatStream) -> tuple[ChatPrompt, Generation]:
            self._leave_stream()
            self._transcript.begin_turn()
            stream.takes_turn()
            self._stream = weakref.ref(stream)
            return await self._start(content, sampling_params, Urgency(priority, queue_timeout_s))

        return ChatStream(begin, self._record, self._transcript.end_turn)

    def _leave_stream(self) -> None:
        """The last stream, if this very task has left it before its end."""
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            stream.leave()

    async def _start(
        self, content: str, sampling_params: SamplingParams | None, urgency: Urgency
    ) -> tuple[ChatPrompt, Generation]:
        refuse_several(sampling_params)
        prompt = await self._prompt(content)
        return prompt, self._llm.generate(
            prompt.token_ids,
            sampling_params,
            cache_salt=self._scope.cache_salt,
            adapter=self._scope.adapter,
            priority=urgency.priority,
            queue_timeout_s=urgency.queue_timeout_s,
        )

    async def explain(self, content: str) -> PromptExplanation:
        """As ``Chat.explain``."""
        prompt = await self._prompt(content)
        return await self._llm.explain(
            prompt.token_ids, cache_salt=self._scope.cache_salt, adapter=self._scope.adapter
        )

    async def _prompt(self, content: str) -> ChatPrompt:
        return await self._llm.between_steps(lambda: self._transcript.prompt(user(content)))

    async def _record(self, prompt: ChatPrompt, output: Output) -> None:
        if output.finish_reason not in ("abort", "timeout"):
            reply = await self._llm.between_steps(lambda: self._transcript.reply(output))
            self._transcript.record(prompt, reply)  # here, where no cancelling can come between
