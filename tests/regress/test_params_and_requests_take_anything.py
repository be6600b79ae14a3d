"""What a caller passes is checked, copied and made plain, field by field: nothing odd reaches the engine."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from radixkv import EngineConfig, InvalidRequestError, SamplingParams
from radixkv.engine import Engine
from radixkv.sequence import Request, token_ids_of
from radixkv.testing import FakeExecutor

HUGE = 10**5000
ODD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": HUGE}, r"max_tokens must lie in 0\.\.2147483647, got a whole number of \d+ bits"),
    ({"max_tokens": np.float64(3.0)}, "max_tokens must be a whole number"),
    ({"max_tokens": np.bool_(True)}, "max_tokens must be a whole number"),
    ({"top_k": HUGE}, "top_k must lie in"),
    ({"seed": HUGE}, "seed must lie in"),
    ({"seed": -1}, "seed must lie in"),
    ({"temperature": 10**400}, "temperature must be finite and lie in"),
    ({"temperature": Fraction(10**400)}, "temperature must be finite and lie in"),
    ({"temperature": 1e-300}, r"lie in 1e-30\.\.1e\+30, got 1e-300 \(or be 0\)"),
    ({"temperature": 3.5e38}, r"lie in 1e-30\.\.1e\+30"),
    ({"temperature": math.nan}, "temperature must be finite"),
    ({"temperature": "0"}, "temperature must be a number"),
    ({"temperature": -1.0}, "temperature must be finite"),
    ({"repetition_penalty": 1e-39}, r"lie in 1e-30\.\.1e\+30, got 1e-39$"),
    ({"repetition_penalty": 3.5e38}, r"lie in 1e-30\.\.1e\+30"),
    ({"repetition_penalty": 0}, "repetition_penalty must"),
    ({"presence_penalty": HUGE}, "presence_penalty must"),
    ({"logit_bias": {HUGE: 1.0}}, "logit_bias token id must lie in"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias token id must lie in"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias token id must be a whole number"),
    ({"logit_bias": {1.5: 1.0}}, "logit_bias token id must be a whole number"),
    ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] must be finite"),
    ({"logit_bias": {1: -1e9}}, r"logit_bias\[1\] must be finite and lie in -10000\.0\.\.10000\.0"),
    ({"logit_bias": [(1, 2.0)]}, "logit_bias must map"),
    ({"logit_bias": None}, "logit_bias must map"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
    ({"stop_token_ids": None}, "stop_token_ids must be a list of token ids"),
    ({"stop_token_ids": {1: 2}}, "stop_token_ids must be a list of token ids"),
    ({"stop_token_ids": ""}, "stop_token_ids must be a list of token ids"),
    ({"stop_token_ids": b"\x01"}, "stop_token_ids must be a list of token ids"),
    ({"stop_token_ids": np.array(3)}, "stop_token_ids must be a list"),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids must lie in"),
    ({"stop_token_ids": [True]}, "stop_token_ids must be a whole number"),
    ({"stop_token_ids": np.ma.array([1, 2], mask=[False, True])}, "stop_token_ids must be a whole number"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False"),
]
ODD_IDS: list[Any] = ["a", None, 2**70, 1.5, HUGE, True]
NO_TUPLES: list[Any] = [None, "ab", ["a"], 5]
ODD_FIELDS: list[Any] = [([],), (1.5,), (True,), ((1,),)]
ODD_INDICES: list[Any] = [-1, 2**64, None, 1.5, "0"]
NO_PARAMS: list[Any] = [None, {}, SamplingParams]
ODD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    *[({"request_id": odd}, "request_id must") for odd in ODD_IDS],
    *[({"namespace": odd}, "namespace must be a tuple") for odd in NO_TUPLES],
    *[({"namespace": odd}, "a namespace is of text") for odd in ODD_FIELDS],
    ({"namespace": ("a", HUGE)}, r"namespace\[1\] must lie in"),
    *[({"sample_index": odd}, "sample_index must") for odd in ODD_INDICES],
    *[({"logprob_start": odd}, "logprob_start must") for odd in (1.5, "a", HUGE, -1, 3, True)],
    *[({"sampling": odd}, "sampling must be SamplingParams") for odd in NO_PARAMS],
    ({"prompt_ids": [1, HUGE]}, r"token ids must lie in 0\.\.2147483647, got a whole .* at position 1"),
    ({"prompt_ids": [1, True]}, "whole numbers in a flat list, got True at position 1"),
    ({"prompt_ids": [1, 2**63, -1]}, "at position 1"),
    ({"prompt_ids": np.ma.array([1, 2], mask=[False, True])}, "masked array"),
    ({"prompt_ids": "ab"}, "flat list of token ids, got str"),
    ({"prompt_ids": object()}, "flat list of token ids, got object"),
]


@pytest.mark.parametrize(("odd", "message"), ODD_PARAMS)
def test_odd_params_are_refused(odd: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**odd)


@pytest.mark.parametrize(("odd", "message"), ODD_REQUESTS)
def test_odd_requests_are_refused_before_the_engine_sees_them(odd: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Request(**{"request_id": 1, "prompt_ids": [1, 2, 3], **odd})


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=np.float64(0.5),
        top_k=np.uint8(7),  # type: ignore[arg-type]
        min_p=0,
        repetition_penalty=np.int32(2),  # type: ignore[arg-type]
        seed=np.uint64(9),  # type: ignore[arg-type]
        logit_bias={np.int64(4): np.float32(1.5)},  # type: ignore[dict-item]
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.5, top_k=7, repetition_penalty=2.0, seed=9,
        logit_bias={4: 1.5}, stop_token_ids=(5, 6),
    )  # fmt: skip
    kinds = {name: type(getattr(params, name)) for name in ("max_tokens", "temperature", "top_k", "seed")}
    assert kinds == {"max_tokens": int, "temperature": float, "top_k": int, "seed": int}
    assert [type(x) for x in (*params.logit_bias, *params.logit_bias.values())] == [int, float]
    assert [type(x) for x in params.stop_token_ids] == [int, int]
    request = Request(
        request_id=np.int32(4),  # type: ignore[arg-type]
        prompt_ids=np.array([1, 2]),
        namespace=("a", np.int64(1), None),  # type: ignore[arg-type]
        logprob_start=np.int64(1),  # type: ignore[arg-type]
        sample_index=np.uint32(2),  # type: ignore[arg-type]
    )
    plain = [request.request_id, *request.namespace, request.logprob_start, request.sample_index]
    assert plain == [4, "a", 1, None, 1, 2]
    assert not [x for x in plain if isinstance(x, np.generic)]
    assert token_ids_of([np.int64(3), 4]).tolist() == [3, 4]


def test_a_bias_that_is_changed_afterwards_changes_nothing() -> None:
    biases: dict[Any, Any] = {3: 1.0}
    params = SamplingParams(max_tokens=4, logit_bias=biases)
    biases.update({-7: 1.0, "a": math.nan})
    assert dict(params.logit_bias) == {3: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[4] = 1.0  # type: ignore[index]
    executor = FakeExecutor(num_pages=8, page_size=4)
    engine = Engine.build(EngineConfig(num_pages=8, page_size=4), executor)
    engine.add(Request(request_id=1, prompt_ids=np.array([1, 2], np.int32), sampling=params))
    while engine.has_work:
        engine.step()
    assert not engine.is_dead


def test_params_can_be_keys_and_travel() -> None:
    first, second = (SamplingParams(logit_bias={3: 1, 4: 2}), SamplingParams(logit_bias={4: 2.0, 3: 1.0}))
    assert first == second
    assert len({first, second, SamplingParams()}) == 2
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == first
