"""A stop string made of byte tokens was found one token late: ``min_tokens`` took it for a later one, and a
token behind it was computed and returned. And one that is a special token could never be found at all."""

from __future__ import annotations

import pytest
from front_kit import byte_fallback, byte_level, word_tokenizer

from radixkv import EngineConfig, InvalidRequestError, Output, SamplingParams, Tokenizer
from radixkv.llm import LLM
from radixkv.testing import FakeExecutor

PROMPT = [60, 61, 62, 63]


def write(tokenizer: Tokenizer, ids: list[int], **params: object) -> Output:
    """What is made of the output ``ids``."""
    executor = FakeExecutor(num_pages=64, page_size=4, vocab_size=tokenizer.vocab_size, eos_token_id=0)
    llm = LLM.from_executor(executor, tokenizer, config=EngineConfig(num_pages=64, page_size=4))
    for i, token_id in enumerate(ids):
        executor.force(0, len(PROMPT) + i, token_id)
    output = llm.generate(PROMPT, SamplingParams(max_tokens=len(ids), **params))  # type: ignore[arg-type]
    llm.check()
    assert not llm.engine.has_work
    return output


def fallback_ids(*names: str) -> list[int]:
    return list(byte_fallback().backend.convert_tokens_to_ids(list(names)))


def test_a_stop_string_of_byte_tokens_counts_where_it_is_complete() -> None:
    ids = fallback_ids("<0xC3>", "<0xA9>", *"oooooo")
    for min_tokens in (0, 1, 2):
        output = write(byte_fallback(), ids, stop=("é",), min_tokens=min_tokens)
        assert (output.text, len(output.token_ids), output.stop_reason) == ("", 2, "é")
    for min_tokens in (3, 4):
        output = write(byte_fallback(), ids, stop=("é",), min_tokens=min_tokens)
        assert (output.text, output.finish_reason) == ("éoooooo", "length")


def test_a_stop_string_that_ends_in_byte_tokens_ends_with_them() -> None:
    ids = fallback_ids("o", "<0xC3>", "<0xA9>", "<0xC3>", "<0xA8>", "o")
    output = write(byte_fallback(), ids, stop=("oé",), include_stop_str_in_output=True)
    assert (output.text, len(output.token_ids)) == ("oé", 3)
    output = write(byte_fallback(), ids, stop=("éè",))
    assert (output.text, len(output.token_ids)) == ("o", 5)
    output = write(byte_fallback(), ids, stop=("èo",))
    assert (output.text, len(output.token_ids)) == ("oé", 6)
    early = write(byte_fallback(), ids, stop=("é",), min_tokens=4)  # complete with the third token
    assert (early.text, early.finish_reason) == ("oéèo", "length")


def test_bytes_that_are_no_text_are_no_stop_string() -> None:
    ids = fallback_ids("<0xC3>", "<0xC3>", "<0xA9>", "o", "o")
    output = write(byte_fallback(), ids, stop=("é",))
    assert output.finish_reason == "length"
    assert output.text == byte_fallback().decode(ids)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_half_a_character_is_complete_with_its_own_token(min_tokens: int) -> None:
    tokenizer = byte_level()
    first = tokenizer.backend.convert_ids_to_tokens(tokenizer.encode("é").tolist())[0][0]
    half = tokenizer.backend.convert_tokens_to_ids(first)
    ids = [half, *tokenizer.encode("x").tolist() * 5]
    output = write(tokenizer, ids, stop=("\N{REPLACEMENT CHARACTER}",), min_tokens=min_tokens)
    if min_tokens <= 1:
        assert (output.text, output.finish_reason) == ("", "stop")
    else:
        assert (output.text, output.finish_reason) == ("\N{REPLACEMENT CHARACTER}xxxxx", "length")


def test_a_stop_string_that_is_a_special_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"'</s>' is a special token, .* into stop_token_ids"):
        write(word_tokenizer(), [5, 6], stop=("w9", "</s>"))
    assert write(word_tokenizer(), [5, 6], stop=("w9",)).finish_reason == "length"
