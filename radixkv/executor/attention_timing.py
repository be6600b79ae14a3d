"""Times of one attention backend on made-up steps, against bare matrix products of the same sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.config import ModelSpec
from radixkv.executor.attention import make_backend
from radixkv.executor.kv_store import KVStore
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.sched.batch import Batch, PrefixGroup

_ROW_BLOCK = 256


@dataclass(frozen=True)
class TimedStep:
    """``sequences`` are (own tokens, rows computed), all behind ``num_shared`` shared tokens (a multiple of
    the page size). ``scattered``: own pages lie in random order, as after long use; else in order."""

    name: str
    num_shared: int
    sequences: tuple[tuple[int, int], ...]
    scattered: bool


@dataclass(frozen=True)
class StepTime:
    """Milliseconds over all layers, plan apart; each layer at its best of the repeats."""

    run_ms: float
    plan_ms: float
    matmul_ms: float
    num_pieces: int


class AttentionTiming:
    """A K/V store full of random numbers, on which steps are timed. Keeps no state of a step."""

    def __init__(self, spec: ModelSpec, *, num_pages: int, page_size: int, attention: str) -> None:
        self.spec, self.page_size, self.attention = spec, page_size, attention
        self._store = KVStore(spec, num_pages=num_pages, page_size=page_size, dtype=torch.float32)
        self._store.data.normal_(generator=torch.Generator().manual_seed(0))

    def measure(self, step: TimedStep, repeats: int) -> StepTime:
        """Backend and matrix products take turns, so that a busy machine slows both."""
        spec = self.spec
        batch = self._batch(step)
        backend = make_backend(self.attention, self._store)
        query = torch.randn(batch.num_rows, spec.num_query_heads, spec.head_dim)
        key = torch.randn(batch.num_rows, spec.num_kv_heads, spec.head_dim)
        products = list(self._products(step))
        best = np.full((2, spec.num_layers), np.inf)
        best_plan = np.inf
        for _ in range(repeats):
            began = time.perf_counter()
            backend.plan(batch)
            best_plan = min(best_plan, time.perf_counter() - began)
            for layer in range(spec.num_layers):
                began = time.perf_counter()
                backend.run(layer, query, key, key, scale=spec.head_dim**-0.5)
                best[0, layer] = min(best[0, layer], time.perf_counter() - began)
            for layer in range(spec.num_layers):
                began = time.perf_counter()
                for product in products:
                    product()
                best[1, layer] = min(best[1, layer], time.perf_counter() - began)
        stats: dict[str, Any] = getattr(backend, "stats", dict)()
        run_ms, matmul_ms = (best.sum(axis=1) * 1e3).tolist()
        return StepTime(run_ms, float(best_plan) * 1e3, matmul_ms, int(stats.get("num_pieces", 0)))

    def _batch(self, step: TimedStep) -> Batch:
        rng = np.random.default_rng(0)
        num_shared = step.num_shared // self.page_size
        free = np.arange(num_shared, self._store.num_pages, dtype=np.int32)
        if step.scattered:
            free = rng.permutation(free)
        shared = np.arange(num_shared, dtype=np.int32)
        seqs: list[ProbeSeq] = []
        for own, rows in step.sequences:
            taken, free = np.split(free, [-(-own // self.page_size)])
            stop = num_shared * self.page_size + own
            pages = np.concatenate([shared, taken])
            seqs.append(ProbeSeq(len(seqs), np.zeros(stop, np.int32), stop - rows, stop, pages))
        groups = (PrefixGroup(0, len(seqs), num_shared),) if num_shared and len(seqs) > 1 else ()
        return probe_batch(self.page_size, seqs, vocab_size=self.spec.vocab_size, prefix_groups=groups)

    def _products(self, step: TimedStep) -> Iterator[Callable[[], Tensor]]:
        """Scores and mix of each part, dense and in order, one product per K/V head; chunks in blocks of
        rows over the keys up to their last row."""
        total_rows = sum(rows for _, rows in step.sequences)
        if step.num_shared:
            yield from self._pair(1, total_rows, step.num_shared)
        single = [own for own, rows in step.sequences if rows == 1]
        if single:
            yield from self._pair(len(single), 1, round(sum(single) / len(single)))
        for own, rows in step.sequences:
            if rows > 1:
                for first in range(0, rows, _ROW_BLOCK):
                    last = min(first + _ROW_BLOCK, rows)
                    yield from self._pair(1, last - first, own - rows + last)

    def _pair(self, num_seqs: int, num_rows: int, num_keys: int) -> Iterator[Callable[[], Tensor]]:
        entries = num_seqs * self.spec.num_kv_heads
        folded = num_rows * self.spec.num_query_heads // self.spec.num_kv_heads
        query = torch.randn(entries, folded, self.spec.head_dim)
        keys = torch.randn(entries, num_keys, self.spec.head_dim)
        scores, mixed = torch.randn(entries, folded, num_keys), torch.empty_like(query)
        yield lambda: torch.bmm(query, keys.transpose(1, 2), out=scores)
        yield lambda: torch.bmm(scores, keys, out=mixed)
