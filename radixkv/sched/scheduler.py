"""Scheduler: queues, budgets, preemption. No tensors, no text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from radixkv.config import EngineConfig, ModelSpec
from radixkv.errors import DuplicateRequestError, InvalidRequestError, MisuseError, NonFiniteLogitsError
from radixkv.kv.invariant import require
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.admission import Admission
from radixkv.sched.batch import Batch, SequenceOutput, StepResult
from radixkv.sched.batch_builder import build_batch
from radixkv.sched.beam_group import BeamGroup
from radixkv.sched.counters import Counters
from radixkv.sched.draws import with_seed
from radixkv.sched.forking import fork_samples
from radixkv.sched.latencies import Latencies
from radixkv.sched.limits import refuse_unfit
from radixkv.sched.live_request import LiveRequest
from radixkv.sched.logprob_results import sampled_entries, take_prompt_scores
from radixkv.sched.running import Running
from radixkv.sched.sequence_outputs import beam_outputs, last_outputs, output_of
from radixkv.sched.steady_clock import steady
from radixkv.sched.stopping import reason_to_stop
from radixkv.sequence import FinishReason, Request, Sequence, Status
from radixkv.token_logprobs import TokenLogprobs


class Scheduler:
    """Turns requests into one batch per step, and a step's result into outputs.

    There are no phases: a running sequence computes what it lacks, a chunk of its prompt or one token.

    - D1 a sequence is in exactly one of waiting, running, finished. A request has one; when its prompt is
      computed, one for each of its samples or beams, and it ends when the last of them has.
    - D2 a step never computes more than ``max_batch_tokens``; a request that can never fit is refused in
      ``add``. Every running sequence computes at least one token in every step, but for beams that are ahead
      of the others of their search.
    - D3 after an abort, ``release`` runs once, whatever the state. While a batch is out (between ``schedule``
      and ``update``, ``fail`` or ``undo``) nothing is released; an abort then takes effect at its return.
    - D4 at most ``max_skips`` later arrivals are admitted before a request, and after ``max_wait_s`` none is,
      whatever the policy. A preempted sequence that resumes has been counted at its first admission.

    Admission takes the pages of the whole remaining prompt and of a decode reserve at once. When decoding
    runs out of pages, the victim is the running sequence with the fewest preemptions, of those the latest
    arrival; it gives up its pages (what was computed stays in the tree while there is room), keeps its
    tokens, and goes to the front of the queue (for its first ``MAX_BOOSTS`` preemptions). The last running
    sequence (or beam search) is never preempted; by D2 it always has room, unless somebody outside holds
    pages, and then it fails with ``OutOfPages``. A step that preempts admits nobody.
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
        self._clock = clock = steady(clock)
        self._latencies = Latencies()
        self._admission = Admission(config, kv, self.counters, self._latencies, clock)
        self._queue = self._admission.queue
        self._live: dict[int, LiveRequest] = {}  # by request id
        self._running = Running(config, kv, self._queue, self._admission.reservation, self.counters)
        self._in_flight: Batch | None = None
        self._abort_later: set[int] = set()
        self._outputs: list[SequenceOutput] = []  # ended outside ``update``
        self._num_arrivals = 0

    # Requests in and out

    def add(self, request: Request) -> None:
        """Put ``request`` into the queue. Raises ``InvalidRequestError`` or one of its kinds, having changed
        nothing, where its id is in use, a token lies outside the vocabulary, it can never fit, or as many
        wait as may (``QueueFullError``)."""
        try:
            if request.request_id in self._live:
                raise DuplicateRequestError(f"request id {request.request_id} is already in use")
            refuse_unfit(request, self.config, self.spec)
            self._admission.refuse_if_full()
        except InvalidRequestError:
            self.counters.num_refused += 1
            raise
        seq = Sequence(with_seed(request), self.config.page_size, self._clock(), self._num_arrivals)
        self._num_arrivals += request.num_samples
        beams = None if request.beam is None else BeamGroup.of(seq, self.spec)
        self._live[request.request_id] = LiveRequest(seq, beams)
        if beams is not None:
            self._running.beams[request.request_id] = beams
        self._queue.add(seq)
        self.counters.num_added += 1

    def abort(self, request_id: int) -> tuple[SequenceOutput, ...]:
        """End a request. Returns the final output of each of its samples that had not ended; nothing where
        there is no such request (any more), or where its batch is out: then the final outputs are among those
        of ``update``."""
        live = self._live.get(request_id)
        if live is None:
            return ()
        if self._in_flight is not None and live.is_running:
            self._abort_later.add(request_id)
            return ()
        return tuple(self._end_request(live, "abort"))

    def finish(self, request_id: int, sample_index: int = 0) -> SequenceOutput | None:
        """End one sample of a request as ``stop``, because its text is complete. Returns its final output;
        ``None`` where there is no such sample (any more). ``MisuseError`` while a batch is out: there is no
        new text then."""
        if self._in_flight is not None:
            raise MisuseError(f"request {request_id} cannot be finished while a batch is out; abort it")
        live = self._live.get(request_id)
        seq = None if live is None else live.sample(sample_index)
        return None if seq is None else self._end(seq, "stop")[0]

    def take_outputs(self) -> list[SequenceOutput]:
        """Final outputs of requests that ended in ``schedule`` or ``undo``; each is given once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def is_full(self) -> bool:
        """Whether ``add`` would raise ``QueueFullError`` now."""
        return self._admission.is_full

    def num_users_of(self, adapter: int) -> int:
        """Requests under ``adapter`` that have not ended."""
        return sum(live.request.adapter == adapter for live in self._live.values())

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._outputs)

    # One step

    def schedule(self) -> Batch | None:
        """The next batch, which is then out until ``update``, ``fail`` or ``undo``; ``None`` where nothing
        can be computed. Requests may end here: see ``take_outputs``."""
        assert self._in_flight is None, "the last batch has not come back"
        with self.counters.timed("schedule_cpu_s"):
            self.kv.expire_pins()
            for seq in self._admission.overdue():
                self._outputs += self._end(seq, "timeout")
            preempted, hopeless = self._running.reserve()
            if hopeless is not None:
                self._outputs += self._end(hopeless[0], "error", hopeless[1])
            grants = self._running.grant()
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
                eos_token_ids=self.spec.eos_token_ids,
            )
            return self._in_flight

    def update(self, batch: Batch, result: StepResult) -> list[SequenceOutput]:
        """Take in what ``batch`` computed; outputs of the sequences that have something new or have ended."""
        with self.counters.timed("update_cpu_s"):
            sequences = self._take_back(batch)
            self.counters.num_steps += 1
            take_prompt_scores(batch, result, sequences)
            entries = sampled_entries(batch, result)
            counts = (batch.query_indptr[1:] - batch.query_indptr[:-1]).tolist()
            for seq, count in zip(sequences, counts, strict=True):
                self.counters.prompt_tokens_computed += max(0, min(count, seq.num_prompt - seq.num_computed))
                seq.num_computed += count
            outputs: list[SequenceOutput] = []
            for request_id in sorted(self._abort_later):
                outputs += self._end_request(self._live[request_id], "abort")
            rows: list[list[int]] = [[] for _ in sequences]
            for row, i in enumerate(batch.sample_seqs.tolist()):
                rows[i].append(row)
            ids = result.sampled_ids.tolist()
            groups: dict[int, dict[int, int]] = {}
            for seq, its_rows in zip(sequences, rows, strict=True):
                if seq.request.beam is not None:
                    groups.setdefault(seq.request.request_id, {}).update(
                        (seq.number, row) for row in its_rows
                    )
                elif seq.status is Status.RUNNING:  # not aborted
                    tokens = [(ids[row], entries[row] if entries else None) for row in its_rows]
                    outputs += self._advance(seq, tokens)
            for request_id, row_of in groups.items():
                if request_id in self._live and self._running.advance_beams(request_id, row_of, result):
                    outputs += self._end_beams(self._live[request_id], None)
            return outputs

    def fail(self, batch: Batch, error: BaseException) -> list[SequenceOutput]:
        """``batch`` did not run to its end: its requests fail (or end as aborted, where that was asked). An
        error that names requests (``NonFiniteLogitsError``) fails only those; the others compute again."""
        named = error.seq_ids if isinstance(error, NonFiniteLogitsError) else batch.seq_ids.tolist()
        return self._abandon(batch, set(named), error)

    def undo(self, batch: Batch) -> None:
        """``batch`` was interrupted: its requests go on, and compute again what it left undone."""
        self._outputs += self._abandon(batch, set(), None)

    def _abandon(self, batch: Batch, failed: set[int], error: BaseException | None) -> list[SequenceOutput]:
        """What a batch that did not run to its end leaves. Nothing of it counts as computed. Whether its page
        copies were done is not known either: who needed one starts again from the tree."""
        outputs: list[SequenceOutput] = []
        copied = {copy.dst for copy in batch.page_copies}
        self.counters.num_undone_steps += 1
        for seq in self._take_back(batch):
            if seq.status is not Status.RUNNING:
                continue  # its request or its beam search has ended or was preempted just now
            request_id = seq.request.request_id
            if request_id in self._abort_later:
                outputs += self._end_request(self._live[request_id], "abort")
            elif seq.number in failed:
                outputs += self._end(seq, "error", error)
            elif int(seq.page_table.pages[seq.num_computed // self.config.page_size]) in copied:
                self._preempt(seq)
        return outputs

    def give_up(self, error: BaseException) -> list[SequenceOutput]:
        """End every request with ``error`` without touching the ledger, which is not to be trusted any more.
        For a dead engine; nothing can be scheduled afterwards."""
        outputs = self.take_outputs()
        for live in self._live.values():
            self.counters.count_end("error")
            if live.beams is not None:
                outputs += beam_outputs(live.beams, "error", error)
                continue
            for seq in live.samples:
                seq.status, seq.finish_reason = Status.FINISHED, "error"
                outputs += last_outputs(seq, (), error)
        self._live, self._in_flight = {}, None
        self._running.clear()
        self._queue.clear()
        self._latencies.clear()
        return outputs

    # Admission

    def _admit(self, grants: dict[Sequence, int]) -> None:
        """Start waiting sequences beside those that run; extends ``grants``."""
        admitted = self._admission.admit(self._running, grants, self._make_way)
        for seq in admitted.sequences:
            self._running.add(seq)
        if admitted.hopeless is not None:
            seq, error = admitted.hopeless
            self._outputs += self._end(seq, "error", error)

    def _preempt(self, seq: Sequence) -> None:
        self._running.preempt(seq)

    def _make_way(self, seq: Sequence) -> None:
        """``seq`` is preempted for a request of higher priority."""
        self._preempt(seq)
        self.counters.num_priority_preemptions += 1

    # Results

    def _take_back(self, batch: Batch) -> list[Sequence]:
        assert batch is self._in_flight, "this batch is not out"
        self._in_flight = None
        return [self._running[number] for number in batch.seq_ids.tolist()]

    def _advance(self, seq: Sequence, tokens: list[tuple[int, TokenLogprobs | None]]) -> list[SequenceOutput]:
        """``seq`` has computed its tokens; ``tokens`` are what it sampled, if it did, one for each sample
        that it stands for, with their log-probabilities where those are wanted."""
        if not tokens:
            if seq.num_computed == seq.num_tokens:  # max_tokens is 0
                return self._end(seq, "length")
            self._running.commit(seq)
            return []
        if seq.num_samples == 1:
            return self._take_token(seq, *tokens[0])
        self._running.commit(seq)
        samples = fork_samples(self.kv, seq)
        self._live[seq.request.request_id].samples = list(samples)
        for sample in samples[1:]:
            self._running.add(sample)
        outputs = []
        for sample, token in zip(samples, tokens, strict=True):
            outputs += self._take_token(sample, *token)
        return outputs

    def _take_token(self, seq: Sequence, token_id: int, entry: TokenLogprobs | None) -> list[SequenceOutput]:
        seq.append(token_id)
        if entry is not None:
            seq.cumulative_logprob += entry.logprob
        self.counters.output_tokens += 1
        self._latencies.token(seq, self._clock())
        reason = reason_to_stop(seq, token_id, self.spec.eos_token_ids)
        if reason is not None:
            return self._end(seq, reason, new_ids=(token_id,), entry=entry)
        self._running.commit(seq)
        return [output_of(seq, (token_id,), entry=entry)]

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        error: BaseException | None = None,
        *,
        new_ids: tuple[int, ...] = (),
        entry: TokenLogprobs | None = None,
    ) -> list[SequenceOutput]:
        """The one way out, from waiting and from running (D3): of a sequence, for every sample that it stands
        for, and of a beam search as a whole."""
        live = self._live[seq.request.request_id]
        if live.beams is not None:
            return self._end_beams(live, reason, error)
        self._leave(seq, reason)
        live.remove(seq, reason)
        if not live.samples:
            self._forget(live)
        return last_outputs(seq, new_ids, error, entry)

    def _end_beams(
        self, live: LiveRequest, reason: FinishReason | None, error: BaseException | None = None
    ) -> list[SequenceOutput]:
        """``reason``: why the search ends before it is over; ``None``: it is over."""
        assert live.beams is not None
        outputs = beam_outputs(live.beams, reason, error)
        live.reason = outputs[0].finish_reason or "stop"
        for beam in list(live.sequences):
            self._leave(beam, live.reason)
        self._forget(live)
        return outputs

    def _end_request(self, live: LiveRequest, reason: FinishReason) -> list[SequenceOutput]:
        if live.beams is not None:
            return self._end_beams(live, reason)
        return [output for seq in list(live.samples) for output in self._end(seq, reason)]

    def _leave(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self.kv.release(seq)
            self._running.remove(seq)
        else:
            self._queue.remove(seq)
        seq.status, seq.finish_reason = Status.FINISHED, reason
        self._admission.ended(seq)

    def _forget(self, live: LiveRequest) -> None:
        """Nothing of the request is left."""
        del self._live[live.request.request_id]
        self._running.beams.pop(live.request.request_id, None)
        self._abort_later.discard(live.request.request_id)
        self.counters.count_end(live.reason)

    # Reports

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, in order of admission; to be looked at only."""
        return list(self._running)

    def stats(self) -> dict[str, Any]:
        """Counters since the start, the gauges ``num_waiting`` and ``num_running``, and the histograms
        ``queue_time_s``, ``ttft_s`` and ``inter_token_s``."""
        gauges = {"num_running": len(self._running)}
        return {**self.counters.stats(), **self._admission.stats(), **gauges, **self._latencies.stats()}

    def check(self) -> None:
        """D1, D2, N1, and S1 of every sequence. Raises ``InternalError``."""
        self._admission.check()
        live = {seq.number: seq for request in self._live.values() for seq in request.sequences}
        self._latencies.check(set(live.values()))
        waiting = {seq.number: seq for seq in self._queue}
        running = {seq.number: seq for seq in self._running}
        require(not waiting.keys() & running.keys(), "D1", "a sequence both waits and runs")
        require({**waiting, **running} == live, "D1", "a sequence neither waits nor runs")
        for seq in waiting.values():
            require(seq.status is Status.WAITING, "D1", seq.request.request_id, "waits as", seq.status)
            require(seq.page_table.num_pages == 0, "D3", f"{seq.request.request_id} waits and holds pages")
        for seq in running.values():
            require(seq.status is Status.RUNNING, "D1", seq.request.request_id, "runs as", seq.status)
            committed = seq.num_committed_pages * self.config.page_size
            require(committed <= seq.num_computed < seq.num_tokens, "S1", seq.request.request_id)
        places = self._running.num_places
        require(places <= self._admission.max_running, "D2", f"{places} places are taken")
        for beams in self._running.beams.values():
            beams.check()
        require(self.counters.num_added == self.counters.num_ended + len(self._live), "N1", self.stats)
