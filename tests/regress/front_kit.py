"""The kits of tests/llm, for the tests that stand here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "llm"))

from async_kit import FOUR, LONG, Gate, expected, start
from fronts import assert_async_idle, assert_idle, fake_async_llm, fake_llm, run, word_tokenizer, words
from tokenizers_kit import byte_fallback, byte_level

__all__ = [
    "FOUR",
    "LONG",
    "Gate",
    "assert_async_idle",
    "assert_idle",
    "byte_fallback",
    "byte_level",
    "expected",
    "fake_async_llm",
    "fake_llm",
    "run",
    "start",
    "word_tokenizer",
    "words",
]
