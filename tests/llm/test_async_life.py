"""AsyncLLM: its other calls, and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from async_kit import FOUR, LONG, Gate, cancel_task, engine_threads, start
from fronts import assert_async_idle, fake_async_llm, fake_llm, run

from radixkv import (
    AsyncLLM,
    EngineDeadError,
    InvalidRequestError,
    MisuseError,
    PinBudgetExceeded,
    SamplingParams,
)

# The other calls


def test_prefill_pin_score_explain_flush_between_steps() -> None:
    """While others stream, and with the blocking front's results."""

    async def main() -> None:
        llm, _ = fake_async_llm(num_pages=4000, max_pinned_pages=20)
        blocking, _ = fake_llm(num_pages=4000, max_pinned_pages=20)
        async with llm:
            stream = llm.generate([90, 91], LONG)
            await anext(stream)
            prefix = list(range(3, 30))
            info = await llm.prefill(prefix, pin=True)
            mine = blocking.prefill(prefix, pin=True)
            assert (info.num_tokens, info.cached_tokens) == (mine.num_tokens, mine.cached_tokens)
            assert info.pin is not None
            assert await llm.score(prefix, [[40], [41, 42]]) == blocking.score(prefix, [[40], [41, 42]])
            assert await llm.score(prefix, []) == []
            assert (await llm.explain([*prefix, 60])).hit_tokens == 27
            with pytest.raises(PinBudgetExceeded):
                await llm.prefill([3] * 100, pin=True)
            with pytest.raises(InvalidRequestError, match=r"^continuation 1: "):
                await llm.score(prefix, [[40], []])
            await llm.unpin(info.pin)
            report = await llm.flush()
            assert report.num_pages_freed > 0
            assert (await llm.explain(prefix)).hit_tokens == 0
            await stream.aclose()
            await assert_async_idle(llm)

    run(main())


def test_cancelling_a_prefill_leaves_no_pin_and_no_request() -> None:
    """Before it ran, while it runs, and when the receipt is already under way. Fault seen: without
    the undo of prefill the third pin stays."""

    async def main() -> None:
        llm, executor = fake_async_llm(max_pinned_pages=20)
        async with llm:
            for num_steps in (0, 1):
                gate = Gate(executor)
                task = asyncio.create_task(llm.prefill(list(range(3, 30)), pin=True))
                for _ in range(num_steps):
                    await gate.arrivals.get()
                await asyncio.sleep(0)
                await cancel_task(task)
                gate.open()
                await assert_async_idle(llm)
            executor.before = None
            task = asyncio.create_task(llm.prefill(list(range(3, 30)), pin=True))
            await asyncio.sleep(0)
            thread = llm._thread
            done = threading.Event()
            thread._post(done.set, lambda error: None)
            while len(executor.batches) < 2 or llm._thread._tasks:  # the loop is held: no mail arrives
                pass
            await cancel_task(task)
            await assert_async_idle(llm)
            assert (await llm.stats())["kv"]["num_pages_pinned"] == 0

    run(main())


# The end


def test_b128_closing_tells_everybody_and_leaves_no_thread() -> None:
    """Fault seen: without the loop over the tasks in _shut_down, the streams wait for ever."""

    async def main() -> None:
        before = engine_threads()
        llm, executor = fake_async_llm(num_pages=4000, max_running=2)
        gate = Gate(executor)
        running = [start(llm, [i], LONG) for i in range(3, 7)]
        scoring = asyncio.create_task(llm.score([30, 31], [[32], [33]]))
        await gate.arrivals.get()
        assert engine_threads() == before + 1
        closing = asyncio.create_task(llm.aclose())
        await asyncio.sleep(0)
        gate.open()
        await closing
        for task in [*running, scoring]:
            with pytest.raises(EngineDeadError, match="this AsyncLLM is closed"):
                await task
        assert engine_threads() == before
        await llm.aclose()
        llm.close()
        calls: list[Any] = [
            lambda: llm.generate([3]), lambda: llm.prefill([3]), lambda: llm.score([3], [[4]]),
            lambda: llm.explain([3]), llm.flush, llm.stats, llm.check,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(EngineDeadError, match="this AsyncLLM is closed"):
                await call()
        llm.abort(0)

    run(main())


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b019_closing_in_mid_flight_leaves_no_page_held(page_size: int) -> None:
    """Some run, some wait, one has just been cancelled. Fault seen: without the aborts in _shut_down the
    running sequences keep their pages."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=4096 // page_size, page_size=page_size, max_running=3)
        engine = llm._thread._open.engine
        gate = Gate(executor)
        tasks = [start(llm, [*range(3, 40), 50 + i], SamplingParams(max_tokens=100)) for i in range(6)]
        for _ in range(4):
            await gate.arrivals.get()
            gate.let_go()
        await gate.arrivals.get()
        tasks[1].cancel()
        closing = asyncio.create_task(llm.aclose())
        await asyncio.sleep(0)
        gate.open()
        await closing
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert Counter(map(type, results)) == {EngineDeadError: 5, asyncio.CancelledError: 1}
        engine.check()
        stats = engine.stats()["kv"]
        assert stats["num_pages_used"] == 0 and not engine.has_work

    run(main())


def test_dropping_the_last_reference_ends_the_thread() -> None:
    before = engine_threads()
    llm, _ = fake_async_llm()
    assert engine_threads() == before + 1
    del llm
    gc.collect()
    assert engine_threads() == before


def test_a_generation_keeps_its_llm() -> None:
    async def main() -> None:
        generation = fake_async_llm()[0].generate([3, 4], FOUR)
        gc.collect()
        assert (await generation).finish_reason == "length"

    run(main())


def test_a_loop_that_is_gone_aborts_what_it_waited_for() -> None:
    """Fault seen: with the result of Mailbox.send ignored, the requests run to their ends."""
    llm, executor = fake_async_llm(num_pages=4000)

    async def leave() -> Any:
        generation = llm.generate([3, 4], LONG)
        await anext(generation)
        return generation

    generation = asyncio.run(leave())
    run(assert_idle_soon(llm))
    assert len(executor.batches) < 9_000
    del generation
    llm.close()


async def assert_idle_soon(llm: AsyncLLM) -> None:
    while (await llm.stats())["front"]["num_live"]:
        await asyncio.sleep(0)
    await assert_async_idle(llm)


def test_in_a_forked_child_every_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            parent = os.getpid()
            monkeypatch.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(MisuseError, match=f"belongs to process {parent}"):
                llm.generate([3])
            with pytest.raises(MisuseError, match=f"belongs to process {parent}"):
                await llm.stats()
            with pytest.raises(MisuseError, match=f"belongs to process {parent}"):
                llm.abort(3)
            llm.close()  # waits for nobody
            monkeypatch.setattr(os, "getpid", lambda: parent)
            await llm.check()

    run(main())


LEAVES_OPEN = """
import asyncio
from fronts import fake_async_llm
from radixkv import SamplingParams

llm, executor = fake_async_llm(num_pages=4000)
generation = llm.generate([3, 4], SamplingParams(max_tokens=9000))

async def main():
    await anext(generation)

asyncio.run(main())
print("left open", flush=True)
"""


def test_b128_leaving_python_with_everything_open_ends_the_thread_and_the_process() -> None:
    """A stream is open, its loop is gone, nothing was closed. Fault seen: a thread that is no daemon, so that
    Python waits for it before it can be told."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_OPEN],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left open\n", "")
