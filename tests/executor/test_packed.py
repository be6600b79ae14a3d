"""Linear layers, plain and packed: the same numbers, one copy of each weight, time kept."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from radixkv.executor import packed
from radixkv.executor.forward_times import ForwardTimes
from radixkv.executor.packed import PackedLinear, TimedLinear, probe_packing, replace_linears


class Block(nn.Module):
    """Every kind of layer: with and without bias, GPT-2's transposed one, a subclass, a tied head."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 40), nn.Linear(40, 24, bias=False)])
        self.conv = Conv1D(24, 24)
        self.odd = OddLinear(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.layers[1](functional.silu(self.layers[0](x)))
        out: torch.Tensor = self.head(self.odd(self.conv(x)))
        return out


class OddLinear(nn.Linear):
    """Not a plain linear layer, so it must be left alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("pack", [False, True])
def test_replaced_layers_give_the_same_numbers(pack: bool) -> None:
    block, times = Block(), ForwardTimes()
    ids = torch.arange(21).view(1, 21)
    with torch.inference_mode():
        expected = block(ids)
        assert len(replace_linears(block, times, pack=pack)) == 4
        assert times.matmul == 0.0
        torch.testing.assert_close(block(ids), expected, atol=1e-5, rtol=1e-5)
        for rows in (1, 2, 7, 64, 300):
            x = torch.randn(rows, 24)
            assert block.layers[0](x).shape == (rows, 40)
    assert times.matmul > 0.0
    kind = PackedLinear if pack else TimedLinear
    assert [type(m) for m in (*block.layers, block.conv, block.head)] == [kind] * 4
    assert type(block.odd) is OddLinear
    assert block.embed.weight.shape == (50, 24)


def test_replacing_twice_finds_nothing_more() -> None:
    block, times = Block(), ForwardTimes()
    assert len(replace_linears(block, times, pack=True)) == 4
    assert len(replace_linears(block, times, pack=True)) == 0


def test_packed_weights_replace_the_originals() -> None:
    """The unpacked weight is gone from memory; a tied embedding keeps its own.

    Fault seen: ``self.weight = weight`` added to PackedLinear.
    """
    block = Block()
    gone = [weakref.ref(block.layers[0].weight), weakref.ref(block.conv.weight)]
    kept = weakref.ref(block.embed.weight)
    replace_linears(block, ForwardTimes(), pack=True)
    assert [ref() for ref in gone] == [None, None]
    assert kept() is block.embed.weight


def test_unpacked_layers_share_their_weight() -> None:
    block = Block()
    weight = block.layers[0].weight
    replace_linears(block, ForwardTimes(), pack=False)
    assert block.layers[0].weight is weight
    assert block.head.weight is block.embed.weight
    assert {name for name, _ in block.named_parameters()} >= {"layers.0.weight", "embed.weight"}


def test_probe_says_what_it_measured() -> None:
    report = probe_packing([torch.randn(96, 64), torch.randn(64, 96)])
    assert [rows for rows, _, _ in report.seconds] == list(packed.PROBE_ROWS)
    assert report.max_error < 2e-5
    assert report.reason == ("faster" if report.use else "not faster")


def test_probe_refuses_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.packed_linear
    monkeypatch.setattr(packed, "packed_linear", lambda x, w, b: right(x, w, b) * 1.001)
    report = probe_packing([torch.randn(96, 64), torch.randn(64, 96)])
    assert not report.use and report.reason.startswith("results differ by")
    assert 5e-4 < report.max_error < 2e-3


def test_probe_refuses_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.packed_linear
    monkeypatch.setattr(packed, "packed_linear", lambda x, w, b: right(x, w, b) * float("nan"))
    report = probe_packing([torch.randn(96, 64), torch.randn(64, 96)])
    assert not report.use


@pytest.mark.parametrize("error", [AttributeError("no such operator"), RuntimeError("not built in\nmore")])
def test_probe_survives_a_build_without_the_operators(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(packed, "pack_weight", missing)
    report = probe_packing([torch.randn(96, 64), torch.randn(64, 96)])
    assert not report.use
    assert report.reason == f"operators are not usable: {str(error).splitlines()[0]}"


@pytest.mark.parametrize(
    ("packed_seconds", "use"),
    [((0.5, 0.5, 1.5), True), ((0.9, 1.0, 1.0), True), ((1.0, 1.0, 1.0), False), ((0.9, 1.2, 1.0), False)],
)
def test_probe_decides_by_the_geometric_mean(
    monkeypatch: pytest.MonkeyPatch, packed_seconds: tuple[float, ...], use: bool
) -> None:
    by_rows = dict(zip(packed.PROBE_ROWS, packed_seconds, strict=True))
    monkeypatch.setattr(packed, "_race", lambda xs, weights, p: (1.0, by_rows[len(xs[0])]))
    assert probe_packing([torch.randn(96, 64)]).use is use


def test_probe_takes_the_first_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PROBE_BYTES", 3 * 4 * 64 * 64)
    seen: list[int] = []

    def count(xs: list[torch.Tensor], weights: object, packed: object) -> tuple[float, float]:
        seen.append(len(xs))
        return 1.0, 1.0

    monkeypatch.setattr(packed, "_race", count)
    probe_packing([torch.randn(64, 64) for _ in range(5)])
    probe_packing([torch.randn(640, 64) for _ in range(5)])
    assert seen == [3, 3, 3, 1, 1, 1]


def test_nothing_to_probe() -> None:
    assert probe_packing([]).reason == "no linear layers"
