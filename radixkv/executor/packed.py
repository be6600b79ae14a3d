"""Linear layers that keep their time, with oneDNN's packed weights where a probe shows that they win.

``F.linear`` with few rows is far from the speed of the memory; a weight that was reordered once for
oneDNN's kernels is not. With one thread both are as fast; with two, packed is faster at every row count
from 1 to a few hundred. The operators are private to a build of torch, so a probe decides whether they
exist, agree and pay; without them ``F.linear`` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from radixkv.executor.adapter_shelf import AdapterShelf
from radixkv.executor.forward_times import ForwardTimes

ROWS_HINT = 32
"""Rows that the packed layout is chosen for. This hint won or tied at every row count from 1 to 1,024."""
PROBE_ROWS = (1, 16, 64)
PROBE_BYTES = 16 << 20
"""Weights that the probe takes, from the first layer on."""
PROBE_ROUNDS = (3, 9)
PROBE_SECONDS = 0.4
"""Per row count: at least the first number of rounds, then up to the second while the seconds last."""


class _OwnLinear(nn.Module):
    """What both kinds have in common: the time they take, and the adapters that are asked after the
    product (see ``AdapterShelf``)."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        times: ForwardTimes,
        *,
        name: str = "",
        shelf: AdapterShelf | None = None,
        is_transposed: bool = False,
    ) -> None:
        """``name``: under which adapters know the layer. ``is_transposed``: the model itself keeps the
        weight as ``[in_features, out_features]``."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.times = times
        self.name = name
        self.shelf = AdapterShelf() if shelf is None else shelf
        self.is_transposed = is_transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = perf_counter()
        y = self._product(x)
        if not self.shelf.is_idle:
            self.shelf.add(self.name, x, y)
        self.times.matmul += perf_counter() - start
        return y

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class TimedLinear(_OwnLinear):
    """``x @ weight.T + bias`` through ``F.linear``; ``weight`` is ``[out_features, in_features]``."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, times: ForwardTimes, **options: Any
    ) -> None:
        super().__init__(weight, bias, times, **options)
        self.weight = weight

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def plain_weight(self) -> torch.Tensor:
        """``[out_features, in_features]``; a view."""
        return self.weight.detach()

    def set_weight(self, weight: torch.Tensor) -> None:
        """Write another weight, ``[out_features, in_features]``, over this one."""
        self.weight.copy_(weight)


class PackedLinear(_OwnLinear):
    """The same over a weight in oneDNN's layout. It keeps no other copy of the weight and has no
    gradient: it is run under ``torch.inference_mode`` or ``no_grad``."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, times: ForwardTimes, **options: Any
    ) -> None:
        super().__init__(weight, bias, times, **options)
        self.packed = pack_weight(weight)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return packed_linear(x, self.packed, self.bias)

    def plain_weight(self) -> torch.Tensor:
        """``[out_features, in_features]``; a copy."""
        return self.packed.to_dense()

    def set_weight(self, weight: torch.Tensor) -> None:
        """Pack another weight, ``[out_features, in_features]``, in place of this one."""
        self.packed = pack_weight(weight.to(self.packed.dtype))


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
    """What the probe found. ``seconds`` has (rows, plain, packed), summed over the probe's weights."""

    use: bool
    reason: str
    max_error: float = 0.0
    seconds: tuple[tuple[int, float, float], ...] = ()


