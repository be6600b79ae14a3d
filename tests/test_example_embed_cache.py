"""examples/embed_cache.py runs without torch, and its hits change no token."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "embed_cache.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_cache", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs_as_shown_and_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split(" prompt")[0] for line in lines[:3]] == ["50 of 53", "50 of 52", "53 of 54"]
    assert "hit_tokens=50" in lines[3]
    assert "reason='differs'" in lines[3]


def test_hits_change_no_token(example: ModuleType) -> None:
    warm = example.TinyEngine()
    for length in (1, 15, 16, 17, 40, 40, 33, 64, 1):
        prompt = list(range(length))
        assert warm.generate(prompt, 20)[0] == example.TinyEngine().generate(prompt, 20)[0]
        warm.kv.check([])


def test_it_evicts_when_the_pool_is_full(example: ModuleType) -> None:
    engine = example.TinyEngine()
    for start in range(0, 8000, 200):
        engine.generate(list(range(start, start + 100)), 2)
    engine.kv.check([])
    assert engine.kv.stats()["tree_num_evicted"] > 0
