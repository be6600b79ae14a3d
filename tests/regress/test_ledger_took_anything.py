"""The ledger accepted sequences that it does not hold, counts that fell, and arguments of any kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radixkv.errors import ConfigError, InvalidRequestError, MisuseError
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_pool import PagePool
from radixkv.kv.page_table import PageTable
from radixkv.kv.radix_tree import RadixTree
from radixkv.sequence import Request, Sequence
from radixkv.types import Namespace, PageIds, TokenIds

P = 4
Verb = Callable[[KVCacheManager, Sequence], object]
VERBS: dict[str, Verb] = {
    "reserve": lambda kv, seq: kv.reserve(seq, 1),
    "commit": lambda kv, seq: kv.commit(seq),
    "fork": lambda kv, seq: kv.fork(seq),
    "truncate": lambda kv, seq: kv.truncate(seq, seq.num_tokens),
    "release": lambda kv, seq: kv.release(seq),
}


def ids(*values: int) -> TokenIds:
    return np.array(values, np.int32)


def ledger(*, null: bool = False) -> KVCacheManager:
    return KVCacheManager(PagePool(16), NullTree(P) if null else RadixTree(P), max_pinned_pages=4)


def sequence(length: int = 11, namespace: Namespace = ()) -> Sequence:
    return Sequence(
        Request(request_id=7, prompt_ids=np.arange(length, dtype=np.int32), namespace=namespace), P
    )


def computed(kv: KVCacheManager, num_computed: int = 10) -> Sequence:
    """A held sequence of 11 tokens, ``num_computed`` of them computed."""
    seq = sequence()
    kv.acquire(seq)
    kv.reserve(seq, num_computed)
    seq.num_computed = num_computed
    kv.commit(seq)
    return seq


# ---- sequences that it does not hold ---------------------------------------------------------------------


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("verb", ["reserve", "commit", "fork", "truncate"])
@pytest.mark.parametrize("life", ["never acquired", "released"])
def test_what_is_not_acquired_is_refused(verb: str, life: str, null: bool) -> None:
    """Fault seen: ``_check_held`` that returns at once: pages in the default namespace, an empty fork."""
    kv = ledger(null=null)
    seq = sequence(namespace=("a",))
    if life == "released":
        kv.acquire(seq)
        kv.release(seq)
    with pytest.raises(MisuseError, match="request 7, which holds nothing: acquire it first"):
        VERBS[verb](kv, seq)
    kv.release(seq)  # does nothing
    assert kv.pool.num_free == 16
    kv.check([seq])


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("num_computed", [0, 10])
@pytest.mark.parametrize("verb", [*VERBS, "acquire"])
def test_what_another_manager_holds_is_refused(verb: str, num_computed: int, null: bool) -> None:
    """Fault seen: ``_check_manager`` that looks at nothing: its pages freed in the wrong pool."""
    kv, other = ledger(null=null), ledger(null=null)
    theirs, mine = computed(other, num_computed), computed(kv)
    state = (theirs.page_table.pages.tolist(), theirs.num_computed, theirs.namespace)
    call: Verb = VERBS.get(verb, lambda kv, seq: kv.acquire(seq))
    with pytest.raises(MisuseError, match=f"{verb} of request 7, which another manager holds"):
        call(kv, theirs)
    assert state == (theirs.page_table.pages.tolist(), theirs.num_computed, theirs.namespace)
    kv.check([mine])
    other.check([theirs])
    other.release(theirs)
    kv.acquire(theirs)  # free again for anybody
    kv.check([mine, theirs])


def test_acquire_twice_is_refused_even_where_nothing_was_found() -> None:
    kv = ledger()
    seq = sequence()
    kv.acquire(seq)
    with pytest.raises(MisuseError, match="release it first"):
        kv.acquire(seq)
    kv.check([seq])


def test_a_table_made_by_hand_is_refused() -> None:
    kv = ledger()
    held, seq = computed(kv), sequence()
    seq.page_table = PageTable(P, held.page_table.pages)
    for verb in VERBS.values():
        with pytest.raises(MisuseError, match="acquire it first"):
            verb(kv, seq)
    kv.check([held])


# ---- counts that fell ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("num_computed", [-1, 0, 8, 9])
def test_num_computed_must_not_fall(verb: str, num_computed: int) -> None:
    """Fault seen: no comparison with the last look: positions on committed pages written again."""
    kv = ledger()
    seq = computed(kv)
    seq.num_computed = num_computed
    with pytest.raises(MisuseError, match=f"{verb}: num_computed fell from 10 to {num_computed}"):
        VERBS[verb](kv, seq)
    seq.num_computed = 10
    kv.check([seq])
    kv.release(seq)
    kv.check([])


@pytest.mark.parametrize("verb", VERBS)
def test_num_computed_must_be_a_whole_number_with_room(verb: str) -> None:
    kv = ledger()
    seq = computed(kv)
    for wrong, message in ((10.5, "whole number, got 10.5"), (None, "got None"), (12, "12 tokens computed")):
        seq.num_computed = wrong  # type: ignore[assignment]
        with pytest.raises(MisuseError, match=message):
            VERBS[verb](kv, seq)
    seq.num_computed = 10
    kv.check([seq])


@pytest.mark.parametrize("forgotten", ["num_computed", "namespace"])
def test_a_fork_of_which_something_was_not_copied_is_refused(forgotten: str) -> None:
    """Fault seen: a fork's table without what its parent had computed: shared pages written."""
    kv = ledger()
    seq, child = computed(kv), sequence()
    child.page_table = kv.fork(seq)
    if forgotten != "num_computed":
        child.num_computed = seq.num_computed
    if forgotten != "namespace":
        child.namespace = seq.namespace
    for verb in VERBS.values():
        with pytest.raises(MisuseError, match=r"fell from 10 to 0|of namespace \(\), whose pages"):
            verb(kv, child)
    child.num_computed, child.namespace = seq.num_computed, seq.namespace
    child.num_committed_pages = seq.num_committed_pages
    kv.reserve(child, 1)
    kv.check([seq, child])


