"""Planted faults: each breaks one thing that a request's life rests on. The fuzzer must notice every one.

Long because each is a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv.engine import Engine
from radixkv.errors import RadixKVError
from radixkv.kv.events import Cleared, Removed
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_pool import PagePool
from radixkv.kv.pins import Pin, PinBook
from radixkv.kv.radix_tree import RadixTree
from radixkv.kv.slot_logprobs import SlotLogprobs
from radixkv.sched import batch_builder, sampling_rows, scheduler
from radixkv.sched.admission import Admission
from radixkv.sched.batch import Batch, SequenceOutput
from radixkv.sched.beam_group import BeamGroup
from radixkv.sched.candidates import Candidates
from radixkv.sched.running import Running
from radixkv.sched.scheduler import Scheduler
from radixkv.sched.waiting import WaitingQueue
from radixkv.sequence import Sequence
from radixkv.types import Namespace, PageIds

Patch = pytest.MonkeyPatch

NOTICED = (AssertionError, RadixKVError, LookupError)
"""What a run raises that found something."""


def _replace(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """``owner.name`` becomes ``make(what it was)``."""
    patch.setattr(owner, name, make(getattr(owner, name)))


def first_copy_is_lost(patch: Patch) -> None:
    _replace(patch, KVCacheManager, "take_copies", lambda real: lambda self: real(self)[1:])


def copy_takes_a_token_too_few(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def take_copies(self: KVCacheManager) -> tuple[Any, ...]:
            return tuple(type(c)(c.src, c.dst, c.num_tokens - 1) for c in real(self) if c.num_tokens > 1)

        return take_copies

    _replace(patch, KVCacheManager, "take_copies", make)


def interrupted_copy_counts_as_done(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def abandon(self: Scheduler, batch: Batch, *args: Any) -> Any:
            object.__setattr__(batch, "page_copies", ())
            return real(self, batch, *args)

        return abandon

    _replace(patch, Scheduler, "_abandon", make)


def interrupted_rows_count_as_computed(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def undo(self: Scheduler, batch: Batch) -> None:
            for seq, num in zip(batch.seq_ids.tolist(), np.diff(batch.query_indptr).tolist(), strict=True):
                running = self._running[seq]
                if running.num_computed + num < running.num_tokens:
                    running.num_computed += num
            real(self, batch)

        return undo

    _replace(patch, Scheduler, "undo", make)


def stale_is_inserted(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_is_stale", lambda self, seq: False)


def flush_keeps_the_epoch(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def flush(self: KVCacheManager) -> Any:
            epoch = self.epoch
            report = real(self)
            self.epoch = epoch
            return report

        return flush

    _replace(patch, KVCacheManager, "flush", make)


def flush_leaves_the_pins(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "pins", property(lambda self: ()))


def namespace_is_ignored(patch: Patch) -> None:
    def namespace_of(self: KVCacheManager, namespace: Namespace) -> Namespace:
        return (self.epoch,)

    patch.setattr(KVCacheManager, "_namespace", namespace_of)


def namespace_fields_are_joined(patch: Patch) -> None:
    def namespace_of(self: KVCacheManager, namespace: Namespace) -> Namespace:
        return ("".join(map(str, namespace))[:0], self.epoch)

    patch.setattr(KVCacheManager, "_namespace", namespace_of)


def adapters_share_a_namespace(patch: Patch) -> None:
    def namespace_of(self: KVCacheManager, namespace: Namespace) -> Namespace:
        if "radixkv adapter" in namespace:  # what a request's adapter adds, with its index
            namespace = namespace[:-2]
        return (*(field for field in namespace if not str(field).startswith("adapter")), self.epoch)

    patch.setattr(KVCacheManager, "_namespace", namespace_of)


def adapters_are_forgotten(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Batch:
            batch: Batch = real(*args, **kwargs)
            return replace(batch, adapter_ids=np.zeros_like(batch.adapter_ids))

        return build

    _replace(patch, scheduler, "build_batch", make)


def overtaking_is_not_bounded(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "num_overtakers", lambda self, seq: 0)


def waiting_time_is_not_bounded(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def init(self: Candidates, config: Any, kv: Any, queue: Any, clock: Any) -> None:
            real(self, config, kv, queue, lambda: 0.0)

        return init

    _replace(patch, Candidates, "__init__", make)


def pins_do_not_expire(patch: Patch) -> None:
    patch.setattr(PinBook, "expired", lambda self, now: [])


def unpin_forgets_the_pages(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "unpin", lambda self, pin: self._book.remove(pin.pin_id))


def pin_is_let_go_twice(patch: Patch) -> None:
    def unpin(self: KVCacheManager, pin: Pin) -> None:
        self._book.remove(pin.pin_id)
        self._let_go(np.array(pin.pages, np.int32))

    patch.setattr(KVCacheManager, "unpin", unpin)


def a_page_is_not_let_go(patch: Patch) -> None:
    def make(real: Any) -> Any:
        return lambda self, pages: real(self, pages[:-1] if len(pages) > 2 else pages)

    _replace(patch, KVCacheManager, "_let_go", make)


def freed_pages_come_back_too_early(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def decref(self: PagePool, pages: PageIds) -> None:
            shared = pages[self._count[pages] == 2]
            real(self, pages)
            if len(shared) > 1:
                real(self, shared[:1])

        return decref

    _replace(patch, PagePool, "decref", make)


def match_goes_a_token_too_far(patch: Patch) -> None:
    patch.setattr(Sequence, "max_hit_tokens", property(lambda self: self.num_tokens))


def scored_prompt_is_hit_whole(patch: Patch) -> None:
    patch.setattr(Sequence, "max_hit_tokens", property(lambda self: self.num_tokens - 1))


def resumed_scores_stand_twice(patch: Patch) -> None:
    def next_scored(self: Sequence) -> int:
        start = self.request.logprob_start
        return self.num_prompt if start is None else max(start, 1, self.num_computed + 1)

    patch.setattr(Sequence, "next_scored", property(next_scored))


def preempted_one_forgets_its_output(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def preempt(self: Running, seq: Sequence) -> None:
            real(self, seq)
            if seq.request.beam is None:
                seq.num_tokens = seq.num_prompt

        return preempt

    _replace(patch, Running, "preempt", make)


def aborted_one_ends_twice(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def abort(self: Engine, request_id: int) -> tuple[SequenceOutput, ...]:
            outputs: tuple[SequenceOutput, ...] = real(self, request_id)
            self._undelivered += outputs
            return outputs

        return abort

    _replace(patch, Engine, "abort", make)


def failed_one_lives_on(patch: Patch) -> None:
    _replace(
        patch, Scheduler, "fail", lambda real: lambda self, batch, error: self._abandon(batch, set(), None)
    )


def stop_ids_are_ignored(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def reason(seq: Sequence, token_id: int, ends: Any) -> Any:
            return None if token_id in seq.request.sampling.stop_token_ids else real(seq, token_id, ends)

        return reason

    _replace(patch, scheduler, "reason_to_stop", make)


def end_token_is_always_obeyed(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def reason(seq: Sequence, token_id: int, ends: Any) -> Any:
            return "stop" if token_id in ends else real(seq, token_id, ends)

        return reason

    _replace(patch, scheduler, "reason_to_stop", make)


def end_token_before_min_tokens(patch: Patch) -> None:
    def make(real: Any) -> Any:
        return lambda grants, copies, **kwargs: real(grants, copies, **{**kwargs, "eos_token_ids": ()})

    _replace(patch, scheduler, "build_batch", make)


def samples_share_their_draws(patch: Patch) -> None:
    def make(real: Any) -> Any:
        return lambda seed, sample_index, position: real(seed, np.zeros_like(sample_index), position)

    _replace(patch, sampling_rows, "draws_of", make)


def forks_write_on_shared_pages(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "_shared_page", lambda self, seq: None)


def dropped_beam_keeps_its_pages(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def advance(self: BeamGroup, kv: KVCacheManager, *args: Any) -> Any:
            before = [beam.page_table.pages.copy() for beam in self.beams]
            new, dropped = real(self, kv, *args)
            if dropped:
                kv._hold(before[0][:1])
            return new, dropped

        return advance

    _replace(patch, BeamGroup, "advance", make)


def nobody_waits_too_long(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "overdue", lambda self, now: [])


def queue_takes_one_too_many(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def refuse(self: Admission) -> None:
            if len(self.queue) != self._config.max_waiting:
                real(self)

        return refuse

    _replace(patch, Admission, "refuse_if_full", make)


def removals_are_not_told(patch: Patch) -> None:
    def make(real: Any) -> Any:
        return lambda self: tuple(event for event in real(self) if not isinstance(event, Removed))

    _replace(patch, KVCacheManager, "take_events", make)


def cleared_is_not_told(patch: Patch) -> None:
    def make(real: Any) -> Any:
        return lambda self: tuple(event for event in real(self) if not isinstance(event, Cleared))

    _replace(patch, KVCacheManager, "take_events", make)


def logprobs_are_the_next_ones(patch: Patch) -> None:
    _replace(
        patch,
        scheduler,
        "sampled_entries",
        lambda real: lambda batch, result: (real(batch, result) or [])[::-1],
    )


def scores_of_freed_slots_are_read(patch: Patch) -> None:
    patch.setattr(SlotLogprobs, "forget", lambda self, pages, from_offset=0: None)


def a_held_page_is_evicted(patch: Patch) -> None:
    def make(real: Any) -> Any:
        return lambda self, num, ref_count: real(self, num, np.ones_like(ref_count))

    _replace(patch, RadixTree, "evict", make)


def rows_land_one_slot_further(patch: Patch) -> None:
    def make(real: Any) -> Any:
        def slots_of(pages: Any, positions: Any, page_size: int, *first: Any) -> Any:
            slots = real(pages, positions, page_size, *first)
            return slots + (len(slots) > 3) * (np.arange(len(slots)) == len(slots) - 1)

        return slots_of

    _replace(patch, batch_builder, "slots_of", make)


FIRST_SEEN: dict[Callable[[Patch], None], int] = {
    first_copy_is_lost: 0,
    copy_takes_a_token_too_few: 0,
    interrupted_copy_counts_as_done: 80,
    interrupted_rows_count_as_computed: 12,
    stale_is_inserted: 1,
    flush_keeps_the_epoch: 1,
    flush_leaves_the_pins: 1,
    namespace_is_ignored: 3,
    namespace_fields_are_joined: 3,
    adapters_share_a_namespace: 135,
    adapters_are_forgotten: 2,
    overtaking_is_not_bounded: 69,
    waiting_time_is_not_bounded: 119,
    pins_do_not_expire: 27,
    unpin_forgets_the_pages: 11,
    pin_is_let_go_twice: 45,
    a_page_is_not_let_go: 1,
    freed_pages_come_back_too_early: 0,
    match_goes_a_token_too_far: 2,
    scored_prompt_is_hit_whole: 2,
    resumed_scores_stand_twice: 6,
    preempted_one_forgets_its_output: 2,
    aborted_one_ends_twice: 0,
    failed_one_lives_on: 3,
    stop_ids_are_ignored: 3,
    end_token_is_always_obeyed: 3,
    end_token_before_min_tokens: 17,
    samples_share_their_draws: 0,
    forks_write_on_shared_pages: 7,
    dropped_beam_keeps_its_pages: 49,
    nobody_waits_too_long: 6,
    queue_takes_one_too_many: 1,
    removals_are_not_told: 9,
    cleared_is_not_told: 23,
    logprobs_are_the_next_ones: 0,
    scores_of_freed_slots_are_read: 81,
    a_held_page_is_evicted: 0,
    rows_land_one_slot_further: 0,
}
"""Fault to the first program that notices it; ``python tests/fuzz/fuzz.py --faults`` finds them anew."""
