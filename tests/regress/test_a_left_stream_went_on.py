"""After a ``break`` the chat still waited for the reply, and a generation that had a name ran to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv import AsyncChat, AsyncLLM, EngineConfig, MisuseError, SamplingParams, Tokenizer
from radixkv.testing import FakeExecutor

LONG = SamplingParams(max_tokens=4_000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def word_tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 97)}}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    wrapped.chat_template = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}"
    return Tokenizer(wrapped)


def run(use: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
    """``use`` with a guard: what hangs fails instead."""

    async def main() -> None:
        executor = FakeExecutor(num_pages=1_100, page_size=4, vocab_size=97, max_positions=5_000)
        config = EngineConfig(num_pages=1_100, page_size=4)
        async with AsyncLLM.from_executor(executor, word_tokenizer(), config=config) as llm:
            await asyncio.wait_for(use(llm), 60)

    asyncio.run(main())


async def num_live(llm: AsyncLLM) -> int:
    live: int = (await llm.stats())["front"]["num_live"]
    return live


async def leave_unnamed(chat: AsyncChat) -> None:
    async for _ in chat.stream("w3", LONG):
        break


async def leave_by_an_error(chat: AsyncChat) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async for _ in chat.stream("w3", LONG):
            raise ZeroDivisionError


async def leave_closed(chat: AsyncChat) -> None:
    async with contextlib.aclosing(chat.stream("w3", LONG)) as stream:
        await anext(stream)


@pytest.mark.parametrize("leave", [leave_unnamed, leave_by_an_error, leave_closed])
def test_a_chat_goes_on_at_once_after_its_stream_was_left(
    leave: Callable[[AsyncChat], Awaitable[None]],
) -> None:
    async def use(llm: AsyncLLM) -> None:
        chat = llm.chat()
        await leave(chat)
        output = await chat.send("w4", SHORT)
        assert output.usage.completion_tokens == 2
        assert [message["content"] for message in chat.messages] == ["w4", output.text]
        assert await num_live(llm) == 0

    run(use)


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_goes_on_at_once_after_a_stream_that_has_a_name(streams: bool) -> None:
    async def use(llm: AsyncLLM) -> None:
        chat = llm.chat()
        left = chat.stream("w3", LONG)
        async for _ in left:
            break
        if streams:
            assert [delta async for delta in chat.stream("w4", SHORT)]
        else:
            await chat.send("w4", SHORT)
        assert [message["content"] for message in chat.messages][:1] == ["w4"]
        assert len(chat.messages) == 2
        with pytest.raises(MisuseError, match="this stream is over"):
            await anext(left)
        await left.aclose()
        await chat.send("w5", SHORT)
        assert await num_live(llm) == 0

    run(use)


def test_a_stream_that_another_task_reads_is_not_ended() -> None:
    async def use(llm: AsyncLLM) -> None:
        chat = llm.chat()
        stream = chat.stream("w3", SamplingParams(max_tokens=50, ignore_eos=True))

        async def read(first: asyncio.Event, go_on: asyncio.Event) -> int:
            num = 0
            async for delta in stream:
                num += len(delta.token_ids)
                first.set()
                await go_on.wait()
            return num

        first, go_on = asyncio.Event(), asyncio.Event()
        reader = asyncio.create_task(read(first, go_on))
        await first.wait()
        for say in (lambda: chat.send("w4"), lambda: anext(chat.stream("w4"))):
            with pytest.raises(MisuseError, match=r"waits for a reply already.*aclose"):
                await say()
        go_on.set()
        assert await reader == 50
        assert len(chat.messages) == 2

    run(use)


def test_a_turn_is_over_with_its_last_piece() -> None:
    async def use(llm: AsyncLLM) -> None:
        chat = llm.chat()
        stream = chat.stream("w3", SHORT)
        async for delta in stream:
            if delta.finish_reason is not None:
                break
        await asyncio.create_task(chat.send("w4", SHORT))
        assert len(chat.messages) == 4
        assert [delta async for delta in stream] == []

    run(use)


def test_a_named_generation_whose_loop_is_left_is_aborted() -> None:
    async def use(llm: AsyncLLM) -> None:
        generation = llm.generate([5, 6, 7], LONG)
        async for _ in generation:
            break
        assert await num_live(llm) == 0
        assert [delta async for delta in generation] == []
        with pytest.raises(MisuseError, match="closed before its end"):
            await generation

        other = llm.generate([5, 6, 7], SHORT)
        await anext(other)  # no loop: nothing is left
        assert (await other).usage.completion_tokens == 2
        inside = llm.generate([5, 6, 7], SHORT)
        async for _ in inside:
            assert (await inside).usage.completion_tokens == 2

    run(use)


def test_a_generation_makes_a_task() -> None:
    """``create_task`` takes coroutines only."""

    async def use(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate([5, 6, 7], SHORT).output())
        async with asyncio.TaskGroup() as group:
            other = group.create_task(llm.generate([5, 6, 7], SHORT).output())
        assert (await task).token_ids == other.result().token_ids
        long = asyncio.create_task(llm.generate([5, 6, 7], LONG).output())
        while not await num_live(llm):
            await asyncio.sleep(0)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert await num_live(llm) == 0

    run(use)
