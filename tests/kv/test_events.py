"""Events give the tree's content, in the right order, and say what is lost.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from driver import EVICTION_POLICIES, Driver, Setting
from ledger_model import tree_content
from machine import LedgerMachine
from serving import PAGE_SIZES, run_of

from radixkv.config import EvictionPolicyName
from radixkv.errors import ConfigError, InternalError, MisuseError
from radixkv.kv.events import Cleared, Event, EventLog, Lost, Removed, Stored, replay
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request, Sequence
from radixkv.types import PageIds, TokenIds

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


class Witness(PagePool):
    """Writes down, as it happens, what is freed, what its holder's table shows then, and what is told."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.steps: list[str] = []
        self.told: list[Event] = []
        self.kv: KVCacheManager | None = None
        self.watched: Sequence | None = None

    def decref(self, pages: PageIds) -> None:
        super().decref(pages)
        self.look()
        freed = pages[self.ref_count[pages] == 0]
        if len(freed) and self.watched is not None:
            shown = np.intersect1d(freed, self.watched.page_table.pages)
            assert len(shown) == 0, f"pages {shown} are freed while a table shows them"
            self.steps.append("free")

    def look(self) -> None:
        """Whoever listens all the time hears of it now."""
        if self.kv is not None and (events := self.kv.take_events()):
            self.told += events
            self.steps.append("notify")


def new_sequence(token_ids: TokenIds, page_size: int, number: int = 0, max_tokens: int = 8) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(Request(request_id=number, prompt_ids=token_ids, sampling=sampling), page_size)


def serve(kv: KVCacheManager, token_ids: TokenIds) -> None:
    seq = new_sequence(token_ids, kv.page_size)
    kv.acquire(seq)
    kv.reserve(seq, seq.num_tokens - seq.num_computed)
    kv.take_copies()
    seq.num_computed = seq.num_tokens
    kv.release(seq)


def reserve_all(kv: KVCacheManager, seq: Sequence) -> None:
    kv.reserve(seq, seq.num_tokens - seq.num_computed)


def in_flight(kv: KVCacheManager, seq: Sequence) -> None:
    reserve_all(kv, seq)
    kv.take_copies()


def half_computed(kv: KVCacheManager, seq: Sequence) -> None:
    in_flight(kv, seq)
    seq.num_computed += (seq.num_tokens - seq.num_computed) // 2 + 1


def committed(kv: KVCacheManager, seq: Sequence) -> None:
    half_computed(kv, seq)
    kv.commit(seq)


def decoding(kv: KVCacheManager, seq: Sequence) -> None:
    in_flight(kv, seq)
    seq.num_computed = seq.num_tokens
    seq.append(7)
    kv.commit(seq)
    kv.reserve(seq, 1)


STAGES: dict[str, Callable[[KVCacheManager, Sequence], None]] = {
    "matched": lambda kv, seq: None,
    "reserved": reserve_all,
    "in flight": in_flight,
    "half computed": half_computed,
    "committed": committed,
    "decoding": decoding,
}