def probe_packing(weights: Sequence[torch.Tensor]) -> PackingReport:
    """Try packed weights on the first of a model's weights: do they exist, agree and win?

    They agree when the largest difference to ``F.linear`` is under ``2e-5`` of the largest value in
    float32 (``2e-2`` in half precision). They win when the geometric mean over ``PROBE_ROWS`` of packed
    time by plain time is below 1.
    """
    weights = _first(weights)
    if not weights:
        return PackingReport(False, "no linear layers")
    if weights[0].device.type != "cpu":
        return PackingReport(False, f"weights are on {weights[0].device.type}")
    generator = torch.Generator().manual_seed(0)
    bound = 2e-5 if weights[0].dtype == torch.float32 else 2e-2
    max_error, seconds = 0.0, []
    with torch.inference_mode():
        try:
            packed = [pack_weight(weight) for weight in weights]
            for rows in PROBE_ROWS:
                xs = [torch.randn(rows, w.shape[1], generator=generator).to(w.dtype) for w in weights]
                max_error = max(max_error, *map(_error, xs, weights, packed))
                seconds.append((rows, *_race(xs, weights, packed)))
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            return PackingReport(False, f"operators are not usable: {str(error).splitlines()[0]}")
    if not max_error <= bound:
        return PackingReport(False, f"results differ by {max_error:.1e}", max_error, tuple(seconds))
    wins = sum(log(packed_s / plain_s) for _, plain_s, packed_s in seconds) < 0
    return PackingReport(wins, "faster" if wins else "not faster", max_error, tuple(seconds))


def _first(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first weights up to ``PROBE_BYTES``, at least one."""
    taken: list[torch.Tensor] = []
    num_bytes = 0
    for weight in weights:
        num_bytes += weight.numel() * weight.element_size()
        if taken and num_bytes > PROBE_BYTES:
            break
        taken.append(weight)
    return taken


def _error(x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor) -> float:
    plain_y, packed_y = functional.linear(x, weight).float(), packed_linear(x, packed, None).float()
    error = float((plain_y - packed_y).abs().max() / plain_y.abs().max())
    return error if error == error else float("inf")  # max() would lose a NaN


def _race(
    xs: list[torch.Tensor], weights: list[torch.Tensor], packed: list[torch.Tensor]
) -> tuple[float, float]:
    """Seconds of all plain and of all packed products. The best of several rounds is taken per product:
    on a busy machine few of them get through undisturbed, but over a few rounds each does once."""
    best_plain, best_packed = [float("inf")] * len(xs), [float("inf")] * len(xs)
    least, most = PROBE_ROUNDS
    begin = perf_counter()
    for round_idx in range(most):
        if round_idx >= least and perf_counter() - begin > PROBE_SECONDS:
            break
        for i, x in enumerate(xs):
            start = perf_counter()
            functional.linear(x, weights[i])
            best_plain[i] = min(best_plain[i], perf_counter() - start)
        for i, x in enumerate(xs):
            start = perf_counter()
            packed_linear(x, packed[i], None)
            best_packed[i] = min(best_packed[i], perf_counter() - start)
    return sum(best_plain), sum(best_packed)


def is_linear(module: nn.Module) -> bool:
    """Exactly ``nn.Linear`` (a subclass may compute something else) or GPT-2's ``Conv1D``."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def plain_weight(module: Any) -> torch.Tensor:
    """The weight of a linear layer as ``[out_features, in_features]``; a view."""
    weight: torch.Tensor = module.weight
    return weight if type(module) is nn.Linear else weight.detach().t()


def replace_linears(
    model: nn.Module, times: ForwardTimes, *, pack: bool, shelf: AdapterShelf | None = None
) -> dict[str, tuple[int, int]]:
    """Replace every linear layer of ``model``, one after the other. Returns the layers' names with
    ``(out_features, in_features)``. ``shelf``: the adapters that they ask.

    With ``pack`` the packed weight takes the place of the original, which is freed unless something else
    holds it (an embedding tied to the head keeps its own).
    """
    found = [
        (parent, name, f"{path}.{name}" if path else name)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if is_linear(child)
    ]
    shapes: dict[str, tuple[int, int]] = {}
    kind = PackedLinear if pack else TimedLinear
    for parent, name, path in found:
        child = getattr(parent, name)
        is_transposed = type(child) is not nn.Linear
        own = kind(
            plain_weight(child), child.bias, times, name=path, shelf=shelf, is_transposed=is_transposed
        )
        setattr(parent, name, own)
        shapes[path] = (own.out_features, own.in_features)
    return shapes
