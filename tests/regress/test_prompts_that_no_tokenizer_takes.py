"""Half a surrogate pair, numbers too large to print, masked arrays, ids that are none: typed errors with the
prompt's index, from every call that takes a prompt, and nothing else is disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv import LLM, EngineConfig, InvalidRequestError, Output, SamplingParams, Tokenizer
from radixkv.cli import main
from radixkv.testing import FakeExecutor

HALF = "a\ud800b"
NO_UTF_8 = r"the text does not fit into UTF-8: half a surrogate pair, U\+D800 at position 1$"
HUGE = 10**5000
SOME = SamplingParams(max_tokens=2)
MASKED = np.ma.array([3, 4], mask=[True, False])
BAD: list[tuple[Any, str]] = [
    (HALF, NO_UTF_8),
    ([3, HUGE], r"token id a whole number of \d+ bits at position 1 is outside the vocabulary, 0\.\.49$"),
    ([3, -HUGE], "token id a whole number of"),
    ([3, HUGE, "a"], "token ids must be whole numbers, got 'a' at position 2"),
    ([3, np.bool_(True)], "token ids must be whole numbers, got"),
    (MASKED, "token ids must not be a masked array"),
    (np.ma.array([3, 4]), "token ids must not be a masked array"),
    ([3, np.ma.masked], "position 1 holds a MaskedConstant, not a token id"),
]


def open_llm() -> tuple[LLM, Tokenizer]:
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    executor = FakeExecutor(num_pages=16, page_size=4, vocab_size=50)
    tokenizer = Tokenizer(wrapped)
    return LLM.from_executor(executor, tokenizer, config=EngineConfig(num_pages=16, page_size=4)), tokenizer


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_every_call_names_what_is_wrong(bad: Any, message: str) -> None:
    llm, _ = open_llm()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("prompt 1", lambda: llm.generate(["w3", bad], SOME)),
        ("prompt", lambda: llm.generate(bad, SOME)),
        ("prefix", lambda: llm.prefill(bad)),
        ("prompt", lambda: llm.score(bad, ["w3"])),
        ("continuation 1", lambda: llm.score("w3", ["w4", bad])),
        ("prompt", lambda: llm.explain(bad)),
    ]
    for what, call in calls:
        with pytest.raises(InvalidRequestError, match=f"^{what}: .*{message}"):
            call()
    good, error = llm.generate(["w3", bad], SOME, return_exceptions=True)
    assert isinstance(good, Output) and isinstance(error, InvalidRequestError)


def test_rows_of_a_masked_array_are_refused() -> None:
    llm, _ = open_llm()
    with pytest.raises(InvalidRequestError, match=r"^prompt 0: token ids must not be a masked array"):
        llm.generate(np.ma.array([[3, 4], [5, 6]], mask=[[False, True], [False, False]]), SOME)


def test_the_tokenizer_alone() -> None:
    _, tokenizer = open_llm()
    with pytest.raises(InvalidRequestError, match=f"^{NO_UTF_8}"):
        tokenizer.encode(HALF)
    with pytest.raises(InvalidRequestError, match=f"^{NO_UTF_8}"):
        tokenizer.encode_chat([{"role": "user", "content": HALF}])
    with pytest.raises(InvalidRequestError, match=r"must be text, got b'w3'"):
        tokenizer.encode(b"w3")  # type: ignore[arg-type]
    odd: list[Any] = [-1, HUGE, 2**40, 1.5, "3", None, True]
    for token_id in odd:
        with pytest.raises(InvalidRequestError, match="token id at position 1 must"):
            tokenizer.decode([3, token_id])
    mixed: list[Any] = [3, np.int64(4)]
    assert tokenizer.decode(mixed) == tokenizer.decode(np.array([3, 4], np.int32)) == "w3 w4"
    assert tokenizer.decode([3, 45]).split() == ["w3"]  # the model's vocabulary is padded


def test_the_command_line_says_so_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no/model", "w3", "a\udcff"]) == 1
    assert capsys.readouterr().err == (
        "radixkv: prompt 1: the text does not fit into UTF-8: half a surrogate pair, U+DCFF at position 1\n"
    )
