"""The machine notices every planted fault within a bounded number of steps, and nothing without one."""

from __future__ import annotations

import pytest
from driver import run_many
from faults import FAULTS

from radixkv.errors import RadixKVError

MAX_STEPS = 3000


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, RadixKVError)):
        run_many(MAX_STEPS)


def test_nothing_is_caught_without_a_fault() -> None:
    num_steps, _ = run_many(MAX_STEPS)
    assert num_steps >= MAX_STEPS
