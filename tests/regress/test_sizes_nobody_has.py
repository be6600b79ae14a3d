"""Sizes that no machine has ended in MemoryError, OverflowError or a killed process: each names its limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv.config import MAX_SETTING, ModelSpec
from radixkv.errors import ConfigError
from radixkv.executor import sizing
from radixkv.executor.kv_store import KVStore, bytes_per_page
from radixkv.executor.memory import num_pages_for
from radixkv.executor.sizing import build_executor
from radixkv.executor.threads import THREADS_PER_CORE, set_num_threads, usable_cores
from radixkv.kv.page_pool import PagePool
from radixkv.testing.tiny_models import tiny_model

SPEC = ModelSpec(
    name="t", vocab_size=10, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
SIZES = [10**13, 10**30, 10**400, 10**5000]
IDS = ["13 zeros", "30 zeros", "400 zeros", "5000 zeros"]


@pytest.mark.parametrize("num_tokens", SIZES, ids=IDS)
def test_a_token_budget_beyond_any_store(num_tokens: int) -> None:
    """MemoryError, ValueError, OverflowError (by way of a float) and one that cannot be printed."""
    with pytest.raises(ConfigError, match=f"num_tokens must be at most {16 * MAX_SETTING} "):
        num_pages_for(SPEC, page_size=16, dtype=torch.float32, num_tokens=num_tokens)


def test_a_token_budget_beyond_the_memory_names_both() -> None:
    page_bytes = bytes_per_page(SPEC, 16, torch.float32)
    there = 5 * page_bytes
    common: dict[str, Any] = {"page_size": 16, "dtype": torch.float32, "available_bytes": there}
    assert num_pages_for(SPEC, num_tokens=64, **common) == 4
    with pytest.raises(ConfigError, match=f"needs {6 * page_bytes} bytes .* {there} are available"):
        num_pages_for(SPEC, num_tokens=65, **common)


def test_the_memory_is_asked_where_a_budget_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama")
    monkeypatch.setattr(sizing, "available_memory_bytes", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"num_tokens=1000 needs \d+ bytes .* 10000 are available"):
        build_executor(loaded, num_tokens=1000, page_size=16, num_threads=1)

    def unknown() -> int:
        raise ConfigError("unknown on this system")

    monkeypatch.setattr(sizing, "available_memory_bytes", unknown)
    executor, _ = build_executor(loaded, num_tokens=1000, page_size=16, num_threads=1)
    assert executor.num_pages == 63


@pytest.mark.parametrize("num_pages", [10**9, 0, 2**31, 10**400, 2.0, None], ids=lambda n: "n")
def test_a_store_that_cannot_be_had(num_pages: Any) -> None:
    spec = ModelSpec(
        name="t",
        vocab_size=9,
        num_layers=500,
        num_query_heads=8,
        num_kv_heads=8,
        head_dim=512,
        max_positions=9,
    )
    with pytest.raises(ConfigError, match=r"cannot be had on cpu|num_pages must be a whole number in"):
        KVStore(spec, num_pages=num_pages, page_size=256, dtype=torch.float32)


def test_a_pool_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_pages in (2**31, 2**40, 10**5000):
        with pytest.raises(ConfigError, match=f"num_pages must be at most {MAX_SETTING}, got"):
            PagePool(num_pages)

    def no_memory(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr("numpy.arange", no_memory)
    with pytest.raises(ConfigError, match="num_pages=1000 needs 12000 bytes of memory"):
        PagePool(1000)


@pytest.mark.parametrize("num_threads", [5000, 2**31, 2**40, 10**5000, 1.5, True, -1], ids=lambda n: "n")
def test_more_threads_than_cores_can_serve(num_threads: Any) -> None:
    """From 2**31 on a raw ValueError; some thousands may end the process."""
    before = torch.get_num_threads()
    most = THREADS_PER_CORE * usable_cores()
    with pytest.raises(ConfigError, match=rf"num_threads must be a whole number in 1\.\.{most} "):
        set_num_threads(num_threads)
    assert torch.get_num_threads() == before


def test_numbers_of_numpy_are_sizes_too() -> None:
    sizes: dict[str, Any] = {"num_pages": np.int64(3), "page_size": np.int32(4)}
    store = KVStore(SPEC, dtype=torch.float32, **sizes)
    assert (type(store.num_pages), type(store.page_size), store.num_slots) == (int, int, 16)
    tokens: Any = np.int64(33)
    num_pages = num_pages_for(SPEC, page_size=16, dtype=torch.float32, num_tokens=tokens)
    assert (num_pages, type(num_pages)) == (3, int)
    pages: Any = np.int16(5)
    assert type(PagePool(pages).num_pages) is int
