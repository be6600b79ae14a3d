"""ReferenceBackend: the plain oracle. Slow on purpose, never tuned; other backends are compared with it."""

from __future__ import annotations

from typing import Any

import torch

from radixkv.executor.kv_store import KVStore
from radixkv.kv.page_table import PageTable
from radixkv.sched.batch import Batch


class ReferenceBackend:
    """One row at a time: gather what it sees through the page table, softmax in float32, sum.

    A1: it writes only ``slot_mapping``, reads only the batch's pages, and keeps nothing of a request
    beyond the plan of the current step. It ignores ``prefix_groups``.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._batch: Batch | None = None
        self._write_slots = torch.empty(0, dtype=torch.int64)
        self._read_slots: list[torch.Tensor] = []

    def plan(self, batch: Batch) -> None:
        """Look up the slots of every position of every sequence."""
        device = self.store.device
        self._batch = batch
        self._write_slots = torch.as_tensor(batch.slot_mapping, device=device)
        self._read_slots = []
        for seq_idx in range(batch.num_seqs):
            first, last = batch.page_indptr[seq_idx], batch.page_indptr[seq_idx + 1]
            table = PageTable(batch.page_size, batch.page_indices[first:last])
            slots = table.slot_mapping(0, int(batch.seq_lens[seq_idx]))
            self._read_slots.append(torch.as_tensor(slots, device=device))

    def run(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.run``. ``softcap`` bounds a score to ``softcap * tanh(score / softcap)``."""
        batch = self._batch
        assert batch is not None, "plan comes before run"
        self.store.write(layer_idx, self._write_slots, key, value)
        all_keys, all_values = self.store.key(layer_idx), self.store.value(layer_idx)
        group_size = query.shape[1] // key.shape[1]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for seq_idx in range(batch.num_seqs):
            slots = self._read_slots[seq_idx]
            for row in range(batch.query_indptr[seq_idx], batch.query_indptr[seq_idx + 1]):
                last = int(batch.positions[row])
                first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
                seen = slots[first : last + 1]
                keys = all_keys[seen].float().repeat_interleave(group_size, dim=1)
                values = all_values[seen].float().repeat_interleave(group_size, dim=1)
                scores = torch.einsum("hd,phd->hp", query[row].float(), keys) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(scores, dim=-1)
                output[row] = torch.einsum("hp,phd->hd", weights, values).to(query.dtype)
        return output

    def check(self) -> None:
        """Every slot of the plan lies in the store."""
        for slots in (self._write_slots, *self._read_slots):
            assert slots.numel() == 0 or 0 <= int(slots.min()) <= int(slots.max()) < self.store.num_slots

    def stats(self) -> dict[str, Any]:
        return {"name": "reference"}
