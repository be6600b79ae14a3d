"""KVCacheManager: the life of a sequence's pages, examples with exact page ids.

Long because each verb's examples stand together with those of the verbs that it meets.
"""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.errors import (
    ConfigError,
    InternalError,
    InvalidRequestError,
    MisuseError,
    OutOfPages,
    PinBudgetExceeded,
)
from radixkv.kv import KVCacheManager, NullTree, PageCopy, PagePool, PageTable, RadixTree, Request, Sequence
from radixkv.types import Namespace, TokenIds

P = 4
SAMPLED = 7777


class Ledger:
    """A manager with its sequences; every step checks all invariants."""

    def __init__(self, num_pages: int = 16, page_size: int = P, *, null: bool = False, pins: int = 8) -> None:
        self.pool = PagePool(num_pages)
        self.tree = NullTree(page_size) if null else RadixTree(page_size)
        self.now = 0.0
        self.kv = KVCacheManager(
            self.pool, self.tree, max_pinned_pages=min(pins, num_pages - 1), clock=lambda: self.now
        )
        self.sequences: list[Sequence] = []

    def new(self, tokens: TokenIds, namespace: Namespace = (), logprob_start: int | None = None) -> Sequence:
        number = len(self.sequences)
        request = Request(
            request_id=number,
            prompt_ids=tokens,
            namespace=namespace,
            logprob_start=logprob_start,
        )
        seq = Sequence(request, self.kv.page_size)
        self.sequences.append(seq)
        return seq

    def admit(self, tokens: TokenIds, namespace: Namespace = ()) -> Sequence:
        """Acquire and reserve the whole prompt."""
        seq = self.new(tokens, namespace)
        self.kv.acquire(seq)
        self.kv.reserve(seq, seq.num_tokens - seq.num_computed)
        self.check()
        return seq

    def compute(self, seq: Sequence, *output: int) -> tuple[PageCopy, ...]:
        """Compute all tokens, then append and compute each of ``output``; returns the copies taken."""
        copies: tuple[PageCopy, ...] = ()
        for token in (None, *output):
            if token is not None:
                seq.append(token)
            num = seq.num_tokens - seq.num_computed
            self.kv.reserve(seq, num)
            self.kv.check_writes(seq, num)
            copies += self.kv.take_copies()
            seq.num_computed += num
            seq.append(SAMPLED)  # sampled, not computed
            self.kv.commit(seq)
            self.check()
            seq.num_tokens -= 1
        seq.append(SAMPLED)
        return copies

    def run(self, tokens: TokenIds, *output: int, namespace: Namespace = ()) -> Sequence:
        """A whole life: admitted, computed, released."""
        seq = self.admit(tokens, namespace)
        self.compute(seq, *output)
        self.kv.release(seq)
        self.check()
        return seq

    def check(self) -> None:
        self.kv.check(self.sequences)

    def peek(self, tokens: TokenIds, namespace: Namespace = ()) -> int:
        """The hit of these tokens and one more."""
        request = Request(request_id=0, prompt_ids=np.append(tokens, np.int32(999_999)), namespace=namespace)
        return self.kv.peek(request)


def span(start: int, stop: int) -> TokenIds:
    return np.arange(start, stop, dtype=np.int32)


def join(*parts: TokenIds) -> TokenIds:
    return np.concatenate(parts)


def table(seq: Sequence) -> list[int]:
    return [int(page) for page in seq.page_table.pages]


# ---- acquire, reserve, commit, release -------------------------------------------------------------------


def test_the_first_request_finds_nothing_and_leaves_all_it_computed() -> None:
    led = Ledger()
    seq = led.admit(span(0, 10))
    assert (table(seq), seq.num_computed, seq.num_cached) == ([0, 1, 2], 0, 0)
    assert led.compute(seq) == ()
    assert seq.num_committed_pages == 2
    assert led.pool.ref_count[:3].tolist() == [2, 2, 1]
    led.kv.release(seq)
    assert (table(seq), seq.num_computed, seq.num_committed_pages) == ([], 0, 0)
    assert led.pool.ref_count[:3].tolist() == [1, 1, 1]
    assert led.peek(span(0, 10)) == 10
    assert led.kv.num_available == 16
    led.check()


