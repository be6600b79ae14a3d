"""Paged runs of every family against plain transformers forwards: the whole executor at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from paged_runs import NUM_PAGES, PagedRun, plain_logits

from radixkv.executor.attention import BACKENDS
from radixkv.executor.hf import HFExecutor
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.testing.tiny_models import FAMILIES, tiny_model

TOLERANCE = 1e-4
PAGE_SIZES = (1, 4, 16, 64)


@pytest.fixture(scope="module")
def model_of() -> Callable[[str], LoadedModel]:
    """One model per family for the whole module; executors share it."""
    return lru_cache(maxsize=None)(tiny_model)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_runs_equal_plain_forwards(
    model_of: Callable[[str], LoadedModel], family: str, attention: str, page_size: int
) -> None:
    """Random chunks of eight sequences in three families, some rows extending and some decoding in one
    batch, on shared and scattered pages, with partial pages copied.

    Fault seen: ``last - sliding_window`` in ReferenceBackend; a copy of one token too few in KVStore.
    """
    loaded = model_of(family)
    executor = HFExecutor(loaded, num_pages=NUM_PAGES, page_size=page_size, attention=attention)
    poison(executor)
    run = PagedRun(PAGE_SIZES.index(page_size), page_size=page_size, vocab_size=loaded.spec.vocab_size)
    wanted = {member.seq_id: plain_logits(loaded, member.token_ids) for member in run.members}
    num_groups = num_mixed = num_copies = 0
    for batch, seqs in run.steps():
        parts = torch.split(executor.logits(batch), [seq.stop - seq.start for seq in seqs])
        for seq, got in zip(seqs, parts, strict=True):
            difference = (got - wanted[seq.seq_id][seq.start : seq.stop]).abs().max()
            assert difference < TOLERANCE, f"sequence {seq.seq_id} at {seq.start}..{seq.stop}"
        num_groups += len(batch.prefix_groups)
        num_mixed += 0 < batch.num_extend_seqs < batch.num_seqs
        num_copies += len(batch.page_copies)
    assert num_groups > 0 and num_mixed > 0, "the run was too tame"
    assert num_copies > 0 or page_size == 1
    executor.check()


def poison(executor: HFExecutor) -> None:
    """Whatever is read before it was written shows as NaN."""
    executor.store.data.fill_(float("nan"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_key_shows(model_of: Callable[[str], LoadedModel], family: str) -> None:
    """The models are sharp enough for the test above: one wrong K row moves the logits visibly."""
    loaded = model_of(family)
    executor = HFExecutor(loaded, num_pages=4, page_size=8, attention="reference")
    token_ids = np.arange(20, dtype=np.int32)
    pages = np.array([2, 0, 3], np.int32)
    before = ProbeSeq(0, token_ids, 0, 19, pages)
    last = ProbeSeq(0, token_ids, 19, 20, pages)
    executor.logits(probe_batch(8, [before], vocab_size=loaded.spec.vocab_size))
    batch = probe_batch(8, [last], vocab_size=loaded.spec.vocab_size)
    right = executor.logits(batch)
    assert torch.equal(executor.logits(batch), right)
    slot_of_18 = 3 * 8 + 18 % 8
    executor.store.key(0)[slot_of_18] = executor.store.key(0)[slot_of_18].flip(-1)
    assert (executor.logits(batch) - right).abs().max() > 10 * TOLERANCE
