"""Receipts were numbered from 0 in every ledger: unpinning another one's dropped one's own pin."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from radixkv.errors import MisuseError
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_pool import PagePool
from radixkv.kv.pins import Pin
from radixkv.kv.radix_tree import RadixTree
from radixkv.sequence import Request, Sequence
from radixkv.types import TokenIds

PROMPT: TokenIds = np.arange(9, dtype=np.int32)


def ledger() -> KVCacheManager:
    """One that knows ``PROMPT``."""
    kv = KVCacheManager(PagePool(8), RadixTree(4), max_pinned_pages=4)
    seq = Sequence(Request(request_id=0, prompt_ids=PROMPT), 4)
    kv.acquire(seq)
    kv.reserve(seq, 9)
    seq.num_computed = 9
    kv.release(seq)
    return kv


def test_a_receipt_of_another_ledger_is_refused_and_changes_nothing() -> None:
    """Fault seen: ``refuse_foreign`` that looks at the type only."""
    mine, other = ledger(), ledger()
    pin, foreign = mine.pin(PROMPT), other.pin(PROMPT)
    assert (pin.pin_id, pin.pages) == (foreign.pin_id, foreign.pages)
    with pytest.raises(MisuseError, match="pin 0 is not from here"):
        mine.unpin(foreign)
    assert mine.pins == (pin,) and other.pins == (foreign,)
    other.unpin(foreign)
    with pytest.raises(MisuseError, match="not from here"):  # nor when it has been let go
        mine.unpin(foreign)
    for kv in (mine, other):
        kv.check([])


@pytest.mark.parametrize("thing", [None, 0, "0", (0,)])
def test_what_is_no_receipt_is_refused(thing: object) -> None:
    kv = ledger()
    kv.pin(PROMPT)
    with pytest.raises(MisuseError, match="not a pin"):
        kv.unpin(thing)  # type: ignore[arg-type]
    assert len(kv.pins) == 1


def test_a_copy_of_a_receipt_is_as_good() -> None:
    kv = ledger()
    for _ in range(2):
        pin = kv.pin(PROMPT)
        copies: tuple[Pin, Pin] = (copy.deepcopy(pin), pickle.loads(pickle.dumps(pin)))
        for each in (*copies, pin):
            kv.unpin(each)
            assert kv.pins == ()
    kv.check([])
