"""CpuBackend: fast exact attention over the paged store on a CPU, in two levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv.errors import ConfigError, InternalError
from radixkv.executor.attention.cpu_plan import Layout, Piece, PlanLimits, build_pieces
from radixkv.executor.attention.key_source import KeySource
from radixkv.executor.attention.parts import (
    attend,
    attend_single_rows,
    find_fused_kernel,
    heads_at_once,
    merge_into,
)
from radixkv.executor.kv_store import KVStore
from radixkv.sched.batch import Batch

GATHER_BYTES = 12 << 20
"""K and V copied out of the store at once, in float32: small enough to be read again from the cache."""


class CpuBackend:
    """Attention over a :class:`KVStore` in host memory, computed in float32 whatever the store's dtype.

    A1: writes only the batch's ``slot_mapping``, reads only slots of the batch's tokens (padding repeats a
    token of the same sequence, so whatever lies in free or half-filled pages is never touched), keeps no
    request state: what ``plan`` made is dropped by the next ``plan``. A2: agrees with ``reference.py`` to
    1e-5 in float32 for inputs of unit size, 2e-2 in bfloat16 and 2e-3 in float16 (the output's rounding).

    The shared prefix of a group is read once per layer for all its rows (cascade attention, see
    ``parts.py``); tails go together in a few large operations. Scratch stays below 64 MB whatever the
    context, but for one row over more keys than that.
    """

    def __init__(self, store: KVStore, *, limits: PlanLimits | None = None, use_fused: bool = True) -> None:
        """``use_fused=False`` leaves PyTorch's private fused kernel aside even where it is sound.

        Raises ``ConfigError`` when the store is not in host memory.
        """
        if store.device.type != "cpu":
            raise ConfigError(f"the cpu attention backend needs a store on cpu, got one on {store.device}")
        spec = store.spec
        token_bytes = 2 * 4 * spec.num_kv_heads * spec.head_dim
        self._store = store
        at_once = max(256, GATHER_BYTES // token_bytes)
        in_place = store.num_slots if store.dtype == torch.float32 else at_once
        self._limits = limits or PlanLimits(max_gather_tokens=at_once, max_view_tokens=in_place)
        self._fused = find_fused_kernel() if use_fused else None
        self._batch: Batch | None = None
        self._slot_mapping = torch.empty(0, dtype=torch.int64)
        self._layout: Layout | None = None
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._keys = torch.empty(0)
        self._values = torch.empty(0)
        self._spread = torch.empty(0)

    def plan(self, batch: Batch) -> None:
        """Once a step: forget the last batch and lay out this one. Masks and indices are made when the
        first layer with a given window runs, and then serve every layer."""
        assert batch.page_size == self._store.page_size, "batch and store differ in page size"
        self._batch = batch
        self._pieces = {}
        self._layout = Layout.of(batch, self._limits)
        self._slot_mapping = torch.tensor(batch.slot_mapping)

    def run(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write this layer's K/V, then attend.

        ``query`` is ``[R, num_query_heads, head_dim]``, ``key`` and ``value`` ``[R, num_kv_heads,
        head_dim]``; returns ``[R, num_query_heads, head_dim]`` in the query's dtype. Raises ``ConfigError``
        for a window or soft cap that is not above 0.
        """
        if sliding_window is not None and sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {sliding_window}")
        if softcap is not None and not softcap > 0:
            raise ConfigError(f"softcap must be above 0, got {softcap}")
        with torch.no_grad():
            pieces = self._pieces_for(sliding_window)
            store = self._store
            store.write(layer_idx, self._slot_mapping, key.to(store.dtype), value.to(store.dtype))
            rows = query.to(torch.float32).contiguous()
            out, lse = torch.empty_like(rows), rows.new_empty(rows.shape[:2])
            loaded: KeySource | None = None
            for piece in pieces:
                if piece.source is not loaded:
                    keys, values = self._load(layer_idx, piece.source)
                    loaded = piece.source
                part, part_lse = self._attend(piece, rows, keys, values, scale, softcap)
                if piece.padding is not None:
                    out.index_copy_(0, piece.padding.put, part.index_select(0, piece.padding.keep))
                    lse.index_copy_(0, piece.padding.put, part_lse.index_select(0, piece.padding.keep))
                elif piece.is_first and piece.num_rows == len(rows):
                    out, lse = part, part_lse
                else:
                    mine = slice(piece.first_row, piece.first_row + piece.num_rows)
                    if piece.is_first:
                        out[mine], lse[mine] = part, part_lse
                    else:
                        merge_into(out[mine], lse[mine], part, part_lse)
            return out.to(query.dtype)

    def _pieces_for(self, sliding_window: int | None) -> tuple[Piece, ...]:
        layout = self._layout
        if layout is None:
            raise InternalError("attention ran before plan()")
        longest = int(layout.seq_lens.max(initial=0))
        window = longest if sliding_window is None else min(sliding_window, longest)
        if window not in self._pieces:
            under = layout if window == longest else layout.windowed(window)
            self._pieces[window] = build_pieces(under, self._limits)
        return self._pieces[window]

    def _attend(
        self, piece: Piece, rows: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """One piece's output ``[piece.num_rows, num_query_heads, head_dim]`` and log-sum-exp without the
        last dimension. ``keys`` and ``values`` are ``[B, T, num_kv_heads, head_dim]``, ``rows`` ``[R,
        num_query_heads, head_dim]``. A row that sees nothing gets 0 and -inf."""
        if piece.padding is None:
            query = rows[piece.first_row : piece.first_row + piece.num_rows]
        else:
            query = rows.index_select(0, piece.padding.take)
        span = slice(piece.key_start, piece.key_stop)
        keys, values = keys[:, span], values[:, span]
        if piece.single_rows and (self._fused is None or softcap is not None):
            return attend_single_rows(
                query, keys, values, mask=piece.mask, scale=scale, softcap=softcap, zeros=self._zeros(query)
            )
        entries = query.view(piece.source.num_seqs, -1, *query.shape[1:])
        part, part_lse = attend(
            entries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask=piece.mask,
            scale=scale, softcap=softcap, fused=self._fused,
        )  # fmt: skip
        part = part.transpose(1, 2).reshape(query.shape)
        part_lse = part_lse.transpose(1, 2).reshape(query.shape[:2])
        if piece.blind is not None:
            part = part.masked_fill(piece.blind[:, None, None], 0.0)
            part_lse = part_lse.masked_fill(piece.blind[:, None], float("-inf"))
        return part, part_lse

    def _load(self, layer_idx: int, source: KeySource) -> tuple[Tensor, Tensor]:
        """K and V as ``[num_seqs, num_keys, num_kv_heads, head_dim]`` float32: a view of the store where it
        lies in order and is float32, else scratch that the next load overwrites."""
        key, value = self._store.key(layer_idx), self._store.value(layer_idx)
        heads = key.shape[1:]
        if source.slots is None:
            part = slice(source.first_slot, source.first_slot + source.num_keys)
            return key[part].unsqueeze(0).to(torch.float32), value[part].unsqueeze(0).to(torch.float32)
        num_values = len(source.slots) * heads.numel()
        if self._keys.numel() < num_values:
            with torch.inference_mode(False):  # scratch outlives the caller's mode
                self._keys, self._values = torch.empty(num_values), torch.empty(num_values)
        loaded = []
        for stored, scratch in ((key, self._keys), (value, self._values)):
            by_slot = stored.view(stored.shape[0], -1)
            into = scratch[:num_values].view(len(source.slots), -1)
            if stored.dtype == torch.float32:
                torch.index_select(by_slot, 0, source.slots, out=into)
            else:
                into.copy_(by_slot.index_select(0, source.slots))
            loaded.append(into.view(source.num_seqs, source.num_keys, *heads))
        return loaded[0], loaded[1]

    def _zeros(self, query: Tensor) -> Tensor:
        """Scratch for :func:`attend_single_rows`, zero off the diagonal."""
        num_seqs, num_query_heads, head_dim = query.shape
        num_kv_heads = self._store.spec.num_kv_heads
        heads = heads_at_once(num_kv_heads)
        shape = (num_kv_heads // heads, heads, num_query_heads // num_kv_heads, heads, head_dim)
        if self._spread.shape[1:] != shape or len(self._spread) < num_seqs:
            with torch.inference_mode(False):
                self._spread = torch.zeros((num_seqs, *shape))
        return self._spread

    def check(self) -> None:
        """Every row's result is set exactly once, before it is merged into, by a piece of its own sequence;
        groups share what they say they share (A1)."""
        batch = self._batch
        if batch is None:
            return
        for group in batch.prefix_groups:
            firsts = batch.page_indptr[group.first_seq : group.first_seq + group.num_seqs]
            tables = [batch.page_indices[start : start + group.num_pages].tolist() for start in firsts]
            assert all(table == tables[0] for table in tables), f"pages of {group} differ"
        written = set(batch.slot_mapping.tolist())
        assert len(written) == batch.num_rows, "a slot is written twice in a step"
        for pieces in self._pieces.values():
            done = torch.zeros(batch.num_rows, dtype=torch.int64)
            for piece in pieces:
                rows = torch.arange(piece.first_row, piece.first_row + piece.num_rows)
                if piece.padding is not None:
                    rows = piece.padding.put
                assert bool((done[rows] == (0 if piece.is_first else 1)).all()), "piece out of order"
                done[rows] = 1
            assert bool(done.all()), "a row belongs to no piece"

    def stats(self) -> dict[str, Any]:
        """Pieces per layer of the last plan, and bytes of scratch that is kept."""
        scratch = (self._keys, self._values, self._spread)
        return {
            "num_pieces": max((len(pieces) for pieces in self._pieces.values()), default=0),
            "scratch_bytes": sum(t.numel() * t.element_size() for t in scratch),
            "fused_kernel": self._fused is not None,
        }
