"""Engine: scheduler and executor, one step at a time on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.config import EngineConfig
from radixkv.errors import ConfigError, EngineDeadError, InternalError, InvalidRequestError, MisuseError
from radixkv.executor.base import AdapterExecutor, ModelExecutor, UpdatableExecutor
from radixkv.interrupt import InterruptsHeld
from radixkv.kv.events import MAX_EVENT_PAGES, Event
from radixkv.kv.manager import FlushReport, KVCacheManager
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.plain import plain_whole, shown
from radixkv.sched.batch import Batch, SequenceOutput, StepResult
from radixkv.sched.scheduler import Scheduler
from radixkv.sched.steady_clock import steady
from radixkv.sequence import Request


class Engine:
    """``add`` and ``abort`` between steps; ``step`` until ``has_work`` is false. Not thread-safe.

    - E1 ``step`` is schedule, execute, update; nothing is released while a forward is in flight.
    - E2 an ``Exception`` out of execute fails that batch's requests, with the error in their final outputs.
      If ``check`` passes the engine goes on; if not, or if scheduler or ledger raise, it is dead: every
      request that was left ends with an ``EngineDeadError``, and so does every later call; its ``__cause__``
      is what happened.
    - E3 Ctrl-C on the main thread takes effect inside execute, or at the end of a step, never while the
      scheduler or the ledger is being changed. The interrupted batch is undone and its requests live on:
      abort them, or step again. Outputs that a late Ctrl-C kept back come with the next step, or from
      ``take_outputs``. Where the caller holds ``InterruptsHeld``, he raises what came late.
    """

    def __init__(self, scheduler: Scheduler, executor: ModelExecutor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.num_failed_steps = 0
        self.execute_s = 0.0
        """Wall time inside ``execute``, seconds."""
        self.when_ended: Callable[[], None] | None = None
        """Called after whatever may have ended requests; must not raise."""
        self._cause: BaseException | None = None
        self._is_stepping = False
        self._undelivered: list[SequenceOutput] = []
        self._updatable = executor if isinstance(executor, UpdatableExecutor) else None
        self._weights_version = self._weights_version_now

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        executor: ModelExecutor,
        clock: Callable[[], float] = time.monotonic,
    ) -> Engine:
        """An engine with its own pool and tree (a null tree where ``prefix_cache`` is off).

        Raises ``ConfigError`` where the executor's store is smaller than ``num_pages`` or has another
        ``page_size``.
        """
        if executor.page_size != config.page_size:
            raise ConfigError(f"page_size is {config.page_size}, the executor's is {executor.page_size}")
        if executor.num_pages < config.num_pages:
            raise ConfigError(
                f"num_pages is {config.num_pages}, the executor's store has {executor.num_pages}"
            )
        clock = steady(clock)
        tree = (
            RadixTree(config.page_size, config.eviction_policy)
            if config.prefix_cache
            else NullTree(config.page_size)
        )
        kv = KVCacheManager(
            PagePool(config.num_pages),
            tree,
            max_pinned_pages=config.max_pinned_pages,
            eviction_memory=config.eviction_memory,
            max_event_pages=MAX_EVENT_PAGES if config.events else 0,
            clock=clock,
        )
        return cls(Scheduler(config, kv, executor.spec, clock), executor)

    @property
    def kv(self) -> KVCacheManager:
        return self.scheduler.kv

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``InvalidRequestError`` or one of its kinds, before any work, and
        ``EngineDeadError``."""
        self._raise_if_dead()
        if not isinstance(request, Request):
            raise InvalidRequestError(f"the engine takes a Request, got {shown(request)}")
        if request.adapter and not self._has_adapter(request.adapter):
            self.scheduler.counters.num_refused += 1
            raise InvalidRequestError(
                f"request {request.request_id}: no adapter of index {request.adapter} is loaded"
            )
        self.scheduler.add(request)

    def _has_adapter(self, adapter: int) -> bool:
        return isinstance(self.executor, AdapterExecutor) and self.executor.has_adapter(adapter)

    def abort(self, request_id: int) -> tuple[SequenceOutput, ...]:
        """End a request, whatever its state. The final output of each of its samples that had not ended is
        returned here, and not by ``step``; nothing where the id is not in use (any more). Called from inside
        ``execute`` it takes effect, and delivers the outputs, at the end of the step. Raises
        ``InvalidRequestError`` for what is no whole number."""
        self._raise_if_dead()
        outputs = self.scheduler.abort(_whole("request_id", request_id))
        self._tell_ended()
        return outputs

    def finish(self, request_id: int, sample_index: int = 0) -> SequenceOutput | None:
        """End one sample of a request, because its text is complete: like ``abort``, but it ends as ``stop``.
        What it computed stays in the tree, under the ids that were really sampled."""
        self._raise_if_dead()
        output = self.scheduler.finish(_whole("request_id", request_id), _whole("sample_index", sample_index))
        self._tell_ended()
        return output

    def _tell_ended(self) -> None:
        if self.when_ended is not None:
            self.when_ended()

    def new_epoch(self) -> FlushReport:
        """The weights are others from now on: nothing that was computed before is found again, nor is
        anything kept of what the requests in flight have computed so far. They go on, and so end with tokens
        of both. Between steps only. Pins are dropped; the report says so, and what was freed and held."""
        self._raise_if_dead()
        self._weights_version = self._weights_version_now
        return self.kv.flush()

    def follow_weights(self) -> None:
        """Begin a new epoch if somebody else replaced the weights of the model, which executors may share."""
        if self._weights_version != self._weights_version_now:
            self.new_epoch()

    @property
    def _weights_version_now(self) -> int:
        return 0 if self._updatable is None else self._updatable.weights_version

    def take_events(self) -> tuple[Event, ...]:
        """What entered and left the cache since the last call: see ``KVCacheManager.take_events``. Raises
        ``MisuseError`` unless the config says ``events=True``."""
        return self.kv.take_events()

    def take_outputs(self) -> list[SequenceOutput]:
        """Outputs that wait for the next step, so that it need not be taken; each is given once."""
        self._undelivered, outputs = [], self._undelivered
        return outputs + self.scheduler.take_outputs()

    @property
    def is_full(self) -> bool:
        """Whether ``max_waiting`` requests wait, so that ``add`` would raise ``QueueFullError``."""
        return self.scheduler.is_full

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._undelivered)

    def step(self) -> list[SequenceOutput]:
        """One step: everything new about the sequences that took part. Raises ``EngineDeadError`` if the
        engine was dead before; a step that kills it still returns the final outputs of all requests. Raises
        ``MisuseError`` inside ``execute``, whose step is not over."""
        self._raise_if_dead()
        if self._is_stepping:
            raise MisuseError("step was called inside execute: one step at a time")
        self._is_stepping = True
        try:
            return self._step_and_deliver()
        finally:
            self._is_stepping = False
            self._tell_ended()

    def _step_and_deliver(self) -> list[SequenceOutput]:
        self._undelivered, outputs = [], self._undelivered
        try:
            with InterruptsHeld() as interrupts:
                try:
                    outputs += self._step(interrupts)
                    if not self.scheduler.has_work:
                        self._check_idle()
                except Exception as error:
                    outputs += self._die(error)
        except BaseException:
            self._undelivered = outputs
            raise
        return outputs

    def _step(self, interrupts: InterruptsHeld) -> list[SequenceOutput]:
        self.follow_weights()
        batch = self.scheduler.schedule()
        if batch is None:
            return self.scheduler.take_outputs()
        begin = time.perf_counter()
        try:
            try:
                interrupts.open()
                result = self.executor.execute(batch)
                _refuse_misfit(batch, result, self.executor.spec.vocab_size)
            finally:
                interrupts.shut()
        except Exception as error:
            self.num_failed_steps += 1
            outputs = self.scheduler.fail(batch, error)
            outputs += self.scheduler.take_outputs()
            try:
                self.check()
            except Exception as broken:
                broken.__cause__ = error
                outputs += self._die(broken)
            return outputs
        except BaseException:
            self.scheduler.undo(batch)
            raise
        finally:
            self.execute_s += time.perf_counter() - begin
        outputs = self.scheduler.update(batch, result)
        return outputs + self.scheduler.take_outputs()

    def _check_idle(self) -> None:
        """No request is left, so nothing may be held but by the tree and by pins."""
        if self.scheduler.config.check_when_idle:
            self.check()
        self.kv.check_idle()

    def _die(self, cause: BaseException) -> list[SequenceOutput]:
        """Stop for good; the final outputs of everybody who was left."""
        self._cause = cause
        return self.scheduler.give_up(self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        error = EngineDeadError(f"the engine has stopped for good: {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def _raise_if_dead(self) -> None:
        if self._cause is not None:
            raise self._dead_error()

    @property
    def is_dead(self) -> bool:
        return self._cause is not None

    def stats(self) -> dict[str, Any]:
        """What the parts report, under ``scheduler``, ``kv`` and ``executor``, and the engine's own."""
        return {
            "scheduler": self.scheduler.stats(),
            "kv": self.kv.stats(),
            "executor": self.executor.stats(),
            "num_failed_steps": self.num_failed_steps,
            "execute_s": self.execute_s,
            "is_dead": self.is_dead,
        }

    def check(self) -> None:
        """Every invariant of scheduler and ledger. Raises ``InternalError``; costs O(pages)."""
        self.scheduler.check()
        self.kv.check(self.scheduler.running)


def _whole(name: str, value: object) -> int:
    whole = plain_whole(value)
    if whole is None:
        raise InvalidRequestError(f"{name} must be a whole number, got {shown(value)}")
    return whole


def _refuse_misfit(batch: Batch, result: StepResult, vocab_size: int) -> None:
    """An executor that returns the wrong shapes or impossible tokens has failed."""
    if result.sampled_ids.shape != batch.sample_rows.shape:
        raise InternalError(
            f"the executor sampled {len(result.sampled_ids)} tokens for {len(batch.sample_rows)} rows"
        )
    if result.score_logprobs.shape != batch.score_rows.shape:
        raise InternalError(
            f"the executor scored {len(result.score_logprobs)} of {len(batch.score_rows)} rows"
        )
    _refuse_missing_logprobs(batch.sampling.num_logprobs, result.sampled_logprobs, result.top_logprobs)
    _refuse_missing_logprobs(batch.score_num_logprobs, result.score_logprobs, result.score_top_logprobs)
    outside = (result.sampled_ids < 0) | (result.sampled_ids >= vocab_size)
    if np.any(outside):
        raise InternalError(
            f"the executor sampled token id {int(result.sampled_ids[outside][0])}, outside the vocabulary, "
            f"0..{vocab_size - 1}"
        )


def _refuse_missing_logprobs(
    wanted: NDArray[np.int32], logprobs: NDArray[np.float32], top_logprobs: NDArray[np.float32]
) -> None:
    """Every row that asked for log-probabilities must have got them, and none of them may be NaN."""
    rows = np.flatnonzero(wanted)
    if len(rows) == 0:
        return
    num_top = int(wanted.max()) - 1
    if logprobs.shape != wanted.shape or (num_top and top_logprobs.shape != (len(wanted), num_top)):
        raise InternalError(
            f"the executor gave log-probabilities of shape {logprobs.shape} and {top_logprobs.shape} for "
            f"{len(wanted)} rows with up to {num_top} alternatives"
        )
    missing = np.isnan(logprobs[rows])
    if num_top:
        has_place = np.arange(num_top) < wanted[rows, None] - 1
        missing |= (np.isnan(top_logprobs[rows]) & has_place).any(axis=1)
    if missing.any():
        raise InternalError(f"the executor left out log-probabilities of {int(missing.sum())} rows")
