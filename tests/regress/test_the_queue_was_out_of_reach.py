"""Priority and queue timeout were fields of a request that no front could set; a list of more prompts than
``max_waiting`` was refused half way; calls that were not computed in time gave numbers all the same."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv import (
    LLM,
    AsyncLLM,
    EngineConfig,
    InvalidRequestError,
    Output,
    QueueFullError,
    QueueTimeoutError,
    SamplingParams,
    Tokenizer,
)
from radixkv.sched.batch import Batch
from radixkv.testing import FakeExecutor

TWO = SamplingParams(max_tokens=2, ignore_eos=True)
AT_ONCE = 1e-12
"""Seconds: over before the first step."""


def word_tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 97)}}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    wrapped.chat_template = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}"
    return Tokenizer(wrapped)


class Parts:
    """What an LLM is opened over, and the first token of every batch that ran."""

    def __init__(self, **config: Any) -> None:
        self.first_tokens: list[int] = []
        self.executor = FakeExecutor(num_pages=256, page_size=4, vocab_size=97, before=self._note)
        self.config = EngineConfig(num_pages=256, page_size=4, **config)
        self.tokenizer = word_tokenizer()

    def _note(self, batch: Batch) -> None:
        if batch.token_ids[0] not in self.first_tokens:
            self.first_tokens.append(int(batch.token_ids[0]))

    def llm(self) -> LLM:
        return LLM.from_executor(self.executor, self.tokenizer, config=self.config)

    def async_llm(self) -> AsyncLLM:
        return AsyncLLM.from_executor(self.executor, self.tokenizer, config=self.config)


def test_prompts_of_a_list_have_priorities() -> None:
    parts = Parts(policy="priority", max_running=1)
    parts.llm().generate([[50, 1], [60, 1], [70, 1]], SamplingParams(max_tokens=0), priority=[0, 2, 1])
    assert parts.first_tokens == [60, 70, 50]


def test_what_is_no_priority_is_refused_with_its_prompt() -> None:
    llm = Parts().llm()
    with pytest.raises(InvalidRequestError, match=r"got 1 of priority for 2 prompts"):
        llm.generate([[3], [4]], TWO, priority=[1])
    wrong: list[Any] = [1, "high"]
    with pytest.raises(InvalidRequestError, match=r"prompt 1: priority must be a whole number"):
        llm.generate([[3], [4]], TWO, priority=wrong)
    with pytest.raises(
        InvalidRequestError, match=r"prompt: queue_timeout_s must be a number above 0 or None"
    ):
        llm.generate([3], TWO, queue_timeout_s=0)


def test_a_prompt_that_waited_too_long_says_so() -> None:
    llm = Parts().llm()
    late = llm.generate([3, 4], TWO, queue_timeout_s=AT_ONCE)
    assert (late.finish_reason, late.token_ids) == ("timeout", ())
    assert llm.generate([3, 4], TWO, queue_timeout_s=1e6).finish_reason == "length"
    chat = llm.chat()
    assert chat.send("w4", TWO, queue_timeout_s=AT_ONCE, priority=3).finish_reason == "timeout"
    assert chat.messages == []


def test_calls_that_were_not_computed_in_time_give_no_numbers() -> None:
    parts = Parts(queue_timeout_s=AT_ONCE)
    llm = parts.llm()
    with pytest.raises(QueueTimeoutError, match="waited longer than queue_timeout_s"):
        llm.score([3, 4], [[5]])
    with pytest.raises(QueueTimeoutError):
        llm.prefill([3, 4])
    with pytest.raises(QueueTimeoutError):
        llm.beam_search([3, 4], beam_width=2)
    llm.check()

    async def main() -> None:
        async with parts.async_llm() as other:
            for call in (
                other.score([3], [[5], [6]]),
                other.prefill([3]),
                other.beam_search([3], beam_width=2),
            ):
                with pytest.raises(QueueTimeoutError):
                    await call
            await other.check()

    asyncio.run(main())


def test_one_call_feeds_its_list_into_a_short_queue() -> None:
    parts = Parts(max_waiting=2, max_running=2)
    llm = parts.llm()
    prompts = [[3, i] for i in range(1, 21)]
    outputs = llm.generate(prompts, TWO)
    assert [output.finish_reason for output in outputs] == ["length"] * 20
    assert [list(output.token_ids) for output in outputs] == [
        list(o.token_ids) for o in Parts().llm().generate(prompts, TWO)
    ]
    assert len(llm.score([3, 4], [[i] for i in range(1, 21)])) == 20
    stats = llm.stats()["scheduler"]
    assert (stats["num_queue_full"], stats["num_waiting"]) == (0, 0)


def test_a_call_of_several_requests_feeds_them_into_a_short_queue_beside_others() -> None:
    async def main() -> None:
        parts = Parts(max_waiting=2, max_running=2)
        async with parts.async_llm() as llm:
            scores = await llm.score([3, 4], [[i] for i in range(1, 21)])
            assert scores == Parts().llm().score([3, 4], [[i] for i in range(1, 21)])
            beams = await llm.beam_search([[i] for i in range(1, 9)], beam_width=2, max_tokens=2)
            assert isinstance(beams, list) and len(beams) == 8
            cancelled = asyncio.create_task(llm.score([3, 5], [[i] for i in range(1, 21)]))
            while not (cancelled.done() or (await llm.stats())["front"]["num_live"]):
                await asyncio.sleep(0)
            cancelled.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cancelled
            await llm.check()
            assert (await llm.stats())["front"]["num_live"] == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_stranger_is_refused_by_a_full_queue() -> None:
    async def main() -> None:
        async with Parts(max_waiting=3).async_llm() as llm:
            calls = [llm.generate([3, i], TWO, priority=i).output() for i in range(1, 9)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(one, Output) for one in found) >= 3
            refused = [one for one in found if not isinstance(one, Output)]
            assert all(isinstance(one, QueueFullError) for one in refused)
            assert (await llm.stats())["scheduler"]["num_queue_full"] == len(refused)
            late = await llm.generate([3], TWO, queue_timeout_s=AT_ONCE)
            assert late.finish_reason == "timeout"
            chat = llm.chat()
            assert (await chat.send("w4", TWO, queue_timeout_s=AT_ONCE)).finish_reason == "timeout"
            deltas = [delta async for delta in chat.stream("w4", TWO, queue_timeout_s=AT_ONCE)]
            assert [delta.finish_reason for delta in deltas] == ["timeout"]
            assert chat.messages == []
            assert (await chat.send("w4", TWO)).finish_reason == "length"

    asyncio.run(asyncio.wait_for(main(), 60))
