"""Candidates: which waiting sequence is tried next. Holds the bound D4, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixkv.config import EngineConfig
from radixkv.kv.finding import Finding
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.policy import needs_hits, order_of
from radixkv.sched.waiting import WaitingQueue
from radixkv.sequence import Sequence


class Candidates:
    """A view of the waiting queue in the order of trying: preempted sequences, then the policy's order over
    ``max_candidates`` of the others; but a request that may not be overtaken any more (D4) comes before all
    but the preempted. Under ``priority`` the preempted go before those of the same priority only, and after
    the one that may not be overtaken: else a victim would come back before the one that it made way for.

    Remembers hits while nothing that they depend on has changed in the tree; changes nothing else.
    """

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, queue: WaitingQueue, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._kv = kv
        self._queue = queue
        self._clock = clock
        self._order = order_of(config.policy, config.policy_seed)
        self._found: dict[int, Finding] = {}  # by request id

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
        """Cached tokens of a waiting request, looked up again only where the tree has changed in a way that
        may matter to it."""
        request = seq.request
        found = self._found.get(request.request_id)
        if found is not None and found.version == self._kv.version:
            return found.num_tokens
        if found is None or not self._kv.still_finds(request, found):
            found = self._found[request.request_id] = self._kv.find(request)
        return found.num_tokens

    def forget(self, seq: Sequence) -> None:
        """``seq`` does not wait any more."""
        self._found.pop(seq.request.request_id, None)

    def _ordered(self) -> list[Sequence]:
        waiting = self.all() if self._by_priority else self._queue.ordinary(self._config.max_candidates)
        hits: dict[int, int] = {}
        if needs_hits(self._config.policy):
            hits = {seq.request.request_id: self.hit(seq) for seq in waiting}
        return self._order(waiting, hits, self._clock())

    @property
    def _by_priority(self) -> bool:
        return self._config.policy == "priority"

    def may_not_be_overtaken(self, seq: Sequence) -> bool:
        """Whether D4 puts ``seq`` first now; asked of one that runs: whether it would, did it wait."""
        return (
            self._queue.num_overtakers(seq) >= self._config.max_skips
            or self._clock() - seq.arrival >= self._config.max_wait_s
        )
