"""Calls that were cancelled or aborted took effect all the same, gave numbers, kept pages, or hung."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from front_kit import FOUR, LONG, Gate, assert_async_idle, assert_idle, fake_async_llm, fake_llm, run, start

from radixkv import AsyncLLM, MisuseError, RequestAbortedError
from radixkv.sched.batch import Batch

JOBS: dict[str, Callable[[Any], Any]] = {
    "score": lambda llm: llm.score(list(range(3, 40)), [[8], [9], [10], [11]]),
    "beam_search": lambda llm: llm.beam_search(list(range(3, 40)), beam_width=3, max_tokens=20),
    "prefill": lambda llm: llm.prefill(list(range(3, 40)), pin=True),
}


@pytest.mark.parametrize("job", sorted(JOBS))
def test_an_aborted_call_gives_no_numbers(job: str) -> None:
    """``score`` gave total 0, which is probability 1; ``prefill`` pinned what happened to be there."""

    def abort(batch: Batch) -> None:
        executor.before = None
        llm.engine.abort(int(batch.request_ids[0]))

    llm, executor = fake_llm(max_pinned_pages=20, max_batch_tokens=16)
    executor.before = abort
    with pytest.raises(RequestAbortedError, match=r"request \d+ of this call was aborted"):
        JOBS[job](llm)
    assert_idle(llm)
    assert llm.stats()["kv"]["num_pins"] == 0

    async def main() -> None:
        other, executor = fake_async_llm(max_pinned_pages=20, max_batch_tokens=16)
        async with other:
            gate = Gate(executor)
            call = asyncio.ensure_future(JOBS[job](other))
            batch = await gate.arrivals.get()
            other.abort(int(batch.request_ids[0]))
            gate.open()
            with pytest.raises(RequestAbortedError):
                await call
            await assert_async_idle(other)
            assert (await other.stats())["kv"]["num_pins"] == 0

    run(main())


def test_what_is_cancelled_before_it_began_never_begins() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm()
        called: list[int] = []
        async with llm:
            gate = Gate(executor)
            other = start(llm, [5], FOUR)
            await gate.arrivals.get()
            calls = [
                asyncio.ensure_future(call)
                for call in (
                    llm.between_steps(lambda: called.append(1)),
                    llm.flush(),
                    llm.prefill([3, 4, 5], pin=True),
                    llm.generate([6, 7]).output(),
                )
            ]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            gate.open()
            await other
            await llm.check()
            assert called == []
            assert all(set(batch.request_ids.tolist()) == {0} for batch in executor.batches)
            assert (await llm.generate([5], FOUR)).token_ids == (await other).token_ids
            assert (await llm.stats())["scheduler"]["num_added"] == 2

    run(main())


def test_a_prefill_whose_coroutine_is_closed_leaves_no_pin() -> None:
    """By ``close``, as the garbage collector does it: with GeneratorExit, and where no loop may run."""

    async def main() -> None:
        llm, executor = fake_async_llm(max_pinned_pages=20)
        async with llm:
            gate = Gate(executor)
            coroutine = llm.prefill(list(range(3, 40)), pin=True)
            coroutine.send(None)
            await gate.arrivals.get()
            coroutine.close()
            gate.open()
            await assert_async_idle(llm)
            assert (await llm.stats())["kv"]["num_pins"] == 0

    run(main())


@pytest.mark.parametrize("job", sorted(JOBS))
@pytest.mark.parametrize("looks_early", [True, False])
def test_a_call_whose_loop_is_closed_leaves_nothing(job: str, looks_early: bool) -> None:
    """While it runs, and when its result has been sent to a loop that never looked. The task is kept, so
    that nothing is collected."""
    llm, executor = fake_async_llm(max_pinned_pages=20)
    kept: list[asyncio.Task[Any]] = []
    gates: list[Gate] = []

    async def leave() -> None:
        kept.append(asyncio.ensure_future(JOBS[job](llm)))
        gate = Gate(executor)
        gates.append(gate)
        await gate.arrivals.get()
        if not looks_early:
            gate.open()
            while len(llm._thread._tasks) or llm._thread._commands:  # the loop is held: it never looks
                pass

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    executor.before = None
    gates[0].open()

    async def look() -> None:
        await assert_async_idle(llm)
        assert (await llm.stats())["kv"]["num_pins"] == 0
        assert not looks_early or len(executor.batches) == 1, "it ran on for nobody"
        await llm.aclose()

    run(look())
    kept.clear()
    gc.collect()


@pytest.mark.parametrize("whole", [False, True])
def test_closing_a_generation_wakes_who_waits_for_it(whole: bool) -> None:
    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=4000)
        async with llm:
            gate = Gate(executor)
            generation = llm.generate([3, 4], LONG)

            async def consume() -> list[Any]:
                return [delta async for delta in generation]

            waiting = asyncio.ensure_future(generation.output() if whole else consume())
            await gate.arrivals.get()
            await generation.aclose()
            gate.open()
            if whole:
                with pytest.raises(MisuseError, match="closed before its end"):
                    await asyncio.wait_for(waiting, 30)
            else:
                assert await asyncio.wait_for(waiting, 30) == []
            await assert_async_idle(llm)

    run(main())


def test_a_generation_may_be_closed_from_another_loop() -> None:
    async def main(llm: AsyncLLM) -> None:
        async with llm:
            generation = llm.generate([3, 4], LONG)
            waiting = asyncio.ensure_future(generation.output())
            await asyncio.sleep(0)
            await asyncio.to_thread(asyncio.run, generation.aclose())
            with pytest.raises(MisuseError, match="closed before its end"):
                await asyncio.wait_for(waiting, 30)
            await assert_async_idle(llm)

    run(main(fake_async_llm(num_pages=4000)[0]))
