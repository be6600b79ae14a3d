"""Something breaks at each boundary while eight requests are under way: the others are served, or everybody
is told. Nobody waits for ever: the guard in ``run`` would fail the test."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from async_kit import FOUR, expected, start
from fronts import assert_async_idle, assert_idle, fake_async_llm, fake_llm, run, words

from radixkv import AsyncLLM, EngineDeadError, Output, SamplingParams
from radixkv.detokenizer import Detokenizer
from radixkv.generation import _Inbox
from radixkv.kv.page_pool import PagePool
from radixkv.mailbox import Mailbox
from radixkv.sched.batch import Batch
from radixkv.testing import FakeExecutor

EIGHT = [[*range(3, 20), 50 + i] for i in range(8)]
TEN = SamplingParams(max_tokens=10)


class Broken(Exception):
    pass


async def run_eight(llm: AsyncLLM) -> list[Any]:
    """Half of them awaited, half iterated."""

    async def iterated(prompt: list[int]) -> Output:
        generation = llm.generate(prompt, TEN)
        async for _ in generation:
            pass
        return await generation

    calls = [start(llm, prompt, TEN) for prompt in EIGHT[:4]]
    calls += [asyncio.create_task(iterated(prompt)) for prompt in EIGHT[4:]]
    return await asyncio.gather(*calls, return_exceptions=True)


def assert_served(executor: FakeExecutor, results: list[Any], left_out: set[int]) -> None:
    for i, (prompt, result) in enumerate(zip(EIGHT, results, strict=True)):
        if i not in left_out:
            assert list(result.token_ids) == expected(executor, prompt, 10), i


@pytest.mark.parametrize("place", ["before", "after"], ids=["execute", "sample"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_an_error_in_a_step_fails_its_batch_and_serves_the_others(place: str, page_size: int) -> None:
    """Fault seen: without the error in StreamTask.take the failed ones get an output."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=1024 // page_size, page_size=page_size, max_running=3)
        failed: list[int] = []

        def break_once(batch: Batch) -> None:
            if len(executor.batches) == 4:
                failed.extend(set(batch.seq_ids.tolist()))
                raise Broken

        setattr(executor, place, break_once)
        async with llm:
            results = await run_eight(llm)
            broken = {i for i, result in enumerate(results) if isinstance(result, Broken)}
            assert 0 < len(failed) <= 3 and len(broken) == len(failed)
            assert_served(executor, results, broken)
            assert_served(executor, await run_eight(llm), set())
            await assert_async_idle(llm)

    run(main())


def test_an_error_in_the_ledger_tells_everybody_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who run, those who wait, and those who come later. Fault seen: swallowing the engine's last
    outputs in EngineThread._step."""

    async def main() -> None:
        llm, _ = fake_async_llm(max_running=3)
        plain = PagePool.allocate
        calls: list[int] = []

        def allocate(self: PagePool, num_pages: int) -> Any:
            calls.append(num_pages)
            if len(calls) == 3:
                raise Broken("the pool")
            return plain(self, num_pages)

        monkeypatch.setattr(PagePool, "allocate", allocate)
        async with llm:
            results = await run_eight(llm)
            late = await asyncio.gather(
                llm.generate([3]), llm.prefill([3]), llm.score([3], [[4]]), return_exceptions=True
            )
            for result in [*results, *late]:
                assert isinstance(result, EngineDeadError), result
                assert isinstance(result.__cause__, Broken)
            assert (await llm.stats())["is_dead"]

    run(main())


def test_a_thread_that_ends_by_what_no_engine_catches_tells_everybody() -> None:
    """``SystemExit`` out of the executor. Fault seen: without _shut_down everybody waits for ever."""

    async def main() -> None:
        llm, executor = fake_async_llm(max_running=3)

        def leave(batch: Batch) -> None:
            if len(executor.batches) == 3:
                raise SystemExit(3)

        executor.before = leave
        results = await run_eight(llm)
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert isinstance(result.__cause__, SystemExit)
        with pytest.raises(EngineDeadError, match="engine thread has ended: SystemExit"):
            await llm.generate([3], FOUR)
        await llm.aclose()

    run(main())


def test_an_error_of_the_thread_itself_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm, _ = fake_async_llm()
        plain = Mailbox.send

        def send(self: Mailbox) -> bool:
            monkeypatch.setattr(Mailbox, "send", plain)
            raise Broken("our own fault")

        monkeypatch.setattr(Mailbox, "send", send)
        for result in await run_eight(llm):
            assert isinstance(result, EngineDeadError)
            assert isinstance(result.__cause__, Broken)
        await llm.aclose()

    run(main())


def break_text_of(monkeypatch: pytest.MonkeyPatch, token_id: int) -> None:
    plain = Detokenizer.push

    def push(self: Detokenizer, pushed: int) -> str:
        if pushed == token_id:
            raise Broken("no text for this token")
        return plain(self, pushed)

    monkeypatch.setattr(Detokenizer, "push", push)


def a_token_of_one_only(executor: FakeExecutor) -> tuple[int, int]:
    """A token in the middle of one output that is in none of the others."""
    outputs = [expected(executor, prompt, 10) for prompt in EIGHT]
    for i, ids in enumerate(outputs):
        for token_id in ids[3:7]:
            if not any(token_id in other for j, other in enumerate(outputs) if j != i):
                return i, token_id
    raise AssertionError("choose other prompts")


def test_an_error_in_making_text_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault seen: without the ``except`` in EngineThread._hand everybody is told that the engine is dead."""

    async def main() -> None:
        llm, executor = fake_async_llm()
        chosen, token_id = a_token_of_one_only(executor)
        break_text_of(monkeypatch, token_id)
        async with llm:
            results = await run_eight(llm)
            assert isinstance(results[chosen], Broken)
            assert_served(executor, results, {chosen})
            await assert_async_idle(llm)

    run(main())


