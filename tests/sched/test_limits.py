from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv.config import EngineConfig, ModelSpec
from radixkv.errors import InvalidRequestError, RequestTooLargeError
from radixkv.sampling import SamplingParams
from radixkv.sched.limits import refuse_unfit
from radixkv.sequence import Request

SPEC = ModelSpec(
    name="m", vocab_size=100, num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=1, max_positions=60
)


def request(prompt: list[int], **sampling: Any) -> Request:
    return Request(request_id=7, prompt_ids=np.array(prompt, np.int32), sampling=SamplingParams(**sampling))


def refuse(bad: Request, num_pages: int = 10, max_pinned_pages: int = 2) -> None:
    config = EngineConfig(num_pages=num_pages, page_size=4, max_pinned_pages=max_pinned_pages)
    refuse_unfit(bad, config, SPEC)


def test_a_request_that_fits_to_its_last_token_is_accepted() -> None:
    refuse(request([1] * 20, max_tokens=13))  # 32 tokens are computed, the 33rd is only sampled
    refuse(request([1] * 32, max_tokens=0))
    refuse(request([99], max_tokens=1, logit_bias={99: 1.0}, stop_token_ids=(99,)))


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestTooLargeError) as caught:
        refuse(request([1] * 20, max_tokens=14))
    for number in (
        "request 7",
        "9 pages of 4 tokens",
        "20 of prompt",
        "max_tokens 14",
        "has 8",
        "(10",
        "of 2",
    ):
        assert number in str(caught.value)


def test_a_request_beyond_the_models_positions_is_refused_with_the_numbers() -> None:
    refuse(request([1] * 40, max_tokens=20), num_pages=100)
    with pytest.raises(RequestTooLargeError, match=r"61 positions \(40 of prompt, max_tokens 21\).* has 60"):
        refuse(request([1] * 40, max_tokens=21), num_pages=100)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([1, 2, 100]), r"token id 100 at position 2 .*0\.\.99"),
        (request([1], logit_bias={100: 1.0}), r"logit_bias names token id 100"),
        (request([1], stop_token_ids=(5, 100)), r"stop_token_ids names token id 100"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(bad: Request, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        refuse(bad)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_alternatives_than_the_vocabulary_has(name: str) -> None:
    config, spec = EngineConfig(num_pages=10, page_size=4), replace(SPEC, vocab_size=9)
    refuse_unfit(request([1, 2], max_tokens=4, **{name: 9}), config, spec)
    with pytest.raises(InvalidRequestError, match=rf"request 7: {name} asks for 10 .* has 9 tokens"):
        refuse_unfit(request([1, 2], max_tokens=4, **{name: 10}), config, spec)


def test_min_tokens_needs_a_token_that_goes_on() -> None:
    refuse(request([1], max_tokens=4, min_tokens=1, stop_token_ids=tuple(range(99))))
    refuse(request([1], max_tokens=4, min_tokens=1, stop_token_ids=(*range(99), 98)))
    refuse(request([1], max_tokens=4, stop_token_ids=tuple(range(100))))
    with pytest.raises(InvalidRequestError, match="request 7: min_tokens is 1, but every token ends"):
        refuse(request([1], max_tokens=4, min_tokens=1, stop_token_ids=tuple(range(100))))


def test_all_samples_need_a_place_at_once() -> None:
    config = EngineConfig(num_pages=10, page_size=4, max_running=3, max_batch_tokens=64)
    refuse_unfit(request([1], max_tokens=4, n=3, temperature=1.0), config, SPEC)
    with pytest.raises(
        RequestTooLargeError, match=r"wants 4 samples .*, at most 3 .*\(max_running 3, .* 64\)"
    ):
        refuse_unfit(request([1], max_tokens=4, n=4, temperature=1.0), config, SPEC)
