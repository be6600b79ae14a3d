"""CpuBackend against dense attention in float64 and against the reference, over a store full of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_case import NUM_LAYERS, AttentionCase, Family, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.config import ModelSpec
from radixkv.errors import ConfigError, InternalError
from radixkv.executor.attention import cpu, parts
from radixkv.executor.attention.cpu import CpuBackend
from radixkv.executor.attention.cpu_plan import PlanLimits
from radixkv.executor.attention.key_source import KeySource
from radixkv.executor.attention.reference import ReferenceBackend
from radixkv.executor.kv_store import KVStore

TIGHT = PlanLimits(
    max_gather_tokens=24, max_view_tokens=40, row_block=8, min_open_tokens=12, max_mask_values=200,
    min_group_values=0, max_short_keys=20,
)  # fmt: skip
"""Limits so low that small cases meet every cut."""
ROOMY = PlanLimits(max_gather_tokens=4096, max_view_tokens=4096, min_group_values=0)

SHAPES = st.builds(
    Shape,
    page_size=st.sampled_from([1, 4, 16]),
    num_kv_heads=st.sampled_from([1, 2, 3, 5, 8]),
    group_size=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([4, 8, 24]),
)


@st.composite
def family_lists(draw: st.DrawFn) -> list[Family]:
    """Extending families, then decoding ones: alone and in groups, with and without own history."""
    families = []
    for extends in (True, False):
        for _ in range(draw(st.integers(0, 2))):
            members = []
            for _ in range(draw(st.integers(1, 4))):
                rows = draw(st.integers(2, 20)) if extends else 1
                members.append((rows + draw(st.integers(0, 30)), rows))
            families.append(Family(draw(st.integers(0, 6)), tuple(members)))
    return families or [Family(2, ((3, 1), (5, 1)))]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_writes_only_its_slots(case: AttentionCase, before: torch.Tensor) -> None:
    """A1, bit by bit: layer 1 holds the step's K/V in ``slot_mapping``, all else is as before."""
    expected = before.clone()
    by_slot = expected.view(NUM_LAYERS, 2, case.store.num_slots, *before.shape[-2:])
    slots = torch.from_numpy(case.batch.slot_mapping)
    by_slot[1, 0, slots], by_slot[1, 1, slots] = case.key, case.value
    assert torch.equal(bits(case.store.data), bits(expected))


def assert_exact(
    case: AttentionCase,
    backend: CpuBackend,
    *,
    window: int | None = None,
    softcap: float | None = None,
    atol: float = 1e-5,
) -> None:
    before = case.store.data.clone()
    backend.plan(case.batch)
    out = case.run(backend, window=window, softcap=softcap)
    backend.check()
    assert_writes_only_its_slots(case, before)
    wanted = case.dense(window=window, softcap=softcap)
    assert torch.isfinite(wanted).all() and out.dtype == case.query.dtype
    torch.testing.assert_close(out.double(), wanted, atol=atol, rtol=0)


@given(
    shape=SHAPES,
    families=family_lists(),
    limits=st.sampled_from([TIGHT, ROOMY, None]),
    window=st.none() | st.integers(1, 60),
    softcap=st.sampled_from([None, None, 0.8]),
    use_fused=st.booleans(),
    scattered=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=300)
def test_agrees_with_dense_attention(
    shape: Shape, families: list[Family], limits: PlanLimits | None, window: int | None,
    softcap: float | None, use_fused: bool, scattered: bool, seed: int,
) -> None:  # fmt: skip
    """Fault seen: ``positions <= seq_lens`` in the mask of single-row tails."""
    case = AttentionCase(shape, families, seed=seed, scattered=scattered)
    backend = CpuBackend(case.store, limits=limits, use_fused=use_fused)
    assert_exact(case, backend, window=window, softcap=softcap)


