"""CanaryStore: each kind of wrong page is caught, at the right position."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_table import PageTable
from radixkv.testing.canary_store import CanaryError, CanaryStore, PrefixHasher

PAGE_SIZE = 4
IDS = np.arange(10, 21, dtype=np.int32)


def store_with(pages: list[int]) -> tuple[CanaryStore, PageTable]:
    store = CanaryStore(num_pages=8, page_size=PAGE_SIZE)
    table = PageTable(PAGE_SIZE, np.array(pages, np.int32))
    store.write(table.slot_mapping(0, len(IDS)), IDS)
    return store, table


def test_a_run_hashes_like_its_parts() -> None:
    hasher = PrefixHasher()
    whole = hasher.extend(0, IDS)
    for cut in range(1, len(IDS)):
        tail = hasher.extend(int(whole[cut - 1]), IDS[cut:])
        assert np.array_equal(whole[cut:], tail)
    long_ids = np.arange(5000, dtype=np.int32)
    assert np.array_equal(hasher.extend(0, long_ids)[:300], hasher.extend(0, long_ids[:300]))


def test_seeds_are_typed() -> None:
    seeds = [
        PrefixHasher.seed(*fields) for fields in ((), (1,), ("1",), ("",), (None,), ("a", "bc"), ("ab", "c"))
    ]
    assert seeds[0] == 0 and len(set(seeds)) == len(seeds)


def test_what_was_written_reads_back() -> None:
    store, table = store_with([5, 0, 7])
    slots = table.slot_mapping(0, len(IDS))
    last = store.read_check(slots, IDS)
    assert last == store.read_chain(slots) == int(store.hasher.extend(0, IDS)[-1])
    store.check()


def test_chunks_write_what_one_run_writes() -> None:
    whole, table = store_with([5, 0, 7])
    chunks = CanaryStore(num_pages=8, page_size=PAGE_SIZE)
    prefix_hash = 0
    for start, stop in ((0, 1), (1, 6), (6, 11)):
        prefix_hash = chunks.write(table.slot_mapping(start, stop), IDS[start:stop], prefix_hash)
    assert np.array_equal(whole.hashes, chunks.hashes)


@pytest.mark.parametrize(("position", "page_id"), [(0, 5), (3, 5), (4, 0), (10, 7)])
def test_a_wrong_slot_is_named(position: int, page_id: int) -> None:
    store, table = store_with([5, 0, 7])
    slots = table.slot_mapping(0, len(IDS))
    other = IDS.copy()
    other[position] += 1
    with pytest.raises(CanaryError) as caught:
        store.read_check(slots, other)
    assert (caught.value.position, caught.value.page_id) == (position, page_id)
    store.hashes[slots[position]] += np.uint64(1)
    with pytest.raises(CanaryError):
        store.read_check(slots, IDS)
    with pytest.raises(CanaryError):
        store.read_chain(slots)


def test_the_same_tokens_behind_another_prefix_differ() -> None:
    store, _ = store_with([5, 0, 7])
    twin = PageTable(PAGE_SIZE, np.array([1, 0, 7], np.int32))
    other = IDS.copy()
    other[:4] = 99
    store.write(twin.slot_mapping(0, 4), other[:4])
    with pytest.raises(CanaryError, match="position 4: slot 0 "):
        store.read_check(twin.slot_mapping(0, len(IDS)), other)


@pytest.mark.parametrize("num_tokens", [1, PAGE_SIZE - 1, PAGE_SIZE])
def test_b033_a_copy_moves_its_valid_tokens_only(num_tokens: int) -> None:
    # Fault seen: copy_pages copies num_tokens + 1 slots.
    store, table = store_with([5, 0, 7])
    store.copy_pages([PageCopy(src=5, dst=2, num_tokens=num_tokens)])
    copied = PageTable(PAGE_SIZE, np.array([2], np.int32))
    store.read_check(copied.slot_mapping(0, num_tokens), IDS[:num_tokens])
    if num_tokens < PAGE_SIZE:
        with pytest.raises(CanaryError, match="never written"):
            store.read_check(copied.slot_mapping(0, num_tokens + 1), IDS[: num_tokens + 1])
    store.read_check(table.slot_mapping(0, len(IDS)), IDS)


def test_all_sources_are_read_before_any_write() -> None:
    store, _ = store_with([5, 0, 7])
    before = store.hashes.copy()
    store.copy_pages([PageCopy(5, 0, PAGE_SIZE), PageCopy(0, 5, PAGE_SIZE)])
    assert np.array_equal(store.hashes[0:4], before[20:24]) and np.array_equal(
        store.hashes[20:24], before[0:4]
    )
    with pytest.raises(ValueError, match="same page"):
        store.copy_pages([PageCopy(5, 1, 1), PageCopy(0, 1, 1)])
    with pytest.raises(ValueError, match="a copy of 5 tokens"):
        store.copy_pages([PageCopy(5, 1, PAGE_SIZE + 1)])


def test_a_poisoned_page_reads_as_unwritten() -> None:
    store, table = store_with([5, 0, 7])
    store.poison(np.array([0], np.int32))
    with pytest.raises(CanaryError, match=r"page 0, offset 0\) was never written"):
        store.read_check(table.slot_mapping(0, len(IDS)), IDS)
