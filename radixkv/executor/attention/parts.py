"""Softmax attention in parts: each part gives its output and its log-sum-exp; parts are merged in float32.

Attending to a set of keys part by part and merging by log-sum-exp is the online softmax of Milakov and
Gimelshein (2018); FlashAttention (Dao et al., 2022) blocks by it, and cascade attention (Hydragen: Juravsky
et al., 2024; FlashInfer: Ye et al., 2024) takes a shared prefix once for all rows by it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_SCORE_BYTES = 32 << 20
"""Scratch for one block of the score matrix in :func:`attend_dense`; twice this lives at once."""
MAX_HEADS_AT_ONCE = 4
"""K/V heads folded into one matrix product in :func:`attend_single_rows`."""
_FOLD_ROWS = 256

FusedKernel = Callable[..., tuple[Tensor, Tensor]]


def find_fused_kernel() -> FusedKernel | None:
    """PyTorch's fused CPU attention that also returns the log-sum-exp, or ``None``.

    The operator is private to PyTorch, so it is compared with :func:`attend_dense` on a small case with
    grouped heads and a mask before it is trusted.
    """
    try:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ramp = torch.arange(2 * 5 * 4 * 8, dtype=torch.float32)
        query = torch.sin(ramp).view(2, 5, 4, 8).transpose(1, 2)
        key = torch.cos(ramp * 0.7)[: 2 * 6 * 2 * 8].view(2, 6, 2, 8).transpose(1, 2)
        value = torch.sin(ramp * 0.3)[: 2 * 6 * 2 * 8].view(2, 6, 2, 8).transpose(1, 2)
        mask = torch.zeros(2, 1, 5, 6)
        mask[0, 0, :, 4:] = float("-inf")
        got = kernel(query, key, value, attn_mask=mask, scale=0.5)
        want = attend_dense(query, key, value, mask=mask, scale=0.5, softcap=None)
        agree = all(
            a.shape == b.shape and bool(torch.allclose(a, b, atol=1e-5))
            for a, b in zip(got, want, strict=True)
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return kernel if agree else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    fused: FusedKernel | None,
) -> tuple[Tensor, Tensor]:
    """Attention of many rows over one set of keys per batch entry; all tensors float32.

    ``query`` is ``[B, num_query_heads, n, head_dim]``, ``key`` and ``value`` ``[B, num_kv_heads, T,
    head_dim]``, all with any strides but a contiguous last dimension; ``mask`` is 0 or -inf, ``[n, T]`` or
    ``[B, 1, n, T]``. Returns the output, shaped like ``query``, and the natural log-sum-exp
    ``[B, num_query_heads, n]``. A row that sees no key gets an undefined result.
    """
    if fused is None or softcap is not None:
        return attend_dense(query, key, value, mask=mask, scale=scale, softcap=softcap)
    num_seqs, num_query_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_query_heads // num_kv_heads
    one_mask = mask is None or num_rows == 1
    if group == 1 or not one_mask or num_rows * group > _FOLD_ROWS:
        return fused(query, key, value, attn_mask=mask, scale=scale)
    # Few rows: one product per K/V head with the rows of all its query heads is faster than one for each.
    folded = query.reshape(num_seqs, num_kv_heads, group, num_rows, head_dim).flatten(2, 3)
    out, lse = fused(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """What :func:`attend` does, with plain matrix products and with soft capping.

    Goes through entries and rows in blocks whose scores take at most ``MAX_SCORE_BYTES``, but for a single
    row over very many keys.
    """
    num_seqs, num_query_heads, num_rows, _ = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[2]
    group = num_query_heads // num_kv_heads
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty((num_seqs, num_query_heads, num_rows))
    block = max(1, MAX_SCORE_BYTES // (4 * num_query_heads * num_keys))
    for entry in range(num_seqs):
        keys = key[entry].transpose(1, 2)
        entry_mask = mask if mask is None or mask.dim() == 2 else mask[entry if mask.shape[0] > 1 else 0, 0]
        for start in range(0, num_rows, block):
            rows = query[entry, :, start : start + block] * scale
            taken = rows.shape[1]
            scores = torch.bmm(rows.reshape(num_kv_heads, group * taken, -1), keys)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            scores = scores.view(num_query_heads, taken, num_keys)
            if entry_mask is not None:
                scores += entry_mask[start : start + block]
            top = scores.amax(-1, keepdim=True)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            mixed = torch.bmm(weights.view(num_kv_heads, group * taken, num_keys), value[entry])
            out[entry, :, start : start + block] = mixed.view(num_query_heads, taken, -1) / total
            lse[entry, :, start : start + block] = (top + total.log()).squeeze(-1)
    return out, lse


def heads_at_once(num_kv_heads: int) -> int:
    """Largest divisor of ``num_kv_heads`` up to ``MAX_HEADS_AT_ONCE``."""
    return max(n for n in range(1, MAX_HEADS_AT_ONCE + 1) if num_kv_heads % n == 0)


def attend_single_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    zeros: Tensor,
) -> tuple[Tensor, Tensor]:
    """One row per sequence, each over its own keys, where the fused kernel cannot serve; all float32.

    ``query`` is ``[B, num_query_heads, head_dim]``, ``key`` and ``value`` ``[B, T, num_kv_heads, head_dim]``
    with each token's values together, ``mask`` 0 or -inf ``[B, 1, 1, T]``. Returns ``[B, num_query_heads,
    head_dim]`` and the log-sum-exp ``[B, num_query_heads]``.

    Matrix products with as few rows as one head's group are slow, and K is stored token by token. So up to
    four K/V heads are taken at once: their query rows stand in a block-diagonal matrix, K is read as it lies,
    and of the product with V only the diagonal blocks are kept. ``zeros`` is scratch, at least ``[B,
    num_kv_heads / h, h, group, h, head_dim]`` with ``h = heads_at_once(num_kv_heads)``, zero off the
    diagonal of its two ``h``; only that diagonal is written.
    """
    num_seqs, num_query_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1], key.shape[2]
    heads = heads_at_once(num_kv_heads)
    parts, group = num_kv_heads // heads, num_query_heads // num_kv_heads
    spread = zeros[:num_seqs]
    by_head = query.view(num_seqs, parts, heads, group, head_dim)
    torch.mul(by_head.permute(0, 1, 3, 4, 2), scale, out=spread.diagonal(dim1=2, dim2=4))
    left = spread.view(num_seqs, parts, heads * group, heads * head_dim)
    keys = key.view(num_seqs, num_keys, parts, heads * head_dim)
    values = value.view(num_seqs, num_keys, parts, heads * head_dim)
    scores = _stack([torch.bmm(left[:, part], keys[:, :, part].transpose(1, 2)) for part in range(parts)])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    mixed = _stack([torch.bmm(weights[:, part], values[:, :, part]) for part in range(parts)])
    mixed /= total
    blocks = mixed.view(num_seqs, parts, heads, group, heads, head_dim).diagonal(dim1=2, dim2=4)
    out = blocks.permute(0, 1, 4, 2, 3).reshape(num_seqs, num_query_heads, head_dim)
    return out, (top + total.log()).view(num_seqs, num_query_heads)


def _stack(parts: list[Tensor]) -> Tensor:
    """``[B, len(parts), ..]`` of equal ``[B, ..]``; no copy where there is one."""
    return parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, 1)


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a further part in place: ``out`` and ``part_out`` are ``[.., head_dim]``, ``lse`` and
    ``part_lse`` ``[..]``, float32. ``lse`` is finite; a part that saw nothing has ``part_lse`` -inf and a
    finite ``part_out``."""
    out.lerp_(part_out, torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
