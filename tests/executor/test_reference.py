"""The oracle against attention written out position by position, without pages, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from radixkv.config import ModelSpec
from radixkv.errors import ConfigError
from radixkv.executor.attention import make_backend
from radixkv.executor.attention.reference import ReferenceBackend
from radixkv.executor.kv_store import KVStore
from radixkv.executor.probe_batch import ProbeSeq, probe_batch

SPEC = ModelSpec(
    name="t", vocab_size=50, num_layers=2, num_query_heads=6, num_kv_heads=2, head_dim=4, max_positions=64
)
LENGTH = 13


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """``[LENGTH, heads, head_dim]`` each, K and V with their own number of heads."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    per_kv_head = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        for head in range(q.shape[1]):
            seen = [p for p in range(row + 1) if window is None or row - p < window]
            scores = []
            for p in seen:
                score = float(torch.dot(q[row, head].double(), k[p, head // per_kv_head].double())) * scale
                scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
            weights = [math.exp(score - max(scores)) for score in scores]
            for p, weight in zip(seen, weights, strict=True):
                out[row, head] += weight / sum(weights) * v[p, head // per_kv_head].double()
    return out.float()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 13, 40])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_equals_attention_written_out(page_size: int, window: int | None, softcap: float | None) -> None:
    """A first chunk of 8, then 4, then 1, beside another sequence, on scattered pages.

    Fault seen: ``last - sliding_window`` as the first position of a window.
    """
    torch.manual_seed(page_size)
    store = KVStore(SPEC, num_pages=40, page_size=page_size, dtype=torch.float32)
    store.data.fill_(float("nan"))
    backend = ReferenceBackend(store)
    q = torch.randn(2, LENGTH, 6, 4)
    k, v = torch.randn(2, LENGTH, 2, 4), torch.randn(2, LENGTH, 2, 4)
    pages = np.random.default_rng(page_size).permutation(40).astype(np.int32).reshape(2, 20)
    tokens = np.zeros(LENGTH, np.int32)
    expected = [by_hand(q[i], k[i], v[i], 0.3, window, softcap) for i in range(2)]
    for spans in (((0, 8), (0, 2)), ((8, 12), (2, 3)), ((12, 13), (3, 4))):
        seqs = [ProbeSeq(i, tokens, *span, pages[i]) for i, span in enumerate(spans)]
        backend.plan(probe_batch(page_size, seqs, vocab_size=50))
        backend.check()
        rows = [torch.cat([x[i, start:stop] for i, (start, stop) in enumerate(spans)]) for x in (q, k, v)]
        out = backend.run(1, *rows, scale=0.3, sliding_window=window, softcap=softcap)
        wanted = torch.cat([expected[i][start:stop] for i, (start, stop) in enumerate(spans)])
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=0)


def test_it_writes_its_slots_and_no_others() -> None:
    store = KVStore(SPEC, num_pages=4, page_size=4, dtype=torch.float32)
    backend = ReferenceBackend(store)
    seq = ProbeSeq(0, np.zeros(6, np.int32), 0, 6, np.array([3, 1], np.int32))
    backend.plan(probe_batch(4, [seq], vocab_size=50))
    k = torch.randn(6, 2, 4)
    backend.run(0, torch.randn(6, 6, 4), k, k + 1, scale=1.0)
    assert torch.equal(store.key(0)[[12, 13, 14, 15, 4, 5]], k)
    assert torch.equal(store.value(0)[[12, 13, 14, 15, 4, 5]], k + 1)
    assert int((store.data != 0).any(dim=(-1, -2)).sum()) == 2 * 6


def test_half_precision_is_computed_in_float32() -> None:
    """Only the inputs and the result are rounded: the error is that of one rounding."""
    torch.manual_seed(0)
    store = KVStore(SPEC, num_pages=4, page_size=16, dtype=torch.bfloat16)
    backend = ReferenceBackend(store)
    q, k, v = (
        torch.randn(9, 6, 4).bfloat16(),
        torch.randn(9, 2, 4).bfloat16(),
        torch.randn(9, 2, 4).bfloat16(),
    )
    backend.plan(
        probe_batch(16, [ProbeSeq(0, np.zeros(9, np.int32), 0, 9, np.array([2], np.int32))], vocab_size=50)
    )
    out = backend.run(0, q, k, v, scale=0.5)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, by_hand(q, k, v, 0.5, None, None).bfloat16())


def test_unknown_backend_is_refused_by_name() -> None:
    store = KVStore(SPEC, num_pages=1, page_size=1, dtype=torch.float32)
    with pytest.raises(ConfigError, match="cpu, reference, got 'fast'"):
        make_backend("fast", store)
    assert isinstance(make_backend("reference", store), ReferenceBackend)
