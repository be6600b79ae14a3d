"""check_batch refuses a batch with any one field broken."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from test_batch_builder import sequence

from radixkv.kv.page_copy import PageCopy
from radixkv.sched.batch import Batch, PrefixGroup
from radixkv.sched.batch_builder import build_batch
from radixkv.testing.batch_check import BatchError, check_batch


def good_batch() -> Batch:
    """An extend sequence with scores, and two decode sequences behind two shared pages."""
    grants = {
        sequence(1, 8, 4, [1, 2], logprob_start=5): 4,
        sequence(2, 9, 8, [5, 6, 7]): 1,
        sequence(3, 10, 9, [5, 6, 8]): 1,
    }
    return build_batch(grants, (PageCopy(20, 8, 1),), page_size=4, vocab_size=1000)


def changed(batch: Batch, field: str, index: int, value: int) -> Batch:
    array = getattr(batch, field).copy()
    array[index] = value
    return dataclasses.replace(batch, **{field: array})


def test_the_batch_that_is_broken_below_is_good() -> None:
    check_batch(good_batch(), 21, 1000)


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("seq_ids", 0, 2),
        ("token_ids", 0, 1000),
        ("token_ids", 1, 7),
        ("positions", 0, 3),
        ("slot_mapping", 0, 9),
        ("query_indptr", 1, 3),
        ("page_indptr", 1, 1),
        ("page_indices", 1, 9),
        ("page_indices", 2, 21),
        ("page_indices", 3, 9),
        ("last_page_len", 0, 0),
        ("last_page_len", 0, 5),
        ("last_page_len", 1, 2),
        ("sample_rows", 0, 2),
        ("sample_seqs", 0, 1),
        ("score_rows", 0, 1),
        ("score_seqs", 0, 1),
        ("score_targets", 0, 3),
    ],
)
def test_one_wrong_number_is_seen(field: str, index: int, value: int) -> None:
    with pytest.raises(BatchError):
        check_batch(changed(good_batch(), field, index, value), 21, 1000)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_extend_seqs": 2},
        {"num_extend_rows": 3},
        {"positions": np.zeros(6, np.int32)},
        {"prefix_groups": (PrefixGroup(1, 2, 3),)},
        {"prefix_groups": (PrefixGroup(0, 2, 1),)},
        {"prefix_groups": (PrefixGroup(1, 1, 1),)},
        {"prefix_groups": (PrefixGroup(1, 2, 1), PrefixGroup(1, 2, 1))},
        {"page_copies": (PageCopy(20, 8, 1), PageCopy(19, 8, 1))},
        {"page_copies": (PageCopy(8, 8, 1),)},
        {"page_copies": (PageCopy(20, 8, 5),)},
        {"page_copies": (PageCopy(2, 8, 1),)},
        {"page_copies": (PageCopy(20, 5, 1),)},
    ],
)
def test_one_wrong_part_is_seen(fields: dict[str, Any]) -> None:
    with pytest.raises(BatchError):
        check_batch(dataclasses.replace(good_batch(), **fields), 21, 1000)


def test_a_page_written_while_another_reads_it_is_seen() -> None:
    grants = {sequence(1, 8, 5, [5, 6]): 1, sequence(2, 9, 8, [5, 6, 7]): 1}
    with pytest.raises(BatchError, match="W1"):
        check_batch(build_batch(grants, (), page_size=4, vocab_size=1000), 21, 1000)
