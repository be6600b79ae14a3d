from __future__ import annotations

import numpy as np

from radixkv.kv.page_copy import PageCopy
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import Batch, PrefixGroup
from radixkv.sched.batch_builder import build_batch
from radixkv.sequence import Request, Sequence
from radixkv.testing.batch_check import check_batch


def sequence(
    request_id: int,
    num_tokens: int,
    computed: int,
    pages: list[int],
    *,
    max_tokens: int = 5,
    logprob_start: int | None = None,
    page_size: int = 4,
    adapter: int = 0,
) -> Sequence:
    """Token at position ``p`` is ``100 * request_id + p``."""
    request = Request(
        request_id=request_id,
        prompt_ids=np.arange(num_tokens, dtype=np.int32) + 100 * request_id,
        sampling=SamplingParams(max_tokens=max_tokens),
        logprob_start=logprob_start,
        adapter=adapter,
        namespace=("m", adapter, 0) if adapter else (),
    )
    seq = Sequence(request, page_size, number=request_id)
    seq.num_computed = computed
    seq.page_table.extend(np.array(pages, np.int32))
    return seq


def build(grants: dict[Sequence, int], copies: tuple[PageCopy, ...] = (), page_size: int = 4) -> Batch:
    batch = build_batch(grants, copies, page_size=page_size, vocab_size=1000)
    check_batch(batch, 50, 1000)
    return batch


def test_a_chunk_and_a_decode_by_hand() -> None:
    decode = sequence(1, 6, 5, [7, 3, 40])  # 40 is reserved for later
    chunk = sequence(2, 9, 2, [9, 8, 20])
    batch = build({decode: 1, chunk: 5})
    assert batch.request_ids.tolist() == [2, 1]
    assert batch.token_ids.tolist() == [202, 203, 204, 205, 206, 105]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 5]
    assert batch.slot_mapping.tolist() == [38, 39, 32, 33, 34, 13]
    assert batch.query_indptr.tolist() == [0, 5, 6]
    assert batch.page_indptr.tolist() == [0, 2, 4]
    assert batch.page_indices.tolist() == [9, 8, 7, 3]
    assert batch.last_page_len.tolist() == [3, 2]
    assert batch.seq_lens.tolist() == [7, 6]
    assert batch.sample_rows.tolist() == [5] and batch.sample_seqs.tolist() == [1]
    assert (batch.num_extend_seqs, batch.num_extend_rows) == (1, 5)
    assert batch.prefix_groups == () and batch.page_copies == ()


def test_the_last_chunk_samples_unless_nothing_is_asked_for() -> None:
    last = sequence(1, 8, 4, [1, 2])
    silent = sequence(2, 8, 4, [3, 4], max_tokens=0)
    batch = build({last: 4, silent: 4})
    assert batch.request_ids[batch.sample_seqs].tolist() == [1]
    assert batch.last_page_len.tolist() == [4, 4]


def test_sequences_that_share_pages_stand_together_and_form_a_group() -> None:
    seqs = [
        sequence(1, 13, 12, [5, 6, 10, 11]),
        sequence(2, 9, 8, [30, 31, 32]),
        sequence(3, 10, 9, [5, 6, 12]),
        sequence(4, 12, 11, [5, 6, 13]),
    ]
    batch = build(dict.fromkeys(seqs, 1))
    (group,) = batch.prefix_groups
    members = batch.request_ids[group.first_seq : group.first_seq + group.num_seqs]
    assert set(members.tolist()) == {1, 3, 4} and group.num_pages == 2


def test_a_page_that_a_member_still_writes_is_not_shared() -> None:
    """Two whole pages are shared, but one sequence computes from inside the second."""
    early, late = sequence(1, 8, 5, [5, 6]), sequence(2, 9, 8, [5, 7, 8])
    assert build({early: 1, late: 1}).prefix_groups == (PrefixGroup(0, 2, 1),)


def test_sequences_of_one_adapter_stand_together_and_group_only_among_themselves() -> None:
    two = [sequence(i, 9, 8, [5, 6, i], adapter=1) for i in (8, 9)]
    base = [sequence(i, 9, 8, [3, 4, 10 + i]) for i in (1, 2, 5)]
    batch = build(dict.fromkeys((two[0], base[0], base[1], two[1], base[2]), 1))
    assert batch.adapter_ids.tolist() == [0, 0, 0, 1, 1]
    assert batch.request_ids.tolist() == [1, 2, 5, 8, 9]
    groups = [(group.first_seq, group.num_seqs, group.num_pages) for group in batch.prefix_groups]
    assert groups == [(0, 3, 2), (3, 2, 2)]


def test_groups_stay_on_their_side_of_the_border() -> None:
    seqs = {
        sequence(1, 12, 8, [5, 6, 10]): 4,
        sequence(2, 12, 8, [5, 6, 11]): 4,
        sequence(3, 9, 8, [5, 6, 12]): 1,
        sequence(4, 9, 8, [5, 6, 13]): 1,
    }
    assert build(seqs).prefix_groups == (PrefixGroup(0, 2, 2), PrefixGroup(2, 2, 2))


def test_scored_rows_stand_one_before_their_token() -> None:
    seq = sequence(1, 10, 4, [5, 6, 7], max_tokens=0, logprob_start=6)
    batch = build({sequence(2, 4, 0, [9]): 4, seq: 4})
    first = int(batch.query_indptr[batch.request_ids.tolist().index(1)])
    assert (batch.score_rows - first).tolist() == [1, 2, 3]  # positions 5, 6, 7
    assert batch.score_targets.tolist() == [106, 107, 108]
    assert batch.request_ids[batch.score_seqs].tolist() == [1, 1, 1]


def test_scores_go_on_where_they_stopped_and_end_with_the_prompt() -> None:
    seq = sequence(1, 10, 4, [5, 6, 7], logprob_start=6)
    seq.logprobs = [-1.0, -2.0]  # positions 6 and 7
    batch = build({seq: 6})
    assert batch.score_targets.tolist() == [108, 109]
    assert batch.positions[batch.score_rows].tolist() == [7, 8]
    seq.logprobs = [-1.0] * 4
    assert len(build({seq: 6}).score_rows) == 0


def test_position_zero_has_no_score() -> None:
    batch = build({sequence(1, 4, 0, [5], logprob_start=0): 4})
    assert batch.score_targets.tolist() == [101, 102, 103]


def test_copies_travel_with_the_batch() -> None:
    copy = PageCopy(30, 6, 2)
    assert build({sequence(1, 8, 6, [5, 6]): 2}, (copy,)).page_copies == (copy,)


def test_one_token_pages() -> None:
    seq = sequence(1, 5, 3, [5, 9, 2, 7, 4], page_size=1)
    batch = build({seq: 2}, page_size=1)
    assert batch.slot_mapping.tolist() == [7, 4] and batch.last_page_len.tolist() == [1]
    assert batch.page_indices.tolist() == [5, 9, 2, 7, 4]
