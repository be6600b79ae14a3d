"""Scenarios: keys and isolation, flush, conversations, ``explain``.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

import pytest
from machine import LedgerMachine
from serving import PAGE_SIZES, go_on, joined, num_free, num_idle, run_of, serve, serve_whole

from radixkv.kv.explanation import Explanation
from radixkv.types import Namespace


def test_b078_equal_hashes_are_not_equal_keys() -> None:
    """Fault seen: ``RadixTree`` keeps its roots under ``hash(namespace)``. Python's -1 and -2 hash alike."""
    assert hash((-1, 0)) == hash((-2, 0))
    machine = LedgerMachine(page_size=4, num_pages=32)
    assert serve_whole(machine, run_of(1, 12), namespace=(-1,)) == 0
    assert serve_whole(machine, run_of(1, 12), namespace=(-2,)) == 0
    assert serve_whole(machine, run_of(1, 12), namespace=(-1,)) == 11


def test_b079_salts_are_apart_from_each_other_and_from_none() -> None:
    """Fault seen: ``_namespace`` drops fields that are empty."""
    machine = LedgerMachine(page_size=4, num_pages=64)
    salts: list[Namespace] = [("a",), ("b",), (None,), ("",), ()]
    assert [serve_whole(machine, run_of(1, 12), namespace=salt) for salt in salts] == [0] * 5
    assert [serve_whole(machine, run_of(1, 12), namespace=salt) for salt in salts] == [11] * 5
    assert machine.kv.explain(run_of(1, 12), ("c",)).reason == "other_namespace"


def test_b080_fields_are_typed_and_stay_in_their_places() -> None:
    """Fault seen: ``_namespace`` joins the fields into one string."""
    machine = LedgerMachine(page_size=4, num_pages=64)
    pairs: list[Namespace] = [("x", None), (None, "x"), ("a", "bc"), ("ab", "c"), (1, ""), ("1", ""), ("", 1)]
    assert [serve_whole(machine, run_of(1, 12), namespace=pair) for pair in pairs] == [0] * 7
    assert [serve_whole(machine, run_of(1, 12), namespace=pair) for pair in pairs] == [11] * 7


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b087_nothing_computed_before_new_weights_is_found_after(page_size: int) -> None:
    """Fault seen: ``commit`` and ``release`` do not ask ``_is_stale``."""
    machine = LedgerMachine(page_size, num_pages=16)
    prompt = run_of(1, 2 * page_size + 1)
    serve_whole(machine, prompt)
    in_flight = serve(machine, run_of(2000, 3 * page_size), chunk=page_size)
    machine.flush()
    assert machine.tree.num_pages == 0
    assert serve_whole(machine, prompt) == 0
    go_on(machine, in_flight, 3)
    machine.release(in_flight)
    assert serve_whole(machine, run_of(2000, 3 * page_size)) == 0
    assert serve_whole(machine, prompt) == 2 * page_size


