"""RadixTree: examples with exact page ids. Random work against a page-per-node tree is elsewhere.

Long because each rule of the tree has its example here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv.errors import ConfigError, InternalError, MisuseError
from radixkv.kv import NullTree, RadixTree
from radixkv.types import TokenIds


def ids(*values: int) -> TokenIds:
    return np.array(values, np.int32)


def span(start: int, stop: int) -> TokenIds:
    return np.arange(start, stop, dtype=np.int32)


def counts(num_pages: int = 64, **held: int) -> NDArray[np.int32]:
    """A count of 1 (the tree's own) for each page but those named ``p7=2``."""
    out = np.ones(num_pages, np.int32)
    for name, count in held.items():
        out[int(name[1:])] = count
    return out


def found(tree: RadixTree, tokens: TokenIds) -> tuple[list[int], int | None, int]:
    match = tree.match(tokens)
    tree.check()
    return match.page_ids.tolist(), match.partial_page, match.partial_tokens


@pytest.fixture
def low_recursion_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    yield
    sys.setrecursionlimit(before)


def test_an_empty_tree_finds_nothing() -> None:
    tree = RadixTree(4)
    assert found(tree, span(0, 9)) == ([], None, 0)
    assert tree.evict(3, counts()).tolist() == []
    assert tree.num_pages == 0


def test_whole_pages_then_a_part_of_the_next() -> None:
    tree = RadixTree(4)
    done = tree.insert(span(0, 12), ids(5, 6, 7))
    assert done.canonical.tolist() == [5, 6, 7]
    assert done.adopted.tolist() == [5, 6, 7]
    assert done.replaced is None
    assert found(tree, span(0, 12)) == ([5, 6, 7], None, 0)
    assert found(tree, span(0, 11)) == ([5, 6], 7, 3)
    assert found(tree, span(0, 20)) == ([5, 6, 7], None, 0)
    assert found(tree, ids(0, 1, 2, 3, 4, 99)) == ([5], 6, 1)
    assert found(tree, ids(99)) == ([], None, 0)
    assert tree.match(span(0, 11)).num_tokens == 11


def test_a_split_in_the_middle_of_an_edge_keeps_both_branches() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 12), ids(5, 6, 7))
    other = np.concatenate((span(0, 6), ids(90, 91, 92)))
    done = tree.insert(other, ids(1, 2, 3))
    assert done.canonical.tolist() == [5, 2]
    assert done.adopted.tolist() == [2, 3]
    assert tree.num_nodes == 3
    assert found(tree, span(0, 12)) == ([5, 6, 7], None, 0)
    assert found(tree, other) == ([5, 2], 3, 1)
    assert tree.stats()["num_splits"] == 1


def test_the_best_of_many_children_is_found_to_the_token() -> None:
    tree = RadixTree(4)
    for page, last in enumerate((3, 300, 70_000)):
        tree.insert(ids(1, 2, last, 4), ids(page))
    assert found(tree, ids(1, 2, 300, 5)) == ([], 1, 3)
    assert found(tree, ids(1, 2, 70_000)) == ([], 2, 3)
    assert found(tree, ids(1, 2, 4))[2] == 2
    assert found(tree, ids(1, 3))[2] == 1


def test_a_partial_last_page_is_found() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 6), ids(5, 6))
    assert found(tree, span(0, 9)) == ([5], 6, 2)
    assert found(tree, span(0, 5)) == ([5], 6, 1)
    assert tree.num_tokens_of(6) == 2
    assert tree.num_tokens_of(5) == 4
    assert tree.num_tokens_of(9) == 0


def test_a_fuller_page_replaces_a_partial_one_and_a_smaller_one_is_not_adopted() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 5), ids(5, 6))
    done = tree.insert(span(0, 7), ids(5, 7), 1)
    assert (done.adopted.tolist(), done.replaced) == ([7], (6, 7))
    assert found(tree, span(0, 9)) == ([5], 7, 3)
    done = tree.insert(span(0, 6), ids(5, 8), 1)
    assert (done.adopted.tolist(), done.replaced) == ([], None)
    done = tree.insert(span(0, 12), ids(5, 8, 9), 1)
    assert (done.adopted.tolist(), done.replaced) == ([8, 9], (7, 8))
    assert found(tree, span(0, 12)) == ([5, 8, 9], None, 0)
    assert tree.num_nodes == 1


