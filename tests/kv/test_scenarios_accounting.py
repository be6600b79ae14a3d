"""Scenarios: accounting, leaks, holds. Each step of a LedgerMachine also checks M1 and the page oracle.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
from machine import LedgerMachine
from serving import (
    PAGE_SIZES,
    go_on,
    joined,
    num_free,
    num_idle,
    pages_for,
    run_of,
    serve,
    serve_whole,
)

from radixkv.errors import MisuseError
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sequence import Request, Sequence


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b001_idle_pages_are_the_distinct_pages(page_size: int) -> None:
    """Fault seen: ``_repoint`` does not let the duplicates go."""
    half = max(16, page_size)
    machine = LedgerMachine(page_size, num_pages=6 * half // page_size)
    serve_whole(machine, run_of(1, 2 * half))
    serve_whole(machine, joined(run_of(1, half), run_of(3000, half)))
    for _ in range(3):
        serve_whole(machine, run_of(1, 2 * half))
    assert num_idle(machine) == 3 * half // page_size
    assert num_idle(machine) + num_free(machine) == machine.num_pages


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b003_rejected_drafts_give_their_slots_back(page_size: int) -> None:
    """Fault seen: ``truncate`` keeps one page too many."""
    rng = random.Random(page_size)
    for residue in {0, 1, page_size // 2, page_size - 1}:
        machine = LedgerMachine(page_size, num_pages=8 + 80 // page_size)
        row = serve(machine, run_of(1, page_size + residue + 1))
        for _ in range(12):
            machine.append(row, [9000 + n for n in range(4)])
            assert machine.reserve(row, row.seq.num_tokens - row.seq.num_computed)
            machine.forward([7000], rejects=rng.randrange(5))
            assert row.seq.page_table.num_pages == pages_for(row.seq.num_computed, page_size)
        machine.release(row)
        assert num_idle(machine) == pages_for(row.seq.num_tokens - 1, page_size)
        machine.flush()
        assert num_free(machine) == machine.num_pages


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b006_a_split_above_a_held_leaf(page_size: int) -> None:
    """Fault seen: ``_split`` leaves ``node_of`` of the moved pages at the old node."""
    machine = LedgerMachine(page_size, num_pages=8 * 64 // page_size)
    held = serve(machine, run_of(1, 3 * 64))
    serve_whole(machine, joined(run_of(1, 64), run_of(3000, 64)))
    assert num_idle(machine) == 64 // page_size
    serve_whole(machine, joined(run_of(1, 128), run_of(4000, 64)))
    assert num_idle(machine) == 2 * 64 // page_size
    machine.release(held)
    assert num_idle(machine) == machine.tree.num_pages == 5 * 64 // page_size


def test_b007_a_preempted_decode_loses_nothing_and_holds_nothing() -> None:
    """Fault seen: ``release`` does not let go the table's last page."""
    machine = LedgerMachine(page_size=16, num_pages=8)
    serve_whole(machine, run_of(1, 20))
    row = serve(machine, run_of(1, 21), num_output=5)
    assert row.seq.num_cached == 20
    machine.release(row, keep_row=True)
    assert (num_idle(machine), num_free(machine)) == (2, 6)
    machine.acquire(row)
    assert row.seq.num_computed == 25 and row.seq.num_cached == 20
    machine.release(row)
    assert (num_idle(machine), num_free(machine)) == (2, 6)


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_b008_a_failed_reserve_returns_hold_and_copy_page(page_size: int) -> None:
    """Fault seen: ``_end_copy`` does not let the source go."""
    machine = LedgerMachine(page_size, num_pages=6)
    serve_whole(machine, run_of(1, 2 * page_size))
    other = serve(machine, run_of(3000, 3 * page_size))
    row = machine.start(joined(run_of(1, 2 * page_size - 1), run_of(4000, 3 * page_size)))
    assert row.seq.num_computed == 2 * page_size - 1
    assert not machine.reserve(row, 3 * page_size + 1)
    machine.release(row)
    machine.release(other)
    assert machine.kv.pool.ref_count.max() == 1 and num_free(machine) == 1


def test_b010_used_idle_and_free_are_apart() -> None:
    """Fault seen: ``num_pages_used`` counts idle pages."""
    machine = LedgerMachine(page_size=4, num_pages=20, max_pinned_pages=5)
    serve_whole(machine, run_of(1, 12))
    held = serve(machine, run_of(3000, 8))
    machine.pin(run_of(1, 4))
    stats = machine.kv.stats()
    assert (stats["num_pages_used"], stats["num_pages_idle"], stats["num_pages_free"]) == (3, 2, 15)
    assert stats["num_pages_pinned"] == 1
    machine.release(held)
    assert machine.kv.stats()["num_pages_used"] == 1


