"""What a step's attention on the CPU consists of: a list of pieces, made once and used by every layer.

Two levels. The tokens that a group of sequences shares (``PrefixGroup``) are one set of keys for all rows of
the group; what a sequence has for itself, its tail, is attended by its own rows, many sequences in one
piece. Every row is in exactly one tail piece first, which sets its result, then in others, which are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.executor.attention.key_source import Ints, KeySource, StoreMap
from radixkv.sched.batch import Batch, PrefixGroup


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """Where the plan cuts. Numbers are tokens unless named otherwise."""

    max_gather_tokens: int
    """Keys copied out of the store at once."""
    max_view_tokens: int
    """Keys read where they lie at once: all, or as few as are copied when their dtype has to change."""
    row_block: int = 256
    """Rows of one sequence in one piece: causality skips the keys behind a block."""
    min_open_tokens: int = 2048
    """From this length on, keys that all rows of a block see are a piece without a mask."""
    max_mask_values: int = 4 << 20
    """Values in the mask of one piece."""
    min_group_values: int = 1024
    """A shared prefix pays when sequences times tokens of it is at least this."""
    max_short_keys: int = 1024
    """Extending sequences with tails up to this go together in one piece."""
    max_padding: float = 1.6
    """Padded work of a piece over real work."""


@dataclass(frozen=True, eq=False)
class RowPadding:
    """Rows of sequences that differ in their number of rows, padded to the longest."""

    take: Tensor
    """``[num_seqs * n]`` row that stands in each place; padding repeats a sequence's last row."""
    keep: Tensor
    """``[m]`` places that are not padding."""
    put: Tensor
    """``[m]`` rows they belong to, each once."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows attend to keys ``key_start .. key_stop - 1`` of their entry of ``source``."""

    source: KeySource
    key_start: int
    key_stop: int
    first_row: int
    num_rows: int
    """Rows of the batch when they are consecutive; ``num_seqs * n`` when ``padding`` says which they are."""
    padding: RowPadding | None
    mask: Tensor | None
    """0 or -inf, float32: ``[n, keys]`` for one sequence, else ``[num_seqs, 1, n, keys]``."""
    blind: Tensor | None = None
    """``[n]`` bool: rows that see none of these keys, where there are such."""
    is_first: bool = False
    """It sets the rows' result; otherwise it is merged into it."""
    single_rows: bool = False
    """One row per sequence: ``mask`` is ``[num_seqs, 1, 1, keys]``."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Who is where in the batch, and who sees what under one sliding window."""

    seq_lens: Ints
    row_starts: Ints
    """``[S + 1]``"""
    positions: Ints
    lower: Ints
    """``[R]`` first position that a row sees."""
    store_map: StoreMap
    groups: tuple[PrefixGroup, ...]
    page_size: int

    @classmethod
    def of(cls, batch: Batch, limits: PlanLimits) -> Layout:
        """Without a window: every row sees all positions up to its own."""
        seq_lens, row_starts = batch.seq_lens, batch.query_indptr.astype(np.int64)
        num_new = np.diff(row_starts)
        offsets = np.arange(batch.num_rows) - np.repeat(row_starts[:-1], num_new)
        positions = np.repeat(seq_lens - num_new, num_new) + offsets
        assert np.array_equal(positions, batch.positions), "rows must be the last tokens of their sequences"
        worth = [
            group
            for group in batch.prefix_groups
            if group.num_seqs * group.num_pages * batch.page_size >= limits.min_group_values
        ]
        return cls(
            seq_lens=seq_lens,
            row_starts=row_starts,
            positions=positions,
            lower=np.zeros(batch.num_rows, np.int64),
            store_map=StoreMap(batch),
            groups=tuple(worth),
            page_size=batch.page_size,
        )

    def windowed(self, sliding_window: int) -> Layout:
        return replace(self, lower=np.maximum(self.positions - (sliding_window - 1), 0))

    def rows_of(self, seq: int) -> tuple[int, int]:
        return int(self.row_starts[seq]), int(self.row_starts[seq + 1])


def build_pieces(layout: Layout, limits: PlanLimits) -> tuple[Piece, ...]:
    """All pieces of a step in the order in which they must run: tails, then shared prefixes."""
    return tuple(_Planner(layout, limits).pieces())


