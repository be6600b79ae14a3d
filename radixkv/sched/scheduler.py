"""Scheduler: queues, budgets, preemption. No tensors, no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from radixkv.config import EngineConfig, ModelSpec
from radixkv.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    MisuseError,
    NonFiniteLogitsError,
    OutOfPages,
)
from radixkv.kv.invariant import require
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.admission import Admission
from radixkv.sched.batch import Batch, SequenceOutput, StepResult, Usage
from radixkv.sched.batch_builder import build_batch
from radixkv.sched.counters import Counters
from radixkv.sched.draws import with_seed
from radixkv.sched.limits import refuse_unfit
from radixkv.sequence import FinishReason, Request, Sequence, Status


class Scheduler:
    """Turns requests into one batch per step, and a step's result into outputs.

    There are no phases: a running sequence computes what it lacks, a chunk of its prompt or one token.

    - D1 a sequence is in exactly one of waiting, running, finished.
    - D2 a step never computes more than ``max_batch_tokens``; a request that can never fit is refused in
      ``add``. Every running sequence computes at least one token in every step.
    - D3 after an abort, ``release`` runs once, whatever the state. While a batch is out (between ``schedule``
      and ``update``, ``fail`` or ``undo``) nothing is released; an abort then takes effect at its return.
    - D4 at most ``max_skips`` later arrivals are admitted before a request, and after ``max_wait_s`` none is,
      whatever the policy. A preempted sequence that resumes has been counted at its first admission.

    Admission takes the pages of the whole remaining prompt and of a decode reserve at once. When decoding
    runs out of pages, the victim is the running sequence with the fewest preemptions, of those the latest
    arrival; it gives up its pages (what was computed stays in the tree while there is room), keeps its
    tokens, and goes to the front of the queue (for its first ``MAX_BOOSTS`` preemptions). The last running
    sequence is never preempted; by D2 it always has room, unless somebody outside holds pages, and then it
    fails with ``OutOfPages``. A step that preempts admits nobody.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        spec: ModelSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.spec = spec
        self.kv = kv
        self.counters = Counters()
        self._clock = clock
        self._admission = Admission(config, kv, self.counters, clock)
        self._queue = self._admission.queue
        self._live: dict[int, Sequence] = {}  # waiting and running, by request id
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._in_flight: Batch | None = None
        self._abort_later: set[int] = set()
        self._outputs: list[SequenceOutput] = []  # ended outside ``update``
        self._num_arrivals = 0

    # Requests in and out

    def add(self, request: Request) -> None:
        """Put ``request`` into the queue. Raises ``InvalidRequestError`` or one of its kinds, having changed
        nothing, where its id is in use, a token lies outside the vocabulary, or it can never fit."""
        try:
            if request.request_id in self._live:
                raise DuplicateRequestError(f"request id {request.request_id} is already in use")
            refuse_unfit(request, self.config, self.spec)
        except InvalidRequestError:
            self.counters.num_refused += 1
            raise
        seq = Sequence(with_seed(request), self.config.page_size, self._clock(), self._num_arrivals)
        self._num_arrivals += 1
        self._live[request.request_id] = seq
        self._queue.add(seq)
        self.counters.num_added += 1

    def abort(self, request_id: int) -> SequenceOutput | None:
        """End a request. Returns its final output; ``None`` where there is no such request (any more), or
        where its batch is out: then the final output is among those of ``update``."""
        seq = self._live.get(request_id)
        if seq is None:
            return None
        if self._in_flight is not None and request_id in self._running:
            self._abort_later.add(request_id)
            return None
        return self._end(seq, "abort")

    def finish(self, request_id: int, sample_index: int = 0) -> SequenceOutput | None:
        """End a request as ``stop``, because its text is complete; else as ``abort``. ``MisuseError`` while a
        batch is out: there is no new text then."""
        if self._in_flight is not None:
            raise MisuseError(f"request {request_id} cannot be finished while a batch is out; abort it")
        seq = self._live.get(request_id)
        return None if seq is None else self._end(seq, "stop")

    def take_outputs(self) -> list[SequenceOutput]:
        """Final outputs of requests that ended in ``schedule`` or ``undo``; each is given once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._outputs)

    # One step

    def schedule(self) -> Batch | None:
        """The next batch, which is then out until ``update``, ``fail`` or ``undo``; ``None`` where nothing
        can be computed. Requests may end here: see ``take_outputs``."""
        assert self._in_flight is None, "the last batch has not come back"
        with self._timed("schedule_cpu_s"):
            self.kv.expire_pins()
            preempted = self._reserve_for_running()
            grants = self._grant_running()
            if not preempted:
                self._admit(grants)
            if not grants:
                return None
            self._admission.shape_cut_chunks(grants)
            self._in_flight = build_batch(
                grants,
                self.kv.take_copies(),
                page_size=self.config.page_size,
                vocab_size=self.spec.vocab_size,
            )
            return self._in_flight

    def update(self, batch: Batch, result: StepResult) -> list[SequenceOutput]:
        """Take in what ``batch`` computed; outputs of the sequences that have something new or have ended."""
        with self._timed("update_cpu_s"):
            sequences = self._take_back(batch)
            self.counters.num_steps += 1
            self._take_logprobs(batch, result, sequences)
            sampled = dict(zip(batch.sample_seqs.tolist(), result.sampled_ids.tolist(), strict=True))
            counts = (batch.query_indptr[1:] - batch.query_indptr[:-1]).tolist()
            outputs = []
            for i, (seq, count) in enumerate(zip(sequences, counts, strict=True)):
                self.counters.prompt_tokens_computed += max(0, min(count, seq.num_prompt - seq.num_computed))
                seq.num_computed += count
                output = self._advance(seq, sampled.get(i))
                if output is not None:
                    outputs.append(output)
            return outputs

    def fail(self, batch: Batch, error: BaseException) -> list[SequenceOutput]:
        """``batch`` did not run to its end: its requests fail (or end as aborted, where that was asked). An
        error that names requests (``NonFiniteLogitsError``) fails only those; the others compute again."""
        named = error.request_ids if isinstance(error, NonFiniteLogitsError) else batch.seq_ids.tolist()
        return self._abandon(batch, set(named), error)

    def undo(self, batch: Batch) -> None:
        """``batch`` was interrupted: its requests go on, and compute again what it left undone."""
        self._outputs += self._abandon(batch, set(), None)

    def _abandon(self, batch: Batch, failed: set[int], error: BaseException | None) -> list[SequenceOutput]:
        """What a batch that did not run to its end leaves. Nothing of it counts as computed. Whether its page
        copies were done is not known either: who needed one starts again from the tree."""
        outputs = []
        copied = {copy.dst for copy in batch.page_copies}
        self.counters.num_undone_steps += 1
        for seq in self._take_back(batch):
            request_id = seq.request.request_id
            if request_id in self._abort_later:
                outputs.append(self._end(seq, "abort"))
            elif request_id in failed:
                outputs.append(self._end(seq, "error", error))
            elif int(seq.page_table.pages[seq.num_computed // self.config.page_size]) in copied:
                self._preempt(seq)
        return outputs

    def give_up(self, error: BaseException) -> list[SequenceOutput]:
        """End every request with ``error`` without touching the ledger, which is not to be trusted any more.
        For a dead engine; nothing can be scheduled afterwards."""
        outputs = self.take_outputs()
        for seq in list(self._live.values()):
            seq.status, seq.finish_reason = Status.FINISHED, "error"
            self.counters.count_end("error")
            outputs.append(self._output(seq, (), error))
        self._live, self._running, self._in_flight = {}, {}, None
        self._queue.clear()
        return outputs

    # Running sequences

    def _reserve_for_running(self) -> bool:
        """Room for what each running sequence lacks; whether anybody was preempted for it."""
        preempted = False
        for request_id in list(self._running):
            while (seq := self._running.get(request_id)) is not None:
                try:
                    self.kv.reserve(seq, seq.num_tokens - seq.num_computed)
                    break
                except OutOfPages as error:
                    if len(self._running) == 1:
                        self._outputs.append(self._end(seq, "error", error))
                        break
                    victim = max(self._running.values(), key=lambda v: (-v.num_preemptions, v.number))
                    self._preempt(victim)
                    preempted = True
        return preempted

    def _preempt(self, seq: Sequence) -> None:
        self.kv.release(seq)
        del self._running[seq.request.request_id]
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._queue.add(seq)

    def _grant_running(self) -> dict[Sequence, int]:
        """One token for each running sequence, then more for those that lack more, in order of admission."""
        spare = self.config.max_batch_tokens - len(self._running)
        grants: dict[Sequence, int] = {}
        for seq in self._running.values():
            more = min(seq.num_tokens - seq.num_computed - 1, spare)
            grants[seq] = 1 + more
            spare -= more
        return grants

    # Admission

    def _admit(self, grants: dict[Sequence, int]) -> None:
        """Start waiting sequences beside those that run; extends ``grants``."""
        admitted = self._admission.admit(self._running.values(), grants)
        for seq in admitted.sequences:
            seq.status = Status.RUNNING
            self._running[seq.request.request_id] = seq
        if admitted.hopeless is not None:
            seq, error = admitted.hopeless
            self._outputs.append(self._end(seq, "error", error))

    # Results

    def _take_back(self, batch: Batch) -> list[Sequence]:
        assert batch is self._in_flight, "this batch is not out"
        self._in_flight = None
        return [self._running[request_id] for request_id in batch.seq_ids.tolist()]

    def _take_logprobs(self, batch: Batch, result: StepResult, sequences: list[Sequence]) -> None:
        if len(batch.score_seqs) == 0:
            return
        scored, firsts = np.unique(batch.score_seqs, return_index=True)
        parts = np.split(result.score_logprobs, firsts[1:])
        for i, part in zip(scored.tolist(), parts, strict=True):
            sequences[i].logprobs += part.tolist()

    def _advance(self, seq: Sequence, token_id: int | None) -> SequenceOutput | None:
        """``seq`` has computed its rows; ``token_id`` is what it sampled, if it did."""
        if seq.request.request_id in self._abort_later:
            return self._end(seq, "abort")
        new_ids: tuple[int, ...] = ()
        reason: FinishReason | None = None
        if token_id is not None:
            seq.append(token_id)
            new_ids = (token_id,)
            self.counters.output_tokens += 1
            reason = self._reason_to_stop(seq, token_id)
        elif seq.num_computed == seq.num_tokens:
            reason = "length"  # max_tokens is 0
        if reason is not None:
            return self._end(seq, reason, new_ids=new_ids)
        if seq.num_computed // self.config.page_size > seq.num_committed_pages:
            self.kv.commit(seq)
        return self._output(seq, new_ids) if new_ids else None

    def _reason_to_stop(self, seq: Sequence, token_id: int) -> FinishReason | None:
        sampling = seq.request.sampling
        if token_id in sampling.stop_token_ids:
            return "stop"
        if token_id in self.spec.eos_token_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if seq.num_output >= sampling.max_tokens else None

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        error: BaseException | None = None,
        *,
        new_ids: tuple[int, ...] = (),
    ) -> SequenceOutput:
        """The one way out, from waiting and from running (D3)."""
        request_id = seq.request.request_id
        if seq.status is Status.RUNNING:
            self.kv.release(seq)
            del self._running[request_id]
        else:
            self._queue.remove(seq)
        del self._live[request_id]
        self._admission.forget(seq)
        self._abort_later.discard(request_id)
        seq.status, seq.finish_reason = Status.FINISHED, reason
        self.counters.count_end(reason)
        return self._output(seq, new_ids, error)

    def _output(
        self, seq: Sequence, new_ids: tuple[int, ...], error: BaseException | None = None
    ) -> SequenceOutput:
        usage = Usage(seq.num_prompt, seq.num_cached or 0, seq.num_output)
        logprobs = tuple(seq.logprobs) if seq.finish_reason is not None else ()
        return SequenceOutput(seq.request.request_id, new_ids, seq.finish_reason, usage, logprobs, error)

    # Reports

    @contextmanager
    def _timed(self, counter: str) -> Iterator[None]:
        begin = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - begin
            setattr(self.counters, counter, getattr(self.counters, counter) + spent)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, in order of admission; to be looked at only."""
        return list(self._running.values())

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and the gauges ``num_waiting`` and ``num_running``."""
        return {**self.counters.stats(), **self._admission.stats(), "num_running": len(self._running)}

    def check(self) -> None:
        """D1, D2, N1, and S1 of every sequence. Raises ``InternalError``."""
        self._admission.check()
        waiting = {seq.request.request_id: seq for seq in self._queue}
        require(not waiting.keys() & self._running.keys(), "D1", "a sequence both waits and runs")
        require({**waiting, **self._running} == self._live, "D1", "a sequence neither waits nor runs")
        for seq in waiting.values():
            require(seq.status is Status.WAITING, "D1", f"{seq.request.request_id} waits as {seq.status}")
            require(seq.page_table.num_pages == 0, "D3", f"{seq.request.request_id} waits and holds pages")
        for seq in self._running.values():
            require(seq.status is Status.RUNNING, "D1", f"{seq.request.request_id} runs as {seq.status}")
            committed = seq.num_committed_pages * self.config.page_size
            require(committed <= seq.num_computed < seq.num_tokens, "S1", seq.request.request_id)
        require(
            len(self._running) <= self._admission.max_running, "D2", f"{len(self._running)} sequences run"
        )
        require(self.counters.num_added == self.counters.num_ended + len(self._live), "N1", self.stats())