# ---- arguments of any kind -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [2.5, None, "2", True, -1, 10.0, -(10**999)])
def test_reserve_takes_whole_numbers(num_tokens: object) -> None:
    kv = ledger()
    seq = computed(kv)
    for verb in (kv.reserve, kv.truncate):
        with pytest.raises(MisuseError, match="cannot"):
            verb(seq, num_tokens)  # type: ignore[arg-type]
    kv.reserve(seq, np.int64(1))  # type: ignore[arg-type]
    kv.check([seq])


@pytest.mark.parametrize(
    "values",
    [None, 5, "ab", b"ab", {1: 2}, [[1], [1, 2]], [[1, 2]], [1.0], [True], [10**999], [2**31], ["a"], [None],
     np.array(3), np.array([1.0]), np.ma.array([1, 2], mask=[False, True]), np.array([2**40])],
)  # fmt: skip
def test_pin_and_explain_refuse_what_is_no_list_of_token_ids(values: object) -> None:
    kv = ledger()
    for verb in (kv.pin, kv.explain):
        with pytest.raises(InvalidRequestError, match=r"token ids|32 bits"):
            verb(values)  # type: ignore[arg-type]
    assert kv.pins == ()


def test_pin_takes_any_run_of_whole_numbers() -> None:
    kv = ledger()
    kv.release(computed(kv))
    for values in (
        range(9),
        (i for i in range(9)),
        np.arange(9),
        np.arange(9, dtype=np.uint8),
        tuple(range(9)),
    ):
        assert kv.pin(values).num_tokens == 9
    assert kv.pin([]).num_tokens == 0


@pytest.mark.parametrize("timeout_s", [10**400, 0, -1.0, float("nan"), float("inf"), "1", True, [1]])
def test_timeouts_are_finite_numbers_above_0(timeout_s: object) -> None:
    kv = ledger()
    with pytest.raises(InvalidRequestError, match="timeout_s must be above 0 and finite"):
        kv.pin([1], timeout_s=timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("namespace", ["ab", ["a"], None, (1.5,), ([],), (True,)])
def test_namespaces_are_tuples(namespace: object) -> None:
    """Fault seen: ``"ab"`` taken for ``("a", "b")``."""
    kv = ledger()
    for verb in (kv.pin, kv.explain):
        with pytest.raises(InvalidRequestError, match="a namespace is"):
            verb([1], namespace)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["a", None, 1.5, True, -1, 16, 10**999])