def test_release_is_idempotent_in_every_state() -> None:
    led = Ledger()
    seq = led.new(span(0, 10))
    led.kv.release(seq)
    led.kv.acquire(seq)
    led.kv.release(seq)
    led.kv.release(seq)
    led.kv.acquire(seq)
    led.kv.reserve(seq, 10)
    led.kv.release(seq)
    led.kv.release(seq)
    led.check()
    assert led.pool.num_free == 16


def test_b037_a_prompt_found_whole_still_computes_its_last_token() -> None:
    """Fault seen: ``max_hit_tokens`` ignored in ``acquire``."""
    for length in (1, P, 2 * P):
        led = Ledger()
        led.run(span(0, length))
        seq = led.admit(span(0, length))
        assert seq.num_computed == seq.num_cached == length - 1
        copies = led.compute(seq)
        assert [copy.num_tokens for copy in copies] == ([] if length == 1 else [P - 1])
        led.kv.release(seq)
        led.check()


def test_a_hit_that_ends_inside_a_page_is_copied() -> None:
    led = Ledger()
    led.run(span(0, 12))  # pages 0, 1, 2
    seq = led.new(join(span(0, 6), span(50, 55)))
    led.kv.acquire(seq)
    assert (table(seq), seq.num_computed, seq.num_committed_pages) == ([0], 6, 1)
    assert led.pool.ref_count[:3].tolist() == [2, 2, 1]
    led.kv.reserve(seq, 5)
    assert table(seq) == [0, 3, 4]
    assert led.kv.take_copies() == (PageCopy(1, 3, 2),)
    assert led.kv.take_copies() == ()
    assert led.pool.ref_count[:5].tolist() == [2, 1, 1, 1, 1]


def test_the_hit_is_limited_by_the_log_probabilities_wanted() -> None:
    led = Ledger()
    led.run(span(0, 12))
    seq = led.new(span(0, 12), logprob_start=6)
    led.kv.acquire(seq)
    assert seq.num_computed == led.kv.peek(seq.request) == 5
    whole = led.new(span(0, 12), logprob_start=0)
    led.kv.acquire(whole)
    assert whole.num_computed == 0
    led.check()


def test_a_finished_turn_is_found_to_its_last_computed_token() -> None:
    led = Ledger()
    led.run(span(0, 6), 70, 71, 72)  # 9 tokens computed, on pages 0, 1, 2
    turn = join(span(0, 6), np.array([70, 71, 72, 73, 74], np.int32))
    seq = led.admit(turn)
    assert seq.num_cached == 9
    assert led.compute(seq, 75) == (PageCopy(2, 3, 1),)
    assert table(seq) == [0, 1, 3]
    assert led.pool.ref_count[2] == 0, "the fuller page replaced the partial one"
    led.kv.release(seq)
    assert led.peek(join(turn, np.array([75], np.int32))) == 12


def test_two_equal_tails_are_kept_once() -> None:
    led = Ledger()
    first, second = led.admit(span(0, 6)), led.admit(span(0, 6))
    led.compute(first)
    led.compute(second)
    led.kv.release(first)
    led.kv.release(second)
    led.check()
    assert led.tree.num_pages == 2
    assert led.pool.num_free == 14


@pytest.mark.parametrize("short_first", [True, False])
def test_a_tail_that_another_extends_is_kept_once(short_first: bool) -> None:
    led = Ledger()
    short, long = led.admit(span(0, 6)), led.admit(span(0, 7))
    led.compute(short)
    led.compute(long)
    for seq in (short, long) if short_first else (long, short):
        led.kv.release(seq)
        led.check()
    assert led.tree.num_pages == 2
    assert led.peek(span(0, 7)) == 7


def test_b141_a_table_is_repointed_before_its_duplicates_are_freed() -> None:
    """Fault seen: ``_repoint`` left out (M2), and ``replace`` left out of it (M1)."""
    led = Ledger(8)
    first, second = led.admit(span(0, 8)), led.admit(span(0, 8))
    assert (table(first), table(second)) == ([0, 1], [2, 3])
    led.compute(first)
    led.compute(second)
    assert table(second) == [0, 1]
    assert led.pool.ref_count[:4].tolist() == [3, 3, 0, 0]
    third = led.admit(span(100, 110))
    assert table(third) == [2, 3, 4]
    led.compute(first, 1)
    led.compute(second, 2)
    assert table(second)[:2] == [0, 1]


