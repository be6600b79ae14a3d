"""AdapterShelf: the LoRA adapters of one model, and which rows of the running forward belong to which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from radixkv.errors import MisuseError, UnsupportedModelError


@dataclass(frozen=True, eq=False)
class LoraPair:
    """What one adapter adds to one linear layer: ``scale * (x @ a.T) @ b.T`` (Hu et al., 2021)."""

    a: torch.Tensor
    """``[rank, in_features]``"""
    b: torch.Tensor
    """``[out_features, rank]``"""
    scale: float


class AdapterShelf:
    """Adapters by index, from 1 on; an index is never given out twice. Every linear layer of the model asks
    it after its own product, and only rows with an adapter are touched: those of the base model come out
    bit for bit as without it."""

    def __init__(self) -> None:
        self._adapters: dict[int, Mapping[str, LoraPair]] = {}
        self._num_ever = 0
        self._runs: tuple[tuple[int, int, int], ...] = ()  # (first row, behind the last, adapter)
        self._num_rows = 0
        self.touched: set[str] = set()
        """Layers that an adapter was added to since somebody emptied this; for the check at load."""

    @property
    def num_adapters(self) -> int:
        return len(self._adapters)

    def put(self, pairs: Mapping[str, LoraPair]) -> int:
        """Keep an adapter; ``pairs`` by the name of the layer. Returns its index."""
        self._num_ever += 1
        self._adapters[self._num_ever] = pairs
        return self._num_ever

    def has(self, adapter: int) -> bool:
        """Whether there is an adapter of that index."""
        return adapter in self._adapters

    def drop(self, adapter: int) -> None:
        """Forget an adapter. Raises ``MisuseError`` where there is none of that index."""
        if self._adapters.pop(adapter, None) is None:
            raise MisuseError(f"there is no adapter of index {adapter}")

    @contextmanager
    def rows(self, adapters: NDArray[np.int32]) -> Iterator[None]:
        """Inside, every product has ``len(adapters)`` rows, each of the adapter given; 0 is none. Raises
        ``MisuseError`` for an adapter that is not on the shelf."""
        if not adapters.any():
            yield
            return
        missing = set(np.unique(adapters).tolist()) - self._adapters.keys() - {0}
        if missing:
            raise MisuseError(f"there is no adapter of index {', '.join(map(str, sorted(missing)))}")
        borders = np.flatnonzero(np.diff(adapters)) + 1
        starts, stops = [0, *borders.tolist()], [*borders.tolist(), len(adapters)]
        self._runs = tuple(
            (start, stop, int(adapters[start]))
            for start, stop in zip(starts, stops, strict=True)
            if start < stop and adapters[start]
        )
        self._num_rows = len(adapters)
        try:
            yield
        finally:
            self._runs = ()

    @property
    def is_idle(self) -> bool:
        """Whether no row of the running forward has an adapter."""
        return not self._runs

    def add(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Change ``y``, the product of layer ``name`` with ``x``, in the rows that have an adapter for it.
        Both are ``[..., num_rows, features]``."""
        for start, stop, adapter in self._runs:
            pair = self._adapters[adapter].get(name)
            if pair is None:
                continue
            if x.shape[:-1].numel() != self._num_rows:
                raise UnsupportedModelError(
                    f"layer {name} gets {x.shape[:-1].numel()} of {self._num_rows} rows: whose they are is "
                    "not known, so it cannot have an adapter"
                )
            rows = y.view(-1, y.shape[-1])[start:stop]
            part = x.reshape(-1, x.shape[-1])[start:stop]
            rows += functional.linear(functional.linear(part, pair.a), pair.b) * pair.scale
            self.touched.add(name)

    def stats(self) -> dict[str, Any]:
        return {"num_adapters": len(self._adapters)}
