"""linear_seconds: how long a model's matrix products alone take here, with the kernels that serve it."""

from __future__ import annotations

from time import perf_counter

import torch

from radixkv.executor.packed import PackedLinear, TimedLinear
from radixkv.executor.prepared import PreparedModel


def linear_seconds(prepared: PreparedModel, num_rows: int, *, repeats: int = 3) -> tuple[float, float]:
    """Seconds of (all linear layers but the head, the head) over ``num_rows`` rows of random numbers.

    Best of ``repeats`` after one pass that warms up: it is a floor that is wanted, not an average. Nothing
    else of the model runs, and nothing is kept.
    """
    head = prepared.model.get_output_embeddings()
    linears = [m for m in prepared.model.modules() if isinstance(m, (TimedLinear, PackedLinear))]
    generator = torch.Generator().manual_seed(0)
    widths = {linear.in_features for linear in linears}
    inputs = {
        width: torch.randn(1, num_rows, width, generator=generator).to(prepared.device, prepared.dtype)
        for width in widths
    }
    best_layers = best_head = float("inf")
    with torch.inference_mode():
        for attempt in range(repeats + 1):
            layers_s = head_s = 0.0
            for linear in linears:
                start = perf_counter()
                linear(inputs[linear.in_features])
                seconds = perf_counter() - start
                if linear is head:
                    head_s += seconds
                else:
                    layers_s += seconds
            if attempt:
                best_layers, best_head = min(best_layers, layers_s), min(best_head, head_s)
    return best_layers, best_head
