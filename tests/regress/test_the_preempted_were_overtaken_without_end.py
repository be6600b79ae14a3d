"""Under ``priority`` a request was overtaken by ``max_skips`` others before each of its admissions; and one
of several samples that expected more pages than there are never made anybody give way."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.testing import FakeExecutor


def engine_of(page_size: int, num_tokens: int, **options: object) -> Engine:
    num_pages = num_tokens // page_size
    config = EngineConfig(num_pages=num_pages, page_size=page_size, policy="priority", **options)  # type: ignore[arg-type]
    return Engine.build(config, FakeExecutor(num_pages=num_pages, page_size=page_size), lambda: 0.0)


def add(engine: Engine, number: int, priority: int, max_tokens: int, n: int = 1) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, temperature=float(n > 1), seed=1)
    ids = np.array([number + 1, 2], np.int32)
    engine.add(Request(request_id=number, prompt_ids=ids, priority=priority, sampling=sampling))


@pytest.mark.parametrize("max_skips", [0, 1, 10])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_stream_of_high_priority_overtakes_no_more_than_max_skips(page_size: int, max_skips: int) -> None:
    """Fault seen: the queue forgets who overtook a request when it is admitted."""
    engine = engine_of(page_size, 256, max_running=1, max_skips=max_skips)
    add(engine, 0, 0, 8)
    number, num_ended, low_ended = 0, 0, False
    while not low_ended:
        while engine.scheduler.stats()["num_waiting"] < 3:
            number += 1
            add(engine, number, 5, 2)
        for output in engine.step():
            if output.finish_reason is not None:
                low_ended |= output.request_id == 0
                num_ended += output.request_id != 0
        engine.check()
        assert num_ended <= max_skips
    assert num_ended == max_skips


@pytest.mark.parametrize("reserve", [None, 0, 4])
@pytest.mark.parametrize("page_size", [1, 4])
def test_samples_that_expect_more_than_there_is_are_made_way_for(page_size: int, reserve: int | None) -> None:
    """Fault seen: ``_expected_shortage`` that asks for all of it though nobody else would run."""
    engine = engine_of(page_size, 16, decode_reserve_tokens=reserve)
    add(engine, 1, -5, 14)
    engine.step()
    engine.step()
    add(engine, 2, 5, 10, n=4)
    for _ in range(2):
        started = {output.request_id for output in engine.step()}
    assert 2 in started
    ended = []
    while engine.has_work:
        ended += [output for output in engine.step() if output.finish_reason is not None]
        engine.check()
    assert [output.request_id for output in ended] == [2, 2, 2, 2, 1]
    assert all(output.error is None for output in ended)