def test_the_pin_budget_is_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match="max_pinned_pages must"):
        KVCacheManager(PagePool(16), RadixTree(P), max_pinned_pages=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["a", None, 1.5, -1])
def test_the_memory_of_evictions_is_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match="eviction_memory must"):
        KVCacheManager(PagePool(16), RadixTree(P), eviction_memory=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("tree", [RadixTree, NullTree])
@pytest.mark.parametrize("page_size", [2.0, "4", None, True, 0, -4, 3, 512, 10**999])
def test_page_sizes_are_powers_of_two_up_to_256(tree: Callable[[object], object], page_size: object) -> None:
    with pytest.raises(ConfigError, match="page_size must be a power of two up to 256"):
        tree(page_size)


# ---- the tree alone --------------------------------------------------------------------------------------


BAD_INSERTIONS: dict[str, tuple[object, object, object, str]] = {
    "a page twice": (ids(*range(8)), ids(1, 1), 0, "T3: a page stands twice"),
    "a page twice, the last partial": (ids(*range(10)), ids(1, 2, 1), 0, "T3: a page stands twice"),
    "a page of the path": (ids(*range(100, 108), *range(4)), ids(5, 6, 5), 0, "T3: "),
    "known too large": (ids(*range(8)), ids(1, 2), 3, r"num_known must lie in 0\.\.2"),
    "known counts a partial page": (ids(*range(6)), ids(1, 2), 2, r"num_known must lie in 0\.\.1"),
    "known negative": (ids(*range(8)), ids(1, 2), -1, "num_known must lie"),
    "known of no kind": (ids(*range(8)), ids(1, 2), "1", "num_known must lie"),
    "known for other tokens": (ids(*range(8)), ids(5, 2), 1, "for other tokens"),
    "known and not there": (ids(*range(8)), ids(1, 2), 1, "does not hold it"),
    "int64 tokens": (np.arange(8), ids(1, 2), 0, "token ids are a flat int32 array"),
    "a list of tokens": (list(range(8)), ids(1, 2), 0, "token ids are a flat int32 array"),
    "int64 pages": (ids(*range(8)), np.array([1, 2]), 0, "page ids are a flat int32 array"),
    "a list of pages": (ids(*range(8)), [1, 2], 0, "page ids are a flat int32 array"),
    "a negative page": (ids(*range(8)), ids(1, -1), 0, "page ids must be at least 0"),
}


@pytest.mark.parametrize("name", BAD_INSERTIONS)
@pytest.mark.parametrize("namespace", [(), ("new",)])
def test_a_bad_insertion_is_refused_and_changes_nothing(name: str, namespace: Namespace) -> None:
    """Fault seen: no test for repeated pages: a page in the tree twice (T3)."""
    tokens, pages, num_known, message = BAD_INSERTIONS[name]
    tree = RadixTree(P)
    tree.insert(ids(*range(100, 108)), ids(5, 6))
    version = tree.version
    with pytest.raises(MisuseError, match=message):
        tree.insert(tokens, pages, num_known, namespace)  # type: ignore[arg-type]
    tree.check()
    assert (tree.num_pages, tree.version) == (2, version)


def test_every_look_of_the_tree_refuses_other_arrays() -> None:
    tree = RadixTree(P)
    tree.insert(ids(*range(8)), ids(1, 2))
    for look in (tree.match, tree.peek, tree.lookup, tree.explain):
        for wrong in (np.arange(8), [1, 2], None, ids(*range(8)).reshape(2, 4)):
            with pytest.raises(MisuseError, match="token ids are a flat int32 array"):
                look(wrong)  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match="a namespace is a tuple"):
            look(ids(1), [])  # type: ignore[arg-type]


def test_repeated_pages_are_refused_among_many() -> None:
    """Each page once is fine, however many; the last one twice is not."""
    pages: PageIds = np.arange(200, dtype=np.int32)
    tokens: TokenIds = np.arange(800, dtype=np.int32)
    tree = RadixTree(P)
    twice = pages.copy()
    twice[-1] = 0
    with pytest.raises(MisuseError, match="T3: a page stands twice"):
        tree.insert(tokens, twice)
    assert len(tree.insert(tokens, pages).adopted) == 200
    tree.check()