def test_a_commit_in_the_middle_of_anothers_path_repoints_only_what_is_known() -> None:
    led = Ledger()
    a, b = led.admit(span(0, 4)), led.admit(span(0, 8))
    led.compute(a)
    led.compute(b)
    assert table(b) == [0, 2]
    assert led.pool.ref_count[:3].tolist() == [3, 0, 2]


def test_commit_without_a_new_full_page_changes_nothing() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq)
    version = led.kv.version
    led.compute(seq)
    assert led.kv.version == version
    led.compute(seq, 9)
    assert led.kv.version != version


def test_reserve_evicts_the_least_recently_used_and_keeps_the_hit() -> None:
    led = Ledger(6)
    led.run(span(0, 8))  # pages 0, 1
    led.run(span(50, 58))  # pages 2, 3
    seq = led.admit(join(span(0, 8), span(90, 102)))  # hit of 2 pages, 3 more: 4, 5 and the oldest idle one
    assert table(seq) == [0, 1, 3, 4, 5]
    assert led.peek(span(50, 58)) == 4


def test_out_of_pages_evicts_nothing() -> None:
    led = Ledger(4)
    led.run(span(0, 8))
    seq = led.new(span(50, 70))
    led.kv.acquire(seq)
    version, before = led.kv.version, led.kv.stats()
    with pytest.raises(OutOfPages) as caught:
        led.kv.reserve(seq, 20)
    assert (caught.value.needed, caught.value.available) == (5, 4)
    assert led.kv.version == version
    after = led.kv.stats()
    assert after.pop("num_out_of_pages") == before.pop("num_out_of_pages") + 1
    assert after == before
    led.check()


def test_b034_pages_of_the_hit_are_not_evicted_for_the_rest() -> None:
    """Fault seen: ``_hold`` left out of ``acquire``."""
    led = Ledger(8)
    led.run(span(0, 16))  # pages 0..3
    led.run(span(50, 66))  # pages 4..7, used later than the hit
    seq = led.admit(join(span(0, 16), span(90, 106)))
    assert table(seq)[:4] == [0, 1, 2, 3]
    assert seq.num_cached == 16
    assert led.peek(span(50, 66)) == 0


def test_an_admission_that_fails_was_none() -> None:
    led = Ledger(4)
    led.run(span(0, 8))
    seq = led.new(join(span(0, 8), span(90, 110)))
    led.kv.acquire(seq)
    assert seq.num_cached == 8
    with pytest.raises(OutOfPages):
        led.kv.reserve(seq, 20)
    led.kv.release(seq)
    assert seq.num_cached is None
    assert led.kv.num_available == 4
    led.check()


def test_b071_cached_tokens_are_counted_at_first_admission_only() -> None:
    """Fault seen: ``num_cached`` set at every ``acquire``."""
    led = Ledger()
    seq = led.admit(span(0, 10))
    for _ in range(3):
        led.compute(seq)
        led.kv.release(seq)
        led.kv.acquire(seq)
        assert (seq.num_cached, seq.num_computed) == (0, seq.num_tokens - 1)
        led.check()


def test_b007_a_preempted_sequence_finds_all_that_it_had_computed() -> None:
    """Fault seen: ``Sequence.max_hit_tokens`` without the outputs."""
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq, 70, 71, 72, 73)
    led.kv.release(seq)
    led.check()
    led.kv.acquire(seq)
    assert seq.num_computed == 10
    assert seq.num_committed_pages == 2


def test_preemption_after_reserve_cancels_the_copy() -> None:
    led = Ledger()
    led.run(span(0, 7))  # pages 0, 1
    seq = led.admit(join(span(0, 7), span(50, 60)))
    led.kv.release(seq)
    led.check()
    assert led.kv.take_copies() == ()
    assert led.kv.stats()["num_copies_cancelled"] == 1
    assert led.peek(join(span(0, 7), span(50, 60))) == 7


def test_a_copy_in_a_batch_that_failed_is_not_inserted() -> None:
    led = Ledger(5)
    led.run(span(0, 7))  # pages 0, 1
    seq = led.admit(join(span(0, 7), span(50, 55)))
    assert led.kv.take_copies() == (PageCopy(1, 2, 3),)
    assert table(led.admit(span(90, 98))) == [1, 4]  # the source is gone; page 2 was never written
    led.kv.release(seq)
    led.check()
    assert led.peek(span(0, 7)) == 4


