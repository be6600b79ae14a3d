"""Linear layers that keep their time, with oneDNN's packed weights where a probe shows that they win.

``F.linear`` with few rows is far from the speed of the memory; a weight that was reordered once for
oneDNN's kernels is not. The operators are private to a build of torch, so a probe decides whether they
exist, agree and pay; without them ``F.linear`` does the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from radixkv.executor.forward_times import ForwardTimes

ROWS_HINT = 32
"""Rows that the packed layout is chosen for. This hint won or tied at every row count from 1 to 1,024."""
PROBE_ROWS = (1, 32, 256)
MAX_SLOWDOWN = 1.10
"""Packed may be this much slower at the largest of ``PROBE_ROWS``, where it is only meant to tie."""


class TimedLinear(nn.Module):
    """``x @ weight.T + bias`` through ``F.linear``; ``weight`` is ``[out_features, in_features]``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, times: ForwardTimes) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = perf_counter()
        y = functional.linear(x, self.weight, self.bias)
        self.times.matmul += perf_counter() - start
        return y


class PackedLinear(nn.Module):
    """The same over a weight in oneDNN's layout. It keeps no other copy of the weight and has no
    gradient: it is run under ``torch.inference_mode`` or ``no_grad``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, times: ForwardTimes) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = pack_weight(weight)
        self.bias = bias
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = perf_counter()
        y = packed_linear(x, self.packed, self.bias)
        self.times.matmul += perf_counter() - start
        return y


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Reorder ``[out_features, in_features]`` for oneDNN; the result is opaque."""
    with torch.no_grad():
        plain = weight.detach().contiguous()
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, ROWS_HINT)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` with a weight from ``pack_weight``; ``x`` is ``[..., in_features]``."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


@dataclass(frozen=True)
class PackingReport:
    """What the probe found. ``seconds`` has, per row count, the plain and the packed time."""

    use: bool
    reason: str
    max_error: float = 0.0
    seconds: tuple[tuple[int, float, float], ...] = ()


def probe_packing(weight: torch.Tensor) -> PackingReport:
    """Try packed weights on one weight of the model: do they exist, agree and win?

    They agree when the largest difference to ``F.linear`` is under ``2e-5`` of the largest value in
    float32 (``2e-2`` in half precision). They win when they are faster at the small row counts and no more
    than ``MAX_SLOWDOWN`` slower at the largest.
    """
    if weight.device.type != "cpu":
        return PackingReport(False, f"weights are on {weight.device.type}")
    generator = torch.Generator().manual_seed(0)
    bound = 2e-5 if weight.dtype == torch.float32 else 2e-2
    max_error, seconds = 0.0, []
    with torch.inference_mode():
        try:
            packed = pack_weight(weight)
            for rows in PROBE_ROWS:
                x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
                plain_y, packed_y = functional.linear(x, weight), packed_linear(x, packed, None)
                error = (plain_y.float() - packed_y.float()).abs().max() / plain_y.float().abs().max()
                max_error = max(max_error, float(error))
                seconds.append((rows, *_race(x, weight, packed)))
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            return PackingReport(False, f"operators are not usable: {str(error).splitlines()[0]}")
    if not max_error <= bound:
        return PackingReport(False, f"results differ by {max_error:.1e}", max_error, tuple(seconds))
    few_rows_win = all(packed_s < plain_s for _, plain_s, packed_s in seconds[:-1])
    _, plain_s, packed_s = seconds[-1]
    if few_rows_win and packed_s <= MAX_SLOWDOWN * plain_s:
        return PackingReport(True, "faster", max_error, tuple(seconds))
    return PackingReport(False, "not faster", max_error, tuple(seconds))


def _race(x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor) -> tuple[float, float]:
    """Best of five of plain and packed, taken in turn."""
    best_plain = best_packed = float("inf")
    for _ in range(5):
        start = perf_counter()
        functional.linear(x, weight)
        middle = perf_counter()
        packed_linear(x, packed, None)
        best_plain = min(best_plain, middle - start)
        best_packed = min(best_packed, perf_counter() - middle)
    return best_plain, best_packed


def is_linear(module: nn.Module) -> bool:
    """Exactly ``nn.Linear`` (a subclass may compute something else) or GPT-2's ``Conv1D``."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def plain_weight(module: Any) -> torch.Tensor:
    """The weight of a linear layer as ``[out_features, in_features]``; a view."""
    weight: torch.Tensor = module.weight
    return weight if type(module) is nn.Linear else weight.detach().t()


def replace_linears(model: nn.Module, times: ForwardTimes, *, pack: bool) -> int:
    """Replace every linear layer of ``model``, one after the other, and return how many there were.

    With ``pack`` the packed weight takes the place of the original, which is freed unless something else
    holds it (an embedding tied to the head keeps its own).
    """
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_linear(child)
    ]
    for parent, name in found:
        child = getattr(parent, name)
        kind = PackedLinear if pack else TimedLinear
        setattr(parent, name, kind(plain_weight(child), child.bias, times))
    return len(found)
