"""Running: the sequences that run, their room, and who of them has to give up his."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from radixkv.config import EngineConfig
from radixkv.errors import OutOfPages
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.batch import StepResult
from radixkv.sched.beam_group import BeamGroup
from radixkv.sched.counters import Counters
from radixkv.sched.reservation import Reservation
from radixkv.sched.victims import victim_for_pages
from radixkv.sched.waiting import WaitingQueue
from radixkv.sequence import Sequence, Status


class Running:
    """In order of admission. Beams of one search are preempted together, and wait as one.

    When decoding runs out of pages, ``victim_for_pages`` says who gives up its own; what was computed stays
    in the tree while there is room. The last one is never preempted.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        queue: WaitingQueue,
        reservation: Reservation,
        counters: Counters,
    ) -> None:
        self.beams: dict[int, BeamGroup] = {}
        """Of every live beam search, by request id."""
        self._config = config
        self._kv = kv
        self._queue = queue
        self._reservation = reservation
        self._counters = counters
        self._sequences: dict[int, Sequence] = {}  # by number

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __getitem__(self, number: int) -> Sequence:
        return self._sequences[number]

    @property
    def num_places(self) -> int:
        """Those of samples that are still to fork included."""
        return sum(seq.num_samples for seq in self)

    def add(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        self._sequences[seq.number] = seq

    def remove(self, seq: Sequence) -> None:
        """Releases nothing."""
        del self._sequences[seq.number]

    def clear(self) -> None:
        self._sequences.clear()
        self.beams.clear()

    def preempt(self, seq: Sequence) -> None:
        """Take the pages of ``seq``, or of all beams of its search, and let it wait."""
        beams = self.beams.get(seq.request.request_id)
        whole = [seq] if beams is None or beams.is_gathered else beams.beams
        for one in whole:
            self._kv.release(one)
            del self._sequences[one.number]
            one.status = Status.WAITING
            one.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._queue.add(seq if beams is None else beams.gather())

    def reserve(self) -> tuple[bool, tuple[Sequence, OutOfPages] | None]:
        """Room for what each sequence lacks. Whether anybody was preempted for it, and who finds none though
        there is nobody left to preempt."""
        preempted = False
        for number in list(self._sequences):
            while (seq := self._sequences.get(number)) is not None:
                try:
                    self._kv.reserve(seq, seq.num_tokens - seq.num_computed)
                    break
                except OutOfPages as error:
                    if self._is_alone(seq):
                        return preempted, (seq, error)
                    self._reservation.preempted(self)
                    by_priority = self._config.policy == "priority"
                    self.preempt(victim_for_pages(self, by_priority=by_priority))
                    preempted = True
        return preempted, None

    def commit(self, seq: Sequence) -> None:
        """The pages that ``seq`` has filled become known to the tree."""
        if seq.num_computed // self._config.page_size > seq.num_committed_pages:
            self._kv.commit(seq)

    def advance_beams(self, request_id: int, row_of: Mapping[int, int], result: StepResult) -> bool:
        """Beams of one search have computed some tokens: all of them their last one, or none. ``row_of``: the
        row of ``result`` that belongs to each, by number. Returns whether the search is over."""
        group = self.beams[request_id]
        for beam in [group.first] if group.is_gathered else group.beams:
            self.commit(beam)
        if group.is_gathered:
            if group.first.num_computed == group.first.num_tokens:
                for beam in group.spread(self._kv):
                    self.add(beam)
            return False
        if group.first.number not in row_of:
            return False
        rows = [row_of[beam.number] for beam in group.beams]
        num_top = group.first.num_logprobs - 1
        top_ids, top_logprobs = result.top_ids[rows, :num_top], result.top_logprobs[rows, :num_top]
        self._counters.output_tokens += len(group.beams)
        new, dropped = group.advance(self._kv, top_ids, top_logprobs)
        for beam in dropped:
            self.remove(beam)
        for beam in new:
            self.add(beam)
        return group.search.is_over

    def _is_alone(self, seq: Sequence) -> bool:
        """Whether nobody runs but ``seq``, or the beams of its search."""
        if seq.request.beam is None:
            return len(self) == 1
        return all(other.request is seq.request for other in self)

    def grant(self) -> dict[Sequence, int]:
        """One token for each, then more for those that lack more, in order of admission."""
        spare = self._config.max_batch_tokens - len(self)
        grants: dict[Sequence, int] = {}
        for seq in self:
            more = min(seq.num_tokens - seq.num_computed - 1, spare)
            grants[seq] = 1 + more
            spare -= more
        for beams in self.beams.values():
            beams.keep_step(grants)
        return grants