def test_the_partial_source_survives_while_it_waits_to_be_copied() -> None:
    led = Ledger(6)
    led.run(span(0, 6))  # pages 0, 1
    seq = led.admit(join(span(0, 6), span(50, 52)))
    other = led.admit(span(90, 102))  # the last three pages
    with pytest.raises(OutOfPages):
        led.kv.reserve(other, 13)
    assert led.kv.take_copies() == (PageCopy(1, 2, 2),)
    led.kv.reserve(other, 13)
    assert table(other)[-1] == 1
    assert table(seq) == [0, 2]
    led.check()


# ---- partial matches when pages are short ----------------------------------------------------------------


def test_a_partial_page_is_copied_while_there_is_room_so_that_the_next_finds_it_too() -> None:
    led = Ledger()
    led.run(span(0, 7))
    for extra in (50, 60, 70):
        assert led.admit(join(span(0, 7), span(extra, extra + 5))).num_cached == 7
    assert led.kv.stats()["num_partial_copies"] == 3


def test_a_partial_page_is_taken_over_when_no_other_page_can_be_had() -> None:
    led = Ledger(3)
    led.run(span(0, 7))  # pages 0, 1
    seq = led.admit(join(span(0, 7), span(50, 55)))  # 12 tokens, 3 pages
    assert (table(seq), seq.num_computed, seq.num_cached) == ([0, 1, 2], 7, 7)
    assert led.kv.stats()["num_takeovers"] == 1
    assert led.kv.take_copies() == ()
    assert led.peek(span(0, 7)) == 4, "the page is the sequence's own until it is committed"
    led.compute(seq)
    assert led.peek(join(span(0, 7), span(50, 55))) == 12


def test_a_page_taken_over_comes_back_at_release_without_compute() -> None:
    led = Ledger(3)
    led.run(span(0, 7))
    seq = led.admit(join(span(0, 7), span(50, 55)))
    led.kv.release(seq)
    led.check()
    assert led.peek(span(0, 7)) == 7
    assert led.tree.num_pages == 2


def test_a_partial_match_is_dropped_when_its_copy_is_all_that_lacks() -> None:
    led = Ledger(3)
    led.run(span(0, 8))  # page 1 is whole: it cannot be taken over
    seq = led.new(join(span(0, 7), span(50, 55)))
    led.kv.acquire(seq)
    assert (seq.num_computed, seq.num_cached) == (7, 7)
    led.kv.reserve(seq, 5)
    assert (seq.num_computed, seq.num_cached) == (4, 4)
    assert seq.page_table.num_slots == 12, "the room reaches as far as was asked"
    led.check()


def test_a_partial_match_that_others_hold_is_kept_when_pages_lack() -> None:
    led = Ledger(4)
    led.run(span(0, 7))
    led.kv.pin(span(0, 7))
    seq = led.new(join(span(0, 7), span(50, 60)))
    led.kv.acquire(seq)
    with pytest.raises(OutOfPages) as caught:
        led.kv.reserve(seq, 10)
    assert (caught.value.needed, caught.value.available) == (4, 2)
    assert seq.num_computed == 7
    led.check()


def test_a_source_that_the_tree_let_go_is_simply_kept() -> None:
    led = Ledger()
    led.run(span(0, 6))  # pages 0, 1
    slow = led.new(join(span(0, 6), span(50, 53)))
    led.kv.acquire(slow)
    led.run(span(0, 12))  # replaces page 1 by a fuller one
    assert led.pool.ref_count[1] == 1
    led.kv.reserve(slow, 3)
    assert table(slow)[:2] == [0, 1]
    assert led.kv.take_copies() == ()
    led.compute(slow)


# ---- fork and truncate -----------------------------------------------------------------------------------


def fork(led: Ledger, seq: Sequence, *tokens: int) -> Sequence:
    child = led.new(join(seq.token_ids[: seq.num_computed], np.array(tokens, np.int32)))
    child.page_table = led.kv.fork(seq)
    child.num_computed = seq.num_computed
    child.num_committed_pages = seq.num_committed_pages
    child.namespace = seq.namespace
    return child