def test_b088_flush_while_some_run_and_some_wait() -> None:
    """Fault seen: ``flush`` does not raise the epoch."""
    machine = LedgerMachine(page_size=4, num_pages=40, max_pinned_pages=4)
    serve_whole(machine, run_of(1, 20))
    running = [serve(machine, run_of(1000, 8)), serve(machine, run_of(2000, 10))]
    waiting = machine.start(run_of(1, 20))
    machine.release(waiting, keep_row=True)
    assert machine.pin(run_of(1, 8)) is not None
    report = machine.flush()
    assert (report.num_pages_freed, report.num_pages_held) == (5, 4)
    assert [pin.num_tokens for pin in report.pins_dropped] == [8]
    assert machine.kv.epoch == 1 and machine.kv.num_pinned_pages == 0
    machine.acquire(waiting)
    assert waiting.seq.num_computed == 0
    for row in running:
        go_on(machine, row, 6)
        machine.release(row)
    assert machine.tree.num_pages == 0
    go_on(machine, waiting, 2)
    assert machine.tree.num_pages == 5


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b040_only_computed_tokens_are_known(page_size: int) -> None:
    """Fault seen: ``release`` inserts ``num_tokens`` tokens. The last sampled token has no K/V."""
    machine = LedgerMachine(page_size, num_pages=40)
    row = serve(machine, run_of(1, 10), num_output=7)
    text = row.seq.token_ids.copy()
    machine.release(row)
    assert machine.kv.explain(text).hit_tokens == len(text) - 1
    assert serve_whole(machine, joined(text, run_of(3000, 3))) == len(text) - 1
    assert serve_whole(machine, joined(text[:-3], run_of(4000, 3))) == len(text) - 3


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b061_an_aborted_turn_leaves_the_turn_before_it(page_size: int) -> None:
    """Fault seen: ``release`` of a sequence takes its committed pages out of the tree."""
    machine = LedgerMachine(page_size, num_pages=160)
    turn = serve(machine, run_of(1, 40), num_output=10)
    history = turn.seq.token_ids.copy()
    machine.release(turn)
    aborted = machine.start(joined(history, run_of(2000, 30)))
    assert machine.reserve(aborted, 8)
    machine.forward([6000])
    machine.release(aborted)
    assert serve_whole(machine, joined(history, run_of(3000, 9))) == len(history)
    assert serve_whole(machine, joined(history, run_of(2000, 30))) == len(history) - 1 + 8


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b090_a_changed_turn_is_explained_and_its_tail_goes_first(page_size: int) -> None:
    """Fault seen: ``match`` touches the whole node that it ends in, the unreachable tail too."""
    machine = LedgerMachine(page_size, num_pages=6 * 64 // page_size)
    visible, hidden = run_of(1, 64), run_of(1000, 64)
    serve_whole(machine, joined(visible, hidden))
    serve_whole(machine, run_of(2000, 64))
    follow_up = joined(visible, run_of(3000, 64))
    said = machine.kv.explain(follow_up)
    assert (said.reason, said.hit_tokens, said.position, said.cached_token) == ("differs", 64, 64, 1000)
    assert serve_whole(machine, follow_up) == 64
    greedy = machine.start(run_of(4000, 1))
    assert machine.reserve(greedy, (num_free(machine) * page_size) + 64)
    assert machine.kv.explain(joined(visible, hidden)).hit_tokens == 64
    assert machine.kv.explain(run_of(2000, 64)).hit_tokens == 64
    assert machine.kv.explain(follow_up).reason == "whole"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b093_a_follow_up_reuses_the_answer_to_the_token(page_size: int) -> None:
    """Fault seen: ``release`` inserts whole pages only."""
    machine = LedgerMachine(page_size, num_pages=400)
    row = serve(machine, run_of(1, 64), num_output=64)
    history = row.seq.token_ids.copy()
    machine.release(row)
    assert serve_whole(machine, joined(history, run_of(2000, 8))) == 127


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b132_rewinding_to_an_earlier_turn(page_size: int) -> None:
    """Fault seen: ``truncate`` does not let the cut pages go."""
    machine = LedgerMachine(page_size, num_pages=4 * 128 // page_size)
    row = serve(machine, run_of(1, 64), num_output=1)
    go_on(machine, row, 129)
    assert num_idle(machine) == 0
    machine.truncate(row, 65)
    assert row.seq.num_computed == 64 and num_idle(machine) == 128 // page_size
    go_on(machine, row, 2)
    assert serve_whole(machine, joined(run_of(1, 64), run_of(3000, 4))) == 64
    machine.release(row)


def test_b140_explain_says_how_long_why_and_whether_it_ever_was() -> None:
    """Fault seen: ``evict`` does not remember what it let go."""
    machine = LedgerMachine(page_size=4, num_pages=8)
    serve_whole(machine, run_of(1, 16))
    explain = machine.kv.explain
    assert explain(run_of(1, 16)) == Explanation(hit_tokens=16, reason="whole", position=16)
    assert explain(run_of(1, 18)) == Explanation(hit_tokens=16, reason="absent", position=16)
    assert explain(joined(run_of(1, 6), run_of(99, 3))) == Explanation(
        hit_tokens=6, reason="differs", position=6, cached_token=7
    )
    assert explain(run_of(1, 16), ("salt",)) == Explanation(
        hit_tokens=0, reason="other_namespace", position=0, other_namespace=()
    )
    serve_whole(machine, run_of(2000, 24))
    said = explain(run_of(1, 16))
    assert (said.hit_tokens, said.reason, said.evictions_ago) == (8, "evicted", 1)
    machine.explain(run_of(1, 16))
    machine.flush()
    assert explain(run_of(1, 16)).reason == "absent"
    stats = machine.kv.stats()
    assert stats["tree_num_evicted"] == 2
