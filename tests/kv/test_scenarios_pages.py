"""Scenarios: split, insert, evict; page alignment; copies; forks. Content is read through CanaryStore.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

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

from radixkv.kv.page_table import PageTable


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b024_keys_that_part_inside_a_page_share_it_by_copy_only(page_size: int) -> None:
    """Fault seen: ``acquire`` puts the partial page itself into the table."""
    common = page_size + page_size // 4
    machine = LedgerMachine(page_size, num_pages=12)
    first = serve(machine, run_of(1, 3 * page_size))
    second = serve(machine, joined(run_of(1, common), run_of(3000, page_size)))
    assert second.seq.num_cached == common
    mine, theirs = second.seq.page_table.pages, first.seq.page_table.pages
    assert mine[0] == theirs[0] and not np.intersect1d(mine[1:], theirs).size
    assert machine.store.num_copied == common % page_size


def test_b025_admission_counts_pages_not_tokens() -> None:
    """Fault seen: ``reserve`` asks for ``num_tokens // page_size`` pages."""
    machine = LedgerMachine(page_size=64, num_pages=64)
    rows = [serve(machine, joined(run_of(1, 64), run_of(1000 + n, 1))) for n in range(40)]
    assert num_free(machine) == 64 - 41
    for row in rows:
        machine.release(row)
    lone = [machine.start(run_of(2000 + 70 * n, 65)) for n in range(33)]
    assert [machine.reserve(row, 65) for row in lone] == [True] * 32 + [False]


