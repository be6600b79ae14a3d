"""An LLM over FakeExecutor and a tokenizer of numbered words, for the tests of the front."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from radixkv.async_llm import AsyncLLM
from radixkv.config import EngineConfig
from radixkv.llm import LLM
from radixkv.testing import FakeExecutor
from radixkv.text import Tokenizer

VOCAB_SIZE = 200
T = TypeVar("T")


def word_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    """``w3 .. w199``, each its own number; ``</s>`` (0) ends a text, ``<s>`` (1) may begin one, and what is
    no such word is ``<unk>`` (2)."""
    vocab = {"</s>": 0, "<s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCAB_SIZE)}}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", bos_token="<s>"
    )
    wrapped.chat_template = (
        "{% for message in messages %}<s> {{ message['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    return Tokenizer(wrapped)


def words(*numbers: int) -> str:
    return " ".join(f"w{i}" for i in numbers)


def fake_llm(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_positions: int = 10_000,
    tokenizer: Tokenizer | None = None,
    executor: FakeExecutor | None = None,
    **config: Any,
) -> tuple[LLM, FakeExecutor]:
    """The LLM and its executor, which knows what should come out. The store is checked at every read."""
    executor = executor or FakeExecutor(
        num_pages=num_pages, page_size=page_size, vocab_size=VOCAB_SIZE, max_positions=max_positions
    )
    settings = EngineConfig(num_pages=num_pages, page_size=page_size, **config)
    return LLM.from_executor(executor, tokenizer or word_tokenizer(), config=settings), executor


def assert_idle(llm: LLM) -> None:
    """Nothing runs, nothing is held but by the tree, every invariant holds."""
    llm.check()
    assert not llm.engine.has_work
    stats = llm.stats()["kv"]
    assert stats["num_pages_used"] == stats["num_pages_pinned"]


def fake_async_llm(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    tokenizer: Tokenizer | None = None,
    executor: FakeExecutor | None = None,
    **config: Any,
) -> tuple[AsyncLLM, FakeExecutor]:
    """As ``fake_llm``, for the asynchronous front."""
    executor = executor or FakeExecutor(
        num_pages=num_pages, page_size=page_size, vocab_size=VOCAB_SIZE, max_positions=10_000
    )
    settings = EngineConfig(num_pages=num_pages, page_size=page_size, **config)
    return AsyncLLM.from_executor(executor, tokenizer or word_tokenizer(), config=settings), executor


async def assert_async_idle(llm: AsyncLLM) -> None:
    """Nothing runs, nothing is held but by the tree, every invariant holds."""
    await llm.check()
    stats = await llm.stats()
    assert stats["front"]["num_live"] == 0
    assert stats["scheduler"]["num_running"] == stats["scheduler"]["num_waiting"] == 0
    assert stats["kv"]["num_pages_used"] == stats["kv"]["num_pages_pinned"]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` with a guard: what hangs fails instead. No test measures this time."""

    async def guarded() -> T:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(guarded())
