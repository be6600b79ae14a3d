"""What one caller passed, raised or gave up ended the engine thread for all, or took time from all."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from front_kit import FOUR, Gate, assert_async_idle, expected, fake_async_llm, run, start

from radixkv import EngineDeadError, InvalidRequestError, MisuseError, SamplingParams
from radixkv.testing import tiny_model
from radixkv.text import Tokenizer


class Panic(BaseException):
    """As a tokenizer written in Rust raises it."""


@pytest.mark.parametrize("request_id", [[0], {}, "x", None, 1.0, True])
def test_abort_of_what_is_no_number_is_refused(request_id: Any) -> None:
    """A list ended the thread; 1.0 and True aborted request 1."""

    async def main() -> None:
        llm, executor = fake_async_llm()
        async with llm:
            gate = Gate(executor)
            others = [start(llm, [5 + i], FOUR) for i in range(2)]
            await gate.arrivals.get()
            with pytest.raises(InvalidRequestError, match="request_id must be a whole number"):
                llm.abort(request_id)
            gate.open()
            for i, other in enumerate(others):
                assert list((await other).token_ids) == expected(executor, [5 + i], 4)
            await assert_async_idle(llm)

    run(main())


@pytest.mark.parametrize("kind", [asyncio.CancelledError, Panic, ZeroDivisionError])
@pytest.mark.parametrize("call", ["between_steps", "generate", "explain", "chat"])
def test_what_a_callers_function_raises_is_his_alone(
    call: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*arguments: Any, **named: Any) -> Any:
        raise kind

    calls: dict[str, Callable[[Any], Any]] = {
        "between_steps": lambda llm: llm.between_steps(burst),
        "generate": lambda llm: llm.generate("w5").output(),
        "explain": lambda llm: llm.explain("w5"),
        "chat": lambda llm: llm.chat().send("w5"),
    }

    async def main() -> None:
        llm, executor = fake_async_llm()
        async with llm:
            gate = Gate(executor)
            other = start(llm, [5], FOUR)
            await gate.arrivals.get()
            monkeypatch.setattr(Tokenizer, "encode", burst)
            mine = asyncio.ensure_future(calls[call](llm))
            gate.open()
            with pytest.raises(kind):
                await mine
            assert list((await other).token_ids) == expected(executor, [5], 4)
            await assert_async_idle(llm)

    run(main())


def test_leaving_python_from_a_function_for_the_weights_ends_no_thread() -> None:
    """``sys.exit`` in it reaches the caller, and his loop, and no other."""
    from radixkv import AsyncLLM

    llm = AsyncLLM(tiny_model("llama"), num_tokens=256, progress=False)

    def leave(weights: Any) -> Any:
        raise SystemExit(3)

    async def update() -> None:
        await llm.update_weights(leave)

    with pytest.raises(SystemExit, match="3"):
        asyncio.run(update())

    async def go_on() -> None:
        assert len((await llm.generate([5, 6], FOUR)).token_ids) == 4

    run(go_on())
    llm.close()


def test_everybody_gets_an_error_of_his_own() -> None:
    """One object for all collected the tracebacks of all, and kept their frames."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=512, max_running=2)
        gate = Gate(executor)
        waiting = [start(llm, [5 + i], SamplingParams(max_tokens=50)) for i in range(6)]
        await gate.arrivals.get()
        closing = asyncio.create_task(llm.aclose())
        await asyncio.sleep(0)
        gate.open()
        errors = [*await asyncio.gather(*waiting, return_exceptions=True)]
        await closing
        for _ in range(5):
            with pytest.raises(EngineDeadError) as caught:
                await llm.stats()
            errors.append(caught.value)
        assert {type(error) for error in errors} == {EngineDeadError}
        assert len({id(error) for error in errors}) == 11
        lengths = [len(traceback.extract_tb(error.__traceback__)) for error in errors[-5:]]  # type: ignore[union-attr]
        assert len(set(lengths)) == 1

    run(main())


def test_everybody_gets_an_error_of_his_own_when_the_engine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm, executor = fake_async_llm()
        gate = Gate(executor)
        waiting = [start(llm, [5 + i], FOUR) for i in range(4)]
        await gate.arrivals.get()
        cause = ZeroDivisionError()

        def burst(*arguments: Any) -> Any:
            raise cause

        monkeypatch.setattr(llm._thread._open.engine.scheduler, "update", burst)
        gate.open()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(error) for error in errors} == {EngineDeadError}
        assert len({id(error) for error in errors}) == 4
        assert all(error.__cause__ is cause for error in errors)  # type: ignore[union-attr]
        await llm.aclose()

    run(main())


def test_a_forked_child_never_waits_for_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thread of the parent may have held it at the fork: what touches it fails here."""

    class Held:
        def __enter__(self) -> None:
            raise AssertionError("the child would wait for ever")

        def __exit__(self, *what: object) -> None: ...

    async def main() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            generation = llm.generate([3])
            lock, parent = llm._thread._wake, os.getpid()
            monkeypatch.setattr(llm._thread, "_wake", Held())
            monkeypatch.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(MisuseError, match=f"belongs to process {parent}"):
                await generation
            for call in (llm.stats, llm.flush, lambda: llm.chat().send("w5")):
                with pytest.raises(MisuseError, match=f"belongs to process {parent}"):
                    await call()
            with pytest.raises(MisuseError, match=f"belongs to process {parent}"):
                llm.abort(0)
            llm.close()
            monkeypatch.setattr(os, "getpid", lambda: parent)
            monkeypatch.setattr(llm._thread, "_wake", lock)

    run(main())


def count_opcodes(counts: list[int]) -> Any:
    """A trace function that counts what the engine thread's own file and its book do."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("engine_thread.py", "task_book.py")):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[0] += event == "opcode"
        return trace

    return trace


def test_giving_up_one_call_costs_the_same_however_many_there_are() -> None:
    """Every cancelled call looked through the requests of all."""

    async def main(num: int) -> int:
        llm, executor = fake_async_llm()
        counts = [0]
        async with llm:
            gate = Gate(executor)
            tasks = [start(llm, [5 + i % 100], FOUR) for i in range(num)]
            await gate.arrivals.get()
            gate.let_go()
            await gate.arrivals.get()  # whatever was asked for has been taken
            assert len(llm._thread._tasks) == num
            tracing = asyncio.ensure_future(llm.between_steps(lambda: sys.settrace(count_opcodes(counts))))
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            gate.open()
            await tracing
            await llm.between_steps(lambda: sys.settrace(None))
            await assert_async_idle(llm)
        return counts[0]

    few, many = run(main(30)), run(main(120))
    assert 0 < many < 6 * few
