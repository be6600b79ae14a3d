"""Admission: which waiting sequences start in a step, and with what pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from radixkv.config import EngineConfig
from radixkv.errors import OutOfPages
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.candidates import Candidates
from radixkv.sched.counters import Counters
from radixkv.sched.sharing import end_of_chunk, leader_of
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
    with the pages of its whole remaining prompt and of a decode reserve at once, or holds nothing.
    """

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self.queue = WaitingQueue()
        self.max_running = min(config.max_running, config.max_batch_tokens)  # each computes a token per step
        self._config = config
        self._kv = kv
        self._counters = counters
        self._candidates = Candidates(config, kv, self.queue, clock)
        self._min_shared = max(config.page_size, config.min_wait_tokens)

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self._candidates.forget(seq)

    def admit(self, running: Iterable[Sequence], grants: dict[Sequence, int]) -> Admitted:
        """Start waiting sequences beside ``running`` while there are budget, places and pages; extends
        ``grants``, the tokens that each sequence computes in this step.

        Stops at the first that finds no pages, so that smaller ones do not nibble away what it waits for.
        """
        admitted = Admitted()
        budget = self._config.max_batch_tokens - sum(grants.values())
        places = self.max_running - len(running := list(running))
        if not self.queue or budget < 1 or places < 1:
            return admitted
        leaders = [seq for seq in running if self._may_lead(seq)]
        for seq, may_be_overtaken in self._candidates.in_turn():
            if budget < 1 or places < 1:
                break
            if leaders and leader_of(seq, self._candidates.hit(seq), leaders, self._min_shared) is not None:
                if may_be_overtaken:
                    continue
                break
            out_of_pages = self._try_admit(seq)
            if out_of_pages is not None:
                if not running and not admitted.sequences:
                    admitted.hopeless = (seq, out_of_pages)
                break
            admitted.sequences.append(seq)
            grants[seq] = min(seq.num_tokens - seq.num_computed, budget)
            budget -= grants[seq]
            places -= 1
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

    def _try_admit(self, seq: Sequence) -> OutOfPages | None:
        """Give ``seq`` its hit and pages for the rest of its prompt and the decode reserve, or nothing."""
        first = seq.num_cached is None
        self._kv.acquire(seq)
        lacking = seq.num_tokens - seq.num_computed
        decode = min(self._config.decode_reserve_tokens, seq.request.max_computed_tokens - seq.num_tokens)
        try:
            self._kv.reserve(seq, lacking + decode)
        except OutOfPages as error:
            self._kv.release(seq)
            return error
        except BaseException:
            self._kv.release(seq)
            raise
        self.queue.admit(seq)
        self._candidates.forget(seq)
        if first:
            assert seq.num_cached is not None
            self._counters.prompt_tokens += seq.num_prompt
            self._counters.cached_tokens += seq.num_cached
        return None

    def check(self) -> None:
        """Q1 and Q2. Raises ``InternalError``."""
        self.queue.check()

    def stats(self) -> dict[str, int | float]:
        """The gauge ``num_waiting``."""
        return {"num_waiting": len(self.queue)}
