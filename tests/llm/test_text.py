"""The tokenizer's wrapper."""

from __future__ import annotations

import numpy as np
import pytest
from fronts import fake_llm, word_tokenizer, words

from radixkv import InvalidRequestError, SamplingParams


def test_text_to_ids_and_back() -> None:
    tokenizer = word_tokenizer()
    ids = tokenizer.encode(words(3, 199, 4))
    assert ids.dtype == np.int32
    assert ids.tolist() == [3, 199, 4]
    assert tokenizer.decode(ids) == "w3 w199 w4"
    assert tokenizer.decode(ids.tolist()) == "w3 w199 w4"
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([]) == ""


def test_special_tokens_are_recognised_added_and_left_out() -> None:
    tokenizer = word_tokenizer(adds_bos=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 0, 200)
    assert tokenizer.special_token_ids == (0, 1, 2)
    assert tokenizer.encode("w3 </s> w4").tolist() == [1, 3, 0, 4]
    assert tokenizer.encode("w3 </s> w4", add_special_tokens=False).tolist() == [3, 0, 4]
    assert tokenizer.decode([1, 3, 0]) == "w3"
    assert tokenizer.decode([1, 3, 0], skip_special_tokens=False) == "<s> w3 </s>"


def test_spaces_before_punctuation_are_not_tidied() -> None:
    tokenizer = word_tokenizer()
    tokenizer.backend.add_tokens([",", "."])
    ids = tokenizer.encode("w3 , w4 .")
    assert tokenizer.decode(ids) == "w3 , w4 ."


def test_chat_messages_take_the_templates_special_tokens_only() -> None:
    """Fault seen: encoding the template's text with the tokens that begin a text gives two of them."""
    tokenizer = word_tokenizer(adds_bos=True)
    messages = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    assert tokenizer.encode_chat(messages).tolist() == [1, 3, 0, 1, 4, 0, 1]
    assert tokenizer.encode_chat(messages, add_generation_prompt=False).tolist() == [1, 3, 0, 1, 4, 0]
    llm, _ = fake_llm(tokenizer=tokenizer)
    assert (
        llm.generate(tokenizer.encode_chat(messages), SamplingParams(max_tokens=1)).usage.prompt_tokens == 7
    )


def test_chat_without_a_template_or_with_a_refusing_one() -> None:
    tokenizer = word_tokenizer()
    tokenizer.backend.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": "w3"}])
    tokenizer.backend.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "w3"}])
