"""A Rig over FakeExecutor: whole benchmarks without a model."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable

from radixkv.bench.rig import Rig
from radixkv.testing.fake_executor import FakeExecutor

VOCAB_SIZE = 40_000


def encode(text: str) -> list[int]:
    """A token for each word."""
    return [1 + zlib.crc32(word.encode()) % (VOCAB_SIZE - 1) for word in text.split()]


class FakeRig:
    """Makes a Rig and keeps the executors that were made, in order; ``prepare`` sees each new one first."""

    def __init__(self, prepare: Callable[[int, FakeExecutor], None] = lambda number, executor: None) -> None:
        self.executors: list[FakeExecutor] = []
        self._prepare = prepare

    def make(self, num_pages: int, page_size: int) -> FakeExecutor:
        executor = FakeExecutor(num_pages=num_pages, page_size=page_size, vocab_size=VOCAB_SIZE)
        self._prepare(len(self.executors), executor)
        self.executors.append(executor)
        return executor

    def __call__(self, options: argparse.Namespace) -> Rig:
        return Rig(name="fake", encode=encode, decode=lambda ids: "The answer is 1.", make_executor=self.make)