def test_b114_a_fork_shares_every_page_and_copies_its_tail_at_the_first_write() -> None:
    """Fault seen: ``_shared_page`` returning ``None``: W1."""
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq)
    child = fork(led, seq, 90)
    assert table(child) == table(seq) == [0, 1]
    led.check()
    assert led.compute(child) == (PageCopy(1, 2, 2),)
    assert table(child) == [0, 2]
    assert led.compute(seq, 80) == (), "the last holder writes in place"
    assert table(seq) == [0, 1]
    for one in (seq, child):
        led.kv.release(one)
    led.check()
    assert led.peek(join(span(0, 6), np.array([90], np.int32))) == 7
    assert led.peek(join(span(0, 6), np.array([SAMPLED, 80], np.int32))) == 8


def test_a_fork_does_not_share_pages_reserved_for_later() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq)
    led.kv.reserve(seq, 12)
    assert len(table(seq)) == 5
    assert table(fork(led, seq, 90)) == [0, 1]
    led.check()


@pytest.mark.parametrize("reserved", [False, True])
def test_a_fork_before_the_copy_was_made_shares_its_source(reserved: bool) -> None:
    led = Ledger()
    led.run(span(0, 12))  # pages 0, 1, 2
    seq = led.new(join(span(0, 6), span(50, 55)))
    led.kv.acquire(seq)
    if reserved:
        led.kv.reserve(seq, 5)
    child = fork(led, seq, 90)
    assert table(child) == [0, 1]
    led.check()
    led.kv.reserve(seq, 5)
    led.kv.reserve(child, 1)
    assert [(copy.src, copy.num_tokens) for copy in led.kv.take_copies()] == [(1, 2), (1, 2)]
    led.check()


def test_a_fork_that_is_released_unused_leaves_no_trace() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq)
    child = fork(led, seq, 90)
    led.kv.release(child)
    led.check()
    led.compute(seq, 80, 81, 82)
    led.kv.release(seq)
    led.check()
    assert led.tree.num_pages == 3


def test_truncate_gives_back_pages_and_keeps_one_token_to_compute() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq, *range(70, 80))  # 16 computed, 17 tokens
    assert (table(seq), seq.num_committed_pages) == ([0, 1, 2, 3], 4)
    led.kv.truncate(seq, 11)
    assert (seq.num_tokens, seq.num_computed, seq.num_committed_pages) == (11, 10, 2)
    assert table(seq) == [0, 1, 2]
    led.check()
    assert led.compute(seq) == (PageCopy(2, 4, 2),)
    assert table(seq) == [0, 1, 4]
    assert led.tree.num_pages == 4, "what was committed stays"


def test_truncate_at_a_page_edge_needs_no_copy() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq, *range(70, 80))
    led.kv.truncate(seq, 9)
    assert (seq.num_computed, seq.num_committed_pages, table(seq)) == (8, 2, [0, 1])
    assert led.compute(seq) == ()


def test_truncate_of_a_partial_hit_before_its_copy() -> None:
    led = Ledger()
    seq = led.admit(span(0, 5))
    led.compute(seq, *range(70, 80))
    led.kv.release(seq)
    for keep, copies in ((14, [1]), (6, [1]), (5, [])):  # 14: in the page that the copy is for
        led.kv.acquire(seq)
        led.kv.reserve(seq, 1)
        led.kv.truncate(seq, keep)
        led.check()
        led.kv.reserve(seq, 1)
        assert [copy.num_tokens for copy in led.kv.take_copies()] == copies
        led.kv.release(seq)
        led.check()


def test_truncate_beyond_its_limits_is_misuse() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq, 70)
    for num_tokens in (5, 9):
        with pytest.raises(MisuseError, match=f"to {num_tokens} tokens: the prompt has 6, the sequence 8"):
            led.kv.truncate(seq, num_tokens)
    led.check()


# ---- pins ------------------------------------------------------------------------------------------------


def test_a_pin_holds_its_prefix_to_the_token() -> None:
    led = Ledger(8)
    led.run(span(0, 7))
    pin = led.kv.pin(span(0, 7))
    assert (pin.num_tokens, pin.pages, pin.deadline) == (7, (0, 1), None)
    assert led.kv.num_pinned_pages == 2
    led.run(span(50, 74))  # all that is left
    assert led.peek(span(0, 7)) == 7
    led.kv.unpin(pin)
    led.kv.unpin(pin)
    led.run(span(80, 112))
    assert led.peek(span(0, 7)) == 0
    led.check()


