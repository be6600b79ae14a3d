from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from radixkv.sched.batch import PrefixGroup
from radixkv.sched.prefix_groups import best_groups, depth_first_order, shared_with_next
from radixkv.types import PageIds


def table(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def saved(groups: list[PrefixGroup]) -> int:
    return sum(group.num_pages * (group.num_seqs - 1) for group in groups)


def best_by_trying_all(shared: list[int]) -> int:
    """The most page reads that any partition of the sequences into consecutive runs saves."""
    best = 0
    for cuts in product((False, True), repeat=len(shared)):
        total = 0
        run: list[int] = []
        for share, cut in zip([*shared, 0], [*cuts, True], strict=True):
            if cut:
                total += min(run, default=0) * len(run)
                run = []
            else:
                run.append(share)
        best = max(best, total)
    return best


def test_depth_first_order_puts_shared_pages_together() -> None:
    tables = [table(7, 1), table(3, 2, 9), table(7), table(3, 1), table(), table(3, 2, 4)]
    order = depth_first_order(tables)
    arranged = [tables[i].tolist() for i in order]
    assert sorted(order) == list(range(6))
    for length in (1, 2):  # the same leading pages never stand in two places
        heads = [tuple(pages[:length]) for pages in arranged if len(pages) >= length]
        seen = [head for i, head in enumerate(heads) if i == 0 or heads[i - 1] != head]
        assert len(set(seen)) == len(seen)


def test_large_page_ids_order_as_well() -> None:
    tables = [table(256, 5), table(1, 5), table(256, 6), table(65536, 1)]
    order = depth_first_order(tables)
    assert abs(order.index(0) - order.index(2)) == 1


@pytest.mark.parametrize(
    ("tables", "shared"),
    [
        ([table(1, 2, 3), table(1, 2, 3, 4), table(1, 5)], [3, 1]),
        ([table(1), table(2)], [0]),
        ([table(), table(1), table(1)], [0, 1]),
        ([table(), table()], [0]),
        ([table(4, 5)], []),
        ([], []),
        ([table(1, 2), table(3, 2), table(3, 2)], [0, 2]),
    ],
)
def test_shared_with_next(tables: list[PageIds], shared: list[int]) -> None:
    assert shared_with_next(tables).tolist() == shared


def test_one_prefix_for_all_is_one_group() -> None:
    assert best_groups(np.array([70, 70, 70]), 5) == [PrefixGroup(5, 4, 70)]


def test_unrelated_sequences_form_no_group() -> None:
    assert best_groups(np.array([0, 0, 0])) == []
    assert best_groups(np.zeros(0, np.int64)) == []


def test_two_branches_below_a_short_trunk_are_two_groups() -> None:
    # 2 * 1 + 3 * 10 is less than 10 + 10: the trunk is read twice, each branch once.
    assert best_groups(np.array([10, 2, 10])) == [PrefixGroup(0, 2, 10), PrefixGroup(2, 2, 10)]


def test_a_long_trunk_wins_over_short_branches() -> None:
    assert best_groups(np.array([11, 10, 11])) == [PrefixGroup(0, 4, 10)]


def test_the_split_saves_as_much_as_any_other() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        shared = rng.integers(0, 6, rng.integers(1, 8))
        groups = best_groups(shared)
        assert saved(groups) == best_by_trying_all(shared.tolist()), shared
        for group, following in pairwise(groups):
            assert group.first_seq + group.num_seqs <= following.first_seq
        for group in groups:
            members = shared[group.first_seq : group.first_seq + group.num_seqs - 1]
            assert group.num_seqs >= 2 and group.num_pages == members.min() >= 1
