"""One random step over a poisoned store, and its attention written out densely in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixkv.config import ModelSpec
from radixkv.executor.attention.base import AttentionBackend
from radixkv.executor.kv_store import KVStore
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.kv.page_table import PageTable
from radixkv.sched.batch import Batch, PrefixGroup
from radixkv.types import PageIds

NUM_LAYERS = 2


@dataclass(frozen=True)
class Family:
    """Sequences that share ``shared_pages`` whole pages; each is (tokens after those, rows computed)."""

    shared_pages: int
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    page_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group_size


class AttentionCase:
    """``families`` stand in the batch's order: those that extend first. Every slot that no token of the
    batch lives in is NaN, the rest of half-filled pages and the padding page too; so are the slots that the
    step is to write. Sequences of a family of two or more form a ``PrefixGroup``."""

    def __init__(self, shape: Shape, families: list[Family], *, seed: int, scattered: bool) -> None:
        self.shape, self.families = shape, families
        self.rng = np.random.default_rng(seed)
        tails = [-(-tokens // shape.page_size) for f in families for tokens, _ in f.members]
        num_pages = sum(f.shared_pages for f in families) + sum(tails) + 3
        self._order = self.rng.permutation(num_pages) if scattered else np.arange(num_pages)
        spec = ModelSpec(
            name="t", vocab_size=9, num_layers=NUM_LAYERS, num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, max_positions=1 << 20,
        )  # fmt: skip
        self.store = KVStore(spec, num_pages=num_pages, page_size=shape.page_size, dtype=shape.dtype)
        self.store.data.fill_(float("nan"))
        self.batch = self._batch()
        generator = torch.Generator().manual_seed(seed)
        rows = self.batch.num_rows
        self.query = torch.randn(rows, shape.num_query_heads, shape.head_dim, generator=generator)
        self.key = torch.randn(rows, shape.num_kv_heads, shape.head_dim, generator=generator)
        self.value = torch.randn(rows, shape.num_kv_heads, shape.head_dim, generator=generator)
        self.query, self.key, self.value = (x.to(shape.dtype) for x in (self.query, self.key, self.value))
        self._fill_history(generator)

    def _take(self, num_pages: int) -> PageIds:
        taken, self._order = self._order[:num_pages], self._order[num_pages:]
        return taken.astype(np.int32)

    def _batch(self) -> Batch:
        seqs: list[ProbeSeq] = []
        groups: list[PrefixGroup] = []
        for family in self.families:
            shared = self._take(family.shared_pages)
            if len(family.members) > 1 and family.shared_pages > 0:
                groups.append(PrefixGroup(len(seqs), len(family.members), family.shared_pages))
            for tokens, rows in family.members:
                pages = np.concatenate([shared, self._take(-(-tokens // self.shape.page_size))])
                stop = family.shared_pages * self.shape.page_size + tokens
                seqs.append(ProbeSeq(len(seqs), np.zeros(stop, np.int32), stop - rows, stop, pages))
        return probe_batch(self.shape.page_size, seqs, vocab_size=9, prefix_groups=tuple(groups))

    def slots_of(self, seq: int) -> Tensor:
        batch = self.batch
        pages = batch.page_indices[batch.page_indptr[seq] : batch.page_indptr[seq + 1]]
        table = PageTable(batch.page_size, pages)
        return torch.from_numpy(table.slot_mapping(0, int(batch.seq_lens[seq])))

    def _fill_history(self, generator: torch.Generator) -> None:
        for seq in range(self.batch.num_seqs):
            new = int(self.batch.query_indptr[seq + 1] - self.batch.query_indptr[seq])
            slots = self.slots_of(seq)[: int(self.batch.seq_lens[seq]) - new]
            for layer in range(NUM_LAYERS):
                for view in (self.store.key(layer), self.store.value(layer)):
                    fresh = torch.isnan(view[slots, 0, 0])
                    values = torch.randn(len(slots), *view.shape[1:], generator=generator)
                    view[slots[fresh]] = values[fresh].to(view.dtype)

    def run(
        self, backend: AttentionBackend, *, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        return backend.run(
            1, self.query, self.key, self.value, scale=0.4, sliding_window=window, softcap=softcap
        )

    def dense(self, *, window: int | None = None, softcap: float | None = None) -> Tensor:
        """What layer 1 must give; call it after a run has written the step's K/V."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        for seq in range(self.batch.num_seqs):
            rows = slice(int(self.batch.query_indptr[seq]), int(self.batch.query_indptr[seq + 1]))
            slots = self.slots_of(seq)
            keys = self.store.key(1)[slots].double().repeat_interleave(self.shape.group_size, 1)
            values = self.store.value(1)[slots].double().repeat_interleave(self.shape.group_size, 1)
            scores = torch.einsum("rhd,thd->hrt", self.query[rows].double(), keys) * 0.4
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            row_at = torch.from_numpy(self.batch.positions[rows])[:, None]
            key_at = torch.arange(len(slots))[None]
            seen = key_at <= row_at
            if window is not None:
                seen &= key_at > row_at - window
            weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
            out[rows] = torch.einsum("hrt,thd->rhd", weights, values)
        return out
