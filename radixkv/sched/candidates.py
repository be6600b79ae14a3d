"""Candidates: which waiting sequence is tried next. Holds the bound D4, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixkv.config import EngineConfig
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.policy import needs_hits, order_of
from radixkv.sched.waiting import WaitingQueue
from radixkv.sequence import Sequence


class Candidates:
    """A view of the waiting queue in the order of trying: preempted sequences, then the policy's order over
    ``max_candidates`` of the others; but a request that may not be overtaken any more (D4) comes before all
    but the preempted. Under ``priority`` the preempted go before those of the same priority only, and after
    the one that may not be overtaken: else a victim would come back before the one that it made way for.

    Remembers hits while the tree stays as it is; changes nothing else.
    """

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, queue: WaitingQueue, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._kv = kv
        self._queue = queue
        self._clock = clock
        self._order = order_of(config.policy, config.policy_seed)
        self._hits: dict[int, int] = {}  # by request id; of tree version ``_hits_version``
        self._hits_version = -1

    def in_turn(self) -> Iterator[tuple[Sequence, bool]]:
        """Waiting sequences, next to try first, and whether others may be tried before it if it has to wait.
        The caller admits each or, where it may, passes it over; else it stops."""
        if not self._by_priority:
            for seq in self._queue.boosted():
                yield seq, True
        ordered: list[Sequence] | None = None
        place = 0
        while self._queue:
            earliest = self._queue.earliest
            if self.may_not_be_overtaken(earliest):
                yield earliest, False
                continue
            if ordered is None:
                ordered = self._ordered()
            if place == len(ordered):
                return
            if ordered[place] in self._queue:
                yield ordered[place], True
            place += 1

    def all(self) -> list[Sequence]:
        """All that may be tried in this step, in no particular order."""
        return self._queue.boosted() + self._queue.ordinary(self._config.max_candidates)

    def hit(self, seq: Sequence) -> int:
        """Cached tokens of a waiting request, looked up again only when the tree has changed."""
        if self._hits_version != self._kv.version:
            self._hits.clear()
            self._hits_version = self._kv.version
        hit = self._hits.get(seq.request.request_id)
        if hit is None:
            hit = self._hits[seq.request.request_id] = self._kv.peek(seq.request)
        return hit

    def forget(self, seq: Sequence) -> None:
        """``seq`` does not wait any more."""
        self._hits.pop(seq.request.request_id, None)

    def _ordered(self) -> list[Sequence]:
        waiting = self.all() if self._by_priority else self._queue.ordinary(self._config.max_candidates)
        if needs_hits(self._config.policy):
            for seq in waiting:
                self.hit(seq)
        return self._order(waiting, self._hits, self._clock())

    @property
    def _by_priority(self) -> bool:
        return self._config.policy == "priority"

    def may_not_be_overtaken(self, seq: Sequence) -> bool:
        """Whether D4 puts ``seq`` first now; asked of one that runs: whether it would, did it wait."""
        return (
            self._queue.num_overtakers(seq) >= self._config.max_skips
            or self._clock() - seq.arrival >= self._config.max_wait_s
        )