def test_an_error_in_making_text_fails_one_prompt_of_the_blocking_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault seen: without the abort in run.py the request runs on, and no page is let go."""
    llm, executor = fake_llm()
    chosen, token_id = a_token_of_one_only(executor)
    break_text_of(monkeypatch, token_id)
    params = [TEN] * 8
    params[chosen] = SamplingParams(max_tokens=60)
    results = llm.generate(EIGHT, params, return_exceptions=True)
    assert isinstance(results[chosen], Broken)
    assert not llm.engine.has_work
    assert_served(executor, results, {chosen})
    with pytest.raises(Broken):
        llm.generate(EIGHT, TEN)
    assert_idle(llm)


def test_an_error_in_a_receiver_reaches_its_own_caller_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault seen: a Mailbox that stops at the first call that raises leaves the others waiting."""

    async def main() -> None:
        llm, executor = fake_async_llm()
        plain = _Inbox.receive
        victims: list[_Inbox] = []

        def receive(self: _Inbox, delta: Any) -> None:
            if not victims:
                victims.append(self)
            if self is victims[0]:
                raise Broken("receiver")
            plain(self, delta)

        monkeypatch.setattr(_Inbox, "receive", receive)
        async with llm:
            results = await run_eight(llm)
            broken = {i for i, result in enumerate(results) if isinstance(result, Broken)}
            assert len(broken) == 1
            assert_served(executor, results, broken)

    run(main())


def test_a_consumer_that_raises_hurts_nobody_else() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=512)

        async def clumsy() -> None:
            async for delta in llm.generate([9, 9, 9], SamplingParams(max_tokens=1000)):
                raise Broken(delta.text)

        async with llm:
            bad = asyncio.create_task(clumsy())
            assert_served(executor, await run_eight(llm), set())
            with pytest.raises(Broken):
                await bad
            del bad
            await assert_async_idle(llm)

    run(main())


@pytest.mark.parametrize("call", ["generate", "score", "prefill"])
def test_a_failing_call_gets_its_own_error(call: str) -> None:
    async def main() -> None:
        llm, executor = fake_async_llm()

        def break_it(batch: Batch) -> None:
            raise Broken

        calls: dict[str, Any] = {
            "generate": lambda: llm.generate([3, 4], FOUR),
            "score": lambda: llm.score([3, 4], [[5], [6]]),
            "prefill": lambda: llm.prefill([3, 4]),
        }
        async with llm:
            executor.before = break_it
            with pytest.raises(Broken):
                await calls[call]()
            executor.before = None
            await calls[call]()
            output = await llm.generate(words(3, 4), FOUR)
            assert list(output.token_ids) == executor.expected_output(np.array([3, 4]), 4)
            await assert_async_idle(llm)

    run(main())
