"""The ledger took a page table that was another sequence's, a fork of pages that it could repoint for one of
the two only, and pools, trees, sequences and tokens that were none. Wrong K and V came of it, or an
``InternalError`` much later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv.errors import ConfigError, InvalidRequestError, MisuseError
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sequence import Request, Sequence

SIZES = (1, 4, 16, 64)


def ledger(page_size: int, num_pages: int = 16) -> KVCacheManager:
    return KVCacheManager(PagePool(num_pages), RadixTree(page_size), max_pinned_pages=2)


def sequence(page_size: int, ids: list[int], request_id: int = 0) -> Sequence:
    return Sequence(Request(request_id=request_id, prompt_ids=np.array(ids, np.int32)), page_size)


def computed(kv: KVCacheManager, ids: list[int], request_id: int = 0) -> Sequence:
    """All but the last token is computed; nothing is committed."""
    seq = sequence(kv.page_size, ids, request_id)
    kv.acquire(seq)
    kv.reserve(seq, len(ids) - seq.num_computed)
    seq.num_computed = len(ids) - 1
    return seq


def forked(kv: KVCacheManager, seq: Sequence) -> Sequence:
    child = seq.copy(number=99, sample_index=0)
    child.page_table = kv.fork(seq)
    child.num_computed, child.num_committed_pages = seq.num_computed, seq.num_committed_pages
    child.namespace = seq.namespace
    return child


VERBS: dict[str, Callable[[KVCacheManager, Any], object]] = {
    "commit": lambda kv, seq: kv.commit(seq),
    "fork": lambda kv, seq: kv.fork(seq),
    "release": lambda kv, seq: kv.release(seq),
    "reserve": lambda kv, seq: kv.reserve(seq, 1),
    "truncate": lambda kv, seq: kv.truncate(seq, seq.num_tokens),
}
LOOKS: dict[str, Callable[[KVCacheManager, Any], object]] = {
    "acquire": lambda kv, seq: kv.acquire(seq),
    "peek": lambda kv, seq: kv.peek(seq),
    "check": lambda kv, seq: kv.check([seq]),
    "truncate": lambda kv, seq: kv.truncate(seq, 1),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("page_size", SIZES)
def test_a_page_table_belongs_to_one_sequence(page_size: int, verb: str) -> None:
    """Fault seen: ``_check_manager`` that does not look at the owner."""
    kv = ledger(page_size)
    length = page_size + 2 if page_size > 1 else 4
    one, two = computed(kv, [1] * length), computed(kv, [2] * length, request_id=1)
    one.page_table, two.page_table = two.page_table, one.page_table
    for seq in (one, two):
        with pytest.raises(MisuseError, match="page table is another sequence's"):
            VERBS[verb](kv, seq)
    one.page_table, two.page_table = two.page_table, one.page_table
    kv.check([one, two])
    for seq in (one, two):
        kv.release(seq)
    kv.check([])
    assert kv.explain([1] * length).hit_tokens == length - 1


@pytest.mark.parametrize("page_size", SIZES)
def test_a_forked_table_is_for_one_sequence_too(page_size: int) -> None:
    """Fault seen: whoever comes first does not become the owner."""
    kv = ledger(page_size)
    parent = computed(kv, [1] * (page_size + 2))
    child = forked(kv, parent)
    other = child.copy(number=100, sample_index=0)
    other.page_table, other.num_computed = child.page_table, child.num_computed
    other.num_committed_pages, other.namespace = child.num_committed_pages, child.namespace
    kv.reserve(child, 1)
    with pytest.raises(MisuseError, match="page table is another sequence's"):
        kv.release(other)
    kv.check([parent, child])
    kv.release(child)
    kv.release(parent)
    kv.check([])


@pytest.mark.parametrize("page_size", SIZES)
def test_a_fork_of_what_was_not_committed_can_still_be_repointed(page_size: int) -> None:
    """Fault seen: ``fork`` that commits nothing (M2)."""
    kv = ledger(page_size)
    first, last = [1] * page_size, [2] * page_size
    rival = sequence(page_size, [*first, 9], request_id=1)
    kv.acquire(rival)
    parent = computed(kv, [*first, *last, 3])
    child = forked(kv, parent)
    kv.check([rival, parent, child])
    kv.reserve(rival, page_size)
    rival.num_computed = page_size
    kv.commit(rival)
    kv.release(rival)
    kv.commit(parent)
    kv.check([parent, child])
    kv.release(parent)
    kv.check([child])
    big = sequence(page_size, list(range(10, 10 + 64 * 16)), request_id=2)
    kv.acquire(big)
    kv.reserve(big, kv.num_available * page_size)
    kv.check([child, big])
    kv.release(child)
    kv.release(big)
    kv.check([])


@pytest.mark.parametrize("verb", [*VERBS, "acquire", "peek", "check"])
@pytest.mark.parametrize("thing", [None, 5, "x", [1, 2]])
def test_what_is_no_sequence_is_refused(verb: str, thing: object) -> None:
    kv = ledger(4)
    with pytest.raises(MisuseError):
        {**VERBS, **LOOKS}[verb](kv, thing)
    kv.check([])
    with pytest.raises(InvalidRequestError, match="is of a Request"):
        Sequence(thing, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1.5, -5, 2**31, True, "x", None, np.float32(2.0), 10**30])
def test_what_is_no_token_is_not_appended(value: object) -> None:
    """Fault seen: numpy makes 1 of 1.5."""
    seq = sequence(4, [1, 2])
    with pytest.raises(MisuseError, match="a token id is a whole number"):
        seq.append(value)  # type: ignore[arg-type]
    assert seq.token_ids.tolist() == [1, 2]
    seq.append(np.int64(7))  # type: ignore[arg-type]
    assert seq.token_ids.tolist() == [1, 2, 7]


@pytest.mark.parametrize("value", [None, 1.5, "x"])
def test_committed_pages_are_a_whole_number(value: Any) -> None:
    kv = ledger(4)
    seq = computed(kv, [1] * 6)
    seq.num_committed_pages = value
    with pytest.raises(MisuseError, match="num_committed_pages must be a whole"):
        kv.commit(seq)


@pytest.mark.parametrize("policy", ["foo", None, 5, [], "LRU"])
def test_an_eviction_policy_that_there_is_not(policy: Any) -> None:
    with pytest.raises(ConfigError, match="eviction_policy must be one of lru, "):
        RadixTree(4, policy)


def test_a_manager_is_of_a_pool_a_tree_and_a_clock() -> None:
    none: Any = None
    number: Any = 5
    with pytest.raises(ConfigError, match="pool must be"):
        KVCacheManager(none, RadixTree(4))
    with pytest.raises(ConfigError, match="tree must be"):
        KVCacheManager(PagePool(4), none)
    with pytest.raises(ConfigError, match="clock must be"):
        KVCacheManager(PagePool(4), RadixTree(4), clock=number)


@pytest.mark.parametrize("kind", [RadixTree, NullTree])
def test_two_managers_share_nothing(kind: type[RadixTree] | type[NullTree]) -> None:
    """Fault seen: ``claim`` that claims nothing."""
    pool, tree = PagePool(4), kind(4)
    KVCacheManager(pool, tree)
    with pytest.raises(MisuseError, match="this pool already"):
        KVCacheManager(pool, kind(4))
    with pytest.raises(MisuseError, match="this tree already"):
        KVCacheManager(PagePool(4), tree)