def test_a_pin_goes_with_the_page_that_replaces_its_own() -> None:
    led = Ledger(6)
    led.run(span(0, 7))  # pages 0, 1
    pin = led.kv.pin(span(0, 7))
    again = led.kv.pin(span(0, 7))
    led.run(join(span(0, 7), span(50, 55)))
    (moved, _) = led.kv.pins
    assert (moved.pin_id, moved.num_tokens, moved.pages) == (pin.pin_id, 7, (0, 2))
    assert led.kv.num_pinned_pages == 2
    led.check()
    led.run(span(80, 96))  # evicts what is not pinned
    assert led.peek(span(0, 7)) == 7
    led.kv.unpin(pin)
    led.kv.unpin(again)
    led.check()
    assert led.kv.num_available == 6


def test_b130_the_pin_budget_counts_distinct_pages() -> None:
    """Fault seen: ``needed`` counted without ``- held``."""
    led = Ledger(8, pins=2)
    led.run(span(0, 8))
    led.run(span(50, 58))
    led.kv.pin(span(0, 8))
    led.kv.pin(span(0, 5))
    with pytest.raises(PinBudgetExceeded) as caught:
        led.kv.pin(span(50, 54))
    assert (caught.value.needed, caught.value.left) == (1, 0)
    assert len(led.kv.pins) == 2
    led.check()


def test_b020_pins_expire_at_their_deadline_and_only_once() -> None:
    """Fault seen: ``expire_pins`` that lets go without ``remove``."""
    led = Ledger()
    led.run(span(0, 8))
    short, long = led.kv.pin(span(0, 8), timeout_s=5.0), led.kv.pin(span(0, 4), timeout_s=9.0)
    led.now = 4.9
    assert led.kv.expire_pins() == []
    led.now = 5.0
    assert led.kv.expire_pins() == [short]
    assert led.kv.expire_pins() == []
    led.kv.unpin(short)
    led.check()
    assert led.kv.pins == (long,)
    assert led.pool.ref_count[:2].tolist() == [2, 1]


