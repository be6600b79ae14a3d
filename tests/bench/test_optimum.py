"""The replayed optimum, on cases that can be worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.bench.optimum import PrefixSet, Replayed, optimal_hits, share_of_optimum
from radixkv.errors import InternalError


def _request(
    prompt: list[int], submitted_s: float = 0.0, output: tuple[int, ...] = (), finished_s: float = 100.0
) -> Replayed:
    return Replayed(np.array(prompt, np.int32), submitted_s, output, finished_s)


def test_first_prompt_hits_nothing_and_later_ones_the_longest_earlier_prefix() -> None:
    requests = [
        _request([1, 2, 3, 4]),
        _request([1, 2, 9]),
        _request([1, 2, 3, 5]),
        _request([7, 7]),
    ]
    assert optimal_hits(requests) == [0, 2, 3, 0]


def test_a_prompt_found_whole_leaves_one_token_to_compute() -> None:
    assert optimal_hits([_request([1, 2, 3]), _request([1, 2, 3]), _request([1, 2])]) == [0, 2, 1]


def test_an_output_counts_only_once_its_request_has_finished_and_without_its_last_token() -> None:
    first = _request([1, 2], 0.0, (3, 4, 5), finished_s=10.0)
    follow_up = [1, 2, 3, 4, 5, 6]
    assert optimal_hits([first, _request(follow_up, 9.9)]) == [0, 2]
    assert optimal_hits([first, _request(follow_up, 10.0)]) == [0, 4]


def test_a_later_prompt_gives_nothing_to_an_earlier_one() -> None:
    assert optimal_hits([_request([1, 2]), _request([1, 2, 3, 4])]) == [0, 2]
    assert optimal_hits([_request([1, 2, 3, 4]), _request([1, 2])]) == [0, 1]


def test_requests_out_of_order_are_a_fault() -> None:
    with pytest.raises(InternalError, match="submission order"):
        optimal_hits([_request([1], 2.0), _request([1], 1.0)])


def test_prefix_set_agrees_with_looking_at_every_pair() -> None:
    rng = random.Random(5)
    prompts = [
        np.array([rng.choice([0, 1, 255, 256, 70_000]) for _ in range(rng.randint(1, 7))], np.int32)
        for _ in range(300)
    ]
    known = PrefixSet()
    for number, prompt in enumerate(prompts):
        by_hand = 0
        for earlier in prompts[:number]:
            length = min(len(prompt), len(earlier))
            equal = prompt[:length] == earlier[:length]
            by_hand = max(by_hand, length if equal.all() else int(np.argmin(equal)))
        assert known.longest_prefix(prompt) == by_hand
        known.add(prompt)


def test_more_than_the_optimum_is_a_fault() -> None:
    assert share_of_optimum(99, 100) == 0.99
    assert share_of_optimum(0, 0) == 1.0
    with pytest.raises(InternalError, match="101 tokens were counted as hits, but the optimum is 100"):
        share_of_optimum(101, 100)
