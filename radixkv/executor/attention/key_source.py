"""Where the K/V of a batch's sequences lies in the store, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.kv.page_table import PageTable
from radixkv.sched.batch import Batch

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeySource:
    """``num_seqs`` entries of ``num_keys`` tokens of K/V each: a view of the store from ``first_slot`` on
    (one entry), or a copy of ``slots`` (``[num_seqs * num_keys]``, padded with each sequence's last token;
    ``None`` for a view).

    Copying whole pages instead gained nothing worth blanking the rest of half-filled ones.
    """

    num_seqs: int
    num_keys: int
    first_slot: int
    slots: Tensor | None


class StoreMap:
    """The slots of the batch's pages, by sequence. Frozen once made; B1 is applied to all pages at once."""

    def __init__(self, batch: Batch) -> None:
        table = PageTable(batch.page_size, batch.page_indices)
        self._slots = table.slot_mapping(0, table.num_slots)
        self._starts = batch.page_indptr[:-1].astype(np.int64) * batch.page_size

    def source(self, seqs: Ints, starts: Ints, stops: Ints) -> KeySource:
        """Positions ``starts[i] .. stops[i] - 1`` of ``seqs[i]``, padded to the longest; all ``[n]``. A
        view where it is one sequence whose tokens lie in order."""
        num_keys = int((stops - starts).max())
        positions = np.minimum(starts[:, None] + np.arange(num_keys), stops[:, None] - 1)
        slots = self._slots[self._starts[seqs, None] + positions].reshape(-1)
        if len(seqs) == 1 and bool(np.all(np.diff(slots) == 1)):
            return KeySource(1, num_keys, int(slots[0]), None)
        return KeySource(len(seqs), num_keys, 0, torch.from_numpy(slots))
