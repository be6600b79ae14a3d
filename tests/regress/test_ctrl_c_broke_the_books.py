"""Ctrl-C inside a change of the ledger waits for the call's end; a second one, right behind the first, does
not stop the cleaning up; and nothing of an interrupted call is left over."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from radixkv import LLM, EngineConfig, PinBudgetExceeded, SamplingParams
from radixkv.interrupt import InterruptsHeld
from radixkv.kv.page_pool import PagePool
from radixkv.kv.pins import PinBook
from radixkv.kv.radix_tree import RadixTree
from radixkv.sched.scheduler import Scheduler
from radixkv.testing import FakeExecutor

FOUR = SamplingParams(max_tokens=4)


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """Python's handler in place, whatever the runner has set up."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def open_llm(**settings: Any) -> tuple[LLM, FakeExecutor]:
    executor = FakeExecutor(num_pages=32, page_size=4)
    config = EngineConfig(num_pages=32, page_size=4, max_pinned_pages=4, **settings)
    return LLM.from_executor(executor, config=config, progress=False), executor


def press_after(monkeypatch: pytest.MonkeyPatch, owner: type, verb: str) -> None:
    """Ctrl-C as the first call of ``verb`` returns, half-way through what the manager does."""
    plain: Callable[..., Any] = getattr(owner, verb)

    def pressed(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, verb, plain)
        result = plain(*arguments, **named)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, verb, pressed)


def assert_usable(llm: LLM, executor: FakeExecutor) -> None:
    llm.check()
    assert not llm.engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for prompt in ([1, 2, 3], list(range(40, 80)), list(range(100, 140))):  # the last ones evict
        expected = executor.expected_output(np.array(prompt, np.int32), 4)
        assert list(llm.generate(prompt, FOUR).token_ids) == expected
    llm.check()


HALF_WAY: list[tuple[str, type, str]] = [
    ("pin", PinBook, "add"),
    ("pin", PagePool, "incref"),
    ("unpin", PinBook, "remove"),
    ("unpin", PagePool, "decref"),
    ("flush", RadixTree, "clear"),
    ("flush", PagePool, "decref"),
]


@pytest.mark.parametrize(("call", "owner", "verb"), HALF_WAY)
def test_a_change_of_the_ledger_is_finished_first(
    call: str, owner: type, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, executor = open_llm()
    info = llm.prefill(list(range(1, 9)), pin=True)
    llm.generate([[9, 8, 7], [6] * 9], FOUR)
    assert info.pin is not None
    calls = {
        "pin": lambda: llm.prefill(list(range(20, 25)), pin=True),
        "unpin": lambda: llm.unpin(info.pin),  # type: ignore[arg-type]
        "flush": llm.flush,
    }
    press_after(monkeypatch, owner, verb)
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    left = {"pin": [info.pin], "unpin": [], "flush": []}[call]
    assert list(llm.engine.kv.pins) == left, "a pin whose receipt nobody got, or one that was let go"
    assert_usable(llm, executor)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_ctrl_c_does_not_stop_the_cleaning_up(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, executor = open_llm(max_running=2)
    plain_undo, plain_abort = Scheduler.undo, Scheduler.abort

    def undo(self: Scheduler, batch: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        plain_undo(self, batch)
        signal.raise_signal(signal.SIGINT)

    def abort(self: Scheduler, request_id: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        return plain_abort(self, request_id)

    monkeypatch.setattr(Scheduler, "undo", undo)
    monkeypatch.setattr(Scheduler, "abort", abort)
    setattr(executor, when, lambda batch: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3], [4], [5], [6]], FOUR)
    setattr(executor, when, None)
    assert_usable(llm, executor)


def test_the_first_interrupt_shuts_the_gate() -> None:
    """The moment between what was interrupted and what cleans up after it, as close as a test gets."""
    cleaned: list[bool] = []

    def work() -> None:
        with InterruptsHeld() as interrupts:
            try:
                try:
                    interrupts.open()
                    signal.raise_signal(signal.SIGINT)
                finally:
                    signal.raise_signal(signal.SIGINT)
                    interrupts.shut()
            except KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
                cleaned.append(True)
                raise

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_inside_another_leaves_the_raising_to_it() -> None:
    reached: list[str] = []

    def work() -> None:
        with InterruptsHeld() as outer:
            with InterruptsHeld() as inner:
                signal.raise_signal(signal.SIGINT)
                assert inner.noted and outer.noted
            reached.append("after the inner one")
            with pytest.raises(KeyboardInterrupt):
                inner.open()  # what was noted is raised where it may be
            assert not outer.noted
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after the inner one", "the end"]


def test_outputs_that_nobody_took_do_not_keep_the_engine_busy() -> None:
    """A Ctrl-C at the end of a step of somebody who drives the engine himself keeps outputs back."""
    llm, executor = open_llm()

    def press_late(batch: Any) -> None:
        executor.after = None
        monkey.setattr(Scheduler, "update", late)

    plain = Scheduler.update

    def late(self: Scheduler, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return plain(self, *arguments)

    with pytest.MonkeyPatch.context() as monkey:
        executor.after = press_late
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[3], [4]], SamplingParams(max_tokens=1))
    assert_usable(llm, executor)


def test_ctrl_c_between_the_prompts_of_a_long_list_is_raised_before_any_work() -> None:
    llm, executor = open_llm()

    class Pressing(list[int]):
        def __len__(self) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().__len__()

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3], Pressing([4]), [5]], FOUR)
    assert executor.batches == []
    with pytest.raises(PinBudgetExceeded):
        llm.prefill([1] * 40, pin=True)
    assert_usable(llm, executor)
