"""check_batch: the whole contract of Batch, verified. For executors in tests."""

from __future__ import annotations

import numpy as np

from radixkv.sched.batch import Batch, PrefixGroup


class BatchError(AssertionError):
    """The batch breaks its contract; the message names the rule."""


def _require(holds: object, rule: str) -> None:
    if not holds:
        raise BatchError(rule)


def check_batch(batch: Batch, num_pages: int, vocab_size: int) -> None:
    """Raise ``BatchError`` unless ``batch`` keeps every promise of its docstring, W1 and C2 included, over a
    store of ``num_pages`` pages (the padding page not counted)."""
    _check_rows(batch, vocab_size)
    _check_pages(batch, num_pages)
    _check_copies(batch, num_pages)
    _check_sampling(batch, vocab_size)
    _check_scores(batch)
    for group in batch.prefix_groups:
        _check_group(batch, group)
    ends = [group.first_seq + group.num_seqs for group in batch.prefix_groups]
    starts = [group.first_seq for group in batch.prefix_groups]
    _require(all(e <= s for e, s in zip(ends, starts[1:], strict=False)), "groups are disjoint, in order")


def _check_rows(batch: Batch, vocab_size: int) -> None:
    counts = np.diff(batch.query_indptr)
    _require(batch.num_seqs >= 1, "a batch has a sequence")
    _require(batch.query_indptr[0] == 0 and len(batch.query_indptr) == batch.num_seqs + 1, "query_indptr")
    _require(np.all(counts >= 1), "each sequence computes at least one token")
    _require(batch.query_indptr[-1] == batch.num_rows, "query_indptr ends at the last row")
    _require(len(np.unique(batch.seq_ids)) == batch.num_seqs, "a sequence stands in a batch once")
    _require(np.all(counts[: batch.num_extend_seqs] > 1), "extend sequences come first, with several rows")
    _require(np.all(counts[batch.num_extend_seqs :] == 1), "decode sequences come last, with one row")
    _require(batch.num_extend_rows == batch.query_indptr[batch.num_extend_seqs], "num_extend_rows")
    _require(np.all((batch.token_ids >= 0) & (batch.token_ids < vocab_size)), "token ids in the vocabulary")
    for name, dtype in (
        ("seq_ids", np.int64), ("token_ids", np.int32), ("positions", np.int64), ("slot_mapping", np.int64),
        ("query_indptr", np.int32), ("page_indptr", np.int32), ("page_indices", np.int32),
        ("last_page_len", np.int32), ("sample_rows", np.int64), ("sample_seqs", np.int64),
        ("score_rows", np.int64), ("score_targets", np.int32), ("score_seqs", np.int64),
    ):  # fmt: skip
        _require(getattr(batch, name).dtype == dtype, f"{name} is {np.dtype(dtype)}")


