"""What the tests of AsyncLLM share: steps at a gate, a spy on aborts, the oracle's outputs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from radixkv import AsyncLLM, Output, SamplingParams
from radixkv.sched.batch import Batch
from radixkv.testing import FakeExecutor

FOUR = SamplingParams(max_tokens=4)
LONG = SamplingParams(max_tokens=9_800)


def expected(executor: FakeExecutor, prompt: list[int], max_tokens: int) -> list[int]:
    return executor.expected_output(np.array(prompt, np.int32), max_tokens)


def engine_threads() -> int:
    return sum(thread.name == "radixkv-engine" for thread in threading.enumerate())


def spy_on_aborts(llm: AsyncLLM) -> list[int]:
    """Every abort that reaches the engine."""
    engine = llm._thread._open.engine
    aborted: list[int] = []
    plain = engine.abort

    def abort(request_id: int) -> Any:
        aborted.append(request_id)
        return plain(request_id)

    engine.abort = abort  # type: ignore[method-assign]
    return aborted


def start(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> asyncio.Task[Output]:
    async def whole() -> Output:
        return await llm.generate(prompt, params)

    return asyncio.create_task(whole())


class Gate:
    """Lets the engine's steps go one by one, or all."""

    def __init__(self, executor: FakeExecutor) -> None:
        self._permits = threading.Semaphore(0)
        self.arrivals: asyncio.Queue[Batch] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.is_open = False
        executor.before = self._before

    def _before(self, batch: Batch) -> None:
        self._loop.call_soon_threadsafe(self.arrivals.put_nowait, batch)
        if not self.is_open:
            assert self._permits.acquire(timeout=60)

    def let_go(self) -> None:
        self._permits.release()

    def open(self) -> None:
        self.is_open = True
        self._permits.release()


async def cancel_task(task: asyncio.Task[Any]) -> None:
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
