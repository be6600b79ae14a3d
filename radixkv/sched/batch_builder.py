"""build_batch: one step's grants as one frozen Batch. Costs O(sequences) in Python, the rest is numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_table import slots_of
from radixkv.sched.batch import Batch, PrefixGroup
from radixkv.sched.prefix_groups import best_groups, depth_first_order, shared_with_next
from radixkv.sched.sampling_rows import sampling_rows
from radixkv.sequence import Sequence
from radixkv.types import PageIds, TokenIds


@dataclass(frozen=True)
class _Scores:
    rows: NDArray[np.int64]
    targets: TokenIds
    seqs: NDArray[np.int64]
    num_logprobs: NDArray[np.int32]


def build_batch(
    grants: Mapping[Sequence, int],
    page_copies: tuple[PageCopy, ...],
    *,
    page_size: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
) -> Batch:
    """A batch that computes the next ``grants[seq]`` (at least 1) tokens of each sequence.

    Each page table covers them already, and ``page_copies`` are due before the forward. Changes no sequence.
    """
    extend, extend_groups = _arrange([seq for seq, n in grants.items() if n > 1], page_size, 0)
    decode, decode_groups = _arrange([seq for seq, n in grants.items() if n == 1], page_size, len(extend))
    sequences = extend + decode
    num_seqs = len(sequences)
    counts = np.array([grants[seq] for seq in sequences], np.int64)
    starts = np.array([seq.num_computed for seq in sequences], np.int64)
    stops = starts + counts
    row_indptr = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(row_indptr[-1]) + np.repeat(starts - row_indptr[:-1], counts)
    num_pages = -(-stops // page_size)
    page_indptr = np.concatenate([[0], np.cumsum(num_pages)])
    page_indices: PageIds = np.concatenate(
        [seq.page_table.pages[:n] for seq, n in zip(sequences, num_pages.tolist(), strict=True)]
    )
    bounds = list(zip(sequences, starts.tolist(), stops.tolist(), strict=True))
    sample_seqs = [
        i
        for i, (seq, _, stop) in enumerate(bounds)
        if stop == seq.num_tokens and seq.request.sampling.max_tokens > 0
        for _ in range(1 if seq.request.beam is not None else seq.num_samples)
    ]
    sample_index = np.array(sample_seqs, np.int64)
    scores = _score_rows(bounds, row_indptr)
    return Batch(
        page_size=page_size,
        seq_ids=np.fromiter((seq.number for seq in sequences), np.int64, num_seqs),
        request_ids=np.fromiter((seq.request.request_id for seq in sequences), np.int64, num_seqs),
        adapter_ids=np.fromiter((seq.request.adapter for seq in sequences), np.int32, num_seqs),
        token_ids=np.concatenate([seq.token_ids[start:stop] for seq, start, stop in bounds]),
        positions=positions,
        slot_mapping=slots_of(page_indices, positions, page_size, np.repeat(page_indptr[:-1], counts)),
        query_indptr=row_indptr.astype(np.int32),
        page_indptr=page_indptr.astype(np.int32),
        page_indices=page_indices,
        last_page_len=((stops - 1) % page_size + 1).astype(np.int32),
        sample_rows=row_indptr[1:][sample_index] - 1,
        sample_seqs=sample_index,
        sampling=sampling_rows([sequences[i] for i in sample_seqs], vocab_size, eos_token_ids),
        score_rows=scores.rows,
        score_targets=scores.targets,
        score_seqs=scores.seqs,
        score_num_logprobs=scores.num_logprobs,
        page_copies=page_copies,
        prefix_groups=(*extend_groups, *decode_groups),
        num_extend_seqs=len(extend),
        num_extend_rows=int(row_indptr[len(extend)]),
    )


def _arrange(
    sequences: list[Sequence], page_size: int, first_seq: int
) -> tuple[list[Sequence], list[PrefixGroup]]:
    """The sequences by adapter, then in depth-first order of the whole pages before their first row, and
    their groups. Those of different adapters share no page."""
    if len(sequences) < 2:
        return sequences, []
    adapters = {seq.request.adapter for seq in sequences}
    if len(adapters) > 1:
        arranged: list[Sequence] = []
        groups: list[PrefixGroup] = []
        for adapter in sorted(adapters):
            alike = [seq for seq in sequences if seq.request.adapter == adapter]
            part, part_groups = _arrange(alike, page_size, first_seq + len(arranged))
            arranged += part
            groups += part_groups
        return arranged, groups
    tables = [seq.page_table.pages[: seq.num_computed // page_size] for seq in sequences]
    order = depth_first_order(tables)
    shared = shared_with_next([tables[i] for i in order])
    return [sequences[i] for i in order], best_groups(shared, first_seq)


def _score_rows(bounds: list[tuple[Sequence, int, int]], row_indptr: NDArray[np.int64]) -> _Scores:
    """The row of position ``p - 1`` scores the prompt's token at ``p``, each position once: those that an
    earlier step (before a preemption, say) has scored already are left out."""
    rows: list[NDArray[np.int64]] = []
    targets: list[TokenIds] = []
    seqs: list[NDArray[np.int64]] = []
    num_logprobs: list[NDArray[np.int32]] = []
    for i, (seq, start, stop) in enumerate(bounds):
        if seq.request.logprob_start is None:
            continue
        first = seq.next_scored
        last = min(stop + 1, seq.num_prompt)  # exclusive
        if first < last:
            assert first > start, "a position's row comes before it; max_hit_tokens leaves it to be computed"
            rows.append(np.arange(first - 1, last - 1) + (row_indptr[i] - start))
            targets.append(seq.token_ids[first:last])
            seqs.append(np.full(last - first, i, np.int64))
            num_logprobs.append(np.full(last - first, 1 + seq.request.num_prompt_alternatives, np.int32))
    if not rows:
        no_int32 = np.empty(0, np.int32)
        return _Scores(np.empty(0, np.int64), no_int32, np.empty(0, np.int64), no_int32)
    return _Scores(
        np.concatenate(rows), np.concatenate(targets), np.concatenate(seqs), np.concatenate(num_logprobs)
    )