def _check_pages(batch: Batch, num_pages: int) -> None:
    page_size = batch.page_size
    _require(batch.page_indptr[0] == 0 and batch.page_indptr[-1] == len(batch.page_indices), "page_indptr")
    _require(np.all(np.diff(batch.page_indptr) >= 1), "each sequence has a page")
    _require(
        np.all((batch.last_page_len >= 1) & (batch.last_page_len <= page_size)), "1 <= last_page_len <= P"
    )
    _require(np.all((batch.page_indices >= 0) & (batch.page_indices < num_pages)), "page ids in the pool")
    _require(len(np.unique(batch.slot_mapping)) == batch.num_rows, "W1: each slot is written once")
    written = np.zeros(num_pages, np.int64)
    users = np.zeros(num_pages, np.int64)
    for i in range(batch.num_seqs):
        rows = slice(int(batch.query_indptr[i]), int(batch.query_indptr[i + 1]))
        pages = batch.page_indices[batch.page_indptr[i] : batch.page_indptr[i + 1]]
        stop = int(batch.seq_lens[i])
        start = stop - (rows.stop - rows.start)
        _require(start >= 0, "a sequence computes no more tokens than it has")
        positions = np.arange(start, stop)
        _require(
            np.array_equal(batch.positions[rows], positions), "positions run up to the sequence's length"
        )
        slots = pages[positions // page_size].astype(np.int64) * page_size + positions % page_size
        _require(np.array_equal(batch.slot_mapping[rows], slots), "B1: slots follow from the page table")
        _require(len(np.unique(pages)) == len(pages), "B2: a page stands in a table once")
        users[pages] += 1
        written[np.unique(slots // page_size)] += 1
    shared = np.flatnonzero((written > 0) & (users > 1))
    _require(len(shared) == 0, f"W1: pages {shared.tolist()} are written and somebody else reads them")


def _check_copies(batch: Batch, num_pages: int) -> None:
    written = set((batch.slot_mapping // batch.page_size).tolist())
    destinations = [copy.dst for copy in batch.page_copies]
    _require(len(set(destinations)) == len(destinations), "C2: destinations are distinct")
    for copy in batch.page_copies:
        _require(copy.src != copy.dst, "C2: a page is not copied onto itself")
        _require(0 <= copy.src < num_pages and 0 <= copy.dst < num_pages, "C2: pages in the pool")
        _require(1 <= copy.num_tokens <= batch.page_size, "C2: a copy has 1..P tokens")
        _require(copy.dst in written, "C2: a copy is made because its sequence writes on behind it")
        _require(copy.src not in written, "W1: a copy's source is written by somebody")


def _check_sampling(batch: Batch, vocab_size: int) -> None:
    sampling, num_samples = batch.sampling, len(batch.sample_rows)
    _require(len(batch.sample_seqs) == num_samples, "sample_seqs is aligned with sample_rows")
    _require(np.all(np.diff(batch.sample_seqs) > 0), "a sequence samples once, in order")
    last_rows = batch.query_indptr[1:][batch.sample_seqs] - 1
    _require(np.array_equal(batch.sample_rows, last_rows), "a sequence samples at its last row")
    for name in (
        "temperature", "top_k", "top_p", "min_p", "draws", "repetition_penalty", "presence_penalty",
        "frequency_penalty",
    ):  # fmt: skip
        _require(len(getattr(sampling, name)) == num_samples, f"sampling.{name} is aligned with sample_rows")
    _require(np.all((sampling.draws >= 0.0) & (sampling.draws < 1.0)), "draws lie in [0, 1)")
    _require(np.all((sampling.top_k >= 1) & (sampling.top_k <= vocab_size)), "1 <= top_k <= vocab_size")
    _require(len(sampling.bias_row) == len(sampling.bias_token) == len(sampling.bias_value), "bias triples")
    _require(
        len(sampling.seen_row) == len(sampling.seen_token) == len(sampling.seen_in_output), "seen triples"
    )
    for name in ("bias", "seen"):
        row, token = getattr(sampling, f"{name}_row"), getattr(sampling, f"{name}_token")
        _require(np.all((row >= 0) & (row < num_samples)), f"{name}_row indexes sample_rows")
        pairs = row * vocab_size + token
        _require(len(np.unique(pairs)) == len(pairs), f"{name}: a (row, token) pair stands once")


def _check_scores(batch: Batch) -> None:
    rows, seqs = batch.score_rows, batch.score_seqs
    _require(len(rows) == len(batch.score_targets) == len(seqs), "scores are aligned")
    _require(np.all(np.diff(rows) > 0), "score rows are in order, each once")
    inside = (rows >= batch.query_indptr[:-1][seqs]) & (rows < batch.query_indptr[1:][seqs])
    _require(np.all(inside), "a score row belongs to its sequence")
    followed = rows + 1 < batch.query_indptr[1:][seqs]
    _require(
        np.array_equal(batch.token_ids[rows[followed] + 1], batch.score_targets[followed]),
        "the row of position p - 1 scores the token at p",
    )


def _check_group(batch: Batch, group: PrefixGroup) -> None:
    members = range(group.first_seq, group.first_seq + group.num_seqs)
    _require(group.num_seqs >= 2 and group.num_pages >= 1, "a group shares a page among two or more")
    _require(members.start >= 0 and members.stop <= batch.num_seqs, "a group's members are in the batch")
    border = batch.num_extend_seqs
    _require(members.stop <= border or members.start >= border, "a group does not span the border")
    tables = [batch.page_indices[batch.page_indptr[i] : batch.page_indptr[i + 1]] for i in members]
    for i, table in zip(members, tables, strict=True):
        first_position = int(batch.positions[batch.query_indptr[i]])
        _require(group.num_pages * batch.page_size <= first_position, "a group's pages lie before every row")
        _require(
            np.array_equal(table[: group.num_pages], tables[0][: group.num_pages]),
            "a group's members share its pages",
        )
