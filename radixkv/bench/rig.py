"""Rig: a model made ready to be measured, apart from how it is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from radixkv.bench.peer import PeerResult
from radixkv.bench.workloads import Encode, Workload
from radixkv.executor.base import ModelExecutor

MakeExecutor: TypeAlias = Callable[[int, int], ModelExecutor]
"""``(num_pages, page_size)`` to an executor with an empty store over the one model."""


@dataclass(frozen=True)
class Floor:
    """Seconds of a model's matrix products alone: nothing can be faster with these kernels here."""

    chunk_rows: int
    chunk_s: float
    """All layers over ``chunk_rows`` rows."""
    step_rows: int
    step_s: float
    """All layers and the head over ``step_rows`` rows, as a decode step of that many requests does."""
    head_s: float
    """The head alone over ``step_rows`` rows."""

    def seconds(self, *, prompt_tokens: int, max_tokens: int) -> float:
        """Compute ``prompt_tokens`` in full chunks, take a first token for each request, then decode."""
        return prompt_tokens / self.chunk_rows * self.chunk_s + self.head_s + (max_tokens - 1) * self.step_s


class Peer(Protocol):
    """Another system that serves the same workloads."""

    def run(self, workload: Workload) -> PeerResult: ...


@dataclass(frozen=True, eq=False)
class Rig:
    """Everything that a benchmark needs of a model."""

    name: str
    encode: Encode
    decode: Callable[[Sequence[int]], str]
    make_executor: MakeExecutor
    num_threads: int | None = None
    digest: str | None = None
    load_report: dict[str, float] = field(default_factory=dict)
    measure_floor: Callable[[int, int], Floor] | None = None
    """``(chunk_rows, step_rows)`` to the floor; ``None`` where there is no real model."""
    open_peer: Callable[[Workload], Peer] | None = None
    """Warm up transformers' own batching on a small workload; ``None`` where there is no real model."""
