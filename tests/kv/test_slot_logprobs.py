"""SlotLogprobs by itself, and where the manager tells it to forget."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.errors import InternalError
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.kv.slot_logprobs import SlotLogprobs
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request, Sequence

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def test_numbers_are_kept_copied_and_forgotten_by_slot() -> None:
    known = SlotLogprobs(num_pages=4, page_size=4)
    known.forget(np.array([1], np.int32))
    known.copy([PageCopy(0, 1, 2)])
    assert known.is_empty and known.known_run(slots(0, 1)) == []
    known.note(slots(5, 6, 7), [-1.0, -2.0, -3.0])
    assert not known.is_empty
    assert known.known_run(slots(5, 6, 7, 8, 5)) == [-1.0, -2.0, -3.0]
    known.copy([PageCopy(1, 2, 3), PageCopy(2, 0, 4)])  # all sources are read before any is written
    assert known.known_run(slots(9, 10, 11)) == [-1.0, -2.0]
    assert known.known_run(slots(1)) == []
    known.forget(np.array([1], np.int32), 2)
    assert known.known_run(slots(5, 6)) == [-1.0]
    known.forget(np.array([1, 2], np.int32))
    assert known.known_run(slots(5)) == known.known_run(slots(9)) == []
    assert known.stats() == {"num_logprobs_noted": 3, "num_logprobs_reused": 0}
    known.check()


@pytest.mark.parametrize("bad", [float("-inf"), 0.5])
def test_check_finds_what_is_no_log_probability(bad: float) -> None:
    known = SlotLogprobs(num_pages=2, page_size=4)
    known.note(slots(3), [bad])
    with pytest.raises(InternalError, match="L1"):
        known.check()


def manager_of(num_pages: int) -> KVCacheManager:
    return KVCacheManager(PagePool(num_pages), RadixTree(4))


def sequence_of(ids: list[int], sampling: SamplingParams = SCORED) -> Sequence:
    return Sequence(Request(request_id=len(ids), prompt_ids=np.array(ids, np.int32), sampling=sampling), 4)


def run(kv: KVCacheManager, seq: Sequence) -> None:
    """To its end; every position that is to be scored gets minus its token."""
    kv.acquire(seq)
    kv.reserve(seq, seq.num_tokens - seq.num_computed)
    kv.take_copies()
    if seq.request.logprob_start is not None:
        seq.logprobs += [-float(token) for token in seq.token_ids[seq.next_scored :].tolist()]
    seq.num_computed = seq.num_tokens
    kv.release(seq)


def test_what_was_taken_at_an_admission_that_failed_is_looked_at_anew() -> None:
    """In between the weights may have changed."""
    kv = manager_of(8)
    run(kv, sequence_of([1, 2, 3, 4, 5, 6]))
    seq = sequence_of([1, 2, 3, 4, 5, 6, 7])
    kv.acquire(seq)
    assert seq.logprobs == [-2.0, -3.0, -4.0, -5.0, -6.0]
    kv.release(seq)
    assert seq.logprobs == [] and seq.num_cached is None
    kv.check([])


def test_a_page_taken_over_forgets_what_it_no_longer_stands_for() -> None:
    """The tree let go of the page between the match and the reserve, and the page held more than matched."""
    kv = manager_of(4)
    run(kv, sequence_of([1, 2, 3, 4, 5, 6, 7, 8]))
    plain = sequence_of([1, 2, 3, 4, 5, 60, 70, 80], SamplingParams(max_tokens=0))
    kv.acquire(plain)
    assert plain.num_computed == 5
    assert kv.flush().num_pages_held == 2
    plain.namespace = (kv.epoch,)  # as if the page had been evicted, and not flushed
    assert plain.page_table.hold is not None
    plain.page_table.hold.namespace = plain.namespace
    plain.num_committed_pages = 0
    kv.reserve(plain, 3)
    assert kv.stats()["num_takeovers"] == 1
    plain.num_computed = 8
    kv.release(plain)
    assert kv.peek(sequence_of([1, 2, 3, 4, 5, 60, 70, 80]).request) == 4  # position 5 must be scored
    kv.check([])


def test_peek_counts_what_need_not_be_scored_again() -> None:
    kv = manager_of(8)
    run(kv, sequence_of([1, 2, 3, 4, 5, 6]))
    for ids, hit in (([1, 2, 3, 4, 5, 6], 5), ([1, 2, 3], 2), ([1, 2, 3, 4, 5, 6, 7], 5), ([1, 9], 0)):
        assert kv.peek(sequence_of(ids).request) == hit
    with_top = SamplingParams(max_tokens=0, prompt_logprobs=1)
    assert kv.peek(sequence_of([1, 2, 3, 4, 5, 6], with_top).request) == 0
