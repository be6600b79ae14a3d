"""PagePool: exact ids, all or nothing, and every misuse refused before anything changed."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.errors import ConfigError, InternalError, MisuseError, OutOfPages
from radixkv.kv import PagePool
from radixkv.types import PageIds


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def test_pages_are_handed_out_in_order_and_freed_ones_come_back_first() -> None:
    pool = PagePool(6)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    pool.decref(ids(0, 2))
    assert pool.num_free == 5
    assert pool.allocate(4).tolist() == [0, 2, 3, 4]
    assert pool.ref_count.tolist() == [1, 1, 1, 1, 1, 0]
    pool.check()


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(2)
    page = pool.allocate(1)
    pool.incref(page)
    pool.decref(page)
    assert pool.num_free == 1
    pool.decref(page)
    assert pool.num_free == 2
    pool.check()


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="needs 2 pages, only 1 are available") as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert pool.num_free == 1
    assert pool.allocate(0).tolist() == []
    pool.check()


@pytest.mark.parametrize("verb", ["incref", "decref"])
@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (ids(3), "P2: page 3 is free already"),
        (ids(0, 0), "P3: a page stands twice"),
        (ids(-1), "must lie in 0..3"),
        (ids(0, 4), "must lie in 0..3"),
        (np.array([0], np.int64), "flat int32"),
        (np.array([[0]], np.int32), "flat int32"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(verb: str, pages: PageIds, message: str) -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(MisuseError, match=message):
        getattr(pool, verb)(pages)
    assert pool.ref_count.tolist() == [1, 1, 0, 0]
    assert pool.num_free == 2
    pool.check()


def test_negative_allocation_is_misuse() -> None:
    with pytest.raises(MisuseError, match="-1"):
        PagePool(1).allocate(-1)


@pytest.mark.parametrize("num_pages", [0, -3, 2.0, True])
def test_a_pool_has_at_least_one_page(num_pages: int) -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(num_pages)


def test_counts_cannot_be_written_from_outside() -> None:
    pool = PagePool(2)
    with pytest.raises(ValueError, match="read-only"):
        pool.ref_count[0] = 1


def test_no_call_is_no_change() -> None:
    pool = PagePool(2)
    pool.incref(ids())
    pool.decref(ids())
    assert pool.stats() == {"num_pages": 2, "num_free": 2, "num_live": 0, "num_references": 0}


def test_check_finds_a_page_that_is_free_and_held() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    pool._count[1] = 0
    with pytest.raises(InternalError, match=r"P1 does not hold.*\[1\]"):
        pool.check()


@pytest.mark.parametrize("num_free", [-1, 4])
def test_check_finds_a_stack_that_cannot_be(num_free: int) -> None:
    pool = PagePool(3)
    pool._num_free = num_free
    with pytest.raises(InternalError, match=f"P1 does not hold.*'num_free': {num_free}"):
        pool.check()


def test_check_finds_a_page_twice_on_the_stack() -> None:
    pool = PagePool(3)
    pool._stack[0] = pool._stack[1]
    with pytest.raises(InternalError, match=r"P1 does not hold.*twice"):
        pool.check()


def test_check_finds_a_negative_count() -> None:
    pool = PagePool(3)
    pool.allocate(1)
    pool._count[0] = -1
    with pytest.raises(InternalError, match="P2 does not hold"):
        pool.check()


def test_random_use_agrees_with_a_plain_model() -> None:
    rng = np.random.default_rng(0)
    pool, held = PagePool(64), [0] * 64
    for _ in range(500):
        live = np.array([page for page in range(64) if held[page]], np.int32)
        some = rng.permutation(live)[: rng.integers(0, 9)]
        what = rng.integers(3)
        if what == 0:
            num = min(int(rng.integers(0, 9)), pool.num_free)
            for page in pool.allocate(num).tolist():
                assert held[page] == 0
                held[page] = 1
        elif what == 1:
            pool.incref(some)
            for page in some.tolist():
                held[page] += 1
        else:
            pool.decref(some)
            for page in some.tolist():
                held[page] -= 1
        pool.check()
        assert pool.ref_count.tolist() == held
