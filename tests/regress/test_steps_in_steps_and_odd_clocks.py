"""A step inside execute, or a clock that went back or was no number, killed the engine or let the wrong one
wait; and an abort took ``True`` for request 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.errors import InvalidRequestError, MisuseError
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import Batch
from radixkv.sched.steady_clock import steady
from radixkv.sequence import Request
from radixkv.testing import FakeExecutor


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def engine_of(clock: Clock, **options: Any) -> tuple[Engine, FakeExecutor]:
    executor = FakeExecutor(num_pages=32, page_size=4)
    return Engine.build(EngineConfig(num_pages=32, page_size=4, **options), executor, clock), executor


def add(engine: Engine, number: int, max_tokens: int = 2) -> None:
    ids = np.array([number + 1, 2], np.int32)
    engine.add(Request(request_id=number, prompt_ids=ids, sampling=SamplingParams(max_tokens=max_tokens)))


def ended(engine: Engine) -> list[tuple[int, str]]:
    out: list[tuple[int, str]] = []
    while engine.has_work:
        out += [(o.request_id, o.finish_reason) for o in engine.step() if o.finish_reason is not None]
        engine.check()
    assert not engine.is_dead
    return out


def test_a_step_inside_a_step_is_refused_and_the_engine_lives() -> None:
    """Fault seen: ``step`` that does not know of the one that is under way."""
    engine, executor = engine_of(Clock(0.0))
    refused: list[str] = []

    def before(batch: Batch) -> None:
        with pytest.raises(MisuseError) as raised:
            engine.step()
        refused.append(str(raised.value))

    executor.before = before
    add(engine, 1)
    add(engine, 2)
    assert ended(engine) == [(1, "length"), (2, "length")]
    assert refused == ["step was called inside execute: one step at a time"] * 2

    def careless(batch: Batch) -> None:
        engine.step()

    executor.before = careless
    add(engine, 3)
    add(engine, 4)
    assert ended(engine) == [(3, "error"), (4, "error")]
    executor.before = None
    add(engine, 5)
    assert ended(engine) == [(5, "length")]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_clock_without_a_time_stands_still(odd: float) -> None:
    """Fault seen: a ``SteadyClock`` that passes on whatever it is told."""
    for start in (0.0, odd):
        clock = Clock(start)
        engine, _ = engine_of(clock, queue_timeout_s=5.0, max_running=1)
        add(engine, 1)
        add(engine, 2)
        engine.step()
        clock.now = odd
        assert ended(engine) == [(1, "length"), (2, "length")]
        assert engine.scheduler.stats()["ttft_s"]["max"] == 0.0


def test_a_clock_that_goes_back_lets_nobody_wait_behind_later_ones() -> None:
    """Fault seen: the clock is used as it is."""
    clock = Clock(100.0)
    engine, _ = engine_of(clock, policy="lof", max_running=1, max_skips=1000, max_wait_s=30.0)
    add(engine, 0, 20)
    engine.step()
    add(engine, 1, 3)
    clock.now = 0.0
    add(engine, 2, 4)
    clock.now = 40.0
    for number in range(3, 6):
        add(engine, number, 20)
    assert [number for number, _ in ended(engine)] == [0, 1, 2, 3, 4, 5]
    assert steady(clock)() == 40.0


@pytest.mark.parametrize("thing", [True, 1.0, None, "1", [1], math.nan])
def test_what_is_no_number_of_a_request_is_refused(thing: Any) -> None:
    engine, _ = engine_of(Clock(0.0))
    add(engine, 1)
    engine.step()
    with pytest.raises(InvalidRequestError, match="request_id must be a whole number"):
        engine.abort(thing)
    with pytest.raises(InvalidRequestError, match="request_id must be a whole number"):
        engine.finish(thing)
    with pytest.raises(InvalidRequestError, match="sample_index must be a whole number"):
        engine.finish(1, thing)
    assert ended(engine) == [(1, "length")]