def test_b027_an_abort_after_a_partial_copy_frees_the_shared_page_once() -> None:
    """Fault seen: ``take_copies`` does not let the source go."""
    machine = LedgerMachine(page_size=16, num_pages=8)
    serve_whole(machine, run_of(1, 20))
    row = serve(machine, joined(run_of(1, 20), run_of(3000, 10)), chunk=10)
    assert row.seq.num_computed == 30 and machine.counts["partial copy"] == 1
    machine.release(row)
    assert machine.kv.pool.ref_count.max() == 1
    assert num_idle(machine) == 2 and num_free(machine) == 6  # the fuller page has replaced the first one


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b028_every_length_twice_hits_all_but_one_token(page_size: int) -> None:
    """Fault seen: ``release`` inserts whole pages only."""
    machine = LedgerMachine(page_size, num_pages=70)
    for length in range(1, 65):
        prompt = run_of(100 * length, length)
        assert serve_whole(machine, prompt) == 0
        assert serve_whole(machine, prompt) == length - 1
        machine.flush()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b030_room_beyond_the_tokens_does_not_count(page_size: int) -> None:
    """Fault seen: ``commit`` counts full pages from the table's room."""
    machine = LedgerMachine(page_size, num_pages=12)
    row = serve(machine, run_of(1, 2 * page_size))
    assert machine.reserve(row, 3 * page_size)
    assert row.seq.page_table.num_pages == 5
    machine.forward([9000])
    assert row.seq.num_computed == 2 * page_size + 1
    assert machine.tree.num_pages == row.seq.num_computed // page_size
    machine.release(row)
    assert machine.tree.num_pages == pages_for(2 * page_size + 1, page_size)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b031_tables_of_every_length(page_size: int) -> None:
    """Fault seen: ``slot_mapping`` divides by ``page_size + 1``."""
    machine = LedgerMachine(page_size, num_pages=16)
    for length in range(1, 3 * page_size + 1):
        row = machine.start(run_of(100, length))
        assert machine.reserve(row, length - row.seq.num_computed)
        table = row.seq.page_table
        assert table.num_pages == pages_for(length, page_size)
        assert 1 <= length - (table.num_pages - 1) * page_size <= page_size
        slots = table.slot_mapping(0, length)
        assert slots.tolist() == [
            int(table.pages[i // page_size]) * page_size + i % page_size for i in range(length)
        ]
        machine.release(row)
    assert len(PageTable(page_size).slot_mapping(0, 0)) == 0


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("offset", [1, -1, 0])
def test_b033_copy_on_write_copies_the_valid_tokens(page_size: int, offset: int) -> None:
    """Fault seen: ``_replace_shared`` copies the whole page."""
    machine = LedgerMachine(page_size, num_pages=12)
    parent = serve(machine, run_of(1, 2 * page_size + offset))
    child = machine.fork(parent)
    go_on(machine, child, 3)
    assert machine.store.num_copied == offset % page_size
    assert machine.counts["copy-on-write from a fork"] == (offset != 0)
    go_on(machine, parent, 3)
    assert machine.store.num_copied == offset % page_size, "the parent owns its page alone now"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b036_every_allocation_finds_idle_pages(page_size: int) -> None:
    """Fault seen: ``reserve`` looks at free pages only."""
    for kind in ("prefill", "decode", "copy", "fork"):
        machine = LedgerMachine(page_size, num_pages=8)
        row = serve(machine, run_of(1, page_size), num_output=1)
        if kind == "fork" and page_size > 1:
            go_on(machine, row, 2)
            row = machine.fork(row)
        serve_whole(machine, run_of(2000, num_free(machine) * page_size))
        assert num_free(machine) == 0 and num_idle(machine) > 2
        if kind == "prefill":
            serve(machine, run_of(4000, 2 * page_size))
        elif kind == "copy":
            serve(machine, joined(run_of(2000, page_size + page_size // 2), run_of(4000, 1)))
        else:
            go_on(machine, row, 3)


def test_b114_forks_share_the_prompt() -> None:
    """Fault seen: ``fork`` leaves out the last page."""
    machine = LedgerMachine(page_size=16, num_pages=80)
    parent = serve(machine, run_of(1, 1000))
    children = [machine.fork(parent) for _ in range(3)]
    for row in (parent, *children):
        go_on(machine, row, 2)
    assert machine.store.num_written == 1000 + 4
    assert machine.num_pages - num_free(machine) == pages_for(1000, 16) + 3


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b115_beams_that_die_and_branch(page_size: int) -> None:
    """Fault seen: ``_shared_page`` looks at counts above 2 only."""
    rng = random.Random(page_size)
    machine = LedgerMachine(page_size, num_pages=40 + 600 // page_size)
    root = serve(machine, run_of(1, page_size + 1))
    beams = [root, *(machine.fork(root) for _ in range(3))]
    for step in range(64):
        for beam in beams:
            assert machine.reserve(beam, 1)
        machine.forward([100 * step + n for n in range(4)])
        if rng.random() < 0.5:
            loser = rng.randrange(4)
            machine.release(beams[loser])
            beams[loser] = machine.fork(beams[(loser + 1) % 4])
    assert {beam.seq.num_output for beam in beams} == {65}
    for beam in beams:
        machine.release(beam)
    machine.flush()
    assert num_free(machine) == machine.num_pages


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b137_all_drafts_rejected_at_a_page_edge(page_size: int) -> None:
    """Fault seen: ``truncate`` leaves ``num_computed``."""
    machine = LedgerMachine(page_size, num_pages=20)
    row = serve(machine, run_of(1, 2 * page_size), num_output=1)
    for _ in range(3):
        machine.append(row, [9000, 9001, 9002, 9003])
        assert machine.reserve(row, row.seq.num_tokens - row.seq.num_computed)
        machine.forward([9004], rejects=5)
    accepted = row.seq.token_ids.copy()
    machine.release(row)
    assert len(accepted) == 2 * page_size + 1
    reached = {token for _, node in machine.oracle.nodes() for token in node.token_ids}
    assert reached <= set(accepted.tolist())
    assert serve_whole(machine, accepted) == 2 * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b141_the_second_of_two_equal_prompts_is_repointed(page_size: int) -> None:
    """Fault seen: ``_repoint`` replaces the table's entries after it let the pages go."""
    machine = LedgerMachine(page_size, num_pages=16)
    prompt = run_of(1, 3 * page_size)
    first, second = machine.start(prompt), machine.start(prompt)
    for row in (first, second):
        assert machine.reserve(row, len(prompt))
    assert not np.intersect1d(first.seq.page_table.pages, second.seq.page_table.pages).size
    machine.forward([5000, 5000])
    assert np.array_equal(first.seq.page_table.pages, second.seq.page_table.pages)
    assert machine.counts["repoint"] == 3
    third = machine.start(run_of(3000, 4 * page_size))
    assert machine.reserve(third, 4 * page_size)
    for row in (first, second):
        assert machine.reserve(row, 1)
    machine.forward([5001, 6001, 7001])
    go_on(machine, first, 4)
    go_on(machine, second, 4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b144_two_that_need_more_pages_than_there_are_both_finish(page_size: int) -> None:
    """Fault seen: a failing ``reserve`` keeps what it could get."""
    machine = LedgerMachine(page_size, num_pages=8)
    big, small = machine.start(run_of(1, 4 * page_size)), machine.start(run_of(2000, 3 * page_size))
    assert machine.reserve(big, 4 * page_size) and machine.reserve(small, 3 * page_size)
    machine.forward([5000, 6000])
    for row in (big, small):  # each needs two pages, and one is left
        assert not machine.reserve(row, page_size + 1)
        assert num_free(machine) == 1
    machine.release(small, keep_row=True)
    assert machine.reserve(big, page_size + 1)
    go_on(machine, big, 2)
    machine.release(big)
    machine.acquire(small)
    assert small.seq.num_computed >= 2 * page_size, "eviction took the tail, not the whole prompt"
    go_on(machine, small, 2)
    machine.release(small)