@given(
    shape=SHAPES, families=family_lists(), window=st.none() | st.integers(1, 60),
    softcap=st.sampled_from([None, 0.8]),
)  # fmt: skip
@settings(max_examples=40)
def test_agrees_with_the_reference(
    shape: Shape, families: list[Family], window: int | None, softcap: float | None
) -> None:
    """A2."""
    case = AttentionCase(shape, families, seed=3, scattered=True)
    fast, plain = CpuBackend(case.store, limits=TIGHT), ReferenceBackend(case.store)
    outs = []
    for backend in (fast, plain):
        backend.plan(case.batch)
        outs.append(case.run(backend, window=window, softcap=softcap))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("scattered", [True, False])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, atol: float, scattered: bool) -> None:
    """Off the float64 result by no more than the rounding of the output."""
    shape = Shape(page_size=4, num_kv_heads=2, group_size=2, head_dim=8, dtype=dtype)
    families = [Family(0, ((90, 50),)), Family(9, ((7, 3), (5, 5))), Family(30, ((3, 1), (1, 1), (9, 1)))]
    for limits in (TIGHT, None):
        case = AttentionCase(shape, families, seed=1, scattered=scattered)
        backend = CpuBackend(case.store, limits=limits)
        backend.plan(case.batch)
        out = case.run(backend, window=33)
        wanted = case.dense(window=33)
        torch.testing.assert_close(out.double(), wanted, atol=atol, rtol=0)
        torch.testing.assert_close(out, wanted.to(dtype), atol=0, rtol=1.6e-2 if atol > 1e-2 else 2e-3)


@pytest.mark.parametrize("window", [None, 700, 2200])
@pytest.mark.parametrize("use_fused", [True, False])
def test_a_large_chunk_behind_a_long_context(window: int | None, use_fused: bool) -> None:
    """600 rows behind 2,400 tokens with the limits that a user gets: open pieces, row blocks, merges."""
    shape = Shape(page_size=16, num_kv_heads=1, group_size=2, head_dim=8)
    case = AttentionCase(shape, [Family(0, ((3000, 600),))], seed=2, scattered=True)
    limits = PlanLimits(max_gather_tokens=1500, max_view_tokens=1500)
    assert_exact(case, CpuBackend(case.store, limits=limits, use_fused=use_fused), window=window)
    assert_exact(case, CpuBackend(case.store, use_fused=use_fused), window=window)


def test_layers_with_and_without_a_window_share_a_plan() -> None:
    """As in Gemma, where layers alternate; the plan of one window does not serve another."""
    shape = Shape(page_size=4, num_kv_heads=2, group_size=2, head_dim=8)
    case = AttentionCase(shape, [Family(3, ((6, 1), (2, 1)))], seed=0, scattered=True)
    backend = CpuBackend(case.store, limits=ROOMY)
    backend.plan(case.batch)
    for window in (None, 5, 9, 5, None):
        torch.testing.assert_close(
            case.run(backend, window=window).double(), case.dense(window=window), atol=1e-5, rtol=0
        )


