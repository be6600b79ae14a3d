"""Bad input raises before any work, and names the prompt's index, the value and the limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fronts import VOCAB_SIZE, assert_idle, fake_llm, word_tokenizer, words

from radixkv import LLM, InvalidRequestError, Output, RequestTooLargeError, SamplingParams

FOUR = SamplingParams(max_tokens=4)
BAD: list[tuple[Any, str]] = [
    ("", "is empty; at least 1 token is needed"),
    ([], "is empty; at least 1 token is needed"),
    ((), "is empty"),
    (np.array([], np.int32), "is empty"),
    (np.array([]), "is empty"),
    ([3, VOCAB_SIZE], r"token id 200 at position 1 is outside the vocabulary, 0\.\.199"),
    ([3, 4, -1], r"token id -1 at position 2 is outside the vocabulary, 0\.\.199"),
    (np.array([3, 300]), "token id 300 at position 1"),
    (np.array([3, 2**63], np.uint64), "token id 9223372036854775808 at position 1"),
    ([3, 2**80], "token id 1208925819614629174706176 at position 1 is outside"),
    ([3, True], "whole numbers, got True at position 1"),
    ([3, 4.0], r"whole numbers, got 4\.0 at position 1"),
    ([3, None], "whole numbers, got None at position 1"),
    ([3, "w4"], "whole numbers, got 'w4' at position 1"),
    (np.array([3.0, 4.0]), "an array of float64"),
    (np.array([True, False]), "an array of bool"),
    ([[3, 4]], "nested too deep: position 0 holds a list"),
    ([3, [4]], "nested too deep: position 1 holds a list"),
    (np.array([[3, 4]]), "an array of 2 dimensions"),
    (np.array(3), "an array of 0 dimensions"),
    (None, "text or token ids, got NoneType"),
    (b"w3", "text or token ids, got bytes"),
    ({3: 4}, "text or token ids, got dict"),
    (3, "text or token ids, got int"),
]


def test_b077_bad_prompts_are_refused_and_the_next_request_works() -> None:
    """Fault seen: checking each prompt only as it is added lets the first ones run."""
    llm, executor = fake_llm()
    for bad, message in BAD:
        with pytest.raises(InvalidRequestError, match=f"^prompt 2: .*{message}"):
            llm.generate(["w3", [4, 5], bad, "w6"], FOUR)
    assert executor.batches == []
    assert llm.stats()["scheduler"]["num_added"] == 0
    assert llm.generate("w3", FOUR).finish_reason == "length"
    assert_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "^prompt: is empty"),
        ([3, True], "^prompt: token ids must be whole numbers, got True at position 1"),
        ([True], "^prompt: token ids must be whole numbers, got True at position 0"),
        ([3.5], "^prompt: token ids must be whole numbers"),
        ([3, 999], "^prompt: token id 999 at position 1"),
        (np.array([3.0]), "^prompt: .*float64"),
        (np.array([], np.int32), "^prompt: is empty"),
        (np.array(3), "^prompt: .*0 dimensions"),
        (None, "must be text, token ids or a list of these, got NoneType"),
        (3, "must be text, token ids or a list of these, got int"),
        ({"w3"}, "must be text, token ids or a list of these, got set"),
        ((i for i in [3]), "must be text, token ids or a list of these, got generator"),
        (np.zeros((1, 1, 3), np.int32), "^prompt 0: .*2 dimensions"),
        ([None], "^prompt: token ids must be whole numbers, got None at position 0"),
    ],
)
def test_a_single_bad_prompt_has_no_index(prompt: Any, message: str) -> None:
    llm, executor = fake_llm()
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, FOUR)
    assert executor.batches == []


def test_exceptions_in_place_and_the_others_run() -> None:
    llm, executor = fake_llm()
    prompts: list[Any] = []
    for bad, _ in BAD:
        prompts += [bad, [7, 8]]
    outputs = llm.generate(prompts, FOUR, return_exceptions=True)
    assert len(outputs) == len(prompts)
    expected = executor.expected_output(np.array([7, 8]), 4)
    for index, output in enumerate(outputs[::2]):
        assert isinstance(output, InvalidRequestError)
        assert str(output).startswith(f"prompt {2 * index}: ")
    for output in outputs[1::2]:
        assert isinstance(output, Output)
        assert list(output.token_ids) == expected
    assert isinstance(llm.generate([3, 999], FOUR, return_exceptions=True), InvalidRequestError)
    assert_idle(llm)


def test_over_the_context() -> None:
    llm, executor = fake_llm(max_positions=20)
    with pytest.raises(
        RequestTooLargeError,
        match=r"^prompt 1: needs 21 positions \(17 of prompt, max_tokens 4\), the model has 20$",
    ):
        llm.generate([[3], [3] * 17], FOUR)
    assert executor.batches == []
    assert llm.generate([3] * 16, FOUR).usage.completion_tokens == 4


def test_over_the_pool() -> None:
    llm, executor = fake_llm(num_pages=8, max_pinned_pages=2)
    with pytest.raises(RequestTooLargeError, match=r"^prompt 1: needs 7 pages of 4 tokens .* has 6 \(8 less"):
        llm.generate([[3], [3] * 22], FOUR)
    assert executor.batches == []
    assert llm.generate([3] * 21, FOUR).usage.completion_tokens == 4  # the last token is never computed


def test_text_needs_a_tokenizer() -> None:
    llm, executor = fake_llm()
    bare = LLM.from_executor(executor, config=llm.config)
    with pytest.raises(InvalidRequestError, match="prompt 1: got text, but the model came without"):
        bare.generate([[3], "w3"])
    assert bare.generate([3], FOUR).text == ""


def test_empty_text_is_a_prompt_where_the_tokenizer_begins_every_text() -> None:
    llm, _ = fake_llm(tokenizer=word_tokenizer(adds_bos=True))
    assert llm.generate("", FOUR).usage.prompt_tokens == 1


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["w3", "w4"], [FOUR], "got 1 sampling_params for 2 prompts"),
        (["w3"], [FOUR, FOUR], "got 2 sampling_params for 1 prompts"),
        ("w3", [FOUR], "must be SamplingParams, got list"),
        (["w3", "w4"], [FOUR, None], "sampling_params 1: must be SamplingParams, got None"),
        ("w3", {"max_tokens": 4}, "must be SamplingParams, got dict"),
        (["w3"], "greedy", "or a list of them, got str"),
        (
            ["w3"],
            SamplingParams(logit_bias={200: 1.0}),
            r"^prompt 0: logit_bias names token id 200.*0\.\.199",
        ),
        (["w3"], SamplingParams(stop_token_ids=(7, 200)), "^prompt 0: stop_token_ids names token id 200"),
    ],
)
def test_sampling_params_are_checked_too(prompts: Any, params: Any, message: str) -> None:
    llm, executor = fake_llm()
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params)
    assert executor.batches == []


def test_prefill_score_and_explain_name_what_is_wrong() -> None:
    llm, executor = fake_llm(max_positions=20)
    with pytest.raises(InvalidRequestError, match=r"^prefix: is empty"):
        llm.prefill("")
    with pytest.raises(RequestTooLargeError, match=r"^prefix: needs 21 positions"):
        llm.prefill([3] * 21)
    with pytest.raises(InvalidRequestError, match=r"^prompt: is empty"):
        llm.score("", ["w3"])
    with pytest.raises(InvalidRequestError, match=r"^continuation 1: is empty"):
        llm.score("w3", ["w4", ""])
    with pytest.raises(InvalidRequestError, match=r"^continuation 1: token id 200 at position 0"):
        llm.score("w3", ["w4", [200]])
    with pytest.raises(RequestTooLargeError, match=r"^continuation 0: needs 22 positions"):
        llm.score("w3", [[3] * 21])
    with pytest.raises(
        InvalidRequestError, match="continuations must be a list of texts or token ids, got str"
    ):
        llm.score("w3", "w4")
    with pytest.raises(InvalidRequestError, match=r"^prompt: token ids must be whole numbers"):
        llm.explain([3, None])  # type: ignore[list-item]
    assert executor.batches == []
    assert words(3) == "w3"
