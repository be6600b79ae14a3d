"""Greedy outputs of a real forward do not depend on what the cache holds."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.executor.hf import HFExecutor
from radixkv.executor.loaded_model import LoadedModel
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.testing.tiny_models import VOCAB_SIZE, tiny_model
from radixkv.types import TokenIds

NUM_PAGES = {1: 1600, 4: 400, 16: 100, 64: 60}
"""By page size; too few to keep everything."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama")


def prompts() -> list[TokenIds]:
    """200, behind four beginnings that part inside a page at every page size."""
    rng = np.random.default_rng(38)
    kinds = [rng.integers(2, VOCAB_SIZE, 37) for _ in range(4)]
    return [
        np.append(kinds[i % 4], rng.integers(2, VOCAB_SIZE, 1 + i % 9)).astype(np.int32) for i in range(200)
    ]


def run(loaded: LoadedModel, page_size: int, *, prefix_cache: bool, times: int) -> list[list[int]]:
    """The outputs of each prompt, of all times one after the other."""
    num_pages = NUM_PAGES[page_size]
    config = EngineConfig(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache)
    engine = Engine.build(config, HFExecutor(loaded, num_pages=num_pages, page_size=page_size))
    outputs: list[list[int]] = []
    for _ in range(times):
        outputs += [[] for _ in prompts()]
        base = len(outputs) - len(prompts())
        for number, ids in enumerate(prompts()):
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            engine.add(Request(request_id=base + number, prompt_ids=ids, sampling=params))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                outputs[output.request_id] += output.new_token_ids
    assert (engine.stats()["scheduler"]["cached_tokens"] > 0) == prefix_cache
    return outputs


@pytest.mark.parametrize("page_size", NUM_PAGES)
def test_b038_200_greedy_prompts_cold_and_warm(loaded: LoadedModel, page_size: int) -> None:
    """Fault seen: ``KVStore.copy_pages`` copies the keys and not the values (at page sizes above 1)."""
    cold = run(loaded, page_size, prefix_cache=False, times=1)
    warm = run(loaded, page_size, prefix_cache=True, times=2)
    assert warm == cold + cold