def test_a_partial_child_is_replaced_beside_a_sibling() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 6), ids(5, 6))
    tree.insert(ids(0, 1, 2, 3, 40, 41), ids(5, 7), 1)
    done = tree.insert(span(0, 8), ids(5, 8), 1)
    assert done.replaced == (6, 8)
    assert found(tree, span(0, 8)) == ([5, 8], None, 0)
    assert found(tree, ids(0, 1, 2, 3, 40, 41)) == ([5], 7, 2)


def test_different_partial_pages_stand_side_by_side() -> None:
    tree = RadixTree(4)
    tree.insert(ids(1, 2), ids(0))
    tree.insert(ids(1, 3), ids(1))
    assert found(tree, ids(1, 2, 9)) == ([], 0, 2)
    assert found(tree, ids(1, 3, 9)) == ([], 1, 2)
    assert tree.num_nodes == 2


def test_a_partial_page_may_get_fuller_where_it_is() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 2), ids(3))
    done = tree.insert(span(0, 4), ids(3))
    assert (done.adopted.tolist(), done.replaced) == ([3], (3, 3))
    assert found(tree, span(0, 4)) == ([3], None, 0)


def test_insert_starts_at_the_last_known_page() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 8), ids(5, 6))
    tree.insert(np.concatenate((span(0, 4), span(50, 54))), ids(5, 7), 1)
    done = tree.insert(span(0, 16), ids(5, 6, 8, 9), 2)
    assert done.canonical.tolist() == [5, 6, 8, 9]
    assert done.adopted.tolist() == [8, 9]
    assert found(tree, span(0, 16)) == ([5, 6, 8, 9], None, 0)


def test_insert_of_pages_the_tree_does_not_hold_as_known_is_misuse() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 8), ids(5, 6))
    with pytest.raises(MisuseError, match="page 4 is said to be known"):
        tree.insert(span(20, 28), ids(4, 3), 1)
    with pytest.raises(MisuseError, match="9 tokens do not fill exactly 2 pages"):
        tree.insert(span(0, 9), ids(5, 6))
    with pytest.raises(MisuseError, match=r"T3.*\[6\]"):
        tree.insert(span(20, 28), ids(7, 6))
    tree.check()


def test_namespaces_are_typed_and_apart() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 4), ids(1), 0, ("a", "bc"))
    tree.insert(span(0, 4), ids(2), 0, ("ab", "c"))
    tree.insert(span(0, 4), ids(3), 0, ("",))
    assert tree.match(span(0, 4), ("a", "bc")).page_ids.tolist() == [1]
    assert tree.match(span(0, 4), ("ab", "c")).page_ids.tolist() == [2]
    assert tree.match(span(0, 4), ("",)).page_ids.tolist() == [3]
    assert tree.peek(span(0, 4), ()) == 0
    assert tree.peek(span(0, 4), (None,)) == 0
    assert tree.stats()["num_namespaces"] == 3
    assert tree.evict(2, counts()).tolist() == [1, 2]
    assert tree.stats()["num_namespaces"] == 1
    tree.check(counts())


def test_eviction_trims_a_leaf_from_its_end() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 14), ids(5, 6, 7, 8))
    assert tree.evict(1, counts()).tolist() == [8]
    assert tree.evict(2, counts()).tolist() == [7, 6]
    assert found(tree, span(0, 14)) == ([5], None, 0)
    assert tree.evict(9, counts()).tolist() == [5]
    assert tree.num_nodes == 0
    tree.check(counts())


def test_eviction_stops_at_a_held_page_and_comes_back_when_it_is_idle() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 12), ids(5, 6, 7))
    held = counts(p5=2, p6=2)
    assert tree.num_idle(held) == 1
    assert tree.evict(9, held).tolist() == [7]
    assert tree.evict(9, counts(p5=2)).tolist() == [], "nobody said that page 6 became idle"
    tree.became_idle(ids(6, 33, 63))
    assert tree.evict(9, counts(p5=2)).tolist() == [6]
    assert tree.stats()["num_trims_beside_held"] == 2
    tree.check(counts(p5=2))


def test_the_least_recently_used_leaf_goes_first_and_looking_does_not_count() -> None:
    tree = RadixTree(4)
    for page in range(4):
        tree.insert(span(10 * page, 10 * page + 4), ids(page))
    tree.match(span(0, 4))
    tree.peek(span(10, 14))
    tree.lookup(span(10, 14))
    tree.explain(span(10, 14))
    assert tree.evict(3, counts()).tolist() == [1, 2, 3]


