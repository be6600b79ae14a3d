"""How long a model's matrix products alone take here, with the kernels that serve it.

No engine over these kernels can be faster, whatever it does beside them.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from radixkv.executor.packed import PackedLinear, TimedLinear
from radixkv.executor.prepared import PreparedModel


def layer_seconds(prepared: PreparedModel, num_rows: int) -> float:
    """Seconds of all linear layers but the head over ``num_rows`` rows of random numbers."""
    head = prepared.model.get_output_embeddings()
    modules = prepared.model.modules()
    linears = [m for m in modules if isinstance(m, (TimedLinear, PackedLinear)) and m is not head]
    return _best_seconds(prepared, linears, num_rows)


def head_seconds(prepared: PreparedModel, num_rows: int) -> float:
    """Seconds of the head, hidden states to logits, over ``num_rows`` rows of random numbers."""
    return _best_seconds(prepared, [prepared.model.get_output_embeddings()], num_rows)


def _best_seconds(
    prepared: PreparedModel, linears: list[Any], num_rows: int, *, num_passes: int = 3
) -> float:
    """The fastest pass: a floor is wanted, not an average."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        width: torch.randn(1, num_rows, width, generator=generator).to(prepared.device, prepared.dtype)
        for width in {linear.in_features for linear in linears}
    }
    best = float("inf")
    with torch.inference_mode():
        for _ in range(num_passes):
            start = perf_counter()
            for linear in linears:
                linear(inputs[linear.in_features])
            best = min(best, perf_counter() - start)
    return best
