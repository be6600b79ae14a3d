"""Batches made by hand, without ledger and scheduler: for the check at load, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_table import PageTable
from radixkv.sched.batch import Batch, PrefixGroup, SamplingRows
from radixkv.types import PageIds, TokenIds


@dataclass(frozen=True, eq=False)
class ProbeSeq:
    """Positions ``start .. stop - 1`` of one sequence are computed; ``pages`` cover at least ``stop``."""

    seq_id: int
    token_ids: TokenIds
    """The whole sequence, at least ``stop`` tokens."""
    start: int
    stop: int
    pages: PageIds
    score: tuple[int, ...] = field(default=())
    """Positions within ``start .. stop - 1`` whose next token gets its log-probability."""
    adapter: int = 0


def probe_batch(
    page_size: int,
    seqs: Sequence[ProbeSeq],
    *,
    vocab_size: int,
    page_copies: tuple[PageCopy, ...] = (),
    prefix_groups: tuple[PrefixGroup, ...] = (),
) -> Batch:
    """A greedy batch that samples after the last row of each sequence. The caller puts sequences that
    compute more than one token first, as ``Batch`` wants it."""
    counts = np.array([seq.stop - seq.start for seq in seqs])
    num_extend_seqs = int((counts > 1).sum())
    assert (counts[:num_extend_seqs] > 1).all() and (counts > 0).all(), "extend first, then decode"
    query_indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables = [PageTable(page_size, seq.pages[: -(-seq.stop // page_size)]) for seq in seqs]
    score = [
        (first + p - seq.start, i, p)
        for i, (seq, first) in enumerate(zip(seqs, query_indptr[:-1], strict=True))
        for p in seq.score
    ]
    return Batch(
        page_size=page_size,
        seq_ids=np.array([seq.seq_id for seq in seqs], np.int64),
        request_ids=np.array([seq.seq_id for seq in seqs], np.int64),
        adapter_ids=np.array([seq.adapter for seq in seqs], np.int32),
        token_ids=np.concatenate([seq.token_ids[seq.start : seq.stop] for seq in seqs]).astype(np.int32),
        positions=np.concatenate([np.arange(seq.start, seq.stop, dtype=np.int64) for seq in seqs]),
        slot_mapping=np.concatenate(
            [table.slot_mapping(seq.start, seq.stop) for table, seq in zip(tables, seqs, strict=True)]
        ),
        query_indptr=query_indptr,
        page_indptr=np.concatenate([[0], np.cumsum([table.num_pages for table in tables])]).astype(np.int32),
        page_indices=np.concatenate([table.pages for table in tables]).astype(np.int32),
        last_page_len=np.array([(seq.stop - 1) % page_size + 1 for seq in seqs], np.int32),
        sample_rows=query_indptr[1:].astype(np.int64) - 1,
        sample_seqs=np.arange(len(seqs), dtype=np.int64),
        sampling=greedy_rows(len(seqs), vocab_size),
        score_rows=np.array([row for row, _, _ in score], np.int64),
        score_targets=np.array([seqs[i].token_ids[p + 1] for _, i, p in score], np.int32),
        score_seqs=np.array([i for _, i, _ in score], np.int64),
        score_num_logprobs=np.ones(len(score), np.int32),
        page_copies=page_copies,
        prefix_groups=prefix_groups,
        num_extend_seqs=num_extend_seqs,
        num_extend_rows=int(query_indptr[num_extend_seqs]),
    )


def greedy_rows(num_samples: int, vocab_size: int) -> SamplingRows:
    """Sampling rows of temperature 0 with nothing switched on."""
    return SamplingRows(
        temperature=np.zeros(num_samples, np.float32),
        top_k=np.full(num_samples, vocab_size, np.int32),
        top_p=np.ones(num_samples, np.float32),
        min_p=np.zeros(num_samples, np.float32),
        draws=np.zeros(num_samples, np.float64),
        bias_row=np.empty(0, np.int64),
        bias_token=np.empty(0, np.int64),
        bias_value=np.empty(0, np.float32),
        seen_row=np.empty(0, np.int64),
        seen_token=np.empty(0, np.int64),
        seen_in_output=np.empty(0, np.int32),
        repetition_penalty=np.ones(num_samples, np.float32),
        presence_penalty=np.zeros(num_samples, np.float32),
        frequency_penalty=np.zeros(num_samples, np.float32),
        num_logprobs=np.zeros(num_samples, np.int32),
    )