class _Planner:
    def __init__(self, layout: Layout, limits: PlanLimits) -> None:
        self.layout = layout
        self.limits = limits
        num_seqs = len(layout.seq_lens)
        tail_starts = layout.lower[layout.row_starts[:-1]]
        for group in layout.groups:
            members = slice(group.first_seq, group.first_seq + group.num_seqs)
            shared = group.num_pages * layout.page_size
            tail_starts[members] = np.maximum(tail_starts[members], shared)
        self.tail_starts = tail_starts
        self.tail_lens = layout.seq_lens - tail_starts
        self.num_new = np.diff(layout.row_starts)
        assert num_seqs == 0 or int((self.tail_lens - self.num_new).min()) >= 0, "a prefix reaches into rows"

    def pieces(self) -> Iterator[Piece]:
        yield from self._single_row_tails(np.flatnonzero(self.num_new == 1))
        yield from self._extend_tails(np.flatnonzero(self.num_new > 1))
        for group in self.layout.groups:
            yield from self._prefix(group)

    # Keys ---------------------------------------------------------------------------------------------

    def _span(self, seq: int, start: int, stop: int) -> KeySource:
        """Positions ``start .. stop - 1`` of one sequence."""
        return self.layout.store_map.source(np.array([seq]), np.array([start]), np.array([stop]))

    def _spans(self, seq: int, start: int, stop: int) -> Iterator[tuple[KeySource, int]]:
        """Sources that together are positions ``start .. stop - 1``, with the position each begins at."""
        whole = self._span(seq, start, stop)
        step = self.limits.max_gather_tokens
        if stop - start <= (self.limits.max_view_tokens if whole.slots is None else step):
            yield whole, start
            return
        for left in range(start, stop, step):
            yield self._span(seq, left, min(left + step, stop)), left

    def _tails(self, seqs: Ints) -> tuple[KeySource, Ints]:
        """The tails of several sequences, and ``[n, T]`` the positions, running on over padding."""
        starts = self.tail_starts[seqs]
        source = self.layout.store_map.source(seqs, starts, self.layout.seq_lens[seqs])
        return source, starts[:, None] + np.arange(source.num_keys)

    # Tails --------------------------------------------------------------------------------------------

    def _single_row_tails(self, seqs: Ints) -> Iterator[Piece]:
        """Decode rows: one row over its tail, sequences of similar length together."""
        step = self.limits.max_gather_tokens
        fits = self.tail_lens[seqs] <= step
        for seq in seqs[~fits].tolist():
            start, stop = int(self.tail_starts[seq]), int(self.layout.seq_lens[seq])
            for source, left in self._spans(seq, start, stop):
                for cut in range(0, source.num_keys, step):
                    yield Piece(
                        source, cut, min(cut + step, source.num_keys), int(self.layout.row_starts[seq]), 1,
                        None, None, is_first=left + cut == start, single_rows=True,
                    )  # fmt: skip
        for members in self._buckets(seqs[fits]):
            source, positions = self._tails(members)
            mask = None
            if int(self.tail_lens[members].min()) < source.num_keys:
                mask = _mask(positions < self.layout.seq_lens[members, None])[:, None, None]
            first_row, padding = self._rows(members, 1)
            yield Piece(
                source, 0, source.num_keys, first_row, len(members), padding, mask, is_first=True,
                single_rows=True,
            )  # fmt: skip

    def _extend_tails(self, seqs: Ints) -> Iterator[Piece]:
        """Chunks of more than one row: short ones together, long ones in blocks of rows."""
        limits = self.limits
        short = (self.num_new[seqs] <= limits.row_block) & (
            self.tail_lens[seqs] <= min(limits.max_short_keys, limits.max_gather_tokens)
        )
        for members in self._buckets(seqs[short]):
            if len(members) == 1:
                yield from self._chunk(int(members[0]))
                continue
            source, positions = self._tails(members)
            longest = int(self.num_new[members].max())
            starts = self.layout.row_starts[members, None]
            rows = np.minimum(starts + np.arange(longest), self.layout.row_starts[members + 1, None] - 1)
            mask = _mask(self._sees(rows, positions[:, None, :]))[:, None]
            first_row, padding = self._rows(members, longest)
            yield Piece(
                source, 0, source.num_keys, first_row, len(members) * longest, padding, mask, is_first=True
            )
        for seq in seqs[~short].tolist():
            yield from self._chunk(seq)

    def _chunk(self, seq: int) -> Iterator[Piece]:
        """One sequence's rows over its tail. Keys before a block's first row are a piece without a mask
        when they are many and all of the block's rows see them."""
        layout, limits = self.layout, self.limits
        first, last = layout.rows_of(seq)
        start, stop = int(self.tail_starts[seq]), int(layout.seq_lens[seq])
        shared = next(self._spans(seq, start, stop))[0]
        for row in range(first, last, limits.row_block):
            end = min(row + limits.row_block, last)
            left = max(start, int(layout.lower[row]))
            open_from = max(left, int(layout.lower[end - 1]))
            open_to = int(layout.positions[row])
            behind = int(layout.positions[end - 1]) + 1
            if open_to - open_from < min(limits.min_open_tokens, limits.max_gather_tokens // 2):
                cuts = [(left, behind)]
            else:
                cuts = [(open_to, behind), (open_from, open_to), (left, open_from)]
            for number, (a, b) in enumerate(cuts):
                if a == b:
                    continue
                sources: Iterator[tuple[KeySource, int]] = iter([(shared, start)])
                if shared.num_keys < stop - start:
                    whole = iter([(self._span(seq, a, b), a)])
                    sources = whole if number == 0 else self._spans(seq, a, b)
                for source, base in sources:
                    lo, hi = max(a - base, 0), min(b - base, source.num_keys)
                    yield from self._seen(source, lo, hi, base, row, end, is_first=number == 0)

    # Prefixes -----------------------------------------------------------------------------------------

    def _prefix(self, group: PrefixGroup) -> Iterator[Piece]:
        """The shared tokens, once for all rows of the group; a window may cut off their beginning."""
        layout, limits = self.layout, self.limits
        shared = group.num_pages * layout.page_size
        first = int(layout.row_starts[group.first_seq])
        last = int(layout.row_starts[group.first_seq + group.num_seqs])
        start = min(int(layout.lower[first:last].min()), shared)
        open_from = min(int(layout.lower[first:last].max()), shared)
        if open_from < shared:
            for source, _ in self._spans(group.first_seq, open_from, shared):
                yield Piece(source, 0, source.num_keys, first, last - first, None, None)
        if start < open_from:
            for source, base in self._spans(group.first_seq, start, open_from):
                for row in range(first, last, limits.row_block):
                    end = min(row + limits.row_block, last)
                    yield from self._seen(source, 0, source.num_keys, base, row, end, is_first=False)

    # Rows and masks -----------------------------------------------------------------------------------

    def _sees(self, rows: Ints, positions: Ints) -> NDArray[np.bool_]:
        """Whether each of ``rows`` ``[.., n]`` sees each of ``positions`` ``[.., 1, T]``."""
        layout = self.layout
        return (positions >= layout.lower[rows][..., None]) & (positions <= layout.positions[rows][..., None])

    def _seen(
        self, source: KeySource, lo: int, hi: int, base: int, row: int, end: int, *, is_first: bool
    ) -> Iterator[Piece]:
        """Keys ``lo .. hi - 1`` of a source that begins at position ``base``, for consecutive rows: pieces
        with the mask they need, none for keys that no row sees."""
        step = hi - lo if is_first else max(1, self.limits.max_mask_values // (end - row))
        lower, upper = self.layout.lower[row:end], self.layout.positions[row:end]
        if base + lo >= int(lower.max()) and base + hi - 1 <= int(upper.min()):
            yield Piece(source, lo, hi, row, end - row, None, None, is_first=is_first)
            return
        for left in range(lo, hi, max(step, 1)):
            right = min(left + step, hi)
            sees = self._sees(np.arange(row, end), base + np.arange(left, right))
            if not sees.any():
                continue
            blind = ~sees.any(axis=1)
            yield Piece(
                source, left, right, row, end - row, None, None if sees.all() else _mask(sees),
                blind=torch.from_numpy(blind) if blind.any() else None, is_first=is_first,
            )  # fmt: skip

    def _rows(self, seqs: Ints, longest: int) -> tuple[int, RowPadding | None]:
        """First row when the sequences' rows are consecutive and equally many, else the padding."""
        starts, num_new = self.layout.row_starts[seqs], self.num_new[seqs]
        if np.all(np.diff(seqs) == 1) and np.all(num_new == longest):
            return int(starts[0]), None
        places = np.arange(longest)
        take = starts[:, None] + np.minimum(places, num_new[:, None] - 1)
        keep = np.flatnonzero(places < num_new[:, None])
        take = take.reshape(-1)
        return 0, RowPadding(*(torch.from_numpy(a) for a in (take, keep, take[keep])))

    def _buckets(self, seqs: Ints) -> Iterator[Ints]:
        """Sequences of similar shape, each bucket within the limits on gathers, masks and padding."""
        order = seqs[np.lexsort((seqs, -self.num_new[seqs], -self.tail_lens[seqs]))]
        members: list[int] = []
        most_keys = most_rows = real = 0
        for seq in order.tolist():
            num_keys, num_rows = int(self.tail_lens[seq]), int(self.num_new[seq])
            count, rows = len(members) + 1, max(most_rows, num_rows)
            keys = max(most_keys, num_keys)
            padded = count * keys * rows
            if members and (
                count * keys > self.limits.max_gather_tokens
                or padded > self.limits.max_mask_values
                or padded > self.limits.max_padding * (real + num_keys * num_rows)
            ):
                yield np.array(sorted(members))
                members, most_keys, most_rows, real = [], 0, 0, 0
                keys, rows = num_keys, num_rows
            members.append(seq)
            most_keys, most_rows, real = keys, rows, real + num_keys * num_rows
        if members:
            yield np.array(sorted(members))


def _mask(sees: NDArray[np.bool_]) -> Tensor:
    """0 where a key is seen, -inf where not."""
    return torch.from_numpy(np.where(sees, np.float32(0), np.float32(-np.inf)))
