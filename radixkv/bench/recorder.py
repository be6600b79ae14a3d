"""RecordingExecutor: counts what the model really computes, apart from what the engine says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radixkv.config import ModelSpec
from radixkv.executor.base import ModelExecutor
from radixkv.sched.batch import Batch, StepResult
from radixkv.types import TokenIds


class RecordingExecutor:
    """Passes every batch on to another executor and counts its rows. Requests are numbered from 0.

    ``num_prompt_rows`` counts each prompt position once; ``num_repeated_rows`` counts rows computed again,
    which happens after a preemption only.
    """

    def __init__(self, inner: ModelExecutor, prompts: Sequence[TokenIds]) -> None:
        self._inner = inner
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self._lengths = lengths
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._seen = np.zeros(int(lengths.sum()), bool)
        self.num_repeated_rows = 0
        self.num_rows = 0
        self.num_steps = 0
        self.max_rows = 0

    @property
    def num_prompt_rows(self) -> int:
        return int(np.count_nonzero(self._seen))

    @property
    def spec(self) -> ModelSpec:
        return self._inner.spec

    @property
    def num_pages(self) -> int:
        return self._inner.num_pages

    @property
    def page_size(self) -> int:
        return self._inner.page_size

    def execute(self, batch: Batch) -> StepResult:
        result = self._inner.execute(batch)
        owner = np.repeat(batch.request_ids, np.diff(batch.query_indptr))
        in_prompt = batch.positions < self._lengths[owner]
        rows = self._first[owner[in_prompt]] + batch.positions[in_prompt]
        self.num_repeated_rows += int(np.count_nonzero(self._seen[rows]))
        self._seen[rows] = True
        self.num_rows += batch.num_rows
        self.max_rows = max(self.max_rows, batch.num_rows)
        self.num_steps += 1
        return result

    def stats(self) -> dict[str, Any]:
        return self._inner.stats()