@every_page_size
@pytest.mark.parametrize("stage", STAGES)
def test_b068_an_abort_lets_go_then_frees_then_notifies(page_size: int, stage: str) -> None:
    """Whatever the stage: the table is empty before a page is free, and others hear of it last.

    Fault seen: ``release`` calls ``_publish`` before it lets the table go; ``EventLog.add`` appends to what
    can be taken at once."""
    pool = Witness(4 + 400 // page_size)
    kv = KVCacheManager(pool, RadixTree(page_size), max_event_pages=1000)
    prompt = run_of(100, 130)
    serve(kv, prompt[: 66 if page_size > 1 else 65])
    pool.kv = kv
    seq = new_sequence(prompt, page_size, 1)
    kv.acquire(seq)
    STAGES[stage](kv, seq)
    pool.look()
    is_rest = seq.num_computed > seq.num_committed_pages * page_size
    before, stored = kv.tree.num_pages, replay(pool.told, page_size)
    pool.steps.clear()
    pool.told.clear()
    pool.watched = seq
    kv.release(seq)
    kv.release(seq)
    assert seq.page_table.num_pages == 0
    pool.look()
    assert "notify" not in pool.steps[:-1], f"told too early: {pool.steps}"
    replay(pool.told, page_size, stored)
    assert len(stored) == kv.tree.num_pages >= before
    computes = stage in ("half computed", "committed", "decoding") and is_rest
    assert bool(pool.told) == computes, "only what was computed enters the tree"
    assert stage == "matched" or "free" in pool.steps or stage == "decoding"
    kv.check([])
    kv.check_idle()


@every_page_size
def test_b068_evicted_pages_are_free_when_others_hear_of_it(page_size: int) -> None:
    """Fault seen: ``_allocate`` calls ``_publish`` before ``decref``."""
    pool = Witness(256 // page_size)
    kv = KVCacheManager(pool, RadixTree(page_size), max_event_pages=1000)
    serve(kv, run_of(0, 256))
    pool.kv = kv
    pool.look()
    pool.told.clear()
    seq = new_sequence(run_of(1000, 128), page_size, 1)
    pool.watched = seq
    pool.steps.clear()
    kv.acquire(seq)
    reserve_all(kv, seq)
    pool.look()
    assert pool.steps == ["free", "notify"]
    removed = [event for event in pool.told if isinstance(event, Removed)]
    assert {event.reason for event in removed} == {"evicted"}
    assert sum(len(event.page_keys) for event in removed) == 128 // page_size
    kv.release(seq)


@pytest.mark.parametrize(
    ("page_size", "num_pages", "policy"),
    [(1, 30, "lru"), (4, 11, "lfu"), (16, 10, "slru"), (64, 9, "cost"), (4, 11, "fifo"), (4, 11, "priority")],
)
def test_b135_events_replayed_are_the_tree(
    page_size: int, num_pages: int, policy: EvictionPolicyName
) -> None:
    """After each of some hundred random operations (``LedgerModel.verify_events``), and each removal says
    why. Fault seen: ``_cut`` tells nothing of a replaced page; ``_stored`` takes the node's first page for
    its last."""
    setting = Setting(page_size=page_size, num_pages=num_pages)
    reasons: set[str] = set()
    for seed in range(12):
        machine = setting.machine(policy)
        Driver(machine, setting, seed).run(100)
        machine.verify_events(tree_content(machine.tree), has_changed=True)
        reasons |= {name for name in machine.counts if name.startswith("event: ")}
        if seed >= 1 and {"event: evicted", "event: replaced", "event: cleared"} <= reasons:
            break
    assert reasons >= {"event: evicted", "event: cleared"}
    assert page_size == 1 or "event: replaced" in reasons


def test_policies_are_all_met_above() -> None:
    assert len(EVICTION_POLICIES) == 6


def test_a_page_taken_over_is_told_as_such() -> None:
    machine = LedgerMachine(page_size=4, num_pages=3)
    row = machine.start(run_of(0, 6))
    machine.reserve(row, 6)
    machine.forward([9], ends=(0,))
    row = machine.start(run_of(0, 9))
    assert machine.reserve(row, 5)
    assert machine.counts["event: taken_over"] == 1
    machine.release(row)


def test_events_name_pages_by_keys_that_never_come_again() -> None:
    kv = KVCacheManager(PagePool(8), RadixTree(4), max_event_pages=100)
    serve(kv, run_of(0, 10))
    (stored,) = kv.take_events()
    assert isinstance(stored, Stored)
    assert (stored.namespace, stored.parent, len(stored.page_keys)) == ((), None, 3)
    assert stored.token_ids.tolist() == list(range(10))
    report = kv.flush()
    assert kv.take_events() == (Cleared(num_pages=report.num_pages_freed),)
    serve(kv, run_of(0, 12))
    serve(kv, np.append(run_of(0, 4), run_of(50, 4)).astype(np.int32))
    first, second = kv.take_events()
    assert isinstance(first, Stored) and isinstance(second, Stored)
    assert not set(first.page_keys) & set(stored.page_keys)
    assert second.parent == first.page_keys[0] and second.token_ids.tolist() == [50, 51, 52, 53]
    assert kv.stats()["num_events"] == 4 and kv.stats()["num_events_waiting"] == 0


def test_what_does_not_fit_is_counted_and_content_begins_anew() -> None:
    """Fault seen: ``publish`` pops without counting."""
    kv = KVCacheManager(PagePool(32), RadixTree(4), max_event_pages=10)
    for number in range(4):
        serve(kv, run_of(100 * number, 12))
    kv.check([])
    lost, *kept = kv.take_events()
    assert lost == Lost(num_events=2) and len(kept) == 2
    with pytest.raises(ValueError, match="2 events are lost"):
        replay([lost, *kept], 4)
    pages = replay(kv.content(), 4)
    serve(kv, run_of(400, 5))
    assert replay(kv.take_events(), 4, pages) == replay(kv.content(), 4)
    assert len(pages) == kv.tree.num_pages == 14
    assert kv.stats()["num_events_lost"] == 2


def test_an_event_larger_than_the_buffer_is_lost_alone() -> None:
    log = EventLog(3)
    log.add(Removed(page_keys=(1, 2, 3), reason="evicted"))
    log.publish()
    log.add(Cleared(num_pages=0))
    log.publish()
    assert log.take() == (Lost(num_events=1), Cleared(num_pages=0))
    assert log.take() == ()


def test_events_are_off_unless_asked_for() -> None:
    kv = KVCacheManager(PagePool(8), RadixTree(4))
    serve(kv, run_of(0, 10))
    assert "num_events" not in kv.stats()
    with pytest.raises(MisuseError, match="events are off"):
        kv.take_events()
    with pytest.raises(ConfigError, match="max_event_pages must be at least 0, got -1"):
        KVCacheManager(PagePool(8), RadixTree(4), max_event_pages=-1)


def test_without_a_cache_nothing_is_told() -> None:
    kv = KVCacheManager(PagePool(8), NullTree(4), max_event_pages=100)
    serve(kv, run_of(0, 10))
    assert kv.take_events() == () and list(kv.content()) == []


def test_check_finds_a_buffer_that_was_counted_wrong() -> None:
    log = EventLog(10)
    log._num_entries = 1
    with pytest.raises(InternalError, match="X1 does not hold"):
        log.check()


def test_an_idle_check_finds_what_is_held_by_nobody() -> None:
    """Fault seen: ``check_idle`` leaves the pins out."""
    kv = KVCacheManager(PagePool(16), RadixTree(4), max_pinned_pages=4)
    serve(kv, run_of(0, 10))
    kv.pin(run_of(0, 8))
    kv.check_idle()
    seq = new_sequence(run_of(0, 8), 4, 1)
    kv.acquire(seq)
    with pytest.raises(InternalError, match="M1 does not hold"):
        kv.check_idle()
    kv.release(seq)
    kv.check_idle()
    kv.pool.allocate(1)
    with pytest.raises(InternalError, match="M1 does not hold: idle"):
        kv.check_idle()
