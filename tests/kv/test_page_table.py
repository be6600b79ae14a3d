"""PageTable: the one place where positions become slots (B1)."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.errors import InternalError
from radixkv.kv import PageTable
from radixkv.types import PageIds


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def test_slots_of_a_table_with_scattered_pages() -> None:
    table = PageTable(4, ids(5, 2))
    assert table.slot_mapping(0, 8).tolist() == [20, 21, 22, 23, 8, 9, 10, 11]
    assert table.slot_mapping(3, 5).tolist() == [23, 8]
    assert table.slot_mapping(4, 4).tolist() == []
    assert table.slot_mapping(0, 1).dtype == np.int64


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_slots_agree_with_the_formula_at_every_position(page_size: int) -> None:
    pages = np.random.default_rng(page_size).permutation(40).astype(np.int32)[:7]
    table = PageTable(page_size, pages)
    expected = [int(pages[i // page_size]) * page_size + i % page_size for i in range(7 * page_size)]
    assert table.slot_mapping(0, 7 * page_size).tolist() == expected
    assert table.num_slots == 7 * page_size


def test_slots_do_not_overflow_32_bits() -> None:
    table = PageTable(256, ids(2**30))
    assert table.slot_mapping(255, 256).tolist() == [2**38 + 255]


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (-1, 2), (3, 2)])
def test_positions_outside_the_table_are_our_fault(start: int, stop: int) -> None:
    with pytest.raises(AssertionError):
        PageTable(4, ids(5, 2)).slot_mapping(start, stop)


def test_extend_grows_and_keeps_what_was_there() -> None:
    table = PageTable(2)
    for page in range(100):
        table.extend(ids(page))
    table.extend(np.arange(100, 150, dtype=np.int32))
    assert table.pages.tolist() == list(range(150))
    assert table.stats() == {"num_pages": 150, "num_slots": 300}


def test_pop_from_returns_a_copy_of_what_was_cut() -> None:
    table = PageTable(2, ids(7, 8, 9))
    cut = table.pop_from(1)
    table.extend(ids(1, 2))
    assert cut.tolist() == [8, 9]
    assert table.pages.tolist() == [7, 1, 2]
    assert table.pop_from(3).tolist() == []


def test_replace_keeps_the_length() -> None:
    table = PageTable(2, ids(7, 8, 9))
    table.replace(1, ids(3, 4))
    assert table.pages.tolist() == [7, 3, 4]
    with pytest.raises(AssertionError):
        table.replace(2, ids(5, 6))


def test_check_finds_a_page_that_stands_twice() -> None:
    table = PageTable(2, ids(7, 8, 7))
    with pytest.raises(InternalError, match=r"B2 does not hold.*\[7 8 7\]"):
        table.check()
    PageTable(2, ids(7, 8)).check()
