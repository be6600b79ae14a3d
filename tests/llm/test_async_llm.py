"""AsyncLLM: deltas and whole outputs, many callers, cancelling, no polling, no thread left behind.

Long because every way to wait for an answer, and to stop waiting, stands side by side.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from async_kit import FOUR, LONG, Gate, cancel_task, expected, spy_on_aborts, start
from fronts import VOCAB_SIZE, assert_async_idle, fake_async_llm, fake_llm, run, words

from radixkv import (
    AsyncLLM,
    Delta,
    InvalidRequestError,
    MisuseError,
    SamplingParams,
)
from radixkv.sched.batch import Batch


def test_deltas_joined_are_the_output_and_await_gives_it_whole() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm()
        async with llm:
            deltas: list[Delta] = [delta async for delta in llm.generate(words(3, 4, 5), FOUR)]
            ids = expected(executor, [3, 4, 5], 4)
            assert [i for delta in deltas for i in delta.token_ids] == ids
            assert "".join(delta.text for delta in deltas) == words(*ids)
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            output = await llm.generate([3, 4, 5], FOUR)
            assert (output.text, output.token_ids) == (words(*ids), tuple(ids))
            assert output.finish_reason == "length" and output.stop_reason is None
            assert deltas[-1].finish_reason == "length"
            assert deltas[-1].usage.completion_tokens == 4
            assert output.usage.cached_tokens == 2
            await assert_async_idle(llm)

    run(main())


def test_the_same_outputs_as_the_blocking_front() -> None:
    """With hits, stop strings and uneven lengths; both fronts share all but the thread."""
    prompts = [[*range(3, 20), i] for i in range(40, 60)]
    blocking, _ = fake_llm()
    first = blocking.generate(prompts, SamplingParams(max_tokens=12))
    stops = (first[0].text.split()[5], first[3].text[4:9])
    params = [SamplingParams(max_tokens=3 + i % 9, stop=stops) for i in range(20)]
    wanted = blocking.generate(prompts, params)
    assert {output.finish_reason for output in wanted} == {"stop", "length"}

    async def main() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            outputs = await asyncio.gather(*map(llm.generate, prompts, params))
            for output, other in zip(outputs, wanted, strict=True):
                assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (
                    other.text, other.token_ids, other.finish_reason, other.stop_reason,
                )  # fmt: skip
            await assert_async_idle(llm)

    run(main())


def test_the_prompt_is_copied_when_it_is_passed() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm()
        async with llm:
            mine = [3, 4, 5]
            generation = llm.generate(mine, FOUR)
            mine[0] = 9
            assert list((await generation).token_ids) == expected(executor, [3, 4, 5], 4)

    run(main())


def test_a_slow_consumer_gets_larger_deltas_and_holds_up_nobody() -> None:
    """Fault seen: without joining what was not taken, the first delta after the pause holds one token."""

    async def main() -> None:
        llm, executor = fake_async_llm()
        async with llm:
            slow = llm.generate([3, 4], SamplingParams(max_tokens=40))
            first = await anext(slow)
            fast = await llm.generate([5, 6], SamplingParams(max_tokens=60))
            assert len(fast.token_ids) == 60
            rest = await anext(slow)
            assert len(first.token_ids) + len(rest.token_ids) == 40
            assert rest.finish_reason == "length"
            assert list(first.token_ids + rest.token_ids) == expected(executor, [3, 4], 40)
            with pytest.raises(StopAsyncIteration):
                await anext(slow)
            assert (await slow).token_ids == first.token_ids + rest.token_ids

    run(main())


def test_bad_prompts_raise_where_they_are_awaited_and_hurt_nobody() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm()
        async with llm:
            good = start(llm, [3, 4], FOUR)
            bad: list[Any] = ["", [], [VOCAB_SIZE], [3, True], None, "\ud800"]
            for prompt in bad:
                with pytest.raises(InvalidRequestError, match=r"^prompt: "):
                    await llm.generate(prompt)
                with pytest.raises(InvalidRequestError, match=r"^prompt: "):
                    _ = [delta async for delta in llm.generate(prompt)]
            no_params: Any = {"max_tokens": 4}
            with pytest.raises(InvalidRequestError, match="must be SamplingParams, got"):
                llm.generate([3], no_params)
            assert list((await good).token_ids) == expected(executor, [3, 4], 4)
            await assert_async_idle(llm)

    run(main())


# Cancelling


@pytest.mark.parametrize("streams", [False, True], ids=["awaits", "iterates"])
def test_b062_cancelling_stops_within_two_steps_and_aborts_once(streams: bool) -> None:
    """Fault seen: without the cancel in Generation._abandon the request runs to its 9,800 tokens."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=4000)
        async with llm:
            aborted = spy_on_aborts(llm)
            gate = Gate(executor)
            generation = llm.generate([3, 4], LONG)

            async def consume() -> None:
                if streams:
                    async for _ in generation:
                        pass
                else:
                    await generation

            task = asyncio.create_task(consume())
            for _ in range(3):
                await gate.arrivals.get()
                gate.let_go()
            await gate.arrivals.get()  # the fourth step waits at the gate
            await cancel_task(task)
            await generation.aclose()
            gate.open()
            await llm.check()
            assert len(executor.batches) <= 4 + 1
            assert aborted == [generation.request_id]
            await assert_async_idle(llm)

    run(main())


