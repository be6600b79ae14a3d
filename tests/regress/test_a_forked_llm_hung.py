"""An LLM in a forked child waited for ever for a lock that a thread of the parent held."""

from __future__ import annotations

import os
from typing import Any

import pytest

from radixkv import LLM, ConfigError, EngineConfig, EngineDeadError, MisuseError, PrefillInfo, SamplingParams
from radixkv.testing import FakeExecutor


def open_llm() -> tuple[LLM, FakeExecutor]:
    executor = FakeExecutor(num_pages=16, page_size=4)
    return LLM.from_executor(executor, config=EngineConfig(num_pages=16, page_size=4)), executor


def test_calls_in_a_forked_child_are_refused_and_close_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, executor = open_llm()
    seen: list[str] = []
    parent = os.getpid()

    def inside(batch: Any) -> None:
        """What a child sees that was forked while a forward runs: the lock is held, and the number is new."""
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        for call in (lambda: llm.generate([3]), llm.stats, llm.flush):
            with pytest.raises(MisuseError, match=f"belongs to process {parent}, and this is its fork"):
                call()
            seen.append("refused")
        monkeypatch.setattr(os, "getpid", lambda: parent)

    executor.before = inside
    llm.generate([3], SamplingParams(max_tokens=1))
    assert seen == ["refused"] * 3
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    llm.close()
    with pytest.raises(EngineDeadError):
        _ = llm.engine


def test_the_wrong_thing_for_a_pin_or_a_configuration() -> None:
    llm, executor = open_llm()
    odd: list[Any] = [None, 5, PrefillInfo(1, 0, None)]
    for pin in odd:
        with pytest.raises(MisuseError, match=r"not a pin|info\.pin"):
            llm.unpin(pin)
    no_configs: list[Any] = [None, {}]
    for config in no_configs:
        with pytest.raises(ConfigError, match="config must be an EngineConfig"):
            LLM.from_executor(executor, config=config)
