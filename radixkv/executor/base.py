"""ModelExecutor: what the engine needs of whatever runs the model."""

from __future__ import annotations

from typing import Any, Protocol

from radixkv.config import ModelSpec
from radixkv.sched.batch import Batch, StepResult


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