def test_a_hit_inside_a_page_counts_as_use_of_it() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 4), ids(0))
    tree.insert(span(10, 14), ids(1))
    tree.match(span(0, 2))
    assert tree.evict(1, counts()).tolist() == [1]


def test_pages_of_two_long_leaves_are_evicted_in_turn_as_they_were_used() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 12), ids(0, 1, 2))
    tree.insert(span(50, 62), ids(3, 4, 5))
    tree.match(span(0, 4))
    assert tree.evict(4, counts()).tolist() == [2, 1, 5, 4]
    assert tree.evict(4, counts()).tolist() == [3, 0]


def test_a_parent_follows_its_last_child() -> None:
    tree = RadixTree(4)
    tree.insert(np.concatenate((span(0, 4), span(10, 14))), ids(0, 1))
    tree.insert(np.concatenate((span(0, 4), span(20, 24))), ids(0, 2), 1)
    tree.insert(span(50, 54), ids(3))
    assert tree.evict(3, counts()).tolist() == [1, 2, 0]


def test_a_chain_left_by_eviction_is_merged() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 12), ids(0, 1, 2))
    tree.insert(np.concatenate((span(0, 4), span(90, 94))), ids(0, 3), 1)
    tree.match(span(0, 12))
    assert tree.num_nodes == 3
    assert tree.evict(1, counts()).tolist() == [3]
    assert tree.num_nodes == 1
    assert tree.stats()["num_merges"] == 1
    assert found(tree, span(0, 12)) == ([0, 1, 2], None, 0)


def test_take_gives_a_partial_page_away_and_only_that() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 6), ids(5, 6))
    with pytest.raises(MisuseError, match="page 5 is not a partial page"):
        tree.take(5)
    tree.take(6)
    assert found(tree, span(0, 6)) == ([5], None, 0)
    with pytest.raises(MisuseError, match="page 6"):
        tree.take(6)
    assert tree.evict(2, counts()).tolist() == [5]


def test_clear_lets_go_everything() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 6), ids(5, 6))
    tree.insert(span(0, 6), ids(1, 2), 0, ("other",))
    before = tree.version
    assert tree.clear().tolist() == [1, 2, 5, 6]
    assert tree.version > before
    assert tree.peek(span(0, 6)) == 0
    tree.check(np.zeros(8, np.int32))
    tree.insert(span(0, 6), ids(5, 6))
    assert found(tree, span(0, 6)) == ([5], 6, 2)


