"""Settings that took memory for nothing, became something else unsaid, or failed with a raw error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.config import MAX_SETTING, EngineConfig
from radixkv.errors import ConfigError
from radixkv.llm import LLM
from radixkv.settings import pin_budget_pages, pin_tokens, whole_or_none

HUGE = 10**5000
"""More digits than Python prints."""


def test_a_pin_budget_without_a_cache_is_refused() -> None:
    """It made every request believe that much of the store to be taken, and nothing could be pinned."""
    with pytest.raises(ConfigError, match=r"max_pinned_tokens must be 0 with prefix_cache=False, got 200"):
        pin_budget_pages(200, 64, 4, prefix_cache=False)
    with pytest.raises(ConfigError, match=r"max_pinned_pages must be 0 with prefix_cache=False, got 5"):
        EngineConfig(num_pages=8, prefix_cache=False, max_pinned_pages=5)
    assert pin_budget_pages(None, 64, 4, prefix_cache=False) == 0
    assert pin_budget_pages(0, 64, 4, prefix_cache=False) == 0


def test_a_pin_budget_below_one_page_is_refused() -> None:
    """It became 0: the first pin said that there was no budget."""
    with pytest.raises(ConfigError, match=r"0 or at least one page of 4 tokens, got 3"):
        pin_budget_pages(3, 64, 4, prefix_cache=True)
    assert [pin_budget_pages(n, 64, 4, prefix_cache=True) for n in (0, 4, 7)] == [0, 1, 1]


@pytest.mark.parametrize(
    "settings", [{"max_pinned_tokens": 3}, {"max_pinned_tokens": 64, "prefix_cache": False}]
)
def test_pin_settings_are_judged_before_anything_is_loaded(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_pinned_tokens must be"):
        LLM("./no such model", **settings)


def test_numbers_of_numpy_become_plain_ones() -> None:
    numbers: dict[str, Any] = {
        "num_pages": np.int64(64),
        "page_size": np.uint8(8),
        "max_wait_s": np.float32(0.5),
        "max_skips": np.int32(3),
    }
    config = EngineConfig(**numbers)
    found = (config.num_pages, config.page_size, config.max_wait_s, config.max_skips)
    assert found == (64, 8, 0.5, 3)
    assert list(map(type, found)) == [int, int, float, int]
    for value in (whole_or_none("num_tokens", np.int64(64), 1), pin_tokens(np.int16(64), 16, True)):
        assert value == 64 and type(value) is int


@pytest.mark.parametrize("value", [np.bool_(True), True, np.float64(2.0), 2.0, "2", np.array([2]), [2]])
def test_what_is_no_whole_number_stays_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="num_pages must be a whole number, got"):
        EngineConfig(num_pages=value)
    with pytest.raises(ConfigError, match="num_tokens must be a whole number of at least 1 or None, got"):
        whole_or_none("num_tokens", value, 1)


@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, [HUGE], MAX_SETTING + 1], ids=["huge", "minus", "list", "next"]
)
@pytest.mark.parametrize("name", ["num_pages", "max_running", "max_batch_tokens", "eviction_memory"])
def test_a_setting_too_large_to_print_is_refused_with_its_size(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        EngineConfig(**{"num_pages": 8, name: value})


def test_the_limit_of_a_setting_is_named() -> None:
    with pytest.raises(
        ConfigError, match=f"max_skips must be at most {MAX_SETTING}, got a whole number of 16610 b"
    ):
        EngineConfig(num_pages=8, max_skips=HUGE)
    assert EngineConfig(num_pages=8, max_skips=MAX_SETTING).max_skips == MAX_SETTING
    assert EngineConfig(num_pages=8, max_wait_s=float("inf")).max_wait_s == float("inf")
    with pytest.raises(ConfigError, match="max_wait_s must be at least 0, got nan"):
        EngineConfig(num_pages=8, max_wait_s=float("nan"))
