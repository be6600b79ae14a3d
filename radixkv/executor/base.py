"""ModelExecutor: what the engine needs of whatever runs the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from radixkv.config import ModelSpec
from radixkv.sched.batch import Batch, StepResult

WeightUpdate: TypeAlias = Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Weights by name; or a function that is given all of them and returns those to replace."""


class ModelExecutor(Protocol):
    """Runs one Batch at a time and keeps no state of any request (A1)."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_pages(self) -> int:
        """Pages of the store that the pool may hand out (the padding page is not among them)."""

    @property
    def page_size(self) -> int: ...

    def execute(self, batch: Batch) -> StepResult:
        """Do the page copies, then the forward; sample and score. Blocks until the result is there."""

    def stats(self) -> dict[str, Any]: ...


@runtime_checkable
class AdapterExecutor(Protocol):
    """An executor that runs LoRA adapters, by ``Batch.adapter_ids``."""

    def load_adapter(self, path: str | os.PathLike[str]) -> int:
        """Read an adapter; returns its index, above 0 and never given out before."""

    def has_adapter(self, adapter: int) -> bool:
        """Whether an adapter of this index is loaded."""

    def unload_adapter(self, adapter: int) -> None:
        """Forget an adapter that no sequence uses any more."""


@runtime_checkable
class UpdatableExecutor(Protocol):
    """An executor whose weights can be replaced while it is loaded."""

    @property
    def weights_version(self) -> int:
        """Another number whenever the weights are others, whoever replaced them."""

    def update_weights(self, weights: WeightUpdate) -> None:
        """Replace some weights, or raise and change nothing. The store stays as it is."""
