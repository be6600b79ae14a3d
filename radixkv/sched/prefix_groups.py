"""Which sequences of a batch share which leading pages, from their page tables alone.

Equal page ids are equal prefixes once duplicates have been repointed, so no token is looked at. Reading a
shared prefix once for many rows is the idea of Hydragen (Juravsky et al., 2024) and of cascade attention
(Ye et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from radixkv.sched.batch import PrefixGroup
from radixkv.types import PageIds


def depth_first_order(tables: Seq[PageIds]) -> list[int]:
    """Indices of ``tables`` such that tables with the same leading pages stand together, the way a walk of
    the tree meets them. Any order of fixed-width keys does that; bytes compare fastest."""
    keys = [table.tobytes() for table in tables]
    return sorted(range(len(tables)), key=keys.__getitem__)


def shared_with_next(tables: Seq[PageIds]) -> NDArray[np.int64]:
    """``[len(tables) - 1]``: how many leading pages table ``i`` shares with table ``i + 1``."""
    if len(tables) < 2:
        return np.zeros(0, np.int64)
    lengths = np.array([len(table) for table in tables], np.int64)
    common = np.minimum(lengths[:-1], lengths[1:])
    sizes = common.tolist()
    left = np.concatenate([table[:size] for table, size in zip(tables, sizes, strict=False)])
    right = np.concatenate([table[:size] for table, size in zip(tables[1:], sizes, strict=True)])
    ends = np.cumsum(common)
    starts = ends - common
    differs = np.append(np.flatnonzero(left != right), len(left))
    first_difference: NDArray[np.int64] = differs[np.searchsorted(differs, starts)]
    shared: NDArray[np.int64] = np.minimum(first_difference, ends) - starts
    return shared


def best_groups(shared: NDArray[np.int64], first_seq: int = 0) -> list[PrefixGroup]:
    """Disjoint groups that together save the most page reads, ``num_pages * (num_seqs - 1)`` each.

    ``shared`` is what ``shared_with_next`` returns for sequences in depth-first order; the group's sequences
    are counted from ``first_seq``.
    """
    groups: list[PrefixGroup] = []
    edges = np.flatnonzero(np.diff(np.concatenate([[0], shared > 0, [0]]).astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        run = shared[start:stop]
        if int(run.min()) == int(run.max()):  # the usual case: one shared prefix
            groups.append(PrefixGroup(first_seq + start, stop - start + 1, int(run[0])))
        else:
            groups += _split_run(run, first_seq + start)
    return groups


def _split_run(shared: NDArray[np.int64], first_seq: int) -> list[PrefixGroup]:
    """The exact optimum over one run by dynamic programming over its last sequence."""
    num_seqs = len(shared) + 1
    saved = np.zeros(num_seqs + 1, np.int64)  # saved[n]: the most that the first n sequences can save
    group_start = np.full(num_seqs + 1, -1, np.int64)
    for stop in range(2, num_seqs + 1):
        saved[stop] = saved[stop - 1]
        # For a group of sequences start..stop-1: the fewest pages that any neighbours in it share.
        fewest = np.minimum.accumulate(shared[: stop - 1][::-1])[::-1]
        options = saved[: stop - 1] + fewest * np.arange(stop - 1, 0, -1)
        start = int(np.argmax(options))
        if options[start] > saved[stop]:
            saved[stop] = options[start]
            group_start[stop] = start
    groups: list[PrefixGroup] = []
    stop = num_seqs
    while stop > 0:
        start = int(group_start[stop])
        if start < 0:
            stop -= 1
        else:
            groups.append(PrefixGroup(first_seq + start, stop - start, int(shared[start : stop - 1].min())))
            stop = start
    return groups[::-1]