async def leave_the_loop(llm: AsyncLLM) -> None:
    async for _ in llm.generate([3, 4], LONG):
        break


async def close_it(llm: AsyncLLM) -> None:
    generation = llm.generate([3, 4], LONG)
    await anext(generation)
    await generation.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    with pytest.raises(MisuseError, match="closed before its end"):
        await generation


async def raise_inside(llm: AsyncLLM) -> None:
    async def consume() -> None:
        async for _ in llm.generate([3, 4], LONG):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()


async def run_out_of_time(llm: AsyncLLM) -> None:
    async def consume() -> None:
        async with asyncio.timeout(None) as limit:
            async for _ in llm.generate([3, 4], LONG):
                limit.reschedule(0)

    with pytest.raises(TimeoutError):
        await consume()


@pytest.mark.parametrize("leave", [leave_the_loop, close_it, raise_inside, run_out_of_time])
def test_whoever_leaves_early_aborts_his_request_and_no_other(leave: Callable[[AsyncLLM], Any]) -> None:
    """Fault seen: without Generation.__del__, breaking out of the loop lets the request run on."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=4000)
        async with llm:
            aborted = spy_on_aborts(llm)
            other = start(llm, [5, 6], SamplingParams(max_tokens=200))
            await leave(llm)
            gc.collect()
            assert list((await other).token_ids) == expected(executor, [5, 6], 200)
            await assert_async_idle(llm)
            assert len(aborted) == 1

    run(main())


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b064_a_queued_request_that_is_cancelled_never_prefills(page_size: int) -> None:
    """Fault seen: with the cancel left out, the queued request is in the batches that follow."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=512, page_size=page_size, max_running=2)
        async with llm:
            gate = Gate(executor)
            running = [start(llm, [i, i + 1], SamplingParams(max_tokens=20)) for i in (3, 7)]
            await gate.arrivals.get()
            generation = llm.generate([11, 12], FOUR)
            queued = asyncio.create_task(consume(generation))
            await asyncio.sleep(0)
            await cancel_task(queued)
            gate.open()
            assert [len((await task).token_ids) for task in running] == [20, 20]
            seen = {request_id for batch in executor.batches for request_id in batch.seq_ids.tolist()}
            assert generation.request_id not in seen and len(seen) == 2
            await assert_async_idle(llm)

    async def consume(generation: Any) -> None:
        async for _ in generation:
            pass

    run(main())


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b056_one_of_eight_is_cancelled_and_sent_again_and_the_others_do_not_notice(page_size: int) -> None:
    """Fault seen: with the abort sent to the id's neighbour, what was cancelled goes on."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=8192 // page_size, page_size=page_size)
        prompts = [[*range(3, 40), 100 + i] for i in range(8)]
        due = [expected(executor, prompt, 10) for prompt in prompts]
        num_whole = 0

        async def stream(number: int) -> None:
            nonlocal num_whole
            while True:
                output = await llm.generate(prompts[number], SamplingParams(max_tokens=10))
                assert list(output.token_ids) == due[number]
                num_whole += 1

        chooser = np.random.default_rng(page_size)
        async with llm:
            streams = [asyncio.create_task(stream(number)) for number in range(8)]
            for _ in range(125):  # 500 at four page sizes
                await llm.generate([1, 2], SamplingParams(max_tokens=int(chooser.integers(1, 3))))
                victim = int(chooser.integers(0, 8))
                streams[victim].cancel()
                await asyncio.wait(streams[victim : victim + 1])
                assert streams[victim].cancelled()
                streams[victim] = asyncio.create_task(stream(victim))
            assert not any(task.done() for task in streams)
            for task in streams:
                task.cancel()
            await asyncio.wait(streams)
            assert all(task.cancelled() for task in streams) and num_whole >= 20
            await assert_async_idle(llm)

    run(main())


def test_abort_by_id_gives_what_there_is() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=4000)
        async with llm:
            generation = llm.generate([3, 4], LONG)
            first = await anext(generation)
            llm.abort(generation.request_id)
            llm.abort(generation.request_id)
            llm.abort(12345)
            output = await generation
            assert output.finish_reason == "abort"
            assert output.token_ids[: len(first.token_ids)] == first.token_ids
            assert list(output.token_ids) == expected(executor, [3, 4], len(output.token_ids))
            await assert_async_idle(llm)

    run(main())


def test_one_task_waits_at_a_time_and_on_one_loop() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=4000)
        async with llm:
            gate = Gate(executor)
            generation = llm.generate([3, 4], FOUR)
            task = asyncio.create_task(anext(generation))
            await gate.arrivals.get()
            with pytest.raises(MisuseError, match="another task waits"):
                await generation
            gate.open()
            assert isinstance(await task, Delta)
            with pytest.raises(MisuseError, match="another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(anext(generation)))
            await generation

    run(main())


# Nobody is held up, nothing is polled


def test_b127_a_ticker_is_never_late_because_of_us() -> None:
    """While a forward sleeps, the loop goes on: every step waits until the loop has ticked ten times more,
    so one that held the loop up would never end. Fault seen: stepping in the loop's own thread."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=2000)
        ticks = 0
        ticked = threading.Condition()
        held_up: list[Batch] = []

        def sleep(batch: Batch) -> None:
            with ticked:
                goal = ticks + 10
                if not ticked.wait_for(lambda: ticks >= goal, timeout=20):
                    held_up.append(batch)

        async def ticker() -> None:
            nonlocal ticks
            while True:
                with ticked:
                    ticks += 1
                    ticked.notify_all()
                await asyncio.sleep(0)

        executor.before = sleep
        async with llm:
            task = asyncio.create_task(ticker())
            outputs = await asyncio.gather(*(llm.generate([3 + i, 4], FOUR) for i in range(100)))
            task.cancel()
            for i, output in enumerate(outputs):
                assert list(output.token_ids) == expected(executor, [3 + i, 4], 4)
            assert not held_up
            await assert_async_idle(llm)

    run(main())


