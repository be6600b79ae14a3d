"""A request under an adapter hit the base model's pages where its namespace did not name the adapter; and one
under an adapter that nobody had loaded failed everybody in its batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.errors import InvalidRequestError
from radixkv.namespace import described, has_salt, namespace_of
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request
from radixkv.testing import FakeExecutor
from radixkv.types import Namespace, TokenIds

PROMPT: TokenIds = np.arange(1, 40, dtype=np.int32)


def fake_engine(page_size: int = 4) -> tuple[Engine, FakeExecutor]:
    executor = FakeExecutor(num_pages=256 // page_size, page_size=page_size)
    return Engine.build(EngineConfig(num_pages=256 // page_size, page_size=page_size), executor), executor


def run(engine: Engine) -> list[SequenceOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.check()
    return [output for output in outputs if output.finish_reason is not None]


def request(number: int, adapter: int, namespace: Namespace = ()) -> Request:
    sampling = SamplingParams(max_tokens=2)
    return Request(
        request_id=number, prompt_ids=PROMPT, adapter=adapter, namespace=namespace, sampling=sampling
    )


@pytest.mark.parametrize("namespace", [(), ("salt",), (1,), namespace_of(cache_salt="s")])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_what_an_adapter_computed_is_its_own_in_every_namespace(page_size: int, namespace: Namespace) -> None:
    """The executor notices pages of another adapter. Fault seen: ``under_adapter`` that adds nothing."""
    engine, executor = fake_engine(page_size)
    first, second = executor.load_adapter("a"), executor.load_adapter("b")
    cached = []
    for number, adapter in enumerate((0, first, second, first, 0)):
        engine.add(request(number, adapter, namespace))
        [output] = run(engine)
        assert output.error is None and output.usage is not None
        cached.append(output.usage.cached_tokens)
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) == len(PROMPT) - 1


def test_a_namespace_names_one_adapter() -> None:
    own = request(1, 3, namespace_of(adapter="a", adapter_version=1, cache_salt="s"))
    assert replace(own, request_id=2).namespace == own.namespace
    for adapter in (0, 4):
        with pytest.raises(
            InvalidRequestError, match=f"of adapter 3, and the request is of adapter {adapter}"
        ):
            request(1, adapter, own.namespace)
    assert has_salt(own.namespace, "s") and not has_salt(own.namespace, None)
    assert described(own.namespace) == "that of adapter 'a', version 1, this cache_salt"


@pytest.mark.parametrize("adapter", [1, 7])
def test_an_adapter_that_is_not_loaded_is_refused_before_any_work(adapter: int) -> None:
    """Fault seen: ``add`` that does not ask the executor; then both requests fail."""
    engine, executor = fake_engine()
    gone = executor.load_adapter("a")
    executor.unload_adapter(gone)
    engine.add(request(1, 0))
    with pytest.raises(InvalidRequestError, match=f"no adapter of index {adapter} is loaded"):
        engine.add(request(2, adapter, ("x",)))
    assert [(output.request_id, output.error) for output in run(engine)] == [(1, None)]
    assert engine.scheduler.stats()["num_refused"] == 1
