"""docs/stats.md names every key of ``stats()``, and no other; it names every reason for an end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from radixkv import LLM, AsyncLLM, EngineConfig, SamplingParams
from radixkv.sequence import FinishReason
from radixkv.testing import FakeExecutor, tiny_model

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "stats.md").read_text("utf-8")
HISTOGRAM = {"count", "sum", "mean", "p50", "p90", "p99", "max"}
FRONT_ONLY_WHERE_LOADED = {"imports_s", "convert_s", "load_s"}
"""Of a model that was read from files."""


def rows(section: str) -> list[tuple[str, str]]:
    """First and second column of the section's table."""
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert body is not None
    found = re.findall(r"^\| (`.*?) \| (.*) \|$", body[1], re.M)
    return [(first, second) for first, second in found]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def documented(section: str) -> set[str]:
    return {name for first, _ in rows(section) for name in names(first)}


def explained(section: str, key: str) -> set[str]:
    """Names in the meaning of ``key``."""
    return next(names(second) for first, second in rows(section) if key in names(first))


@pytest.fixture(scope="module")
def stats() -> dict[str, Any]:
    with LLM(tiny_model("llama"), num_tokens=256, events=True, num_threads=1, progress=False) as llm:
        llm.generate([3, 4], SamplingParams(max_tokens=2))
        found: dict[str, Any] = llm.stats()
    return found


def histograms(part: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, value in part.items() if isinstance(value, dict) and "p50" in value)


def test_top(stats: dict[str, Any]) -> None:
    assert set(stats) | {"front"} == documented("Top")
    assert set(stats["load"]) | FRONT_ONLY_WHERE_LOADED == explained("Top", "load")
    assert set(stats["store"]) <= explained("Top", "store")

    async def front() -> set[str]:
        executor = FakeExecutor(num_pages=8, page_size=4)
        config = EngineConfig(num_pages=8, page_size=4)
        async with AsyncLLM.from_executor(executor, config=config) as llm:
            return set((await llm.stats())["front"])

    assert asyncio.run(front()) == explained("Top", "front") - {"AsyncLLM"}


@pytest.mark.parametrize("section", ["scheduler", "executor"])
def test_part(stats: dict[str, Any], section: str) -> None:
    assert set(stats[section]) == documented(section)


def test_kv(stats: dict[str, Any]) -> None:
    pages = explained("kv", "num_pages")
    assert set(stats["kv"]) == documented("kv") | pages
    assert set(stats["executor"]["store"]) == explained("executor", "store")


def test_histograms(stats: dict[str, Any]) -> None:
    for part in ("scheduler", "kv"):
        for name in histograms(stats[part]):
            assert set(stats[part][name]) == HISTOGRAM
            meaning = next(second for first, second in rows(part) if name in names(first))
            assert meaning.startswith("histogram: ")
    before, _, _ = TEXT.partition("\n## ")
    assert names(before) >= HISTOGRAM


def test_reasons() -> None:
    assert documented("Why a request ended") == set(get_args(FinishReason))