def test_b011_many_short_requests_leave_nothing_behind(long_run: bool) -> None:
    """Fault seen: ``EvictionMemory.record`` never forgets."""
    kv = KVCacheManager(PagePool(1000), RadixTree(1), eviction_memory=100)
    num_requests = 200_000 if long_run else 6_000
    half = 0
    for number in range(num_requests):
        request = Request(request_id=number, prompt_ids=np.array([number, 7, number], np.int32))
        seq = Sequence(request, 1)
        kv.acquire(seq)
        kv.reserve(seq, seq.num_tokens - seq.num_computed)
        seq.num_computed = seq.num_tokens
        kv.release(seq)
        if number == num_requests // 2:
            gc.collect()
            half = len(gc.get_objects())
    gc.collect()
    stats = kv.stats()
    assert stats["tree_num_nodes"] <= stats["tree_num_pages"] <= 1000
    assert stats["tree_num_candidates"] <= 1000 and stats["num_copies_open"] == 0
    assert len(gc.get_objects()) < half + 100
    assert len(kv.tree._memory) == 100 if isinstance(kv.tree, RadixTree) else False
    kv.check([])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b013_what_is_held_survives_evicting_everything(page_size: int) -> None:
    """Fault seen: ``acquire`` does not hold what it matched."""
    machine = LedgerMachine(page_size, num_pages=3 * 64 // page_size)
    serve_whole(machine, run_of(1, 64))
    holder = machine.start(joined(run_of(1, 64), run_of(3000, 1)))
    greedy = machine.start(run_of(4000, 1))
    while machine.reserve(greedy, (greedy.seq.page_table.num_pages + 1) * page_size):
        pass
    assert holder.seq.num_computed == 64 and machine.tree.num_pages == 64 // page_size
    machine.read_row(holder)
    machine.release(greedy)


def test_b015_letting_go_twice_is_refused_or_does_nothing() -> None:
    """Fault seen: ``PinBook.remove`` keeps the pin."""
    machine = LedgerMachine(page_size=4, num_pages=8, max_pinned_pages=4)
    row = serve(machine, run_of(1, 8))
    machine.release(row)
    machine.kv.release(row.seq)
    machine.verify()
    pin = machine.pin(run_of(1, 8))
    assert pin is not None
    machine.unpin(pin)
    machine.kv.unpin(pin)
    machine.verify()
    free = np.flatnonzero(machine.kv.pool.ref_count == 0).astype(np.int32)
    with pytest.raises(MisuseError, match="P2"):
        machine.kv.pool.decref(free[:1])
    machine.verify()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b016_a_path_split_twice_while_held_is_idle_after(page_size: int) -> None:
    """Fault seen: ``_let_go`` does not tell the tree what became idle."""
    machine = LedgerMachine(page_size, num_pages=10 * 64 // page_size)
    held = serve(machine, run_of(1, 4 * 64))
    for number in (1, 2):
        serve_whole(machine, joined(run_of(1, number * 64), run_of(3000 + 100 * number, 64)))
    greedy = machine.start(run_of(4000, 1))
    assert machine.reserve(greedy, machine.kv.num_available * page_size)  # meets the held leaf, the oldest
    machine.release(greedy)
    machine.release(held)
    assert machine.kv.pool.ref_count.max() == 1
    assert num_idle(machine) == machine.tree.num_pages
    greedy = machine.start(run_of(5000, 1))
    assert machine.reserve(greedy, machine.num_pages * page_size), "an idle page could not be evicted"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b019_dropped_before_it_had_pages(page_size: int) -> None:
    """Fault seen: ``release`` leaves ``num_cached`` of a request that was never admitted."""
    machine = LedgerMachine(page_size, num_pages=4 * 64 // page_size)
    serve_whole(machine, run_of(1, 100))
    row = machine.start(run_of(1, 100))
    assert row.seq.num_computed == 99
    machine.release(row, keep_row=True)
    assert machine.kv.pool.ref_count.max() == 1 and row.seq.num_cached is None
    machine.acquire(row)
    go_on(machine, row, 1)
    assert row.seq.num_cached == 99
    machine.release(row)
    assert machine.kv.pool.ref_count.max() == 1


def test_b020_pins_end_once_however_they_end() -> None:
    """Fault seen: ``flush`` forgets to drop the pins."""
    machine = LedgerMachine(page_size=4, num_pages=16, max_pinned_pages=8)
    serve_whole(machine, run_of(1, 16))
    by_hand, in_time, by_flush = (machine.pin(run_of(1, 8), timeout_s=t) for t in (None, 1.0, 9.0))
    assert by_hand and in_time and by_flush
    machine.unpin(by_hand)
    machine.pass_time(1.0)
    assert list(machine.pins) == [by_flush.pin_id]
    machine.unpin(in_time)
    machine.flush()
    for pin in (by_hand, in_time, by_flush):
        machine.unpin(pin)
    assert num_free(machine) == 16


@pytest.mark.parametrize("pages", [[0, 0], [1, 0, 1], [-1], [4], [3], [0, 3]])
def test_b021_bad_lists_of_pages_are_refused_whole(pages: list[int]) -> None:
    """Fault seen: ``decref`` without ``_check_call``. Page 4 is the store's padding; 3 is free."""
    pool = PagePool(4)
    pool.allocate(3)
    before = pool.ref_count.copy()
    for verb in (pool.decref, pool.incref):
        with pytest.raises(MisuseError):
            verb(np.array(pages, np.int32))
        assert np.array_equal(pool.ref_count, before) and pool.num_free == 1
        pool.check()


def test_b130_pins_cannot_starve_new_requests() -> None:
    """Fault seen: ``PinBook.add`` ignores the budget."""
    machine = LedgerMachine(page_size=4, num_pages=20, max_pinned_pages=10)
    for number in range(4):
        serve_whole(machine, run_of(100 * number, 16))
    pinned = [machine.pin(run_of(100 * number, 16)) for number in range(4)]
    assert [pin is not None for pin in pinned] == [True, True, False, False]
    assert machine.pin(run_of(0, 16)) is not None, "pages that are pinned already cost nothing"
    serve_whole(machine, run_of(3000, 40))
    assert machine.kv.num_pinned_pages == 8