def test_a_shared_prefix_is_loaded_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 rows behind 40 shared pages: one view of 640 keys, one gather for all tails; 16 extends alike."""
    shape = Shape(page_size=16, num_kv_heads=3, group_size=3, head_dim=8)
    families = [Family(40, ((60, 60),) * 16), Family(40, tuple((60 + i, 1) for i in range(32)))]
    case = AttentionCase(shape, families, seed=0, scattered=False)
    backend = CpuBackend(case.store)
    loads: list[tuple[int, int]] = []
    load = backend._load

    def recorded(layer_idx: int, source: KeySource) -> tuple[torch.Tensor, torch.Tensor]:
        loads.append((source.num_seqs, source.num_keys))
        return load(layer_idx, source)

    monkeypatch.setattr(backend, "_load", recorded)
    assert_exact(case, backend)
    assert loads == [(32, 91), (16, 60), (1, 640), (1, 640)]
    assert backend.stats()["num_pieces"] == 4


def test_padding_never_costs_twice_the_work() -> None:
    """Tails from 1 to 900 tokens: the keys gathered stay below twice the keys there are."""
    shape = Shape(page_size=1, num_kv_heads=1, group_size=1, head_dim=4)
    lengths = [1, 2, 3, 900, 850, 40, 44, 60, 61, 300, 5, 1, 290, 700]
    case = AttentionCase(shape, [Family(0, ((n, 1),)) for n in lengths], seed=0, scattered=True)
    backend = CpuBackend(case.store)
    assert_exact(case, backend)
    (pieces,) = backend._pieces.values()
    gathered = sum(piece.source.num_seqs * piece.source.num_keys for piece in pieces)
    assert sum(lengths) <= gathered < 2 * sum(lengths)
    assert len(pieces) < len(lengths)


def test_scratch_stays_small_behind_a_long_context() -> None:
    """1,024 rows over 9,000 keys: scores are made in blocks, keys are gathered in blocks."""
    shape = Shape(page_size=16, num_kv_heads=2, group_size=2, head_dim=64)
    case = AttentionCase(shape, [Family(0, ((9000, 1024),))], seed=0, scattered=True)
    backend = CpuBackend(case.store)
    backend.plan(case.batch)
    case.run(backend)
    (pieces,) = backend._pieces.values()
    masks = sum(piece.mask.numel() * 4 for piece in pieces if piece.mask is not None)
    assert backend.stats()["scratch_bytes"] <= cpu.GATHER_BYTES and masks < 8 << 20
    torch.testing.assert_close(case.run(backend).double(), case.dense(), atol=1e-5, rtol=0)


def test_plan_and_scratch_outlive_inference_mode() -> None:
    """Scratch made under ``inference_mode`` serves a run outside it, and the other way round."""
    shape = Shape(page_size=4, num_kv_heads=2, group_size=2, head_dim=8)
    case = AttentionCase(shape, [Family(3, ((6, 1), (2, 1)))], seed=0, scattered=True)
    backend = CpuBackend(case.store, limits=ROOMY)
    with torch.inference_mode():
        backend.plan(case.batch)
        inside = case.run(backend)
    assert torch.equal(case.run(backend), inside)
    backend.plan(case.batch)
    with torch.inference_mode():
        assert torch.equal(case.run(backend), inside)


def test_queries_with_any_strides() -> None:
    shape = Shape(page_size=4, num_kv_heads=2, group_size=2, head_dim=8)
    case = AttentionCase(shape, [Family(3, ((6, 3), (2, 2))), Family(0, ((3, 1),))], seed=0, scattered=True)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    case.key = case.key.transpose(0, 1).contiguous().transpose(0, 1)
    assert_exact(case, CpuBackend(case.store, limits=ROOMY))


def test_a_fused_kernel_that_disagrees_is_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.find_fused_kernel() is not None
    dense = parts.attend_dense
    off = {"by": 0.0}

    def altered(*args: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = dense(*args, **kwargs)  # type: ignore[arg-type]
        return out + off["by"], lse

    monkeypatch.setattr(parts, "attend_dense", altered)
    assert parts.find_fused_kernel() is not None
    off["by"] = 1e-3
    assert parts.find_fused_kernel() is None


def test_bad_input_is_refused() -> None:
    shape = Shape(page_size=4, num_kv_heads=1, group_size=1, head_dim=4)
    case = AttentionCase(shape, [Family(0, ((3, 1),))], seed=0, scattered=True)
    backend = CpuBackend(case.store)
    with pytest.raises(InternalError, match="before plan"):
        case.run(backend)
    backend.plan(case.batch)
    with pytest.raises(ConfigError, match="sliding_window must be at least 1, got 0"):
        case.run(backend, window=0)
    with pytest.raises(ConfigError, match=r"softcap must be above 0, got 0\.0"):
        case.run(backend, softcap=0.0)
    with pytest.raises(AssertionError, match="page size"):
        backend.plan(replace(case.batch, page_size=8))
    spec = ModelSpec(
        name="t", vocab_size=9, num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=4, max_positions=9
    )
    elsewhere = KVStore(spec, num_pages=1, page_size=4, dtype=torch.float32, device="meta")
    with pytest.raises(ConfigError, match="store on cpu, got one on meta"):
        CpuBackend(elsewhere)


def test_check_finds_a_group_that_shares_nothing() -> None:
    """A1: what is read for a row is its own sequence's."""
    shape = Shape(page_size=4, num_kv_heads=1, group_size=1, head_dim=4)
    case = AttentionCase(shape, [Family(2, ((3, 1), (2, 1)))], seed=0, scattered=True)
    backend = CpuBackend(case.store, limits=ROOMY)
    pages = case.batch.page_indices.copy()
    pages[int(case.batch.page_indptr[1])] = pages[int(case.batch.page_indptr[2]) - 1]
    backend.plan(replace(case.batch, page_indices=pages))
    with pytest.raises(AssertionError, match="pages of"):
        backend.check()