def test_a_pin_of_something_unknown_holds_nothing() -> None:
    led = Ledger()
    pin = led.kv.pin([1, 2, 3])
    assert (pin.num_tokens, pin.pages) == (0, ())
    led.kv.unpin(pin)
    led.check()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pin_needs_a_sensible_time(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        Ledger().kv.pin([1], timeout_s=timeout_s)


@pytest.mark.parametrize("bad", [[[1]], [1.5], ["a"], [2**31], [-(2**31) - 1]])
def test_token_ids_are_checked_at_the_edge(bad: list[int]) -> None:
    for verb in (Ledger().kv.pin, Ledger().kv.explain):
        with pytest.raises(InvalidRequestError, match="token ids"):
            verb(bad)


# ---- flush, namespaces, explain --------------------------------------------------------------------------


def test_b088_a_flush_frees_what_is_idle_and_reports_the_rest() -> None:
    """Fault seen: ``epoch`` not raised in ``flush``."""
    led = Ledger()
    led.run(span(50, 58))  # pages 0, 1
    running = led.admit(span(0, 8))
    led.compute(running)
    pin = led.kv.pin(span(50, 58))
    report = led.kv.flush()
    assert (report.num_pages_freed, report.num_pages_held, report.pins_dropped) == (2, 2, (pin,))
    led.check()
    led.kv.unpin(pin)
    led.compute(running, *range(60, 70))
    assert led.tree.num_pages == 0, "a commit of an old epoch inserts nothing"
    led.kv.release(running)
    assert led.tree.num_pages == 0
    assert led.pool.num_free == 16
    led.kv.acquire(running)
    assert running.num_computed == 0
    led.check()


def test_b079_namespaces_do_not_see_each_other() -> None:
    """Fault seen: ``_namespace`` with the first of the request's fields only."""
    led = Ledger()
    led.run(span(0, 8), namespace=("salt", "a"))
    assert led.peek(span(0, 8), ("salt", "a")) == 8
    for other in ((), ("salt", "b"), ("salt",), ("salt", None), ("a",), ("",)):
        assert led.peek(span(0, 8), other) == 0
    found = led.kv.explain(span(0, 8), ("salt", "b"))
    assert (found.reason, found.other_namespace) == ("other_namespace", ("salt", "a"))


def test_b140_explain_says_whether_it_was_ever_cached() -> None:
    """Fault seen: ``record`` not called in ``_cut``."""
    led = Ledger(4)
    led.run(span(0, 16))
    led.run(span(50, 58))
    found = led.kv.explain(span(0, 16).tolist())
    assert (found.hit_tokens, found.reason, found.evictions_ago) == (8, "evicted", 1)
    assert led.kv.explain(span(90, 99)).reason == "differs"
    led.kv.flush()
    assert led.kv.explain(span(0, 16)).reason == "absent"


# ---- misuse, null tree, checks ---------------------------------------------------------------------------


def test_steps_out_of_order_are_misuse() -> None:
    led = Ledger()
    led.run(span(0, 7))
    seq = led.new(join(span(0, 7), span(50, 60)))
    led.kv.acquire(seq)
    with pytest.raises(MisuseError, match="release it first"):
        led.kv.acquire(seq)
    with pytest.raises(MisuseError, match="cannot reserve -1 tokens"):
        led.kv.reserve(seq, -1)
    led.kv.reserve(seq, 2)
    seq.num_computed += 2
    with pytest.raises(MisuseError, match="call take_copies first"):
        led.kv.commit(seq)
    seq.num_computed -= 2
    led.kv.take_copies()
    for verb in (lambda: led.kv.fork(seq), lambda: led.kv.truncate(seq, 17), lambda: led.kv.reserve(seq, 1)):
        with pytest.raises(MisuseError, match="in flight"):
            verb()
    seq.num_computed += 20
    with pytest.raises(MisuseError, match="27 tokens computed, room for 12"):
        led.kv.commit(seq)
    seq.num_computed -= 20
    led.kv.release(seq)
    led.check()


def test_computing_more_than_there_is_is_misuse() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    seq.num_computed = 7
    with pytest.raises(MisuseError, match="7 tokens computed, the sequence has 6"):
        led.kv.commit(seq)


def test_a_table_of_another_page_size_is_misuse() -> None:
    led = Ledger()
    seq = led.new(span(0, 6))
    seq.page_table = PageTable(8)
    with pytest.raises(MisuseError, match="8, not 4 tokens"):
        led.kv.acquire(seq)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"max_pinned_pages must lie in 0\.\.3, got 4"):
        KVCacheManager(PagePool(4), RadixTree(4), max_pinned_pages=4)
    with pytest.raises(ConfigError, match="eviction_memory must be at least 0, got -1"):
        KVCacheManager(PagePool(4), RadixTree(4), eviction_memory=-1)


