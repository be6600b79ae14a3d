"""Planted faults: each breaks one thing that the ledger must never get wrong. The machine must notice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ledger_model import tree_content
from machine import LedgerMachine
from numpy.typing import NDArray

from radixkv.errors import OutOfPages
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.match import Insertion, Match
from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_pool import PagePool
from radixkv.kv.page_table import PageTable
from radixkv.kv.pins import Pin
from radixkv.kv.radix_tree import RadixTree
from radixkv.kv.tail_copy import CopyState
from radixkv.sequence import Sequence
from radixkv.types import Namespace, PageIds, SlotMapping, TokenIds

Counts = NDArray[np.int32]
Patch = pytest.MonkeyPatch


def free_before_repoint(patch: Patch) -> None:
    def repoint(self: KVCacheManager, seq: Sequence, start: int, canonical: PageIds) -> None:
        mine = seq.page_table.pages[start : len(canonical)].copy()
        differ = mine != canonical[start:]
        self._let_go(mine[differ])
        self._hold(canonical[start:][differ])
        seq.page_table.replace(start, canonical[start:])

    patch.setattr(KVCacheManager, "_repoint", repoint)


def lost_decref(patch: Patch) -> None:
    real = PagePool.decref

    def decref(self: PagePool, pages: PageIds) -> None:
        real(self, pages[:-1] if len(pages) > 2 else pages)

    patch.setattr(PagePool, "decref", decref)


def double_decref(patch: Patch) -> None:
    real = PagePool.decref

    def decref(self: PagePool, pages: PageIds) -> None:
        real(self, pages)
        real(self, pages[self.ref_count[pages] > 1])

    patch.setattr(PagePool, "decref", decref)


def match_without_hold(patch: Patch) -> None:
    real = KVCacheManager.acquire

    def acquire(self: KVCacheManager, seq: Sequence) -> None:
        real(self, seq)
        self.pool.decref(seq.page_table.pages.copy())

    patch.setattr(KVCacheManager, "acquire", acquire)


def evict_held(patch: Patch) -> None:
    real = RadixTree.evict

    def evict(self: RadixTree, num_pages: int, ref_count: Counts) -> PageIds:
        return real(self, num_pages, np.ones_like(ref_count))

    patch.setattr(RadixTree, "evict", evict)


def evict_interior(patch: Patch) -> None:
    real = RadixTree.evict

    def evict(self: RadixTree, num_pages: int, ref_count: Counts) -> PageIds:
        before = tree_content(self)
        pages = real(self, num_pages, ref_count).copy()
        for index, page in enumerate(pages.tolist()):
            head = before[page][1]
            if head >= 0 and ref_count[head] == 1 and head not in pages:
                pages[index] = head
                break
        return pages

    patch.setattr(RadixTree, "evict", evict)


def wrong_slot_at_a_page_edge(patch: Patch) -> None:
    real = PageTable.slot_mapping

    def slot_mapping(self: PageTable, start: int, stop: int) -> SlotMapping:
        slots = real(self, start, stop)
        positions = np.arange(start, stop)
        edge = (positions % self.page_size == 0) & (positions > 0)
        slots[edge] = self.pages[positions[edge] // self.page_size - 1] * self.page_size
        return slots

    patch.setattr(PageTable, "slot_mapping", slot_mapping)


def copy_off_by(difference: int) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = KVCacheManager.take_copies

        def take_copies(self: KVCacheManager) -> tuple[PageCopy, ...]:
            return tuple(PageCopy(c.src, c.dst, c.num_tokens + difference) for c in real(self))

        patch.setattr(KVCacheManager, "take_copies", take_copies)

    return plant


def copy_after_the_forward(patch: Patch) -> None:
    patch.setattr(LedgerMachine, "copies_come_late", True)


def insert_of_an_uncomputed_token(patch: Patch) -> None:
    real = KVCacheManager._insert

    def insert(self: KVCacheManager, seq: Sequence, num_tokens: int) -> None:
        has_room = num_tokens < min(seq.num_tokens, seq.page_table.num_slots)
        real(self, seq, num_tokens + has_room)

    patch.setattr(KVCacheManager, "_insert", insert)


def stale_copy_after_preemption(patch: Patch) -> None:
    stale: list[PageCopy] = []
    real_end, real_take = KVCacheManager._end_copy, KVCacheManager.take_copies

    def end_copy(self: KVCacheManager, seq: Sequence) -> None:
        copy = self._copies.get(seq)
        if copy is not None and copy.state is CopyState.PENDING:
            destination = int(seq.page_table.pages[copy.page_index])
            stale.append(PageCopy(copy.source, destination, copy.num_tokens))
        real_end(self, seq)

    def take_copies(self: KVCacheManager) -> tuple[PageCopy, ...]:
        late = tuple(stale)
        stale.clear()
        return (*real_take(self), *late)

    patch.setattr(KVCacheManager, "_end_copy", end_copy)
    patch.setattr(KVCacheManager, "take_copies", take_copies)


def unpin_by_match(patch: Patch) -> None:
    asked: dict[tuple[KVCacheManager, int], tuple[TokenIds, Namespace]] = {}
    real = KVCacheManager.pin

    def pin(
        self: KVCacheManager,
        token_ids: TokenIds,
        namespace: Namespace = (),
        *,
        timeout_s: float | None = None,
    ) -> Pin:
        receipt = real(self, token_ids, namespace, timeout_s=timeout_s)
        asked[self, receipt.pin_id] = token_ids, namespace
        return receipt

    def unpin(self: KVCacheManager, receipt: Pin) -> None:
        if self._book.remove(receipt.pin_id) is not None:
            token_ids, namespace = asked[self, receipt.pin_id]
            found = self.tree.lookup(token_ids, self._namespace(namespace))
            self._let_go(found.page_ids)
            if found.partial_page is not None:
                self._let_go(np.array([found.partial_page], np.int32))

    patch.setattr(KVCacheManager, "pin", pin)
    patch.setattr(KVCacheManager, "unpin", unpin)


def recency_not_touched(patch: Patch) -> None:
    def match(
        self: RadixTree,
        token_ids: TokenIds,
        namespace: Namespace = (),
        priority: int = 0,
        *,
        is_retry: bool = False,
    ) -> Match:
        return self.lookup(token_ids, namespace)

    patch.setattr(RadixTree, "match", match)


def namespace_ignored(patch: Patch) -> None:
    real_match, real_insert = RadixTree.match, RadixTree.insert

    def match(
        self: RadixTree,
        token_ids: TokenIds,
        namespace: Namespace = (),
        priority: int = 0,
        *,
        is_retry: bool = False,
    ) -> Match:
        return real_match(self, token_ids, namespace[-1:], priority, is_retry=is_retry)

    def insert(
        self: RadixTree,
        token_ids: TokenIds,
        pages: PageIds,
        num_known: int = 0,
        namespace: Namespace = (),
        priority: int = 0,
    ) -> Insertion:
        return real_insert(self, token_ids, pages, num_known, namespace[-1:], priority)

    patch.setattr(RadixTree, "match", match)
    patch.setattr(RadixTree, "insert", insert)


def out_of_pages_after_a_partial_eviction(patch: Patch) -> None:
    real = KVCacheManager.reserve

    def reserve(self: KVCacheManager, seq: Sequence, num_tokens: int) -> None:
        try:
            real(self, seq, num_tokens)
        except OutOfPages:
            self.pool.decref(self.tree.evict(1, self.pool.ref_count))
            raise

    patch.setattr(KVCacheManager, "reserve", reserve)


def commit_across_a_flush(patch: Patch) -> None:
    def is_stale(self: KVCacheManager, seq: Sequence) -> bool:
        if seq.num_committed_pages == 0:
            seq.namespace = self._namespace(seq.request.namespace)
            if seq.page_table.hold is not None:  # else the manager sees that the namespace is not its own
                seq.page_table.hold.namespace = seq.namespace
        return bool(seq.namespace[-1:] != (self.epoch,))

    patch.setattr(KVCacheManager, "_is_stale", is_stale)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "free before repoint": free_before_repoint,
    "lost decref": lost_decref,
    "double decref": double_decref,
    "match without hold": match_without_hold,
    "evict held": evict_held,
    "evict interior": evict_interior,
    "wrong slot at a page edge": wrong_slot_at_a_page_edge,
    "copy one token too many": copy_off_by(1),
    "copy one token too few": copy_off_by(-1),
    "copy after the forward": copy_after_the_forward,
    "insert of an uncomputed token": insert_of_an_uncomputed_token,
    "stale copy after preemption": stale_copy_after_preemption,
    "unpin by match": unpin_by_match,
    "recency not touched": recency_not_touched,
    "namespace ignored": namespace_ignored,
    "OutOfPages after a partial eviction": out_of_pages_after_a_partial_eviction,
    "commit across a flush": commit_across_a_flush,
}