def test_the_version_changes_with_the_content_only() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 6), ids(5, 6))
    version = tree.version
    tree.match(span(0, 6))
    tree.insert(span(0, 6), ids(7, 8))
    assert tree.version == version
    tree.evict(1, counts())
    assert tree.version != version


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b028_every_length_is_found_whole_and_to_the_token(page_size: int) -> None:
    """Fault seen: ``agree % self.page_size`` made 0 at the end of ``_walk``."""
    tree = RadixTree(page_size)
    next_page = 0
    for length in range(1, 65):
        tokens = np.full(length, 1000 + length, np.int32)
        pages = np.arange(next_page, next_page + -(-length // page_size), dtype=np.int32)
        next_page += len(pages)
        tree.insert(tokens, pages)
        for shorter in range(length + 1):
            match = tree.match(tokens[:shorter])
            assert match.num_tokens == shorter
            assert match.page_ids.tolist() == pages[: shorter // page_size].tolist()
            assert match.partial_tokens == shorter % page_size
    tree.check()


def test_b001_inserting_again_changes_no_number() -> None:
    """Fault seen: ``insert`` reporting every page as adopted."""
    tree = RadixTree(16)
    a, b = span(0, 32), np.concatenate((span(0, 16), span(90, 106)))
    tree.insert(a, ids(0, 1))
    tree.insert(b, ids(2, 3))
    for first in (10, 20, 30):
        assert tree.insert(a, ids(first, first + 1)).adopted.tolist() == []
        assert tree.num_pages == 3
        assert tree.num_idle(counts()) == 3
    assert tree.evict(9, counts()).tolist() == [3, 1, 0]


def test_b024_keys_that_differ_inside_a_page_split_before_it() -> None:
    """Fault seen: ``_split`` at ``spot.used + 1``."""
    tree = RadixTree(16)
    tree.insert(span(0, 32), ids(0, 1))
    other = np.concatenate((span(0, 20), span(90, 102)))
    assert found(tree, other) == ([0], 1, 4)
    assert tree.insert(other, ids(0, 2), 1).adopted.tolist() == [2]
    assert found(tree, span(0, 32)) == ([0, 1], None, 0)
    assert found(tree, other) == ([0, 2], None, 0)


@pytest.mark.usefixtures("low_recursion_limit")
def test_b098_a_tree_5000_deep_is_walked_iteratively() -> None:
    """Fault seen: ``_nodes`` written as a recursive generator."""
    tree = RadixTree(1)
    trunk = span(0, 5000)
    for length in range(1, 5001):
        tree.insert(trunk[:length], trunk[:length], length - 1)
    for at in range(1, 5000):
        tree.insert(np.append(trunk[:at], np.int32(-1)), np.append(trunk[:at], np.int32(5000 + at)), at)
    assert tree.num_nodes > 9000
    assert tree.match(trunk).num_tokens == 5000
    assert tree.explain(np.append(trunk, np.int32(3))).reason == "absent"
    tree.check(counts(10_000))
    assert len(tree.evict(10_000, counts(10_000))) == 9999
    tree.check()
    assert tree.stats()["num_nodes"] == 0


def test_b011_nodes_never_outnumber_pages() -> None:
    """Fault seen: ``_unlink`` without ``drop_child``."""
    tree = RadixTree(4)
    free = list(range(50))
    for number in range(2000):
        if len(free) < 2:
            free.extend(tree.evict(2, counts(50)).tolist())
        tree.insert(span(10 * number, 10 * number + 6), ids(free.pop(), free.pop()))
        assert tree.num_nodes <= tree.num_pages
        assert tree.stats()["num_candidates"] <= 50
    tree.check(counts(50))


def test_long_edges_are_not_copied_over_and_over() -> None:
    tree = RadixTree(4)
    for start in range(0, 40_000, 4):
        tree.insert(span(0, start + 4), np.arange(start // 4 + 1, dtype=np.int32), start // 4)
    assert 9 < tree.num_nodes < 12, "appending stops at 4,096 tokens"
    assert tree.match(span(0, 40_000)).num_tokens == 40_000
    tree.check()


def test_explain_names_the_first_differing_token() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 10), ids(0, 1, 2))
    whole = tree.explain(span(0, 10))
    assert (whole.hit_tokens, whole.reason, whole.position) == (10, "whole", 10)
    differs = tree.explain(ids(0, 1, 2, 3, 4, 99))
    assert (differs.hit_tokens, differs.reason, differs.cached_token) == (5, "differs", 5)
    absent = tree.explain(span(0, 12))
    assert (absent.hit_tokens, absent.reason, absent.cached_token) == (10, "absent", None)
    assert tree.explain(span(50, 60)).hit_tokens == 0


def test_explain_remembers_what_was_evicted() -> None:
    tree = RadixTree(4)
    tree.remember_evictions(3)
    tree.insert(span(0, 12), ids(0, 1, 2))
    tree.insert(span(50, 58), ids(3, 4))
    tree.evict(2, counts())
    found = tree.explain(span(0, 12))
    assert (found.hit_tokens, found.reason, found.evictions_ago) == (4, "evicted", 1)
    tree.evict(3, counts())
    found = tree.explain(span(0, 12))
    assert (found.hit_tokens, found.reason, found.evictions_ago) == (0, "evicted", 3)
    tree.insert(span(90, 94), ids(7))
    tree.evict(1, counts())
    assert tree.explain(span(0, 12)).reason == "absent", "forgotten: three are remembered"


def test_explain_finds_old_children_of_a_page_that_came_back() -> None:
    tree = RadixTree(4)
    tree.remember_evictions(10)
    tree.insert(span(0, 11), ids(0, 1, 2))
    tree.evict(3, counts())
    tree.insert(span(0, 4), ids(5))
    found = tree.explain(span(0, 12))
    assert (found.hit_tokens, found.reason, found.evictions_ago) == (4, "evicted", 2)
    tree.insert(span(0, 8), ids(5, 6), 1)
    found = tree.explain(span(0, 12))
    assert (found.hit_tokens, found.reason, found.evictions_ago) == (8, "evicted", 3)
    assert tree.explain(np.concatenate((span(0, 8), ids(77)))).reason == "absent"


def test_explain_names_the_other_namespace() -> None:
    tree = RadixTree(4)
    tree.insert(span(0, 12), ids(0, 1, 2), 0, ("b",))
    tree.insert(span(0, 6), ids(3, 4), 0, ("a",))
    found = tree.explain(span(0, 12), ("a",))
    assert (found.hit_tokens, found.reason, found.other_namespace) == (6, "other_namespace", ("b",))
    assert tree.explain(span(0, 12), ("b",)).other_namespace is None


@pytest.mark.parametrize("page_size", [0, 3, -4])
def test_page_sizes_are_powers_of_two(page_size: int) -> None:
    with pytest.raises(ConfigError, match=str(page_size)):
        RadixTree(page_size)


def damaged(name: str) -> RadixTree:
    tree = RadixTree(4)
    tree.insert(span(0, 12), ids(5, 6, 7))
    tree.insert(np.concatenate((span(0, 4), span(90, 94))), ids(5, 8), 1)
    tree.check(counts())
    root = tree._roots[()]
    trunk = root.children.peekitem(0)[1]
    leaf = trunk.children.peekitem(0)[1]
    if name == "T1":
        trunk.ids += b"\x09\0\0\0"
    elif name == "T2":
        _key, child = trunk.children.popitem()
        child.tokens = leaf.tokens[:4]
        trunk.children[leaf.tokens[:4]] = child
        child.ids = child.ids[:4]
    elif name == "T4":
        tree._node_of[5] = leaf
    elif name == "T5":
        tree._order._last_use[5] = 0
    return tree


@pytest.mark.parametrize("name", ["T1", "T2", "T4", "T5"])
def test_check_finds_damage_by_its_name(name: str) -> None:
    with pytest.raises(InternalError, match=f"{name} does not hold"):
        damaged(name).check()


def test_check_finds_a_page_that_stands_twice() -> None:
    tree = damaged("none")
    tree._serial[9] = 99  # said to be held, and nowhere to be found
    with pytest.raises(InternalError, match="T3 does not hold"):
        tree.check()


def test_check_finds_counts_that_rise_and_leaves_that_were_lost() -> None:
    tree = damaged("none")
    with pytest.raises(InternalError, match="M2 does not hold"):
        tree.check(counts(p7=2))
    with pytest.raises(InternalError, match="M1 does not hold"):
        tree.check(counts(p7=0))
    tree._order._queue.clear()
    with pytest.raises(InternalError, match=r"T5 does not hold.*cannot be evicted"):
        tree.check(counts())


def test_a_null_tree_finds_and_keeps_nothing() -> None:
    tree = NullTree(4)
    done = tree.insert(span(0, 6), ids(5, 6))
    assert (done.canonical.tolist(), done.adopted.tolist(), done.replaced) == ([5], [], None)
    assert tree.match(span(0, 6)).num_tokens == tree.peek(span(0, 6)) == 0
    assert tree.num_pages == tree.num_nodes == tree.num_idle(counts()) == tree.num_tokens_of(5) == 0
    assert tree.evict(3, counts()).tolist() == tree.clear().tolist() == tree.held_pages.tolist() == []
    tree.became_idle(ids(5))
    tree.remember_evictions(5)
    tree.check(counts())
    assert tree.explain(span(0, 3)).reason == "absent"
    assert tree.version == 0
    assert set(tree.stats()) <= set(RadixTree(4).stats())
    with pytest.raises(MisuseError, match="page 5"):
        tree.take(5)


def test_a_null_tree_has_every_method_of_the_real_one() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(NullTree) == public(RadixTree)


def test_pages_beyond_every_array_so_far_are_no_trouble() -> None:
    tree = RadixTree(1)
    tree.insert(ids(1), ids(0))
    tree.insert(ids(2), ids(100_000))
    tree.became_idle(ids(2**30))
    assert tree.held_pages.tolist() == [0, 100_000]
    assert tree.num_idle(np.ones(10, np.int32)) == 1


def test_an_insert_of_what_is_known_whole_adopts_nothing() -> None:
    """Known pages end in the middle of an edge, and no token is left to walk with."""
    tree = RadixTree(4)
    tree.insert(span(0, 12), ids(5, 6, 7))
    done = tree.insert(span(0, 8), ids(5, 6), 2)
    assert (done.canonical.tolist(), done.adopted.tolist(), done.replaced) == ([5, 6], [], None)
    tree.check(counts())
