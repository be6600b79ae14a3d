"""Admission: which waiting sequences start in a step, and with what pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from radixkv.config import EngineConfig
from radixkv.errors import OutOfPages, QueueFullError
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.candidates import Candidates
from radixkv.sched.counters import Counters
from radixkv.sched.latencies import Latencies
from radixkv.sched.policy import key_of
from radixkv.sched.reservation import Reservation
from radixkv.sched.room import Room
from radixkv.sched.sharing import end_of_chunk, leader_of
from radixkv.sched.victims import weaker_than
from radixkv.sched.waiting import WaitingQueue
from radixkv.sequence import Sequence


@dataclass(eq=False)
class Admitted:
    """What one step's admission did."""

    sequences: list[Sequence] = field(default_factory=list)
    """They hold their hit and pages for the rest of their prompt, and do not wait any more."""
    hopeless: tuple[Sequence, OutOfPages] | None = None
    """Waits still, but nothing runs whose end could give it the pages that it lacks."""


class Admission:
    """Starts waiting sequences, as the policy and D4 have it.

    Owns the waiting queue; what runs belongs to the scheduler, which passes it in. A sequence is admitted
    with the pages of its whole remaining prompt at once, or holds nothing; and only where there is room for
    the output that it and those that run are expected to give (``Reservation``).

    Under ``priority`` a request that lacks a place, pages or budget takes them from running sequences of
    lower priority (``weaker_than`` says from whom), unless somebody else has to go first by D4.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        counters: Counters,
        latencies: Latencies,
        clock: Callable[[], float],
    ) -> None:
        timeout_s = math.inf if config.queue_timeout_s is None else config.queue_timeout_s
        self.queue = WaitingQueue(key_of(config.policy, config.policy_seed), timeout_s, config.max_skips)
        self.reservation = Reservation(config.decode_reserve_tokens)
        self.max_running = min(config.max_running, config.max_batch_tokens)  # each computes a token per step
        self._config = config
        self._kv = kv
        self._counters = counters
        self._latencies = latencies
        self._clock = clock
        self._candidates = Candidates(config, kv, self.queue, clock)
        self._min_shared = max(config.page_size, config.min_wait_tokens)
        self._makes_way = config.policy == "priority" and config.priority_preemption

    @property
    def is_full(self) -> bool:
        """Whether one more may not wait."""
        limit = self._config.max_waiting
        return limit is not None and len(self.queue) >= limit

    def refuse_if_full(self) -> None:
        """Raise ``QueueFullError`` where one more may not wait."""
        if self.is_full:
            assert self._config.max_waiting is not None
            self._counters.num_queue_full += 1
            raise QueueFullError(len(self.queue), self._config.max_waiting)

    def overdue(self) -> list[Sequence]:
        """Those that have waited too long for their first admission; they wait still."""
        return self.queue.overdue(self._clock())

    def ended(self, seq: Sequence) -> None:
        """``seq`` has ended, for the reason that it carries."""
        self._candidates.forget(seq)
        self._latencies.forget(seq)
        if seq.finish_reason == "timeout":
            self._latencies.waited(seq, self._clock())
        if seq.finish_reason in ("stop", "length"):
            self.reservation.ended(seq)

    def admit(
        self, running: Iterable[Sequence], grants: dict[Sequence, int], preempt: Callable[[Sequence], None]
    ) -> Admitted:
        """Start waiting sequences beside ``running`` while there are budget, places and pages; extends
        ``grants``, the tokens that each sequence computes in this step.

        Stops at the first that finds no pages, so that smaller ones do not nibble away what it waits for.
        ``preempt`` is called for each running sequence that makes way; it has no grant any more.
        """
        self.reservation.stepped()
        admitted = Admitted()
        room = Room(
            running,
            grants,
            max_running=self.max_running,
            max_batch_tokens=self._config.max_batch_tokens,
            reservation=self.reservation,
        )
        if not self.queue or not (self._makes_way or (room.budget > 0 and room.places > 0)):
            return admitted
        leaders = [seq for seq in room.running if self._may_lead(seq)]
        for seq, may_be_overtaken in self._candidates.in_turn():
            if seq in room.victims or not (self._makes_way or (room.budget > 0 and room.places > 0)):
                break
            if leaders and leader_of(seq, self._candidates.hit(seq), leaders, self._min_shared) is not None:
                if may_be_overtaken:
                    continue
                break
            alone = not room.running
            out_of_pages = self._try_admit(seq, room, preempt)
            if seq in self.queue:
                if alone and out_of_pages is not None:
                    admitted.hopeless = (seq, out_of_pages)
                break
            admitted.sequences.append(seq)
            leaders = [leader for leader in leaders if leader not in room.victims]
            if self._may_lead(seq):
                leaders.append(seq)
        return admitted

    def shape_cut_chunks(self, grants: dict[Sequence, int]) -> None:
        """End a chunk that the budget cut where those who share its prompt can wait for the rest."""
        if not self.queue:
            return
        waiting: list[Sequence] | None = None
        for seq, count in grants.items():
            end = seq.num_computed + count
            if count > 1 and end < seq.num_tokens and self._may_lead(seq):
                if waiting is None:
                    waiting = self._candidates.all()
                grants[seq] = end_of_chunk(seq, end, waiting, self._min_shared) - seq.num_computed

    def _may_lead(self, seq: Sequence) -> bool:
        """Whether others could wait for ``seq``: it computes enough, and the tree will know it (after a
        flush it would not)."""
        return (
            self._config.prefix_cache
            and seq.num_tokens - seq.num_computed >= self._min_shared
            and seq.namespace == (*seq.request.namespace, self._kv.epoch)
        )

    def _try_admit(self, seq: Sequence, room: Room, preempt: Callable[[Sequence], None]) -> OutOfPages | None:
        """Give ``seq`` its hit, a place and pages, or nothing at all: then it waits still. Returns why, where
        it was for pages."""
        weaker: list[Sequence] = []
        if self._makes_way:
            able = [other for other in room.before if other not in room.victims]
            weaker = weaker_than(seq, able, self._candidates.may_not_be_overtaken)
        num_to_go = room.num_to_make_way(seq, weaker)
        if num_to_go is None:
            return None
        first = seq.num_cached is None
        self._kv.acquire(seq)
        try:
            out_of_pages = self._find_pages(seq, room, weaker, num_to_go, preempt)
        except BaseException:
            self._kv.release(seq)
            raise
        if out_of_pages is not None:
            self._kv.release(seq)
            return out_of_pages
        self.queue.admit(seq)
        self._candidates.forget(seq)
        room.take(seq, weaker)
        if first:
            assert seq.num_cached is not None
            shared = seq.request.num_shared
            self._counters.prompt_tokens += seq.num_prompt - shared
            self._counters.cached_tokens += max(seq.num_cached - shared, 0)
            self._latencies.waited(seq, self._clock())
        return None

    def _find_pages(
        self,
        seq: Sequence,
        room: Room,
        weaker: list[Sequence],
        num_to_go: int,
        preempt: Callable[[Sequence], None],
    ) -> OutOfPages | None:
        """Pages for the rest of the prompt of ``seq``, which holds its hit. At least ``num_to_go`` of
        ``weaker`` make way for them, as many more as it takes, or nobody."""
        lacking = seq.num_tokens - seq.num_computed
        if not self.reservation.is_adaptive:
            lacking += self.reservation.tokens(seq)
        while True:
            giving_way = weaker[:num_to_go]
            out_of_pages = self._expected_shortage(seq, room, giving_way)
            if out_of_pages is None:
                for victim in giving_way:
                    room.make_way(victim)
                    preempt(victim)
                try:
                    self._kv.reserve(seq, lacking)
                    return None
                except OutOfPages as error:
                    out_of_pages = error
            if num_to_go == len(weaker) or (giving_way and giving_way[0] in room.victims):
                return out_of_pages
            num_to_go += 1

    def _expected_shortage(self, seq: Sequence, room: Room, giving_way: list[Sequence]) -> OutOfPages | None:
        """What would be lacking, without ``giving_way``, for ``seq`` and the output that all who run with it
        are expected to give. Beside nobody it may start whatever is expected of it."""
        if not giving_way and not (self.reservation.is_adaptive and room.running):
            return None
        if len(giving_way) == len(room.running):  # then it runs beside nobody
            needed = self.reservation.pages_to_start(seq)
        else:
            needed = self.reservation.pages(seq) + room.pages_to_come(giving_way)
        if not giving_way and self._kv.has_available(needed):
            return None
        available = self._kv.num_available_without(giving_way)
        return OutOfPages(needed, available) if needed > available else None

    def check(self) -> None:
        """Q1 to Q3 and R1. Raises ``InternalError``."""
        self.queue.check()
        self.reservation.check()

    def stats(self) -> dict[str, int | float]:
        """The gauge ``num_waiting``, and the reservation's."""
        return {"num_waiting": len(self.queue), **self.reservation.stats()}