def test_b051_without_a_cache_everything_works_and_nothing_is_found() -> None:
    """Fault seen: ``NullTree.insert`` that adopts."""
    led = Ledger(null=True)
    seq = led.admit(span(0, 10))
    led.compute(seq, 70, 71, 72)
    child = fork(led, seq, 90)
    assert len(led.compute(child)) == 1
    led.kv.truncate(seq, 11)
    led.check()
    led.compute(seq)
    for one in (seq, child):
        led.kv.release(one)
    assert led.pool.num_free == 16
    assert led.peek(span(0, 10)) == 0
    assert led.run(span(0, 10)).num_cached == 0
    assert led.kv.flush().num_pages_freed == 0


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b093_conversations_hit_all_that_was_computed_at_every_page_size(page_size: int) -> None:
    """Fault seen: ``release`` that inserts whole pages only."""
    led = Ledger(512 // page_size + 8, page_size)
    history = span(0, 5)
    for turn in range(5):
        prompt = join(history, span(1000 * turn, 1000 * turn + 13))
        seq = led.run(prompt, *range(7))
        assert seq.num_cached == (len(history) if turn else 0)
        history = seq.token_ids[:-1].copy()
    led.check()


def test_b010_used_idle_and_free_are_separate_numbers() -> None:
    """Fault seen: ``num_pages_used`` that counts idle pages."""
    led = Ledger()
    led.run(span(50, 58))
    led.admit(span(0, 12))
    stats = led.kv.stats()
    names = ("num_pages", "num_pages_free", "num_pages_idle", "num_pages_used")
    assert [stats[name] for name in names] == [16, 11, 2, 3]
    assert led.kv.num_available == 13


def test_check_names_the_invariant_that_broke() -> None:
    led = Ledger()
    seq = led.admit(span(0, 6))
    led.compute(seq)
    led.pool.incref(seq.page_table.pages[1:])
    with pytest.raises(InternalError, match=r"M1 does not hold.*\(1, 2, 1\)"):
        led.check()
    led.pool.decref(seq.page_table.pages[1:])
    led.check()
    seq.num_computed = 3
    with pytest.raises(InternalError, match="S1 does not hold"):
        led.check()
    seq.num_computed = 9
    with pytest.raises(InternalError, match="S1 does not hold"):
        led.check()
    seq.num_computed = 6
    seq._buffer[0] = 99
    with pytest.raises(InternalError, match="M2 does not hold"):
        led.check()


def test_check_finds_a_page_to_be_written_that_is_shared() -> None:
    led = Ledger()
    seq, other = led.admit(span(0, 6)), led.new(span(0, 6))
    other.page_table.extend(seq.page_table.pages)
    led.pool.incref(seq.page_table.pages)
    with pytest.raises(InternalError, match="W1 does not hold"):
        led.check()
    with pytest.raises(InternalError, match="W1 does not hold"):
        led.kv.check_writes(seq, 1)
    with pytest.raises(InternalError, match="no room to write"):
        led.kv.check_writes(seq, 9)


# ---- what others ask before they act ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["matched", "reserved", "taken"])
def test_room_after_a_release_is_known_before_it(stage: str) -> None:
    """Fault seen: a source that was let go when its copy was taken is let go again."""
    led = Ledger(12)
    led.run(span(0, 7))
    led.kv.pin(span(0, 7))  # two pages stay, the copy's source among them
    other = led.admit(join(span(0, 4), span(80, 84)))
    seq = led.new(join(span(0, 7), span(50, 60)))
    led.kv.acquire(seq)
    if stage != "matched":
        led.kv.reserve(seq, 3)
    if stage == "taken":
        led.kv.take_copies()
        seq.num_computed += 3
    before = led.kv.num_available
    said = led.kv.num_available_without([seq])
    both = led.kv.num_available_without([seq, other])
    assert (led.kv.num_available, led.kv.num_available_without([])) == (before, before)
    led.kv.release(seq)
    assert led.kv.num_available == said
    led.kv.release(other)
    assert led.kv.num_available == both == 10


def test_a_tree_that_gives_less_than_it_promised_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    led = Ledger(4)
    led.run(span(0, 16))
    monkeypatch.setattr(led.tree, "evict", lambda num_pages, ref_count: np.empty(0, np.int32))
    with pytest.raises(InternalError, match="M2: 2 pages should be idle, 0 were"):
        led.admit(span(50, 58))


def test_a_shared_tail_is_written_on_where_no_page_can_be_had_for_a_copy() -> None:
    """A fork that ended left its tail in the tree; its sibling goes on upon that page."""
    led = Ledger(2)
    seq = led.admit(span(0, 6))
    led.kv.take_copies()
    seq.num_computed = 6
    seq.append(9)
    led.kv.commit(seq)
    twin = led.new(span(0, 6))
    twin.append(9)
    twin.page_table = led.kv.fork(seq)
    twin.num_computed, twin.num_committed_pages, twin.namespace = 6, 1, seq.namespace
    led.kv.release(twin)
    assert led.tree.num_tokens_of(1) == 6 - 4
    led.kv.reserve(seq, 1)
    assert table(seq) == [0, 1] and led.tree.num_tokens_of(1) == 0
    assert led.kv.stats()["tree_num_taken"] == 1
    led.kv.check_writes(seq, 1)
    led.check()


def test_who_waits_for_pages_hits_once() -> None:
    """Fault seen: ``acquire`` passes no ``is_retry``."""
    led = Ledger(4)
    led.run(span(0, 8))
    blocker = led.admit(span(50, 58))
    seq = led.new(join(span(0, 8), span(60, 72)))
    for _ in range(5):
        led.kv.acquire(seq)
        with pytest.raises(OutOfPages):
            led.kv.reserve(seq, 12)
        led.kv.release(seq)
        led.check()
    assert led.kv.stats()["tree_reuse_gap_uses"]["count"] == 1
    led.kv.release(blocker)
    for _ in range(2):  # the second is another use
        led.kv.acquire(seq)
        led.kv.reserve(seq, 8)
        led.kv.release(seq)
    assert led.kv.stats()["tree_reuse_gap_uses"]["count"] == 2
