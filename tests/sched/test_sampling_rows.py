from __future__ import annotations

from typing import Any

import numpy as np

from radixkv.sampling import SamplingParams
from radixkv.sched.draws import draws_of
from radixkv.sched.sampling_rows import sampling_rows
from radixkv.sequence import Request, Sequence


def sequence(
    prompt: list[int], output: tuple[int, ...] = (), sample_index: int = 0, **params: Any
) -> Sequence:
    request = Request(
        request_id=1,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(**params),
        sample_index=sample_index,
    )
    seq = Sequence(request, 4)
    for token_id in output:
        seq.append(token_id)
    return seq


def test_plain_parameters_become_columns() -> None:
    rows = sampling_rows(
        [sequence([1]), sequence([1], temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=3)], 50
    )
    assert rows.temperature.tolist() == [0.0, 0.5]
    assert rows.top_k.tolist() == [50, 7]
    assert np.allclose(rows.top_p, [1.0, 0.9]) and np.allclose(rows.min_p, [0.0, 0.1])
    assert not rows.all_greedy and sampling_rows([sequence([1])], 50).all_greedy


def test_top_k_beyond_the_vocabulary_keeps_all_of_it() -> None:
    assert sampling_rows([sequence([1], top_k=1000)], 50).top_k.tolist() == [50]


def test_draws_follow_seed_sample_and_output_position() -> None:
    seqs = [
        sequence([1, 2, 3], (9, 9), temperature=1.0, seed=11, sample_index=2),
        sequence([1]),
        sequence([5], (), temperature=1.0, seed=2**63 - 1),
    ]
    expected = draws_of(
        np.array([11, 2**63 - 1], np.uint64), np.array([2, 0], np.uint64), np.array([2, 0], np.uint64)
    )
    draws = sampling_rows(seqs, 50).draws
    assert draws.tolist() == [expected[0], 0.0, expected[1]]


def test_bias_becomes_triples_that_index_the_rows() -> None:
    rows = sampling_rows(
        [sequence([1]), sequence([1], logit_bias={4: 1.5, 2: -3.0}), sequence([1], logit_bias={4: 2.0})], 50
    )
    triples = list(
        zip(rows.bias_row.tolist(), rows.bias_token.tolist(), rows.bias_value.tolist(), strict=True)
    )
    assert triples == [(1, 4, 1.5), (1, 2, -3.0), (2, 4, 2.0)]


def test_seen_tokens_are_listed_once_for_rows_with_penalties_only() -> None:
    seqs = [
        sequence([3, 3, 5], (5, 8, 5)),
        sequence([3, 3, 5], (5, 8, 5), presence_penalty=0.5),
        sequence([6], (), repetition_penalty=1.2),
    ]
    rows = sampling_rows(seqs, 50)
    triples = set(
        zip(rows.seen_row.tolist(), rows.seen_token.tolist(), rows.seen_in_output.tolist(), strict=True)
    )
    assert triples == {(1, 3, 0), (1, 5, 2), (1, 8, 1), (2, 6, 0)}
    assert len(rows.seen_row) == 4
    assert rows.presence_penalty.tolist() == [0.0, 0.5, 0.0]


def test_without_rows_all_arrays_are_empty() -> None:
    rows = sampling_rows([], 50)
    assert len(rows.temperature) == len(rows.draws) == len(rows.bias_row) == len(rows.seen_row) == 0
    assert rows.all_greedy


def test_until_min_tokens_what_would_end_the_text_is_barred() -> None:
    """End tokens unless they are ignored, stop tokens always, each once; a bias stays beside them."""
    ends = (5, 6)
    seqs = [
        sequence([1], (), min_tokens=2, stop_token_ids=(7, 5)),
        sequence([1], (9,), min_tokens=2, ignore_eos=True, stop_token_ids=(7,), logit_bias={7: 3.0}),
        sequence([1], (9, 9), min_tokens=2, stop_token_ids=(7,)),
        sequence([1]),
    ]
    rows = sampling_rows(seqs, 50, ends)
    triples = list(
        zip(rows.bias_row.tolist(), rows.bias_token.tolist(), rows.bias_value.tolist(), strict=True)
    )
    bar = -np.inf
    assert triples == [(0, 7, bar), (0, 5, bar), (0, 6, bar), (1, 7, 3.0), (1, 7, bar)]
