"""A prefix that a flush met was pinned with nothing in it; a replaced adapter stayed until the next one was
loaded; and a salt of a kind that equals everything opened everybody's prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv import LLM, SamplingParams
from radixkv.config import EngineConfig
from radixkv.errors import MisuseError
from radixkv.kv.arguments import as_namespace
from radixkv.namespace import Scope, has_salt, namespace_of
from radixkv.sequence import Request
from radixkv.service import Service
from radixkv.testing import FakeExecutor

PROMPT = list(range(1, 40))
ONE = SamplingParams(max_tokens=1)


def executor_of(page_size: int = 4) -> FakeExecutor:
    return FakeExecutor(num_pages=256 // page_size, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_pin_over_new_weights_holds_the_whole_prefix(page_size: int) -> None:
    """Fault seen: ``prefill_job`` that returns whatever pin it got."""
    executor = executor_of(page_size)
    config = EngineConfig(
        num_pages=256 // page_size, page_size=page_size, max_batch_tokens=8, max_pinned_pages=128 // page_size
    )
    llm = LLM.from_executor(executor, config=config)
    executor.before = lambda batch: executor.update_weights(None) if len(executor.batches) == 2 else None
    info = llm.prefill(PROMPT, pin=True)
    assert info.pin is not None and info.pin.num_tokens == info.num_tokens == len(PROMPT)
    assert llm.generate([*PROMPT, 50], ONE).usage.cached_tokens == len(PROMPT)
    executor.before = lambda batch: executor.update_weights(None)
    with pytest.raises(MisuseError, match="forgotten 3 times"):
        llm.prefill(PROMPT, pin=True)
    executor.before = None
    assert llm.stats()["kv"]["num_pins"] == 0
    llm.check()


@pytest.mark.parametrize("how", ["end", "abort"])
def test_a_replaced_adapter_goes_with_its_last_request(how: str) -> None:
    """Fault seen: the book looks for retired adapters only when another is loaded or unloaded."""
    executor = executor_of()
    service = Service.over(executor, None, EngineConfig(num_pages=64, page_size=4))
    first = service.load_adapter("a", "x")
    request = service.request([1, 2, 3], SamplingParams(max_tokens=3), "prompt", scope=Scope(adapter="a"))
    service.engine.add(request)
    service.engine.step()
    second = service.load_adapter("a", "y")
    assert executor.has_adapter(first.index) and service.stats()["num_adapters_retired"] == 1
    if how == "abort":
        service.engine.abort(request.request_id)
    while service.engine.has_work:
        service.engine.step()
    assert not executor.has_adapter(first.index) and executor.has_adapter(second.index)
    assert service.stats()["num_adapters_retired"] == 0
    service.check()


class EqualToAll(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("alice")


def test_a_salt_is_its_text() -> None:
    """Faults seen: a namespace keeps text of whatever kind; ``has_salt`` compares with it as it is."""
    llm = LLM.from_executor(executor_of(), config=EngineConfig(num_pages=64, page_size=4))
    llm.generate(PROMPT, ONE, cache_salt="alice")
    evil = EqualToAll("bob")
    assert llm.generate(PROMPT, ONE, cache_salt=evil).usage.cached_tokens == 0
    assert not has_salt(namespace_of(cache_salt="alice"), evil)
    request = Request(request_id=1, prompt_ids=np.array([1], np.int32), namespace=(evil,))
    assert [type(field) for field in (*request.namespace, *as_namespace((evil, np.int64(1))))] == [
        str,
        str,
        int,
    ]
