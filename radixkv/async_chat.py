"""AsyncChat: a conversation over an ``AsyncLLM``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from radixkv.chat import refuse_several, user
from radixkv.generation import Generation
from radixkv.namespace import NO_SCOPE, Scope
from radixkv.outputs import Delta, Output, PromptExplanation
from radixkv.sampling import SamplingParams
from radixkv.transcript import ChatPrompt, Message, Transcript

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM


class AsyncChat:
    """As ``Chat``: ``await chat.send("Hello")``, or ``async for delta in chat.stream("Hello")``. A turn whose
    task is cancelled, or whose stream is left before its end, leaves the conversation as it was."""

    def __init__(self, llm: AsyncLLM, transcript: Transcript, scope: Scope = NO_SCOPE) -> None:
        self._llm = llm
        self._scope = scope
        self._transcript = transcript

    @property
    def messages(self) -> list[Message]:
        """What was said, ``{"role": ..., "content": ...}`` each."""
        return self._transcript.messages

    async def send(self, content: str, sampling_params: SamplingParams | None = None) -> Output:
        """Say something as the user, and wait for the reply."""
        with self._transcript.turn():
            refuse_several(sampling_params)
            prompt = await self._prompt(content)
            output = await self._generate(prompt, sampling_params)
            await self._record(prompt, output)
            return output

    async def stream(
        self, content: str, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Say something as the user, and get the reply piece by piece."""
        with self._transcript.turn():
            refuse_several(sampling_params)
            prompt = await self._prompt(content)
            generation = self._generate(prompt, sampling_params)
            try:
                async for delta in generation:
                    if delta.finish_reason is not None:
                        await self._record(prompt, await generation)
                    yield delta
            finally:
                await generation.aclose()

    async def explain(self, content: str) -> PromptExplanation:
        """As ``Chat.explain``."""
        prompt = await self._prompt(content)
        return await self._llm.explain(
            prompt.token_ids, cache_salt=self._scope.cache_salt, adapter=self._scope.adapter
        )

    def _generate(self, prompt: ChatPrompt, sampling_params: SamplingParams | None) -> Generation:
        return self._llm.generate(
            prompt.token_ids,
            sampling_params,
            cache_salt=self._scope.cache_salt,
            adapter=self._scope.adapter,
        )

    async def _prompt(self, content: str) -> ChatPrompt:
        return await self._llm.between_steps(lambda: self._transcript.prompt(user(content)))

    async def _record(self, prompt: ChatPrompt, output: Output) -> None:
        if output.finish_reason != "abort":
            await self._llm.between_steps(lambda: self._transcript.record(prompt, output))