def test_a_step_calls_the_loop_once_whatever_the_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault seen: calling the loop from Mailbox.put."""

    async def main() -> None:
        llm, executor = fake_async_llm()
        async with llm:
            loop = asyncio.get_running_loop()
            plain, calls = loop.call_soon_threadsafe, 0

            def counting(*arguments: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                return plain(*arguments, **named)

            monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
            before = (await llm.stats())["front"]["num_calls"]
            await asyncio.gather(*(llm.generate([3, 4, i], FOUR) for i in range(40, 60)))
            num_calls = (await llm.stats())["front"]["num_calls"] - before
            assert 0 < num_calls <= len(executor.batches) + 1  # and the one of the first stats
            assert calls <= len(executor.batches) + 2

    run(main())


def test_an_idle_thread_is_not_woken() -> None:
    """Fault seen: a wait with a timeout of 1 ms."""

    async def main() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            await llm.generate([3], FOUR)
            before = (await llm.stats())["front"]["num_wakeups"]
            await asyncio.sleep(0.1)
            assert (await llm.stats())["front"]["num_wakeups"] == before + 1

    run(main())


def test_several_loops_share_one_engine() -> None:
    llm, executor = fake_async_llm(num_pages=512)
    found: Counter[int] = Counter()

    def on_its_own_loop(seed: int) -> None:
        async def main() -> None:
            prompts = [[3, 4, seed, i] for i in range(50, 60)]
            outputs = await asyncio.gather(*(llm.generate(prompt, FOUR) for prompt in prompts))
            for prompt, output in zip(prompts, outputs, strict=True):
                assert list(output.token_ids) == expected(executor, prompt, 4)
            found[seed] += 1

        run(main())

    threads = [threading.Thread(target=on_its_own_loop, args=(seed,)) for seed in range(100, 104)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == Counter(range(100, 104))
    run(assert_async_idle(llm))
    llm.close()
