"""A step whose K/V was NaN got into the cache when it sampled nothing, and spoilt every later prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixkv import LLM, SamplingParams
from radixkv.errors import NonFiniteLogitsError
from radixkv.executor.hf import HFExecutor
from radixkv.sched.batch import Batch
from radixkv.testing.tiny_models import tiny_model

PROMPT = list(range(10, 50))
PARAMS = SamplingParams(max_tokens=3)


def make_llm() -> LLM:
    return LLM(
        tiny_model("llama"), num_tokens=256, page_size=4, max_batch_tokens=16, num_threads=1, progress=False
    )


class Outage:
    """From call ``first`` on, for ``num`` forwards, all that the rows of ``request_ids`` (``None``: of all)
    compute is ``value``."""

    def __init__(
        self, patch: pytest.MonkeyPatch, first: int, num: int = 1, *, value: float = float("nan")
    ) -> None:
        self.calls = 0
        self.request_ids: set[int] | None = None
        real = HFExecutor._forward

        def forward(executor: HFExecutor, batch: Batch) -> torch.Tensor:
            hidden = real(executor, batch).clone()
            self.calls += 1
            if first <= self.calls < first + num:
                rows = self._rows(batch)
                for layer in range(executor.spec.num_layers):
                    executor.store.key(layer)[batch.slot_mapping[rows]] = value
                    executor.store.value(layer)[batch.slot_mapping[rows]] = value
                hidden[rows] = value
            return hidden

        patch.setattr(HFExecutor, "_forward", forward)

    def _rows(self, batch: Batch) -> NDArray[Any]:
        seqs = np.repeat(batch.seq_ids, np.diff(batch.query_indptr))
        return (
            np.arange(len(seqs))
            if self.request_ids is None
            else np.flatnonzero(np.isin(seqs, [*self.request_ids]))
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prefill_that_met_nan_fails_and_leaves_nothing(
    chunk: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault seen: no check of rows that sample nothing: no error, and NaN for everybody afterwards."""
    with make_llm() as llm:
        good = llm.generate(PROMPT, PARAMS)
        llm.flush()
        Outage(monkeypatch, chunk, value=value)
        with pytest.raises(NonFiniteLogitsError):
            llm.prefill(PROMPT)
        assert llm.explain(PROMPT).hit_tokens == 16 * (chunk - 1)  # what earlier, sound steps computed
        assert llm.generate(PROMPT, PARAMS).token_ids == good.token_ids
        llm.engine.check()


def test_only_the_request_that_met_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault seen: ``side="left"`` in ``_refuse_unless_finite``: its neighbour fails too."""
    with make_llm() as llm:
        prompts = [[5, 6, 7], list(range(60, 66))]
        good = [out.token_ids for out in llm.generate(prompts, PARAMS)]
        llm.flush()
        outage = Outage(monkeypatch, 1)
        outage.request_ids = {3}  # after two, the second
        first, second = llm.generate(prompts, PARAMS, return_exceptions=True)
        assert not isinstance(first, BaseException) and first.token_ids == good[0]
        assert isinstance(second, NonFiniteLogitsError) and second.request_ids == (3,)
        assert [out.token_ids for out in llm.generate(prompts, PARAMS)] == good
