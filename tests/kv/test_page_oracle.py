"""PageOracle against examples worked out by hand, so that it can judge the tree."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.testing.page_oracle import PageOracle, num_common
from radixkv.types import TokenIds


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def filled() -> PageOracle:
    oracle = PageOracle(page_size=2)
    oracle.insert(ids(1, 2, 3, 4, 5), [10, 11, 12])
    oracle.insert(ids(1, 2, 6, 7), [20, 21])
    oracle.insert(ids(1, 2), [30], ("salt",))
    return oracle


@pytest.mark.parametrize(
    ("query", "pages", "num_tokens"),
    [
        ((), (), 0),
        ((9,), (), 0),
        ((1,), (), 1),
        ((1, 2), (10,), 2),
        ((1, 2, 3), (10,), 3),
        ((1, 2, 3, 9), (10,), 3),
        ((1, 2, 3, 4, 5, 6), (10, 11), 5),
        ((1, 2, 6, 7, 8), (10, 21), 4),
    ],
)
def test_hits_are_counted_in_tokens(query: tuple[int, ...], pages: tuple[int, ...], num_tokens: int) -> None:
    match = filled().lookup(ids(*query))
    assert (match.page_ids, match.num_tokens) == (pages, num_tokens)


def test_namespaces_do_not_meet() -> None:
    oracle = filled()
    assert oracle.lookup(ids(1, 2, 3), ("salt",)).page_ids == (30,)
    assert oracle.lookup(ids(1, 2, 3), ("pepper",)).num_tokens == 0


def test_known_pages_stay_and_new_ones_are_adopted() -> None:
    insertion = filled().insert(ids(1, 2, 6, 7, 8), [90, 91, 92])
    assert insertion.canonical == (10, 21, 92) and insertion.adopted == (2,) and insertion.replaced is None


def test_a_fuller_page_replaces_its_beginning() -> None:
    oracle = filled()
    insertion = oracle.insert(ids(1, 2, 3, 4, 5, 6), [10, 11, 40])
    assert insertion.adopted == (2,)
    assert insertion.replaced == (12, 40)
    again = oracle.insert(ids(1, 2, 3, 4, 5), [10, 11, 50])
    assert again.canonical == (10, 11, 40) and again.adopted == ()
    oracle.check()


def test_the_leaf_used_longest_ago_goes_first() -> None:
    oracle = filled()
    victims = oracle.evict(9, lambda page_id: page_id != 11)
    assert [node.page_id for node in victims] == [12, 21, 30]
    assert set(oracle.content()) == {10, 11}
    oracle = filled()
    oracle.touch(oracle.lookup(ids(1, 2, 3, 4)).nodes)
    assert [node.page_id for node in oracle.evict(9, lambda page_id: True)] == [12, 21, 30, 11, 10]
    assert not oracle.roots


def test_only_what_can_go_is_idle() -> None:
    assert filled().idle_pages(lambda page_id: page_id != 12) == {21, 30}


def test_content_and_edges() -> None:
    oracle = filled()
    assert oracle.content() == {
        10: ((), -1, (1, 2)),
        11: ((), 10, (3, 4)),
        12: ((), 11, (5,)),
        21: ((), 10, (6, 7)),
        30: (("salt",), -1, (1, 2)),
    }
    assert oracle.num_edges() == 4
    oracle.check()
    assert sorted(oracle.clear()) == [10, 11, 12, 21, 30] and not oracle.content()


def test_common_beginning() -> None:
    assert [num_common(a, b) for a, b in (((), ()), ((1,), ()), ((1, 2), (1, 3)), ((1,), (1, 2)))] == [
        0,
        0,
        1,
        1,
    ]
