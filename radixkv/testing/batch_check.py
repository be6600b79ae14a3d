"""check_batch: the whole contract of Batch, verified. For executors in tests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

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


_DTYPES = tuple(
    (name, np.dtype(dtype))
    for name, dtype in (
        ("seq_ids", np.int64), ("adapter_ids", np.int32), ("request_ids", np.int64), ("token_ids", np.int32),
        ("positions", np.int64), ("slot_mapping", np.int64),
        ("query_indptr", np.int32), ("page_indptr", np.int32), ("page_indices", np.int32),
        ("last_page_len", np.int32), ("sample_rows", np.int64), ("sample_seqs", np.int64),
        ("score_rows", np.int64), ("score_targets", np.int32), ("score_seqs", np.int64),
    )
)  # fmt: skip


def _distinct(values: Iterable[int]) -> bool:
    values = list(values)
    return len(set(values)) == len(values)


def _check_rows(batch: Batch, vocab_size: int) -> None:
    for name, dtype in _DTYPES:
        if getattr(batch, name).dtype != dtype:
            raise BatchError(f"{name} is {dtype}")
    indptr = batch.query_indptr.tolist()
    counts = [stop - start for start, stop in pairwise(indptr)]
    border = batch.num_extend_seqs
    _require(batch.num_seqs >= 1, "a batch has a sequence")
    _require(indptr[0] == 0 and len(counts) == batch.num_seqs, "query_indptr")
    _require(min(counts) >= 1, "each sequence computes at least one token")
    _require(indptr[-1] == batch.num_rows, "query_indptr ends at the last row")
    _require(_distinct(batch.seq_ids.tolist()), "a sequence stands in a batch once")
    _require(len(batch.request_ids) == batch.num_seqs, "each sequence has a request")
    _require(all(count > 1 for count in counts[:border]), "extend sequences come first, with several rows")
    _require(all(count == 1 for count in counts[border:]), "decode sequences come last, with one row")
    _require(batch.num_extend_rows == indptr[border], "num_extend_rows")
    _require(len(batch.adapter_ids) == batch.num_seqs and batch.adapter_ids.min() >= 0, "adapter_ids")
    for part in (batch.adapter_ids[:border].tolist(), batch.adapter_ids[border:].tolist()):
        _require(part == sorted(part), "sequences of one adapter stand together, the base model's first")
    low, high = batch.token_ids.min(), batch.token_ids.max()
    _require(low >= 0 and high < vocab_size, "token ids in the vocabulary")


def _check_pages(batch: Batch, num_pages: int) -> None:
    page_size = batch.page_size
    rows, pages = batch.query_indptr.tolist(), batch.page_indptr.tolist()
    _require(pages[0] == 0 and pages[-1] == len(batch.page_indices), "page_indptr")
    _require(min(stop - start for start, stop in pairwise(pages)) >= 1, "each sequence has a page")
    low, high = batch.last_page_len.min(), batch.last_page_len.max()
    _require(low >= 1 and high <= page_size, "1 <= last_page_len <= P")
    low, high = batch.page_indices.min(), batch.page_indices.max()
    _require(low >= 0 and high < num_pages, "page ids in the pool")
    _require(_distinct(batch.slot_mapping.tolist()), "W1: each slot is written once")
    users: dict[int, int] = {}
    written: set[int] = set()
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        table = batch.page_indices[pages[i] : pages[i + 1]]
        start = seq_len - (rows[i + 1] - rows[i])
        _require(start >= 0, "a sequence computes no more tokens than it has")
        positions = np.arange(start, seq_len)
        of_rows = slice(rows[i], rows[i + 1])
        same = (batch.positions[of_rows] == positions).all()
        _require(same, "positions run up to the sequence's length")
        slots = table[positions // page_size].astype(np.int64) * page_size + positions % page_size
        _require((batch.slot_mapping[of_rows] == slots).all(), "B1: slots follow from the page table")
        ids = table.tolist()
        _require(_distinct(ids), "B2: a page stands in a table once")
        for page in ids:
            users[page] = users.get(page, 0) + 1
        written.update(ids[start // page_size :])
    shared = [page for page in written if users[page] > 1]
    _require(not shared, f"W1: pages {shared} are written and somebody else reads them")


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
    _require(all(a <= b for a, b in pairwise(batch.sample_seqs.tolist())), "sequences sample in order")
    last_rows = batch.query_indptr[1:][batch.sample_seqs] - 1
    _require((batch.sample_rows == last_rows).all(), "a sequence samples at its last row")
    for name in (
        "temperature", "top_k", "top_p", "min_p", "draws", "repetition_penalty", "presence_penalty",
        "frequency_penalty",
    ):  # fmt: skip
        if len(getattr(sampling, name)) != num_samples:
            raise BatchError(f"sampling.{name} is aligned with sample_rows")
    _require(((sampling.draws >= 0.0) & (sampling.draws < 1.0)).all(), "draws lie in [0, 1)")
    _require(((sampling.top_k >= 1) & (sampling.top_k <= vocab_size)).all(), "1 <= top_k <= vocab_size")
    _require(len(sampling.bias_row) == len(sampling.bias_token) == len(sampling.bias_value), "bias triples")
    _require(
        len(sampling.seen_row) == len(sampling.seen_token) == len(sampling.seen_in_output), "seen triples"
    )
    for row, token in (
        (sampling.bias_row, sampling.bias_token),
        (sampling.seen_row, sampling.seen_token),
    ):
        if len(row):
            _require(row.min() >= 0 and row.max() < num_samples, "triples index sample_rows")
            _require(_distinct((row * vocab_size + token).tolist()), "a (row, token) pair stands once")


def _check_scores(batch: Batch) -> None:
    rows, seqs = batch.score_rows, batch.score_seqs
    _require(len(rows) == len(batch.score_targets) == len(seqs), "scores are aligned")
    if len(rows) == 0:
        return
    _require((np.diff(rows) > 0).all(), "score rows are in order, each once")
    inside = (rows >= batch.query_indptr[:-1][seqs]) & (rows < batch.query_indptr[1:][seqs])
    _require(inside.all(), "a score row belongs to its sequence")
    followed = rows + 1 < batch.query_indptr[1:][seqs]
    same = batch.token_ids[rows[followed] + 1] == batch.score_targets[followed]
    _require(same.all(), "the row of position p - 1 scores the token at p")


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
