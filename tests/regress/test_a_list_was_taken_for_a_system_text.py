"""``llm.chat([{...}])`` took the list for the system's text, and failed only when something was sent."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from radixkv import LLM, AsyncLLM, EngineConfig, InvalidRequestError, Tokenizer
from radixkv.testing import FakeExecutor


@pytest.mark.parametrize("front", [LLM, AsyncLLM])
def test_a_chat_names_its_messages_argument_at_once(front: Any) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=Backend(models.WordLevel({"a": 0}, unk_token="a")))
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    executor = FakeExecutor(num_pages=8, page_size=4)
    config = EngineConfig(num_pages=8, page_size=4)
    llm = front.from_executor(executor, Tokenizer(wrapped), config=config)
    said = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequestError, match=r"system must be text or None, got .*messages="):
        llm.chat(said)
    assert llm.chat(messages=said).messages == said
    llm.close()
