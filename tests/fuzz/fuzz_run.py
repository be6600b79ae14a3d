"""Runs a program and checks all that must hold, after each step and at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from engine_kit import FakeClock
from fuzz_onlooker import Onlooker, require
from fuzz_oracle import Oracle, Sample, fake_executor
from fuzz_program import LONGEST, Ask, Op, Program, program_of
from numpy.typing import NDArray

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.errors import InvalidRequestError, PinBudgetExceeded, QueueFullError
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.pins import Pin
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import Batch
from radixkv.sequence import Request
from radixkv.testing.fake_executor import FakeExecutor
from radixkv.types import PageIds

MAX_STEPS = 500


class Run:
    """One program on one engine. ``counts`` says how often each kind of event happened."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.counts: Counter[str] = Counter()
        self.clock = FakeClock()
        self.config = EngineConfig(**program.config)
        self.executor: FakeExecutor = fake_executor(
            program.fake, num_pages=self.config.num_pages, page_size=self.config.page_size
        )
        self.engine = Engine.build(self.config, self.executor, self.clock)
        self.kv: KVCacheManager = self.engine.kv
        self.seen = Onlooker(self.config, self.clock)
        self.oracle = Oracle(program.fake)
        self._all_pins: list[Pin] = []
        self._num_asked = 0
        self._watch_admissions()
        self._watch_evictions()

    def _watch_admissions(self) -> None:
        schedule = self.engine.scheduler.schedule

        def watched() -> Batch | None:
            self.counts["pins expired"] += self.seen.expire_pins()
            before = {seq.number for seq in self.engine.scheduler.running}
            batch = schedule()
            for seq in self.engine.scheduler.running:
                if seq.number not in before:
                    self.seen.admit(seq.request.request_id, seq.num_cached)
            if batch is not None:
                self.counts["steps with several adapters"] += len(set(batch.adapter_ids.tolist())) > 1
            return batch

        self.engine.scheduler.schedule = watched  # type: ignore[method-assign]

    def _watch_evictions(self) -> None:
        evict = self.kv.tree.evict

        def watched(num_pages: int, ref_count: NDArray[np.int32]) -> PageIds:
            pages = evict(num_pages, ref_count)
            self.counts["evicted pages"] += len(pages)
            return pages

        self.kv.tree.evict = watched  # type: ignore[method-assign]

    # Running

    def run(self) -> Counter[str]:
        """All of the program, then steps until nothing is left. Raises whatever does not hold."""
        for op in self.program.ops:
            self.counts[op.verb] += 1
            self.do(op)
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        require(not self.engine.has_work, f"still at work after {MAX_STEPS} steps")
        self.check_end()
        return self.counts

    def do(self, op: Op) -> None:
        verb, _, when = op.verb.partition(" ")
        if verb == "add":
            self.add(op)
        elif verb == "tick":
            self.clock.now += op.seconds
        elif verb == "step":
            self.step()
        elif verb in ("interrupt", "fail"):
            self.step(KeyboardInterrupt() if verb == "interrupt" else RuntimeError("planned"), when)
        else:
            {
                "abort": self.abort, "retract": self.retract, "flush": self.flush, "pin": self.pin,
                "unpin": self.unpin,
            }[verb](op)  # fmt: skip
            self.check()

    def check(self) -> None:
        self.engine.check()
        if self.config.events:
            self.seen.follow(self.kv.take_events(), self.kv.content())

    def request_of(self, ask: Ask) -> Request:
        before: list[int] = []
        if ask.follows in self.seen.requests:
            before = self.seen.requests[ask.follows].prompt_ids.tolist()
            before += self.seen.samples[ask.follows][0].tokens
            before = before[: LONGEST[self.config.page_size] - len(ask.prompt)]
            self.counts["further turns"] += 1
        return Request(
            request_id=self._num_asked,
            prompt_ids=np.array(before + list(ask.prompt), np.int32),
            sampling=SamplingParams(max_tokens=ask.max_tokens, **dict(ask.options)),
            namespace=ask.namespace,
            adapter=ask.adapter,
            **dict(ask.fields),
        )

    def add(self, op: Op) -> None:
        self.seen.take(self.engine.take_outputs())  # an interrupted step may have kept some back
        request = self.request_of(op.some_ask)
        self._num_asked += 1
        running = {seq.request.request_id for seq in self.engine.scheduler.running}
        limit = self.config.max_waiting
        is_full = limit is not None and self.seen.num_live - len(running) >= limit
        try:
            self.engine.add(request)
        except QueueFullError as error:
            # Of several samples some may wait while others run; nobody sees that from outside.
            may_be_full = limit is not None and any(len(s) > 1 for s in self.seen.samples.values())
            require(is_full or may_be_full, f"refused: {error}")
            self.counts["queue full"] += 1
        except InvalidRequestError:
            self.counts["refused"] += 1
        else:
            require(not is_full, f"{limit} wait already")
            self.seen.add(request)

    def step(self, error: BaseException | None = None, when: str = "") -> None:
        num_failed = self.engine.num_failed_steps
        if error is not None:
            self._raise_once(error, when)
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            require(isinstance(error, KeyboardInterrupt), "an interrupt from nowhere")
            self.counts["interrupts"] += 1
        else:
            require(not self.engine.is_dead, f"the engine is dead: {self.engine._cause!r}")
            errors = [output.error for output in outputs if output.error is not None]
            require(all(e is error for e in errors), f"failed for no reason: {errors}")
            self.seen.take(outputs)
            self.seen.check_timeouts()
        self.executor.before = self.executor.after = None
        if self.engine.num_failed_steps > num_failed:
            self.counts["failed steps"] += 1
            for number in self.executor.batches[-1].request_ids.tolist():
                ended = self.seen.has_ended(number) or len(self.seen.samples[number]) > 1
                require(ended, f"{number} outlived its failed step")
        self.check()

    def _raise_once(self, error: BaseException, when: str) -> None:
        def hook(batch: Batch) -> None:
            self.executor.before = self.executor.after = None
            raise error

        setattr(self.executor, when, hook)

    def abort(self, op: Op) -> None:
        self.seen.take(self.engine.take_outputs())
        number = op.which
        was_live = number in self.seen.requests and not self.seen.has_ended(number)
        outputs = self.engine.abort(number)
        self.seen.take(outputs)
        require(bool(outputs) == was_live, f"abort of {number} gave {outputs}")
        if was_live:
            self.counts["aborted"] += 1
            require(self.seen.has_ended(number), f"{number} lives on after its abort")

    def retract(self, op: Op) -> None:
        running = self.engine.scheduler.running
        if running:
            beams = [seq for seq in running if seq.request.beam is not None]
            choice = beams or running
            seq = choice[op.which % len(choice)]
            self.engine.scheduler._preempt(seq)
            self.counts["retracted"] += 1
            self.counts["beams retracted"] += seq.request.beam is not None

    def flush(self, op: Op) -> None:
        self.counts["flushed while at work"] += self.engine.has_work
        num_held = self.kv.pool.num_pages - self.kv.pool.num_free
        report = self.kv.flush()
        self.seen.flush()
        num_freed = num_held - (self.kv.pool.num_pages - self.kv.pool.num_free)
        require(len(self.kv.pins) == 0, "pins are left after a flush")
        freed_here = report.num_pages_freed
        require(freed_here <= num_freed, f"{report} says more than the {num_freed} pages that came back")

    def pin(self, op: Op) -> None:
        ask = op.some_ask
        try:
            pin = self.kv.pin(ask.prompt, ask.namespace, timeout_s=op.seconds or None)
        except PinBudgetExceeded:
            self.counts["pins refused"] += 1
            return
        self.counts["pinned tokens"] += pin.num_tokens
        self._all_pins.append(pin)
        self.seen.pins[pin.pin_id] = (pin, self.clock() + op.seconds if op.seconds else None)

    def unpin(self, op: Op) -> None:
        if self._all_pins:
            pin = self._all_pins[op.which % len(self._all_pins)]
            self.kv.unpin(pin)
            self.kv.unpin(pin)  # which does nothing
            self.counts["unpinned"] += self.seen.pins.pop(pin.pin_id, None) is not None

    # The end

    def check_end(self) -> None:
        for number, request in self.seen.requests.items():
            require(self.seen.has_ended(number), f"{number} has not ended")
            self.check_request(request, self.seen.samples[number])
        self.counts["pins expired"] += self.seen.expire_pins()
        self.kv.expire_pins()
        live = {pin.pin_id for pin in self.kv.pins}
        require(live == self.seen.pins.keys(), f"pins {live} are live, not {list(self.seen.pins)}")
        stats = self.kv.stats()
        require(stats["num_pages_used"] == stats["num_pages_pinned"], f"pages are held: {stats}")
        free_or_idle = stats["num_pages"] - stats["num_pages_pinned"]
        require(self.kv.num_available == free_or_idle, f"pages are lost: {stats}")
        self._count_end(stats)

    def _count_end(self, stats: dict[str, Any]) -> None:
        counters = self.engine.scheduler.counters
        self.counts["partial copies"] += stats["num_partial_copies"]
        self.counts["copies on write"] += stats["num_forked_copies"]
        self.counts["cached tokens"] += counters.cached_tokens
        self.counts["preemptions"] += counters.num_preemptions - self.counts["retracted"]
        self.counts["priority preemptions"] += counters.num_priority_preemptions
        self.counts["runs with events"] += self.config.events
        self.counts["runs without a cache"] += not self.config.prefix_cache
        self.counts[f"runs with {self.config.policy}"] += 1
        if self.counts["evicted pages"]:
            self.counts[f"evictions by {self.config.eviction_policy}"] += 1

    def check_request(self, request: Request, samples: list[Sample]) -> None:
        is_done = all(sample.last.finish_reason in ("stop", "length") for sample in samples)
        self.counts["scored"] += bool(samples[0].last.logprobs)
        self.counts["under an adapter"] += is_done and request.adapter > 0
        self.counts["entries of outputs"] += sum(len(sample.entries) for sample in samples)
        self.counts["entries of prompts"] += len(samples[0].last.prompt_logprobs)
        self.counts["beam searches done"] += is_done and request.beam is not None
        self.counts["several samples done"] += is_done and request.sampling.num_samples > 1
        beams = self.oracle.beams(request) if request.beam is not None else []
        for index, got in enumerate(samples):
            name = f"sample {index} of {request.request_id}"
            if request.beam is not None:
                due = beams[index]
                self.check_sample(name, got, due.tokens, due.last.finish_reason)
                if is_done:
                    found, right = got.last.cumulative_logprob, due.last.cumulative_logprob
                    require(found == right, f"{name}: {found}, not {right}")
            else:
                tokens, reason = self.oracle.sample(request, index)
                self.check_sample(name, got, tokens, reason)
            self.check_scores(name, got, request)

    def check_sample(self, name: str, got: Sample, tokens: list[int], reason: str | None) -> None:
        final = got.last
        self.counts[f"ended by {final.finish_reason}"] += 1
        if final.finish_reason in ("stop", "length"):
            require(got.tokens == tokens, f"{name} gave {got.tokens}, not {tokens}")
            require(final.finish_reason == reason, f"{name} ended by {final.finish_reason}, not {reason}")
        else:
            begins = got.tokens == tokens[: len(got.tokens)]
            require(begins, f"{name} gave {got.tokens}, which does not begin {tokens}")
        if final.finish_reason == "timeout":
            require(final.request_id not in self.seen.admitted, f"{name} ran, and then waited too long")
            require(self.seen.timeout_s(final.request_id) is not None, f"{name} had no time limit")
        num_tokens = final.usage.completion_tokens
        require(num_tokens == len(got.tokens), f"{name} counts {final.usage}, gave {len(got.tokens)}")
        num_prompt = len(self.seen.requests[final.request_id].prompt_ids)
        require(final.usage.prompt_tokens == num_prompt, f"{name} counts {final.usage}")

    def check_scores(self, name: str, got: Sample, request: Request) -> None:
        scores = self.oracle.scores(request)
        found = list(got.last.logprobs)
        if got.last.finish_reason in ("stop", "length"):
            entries = list(got.last.prompt_logprobs)
            require(entries == self.oracle.prompt_entries(request), f"{name} scored the prompt {entries}")
        else:
            scores = scores[: len(found)]
        require(found == scores, f"{name} scored {found}, not {scores}")
        due = self.oracle.entries(request, got.tokens)
        require(got.entries == due, f"{name} has {got.entries}, not {due}")
        if due:
            total = 0.0
            for entry in due:
                total += entry.logprob
            require(got.last.cumulative_logprob == total, f"{name}: {got.last.cumulative_logprob}")


def run_seed(seed: int) -> Counter[str]:
    """Make and run the program of ``seed``; what it raises names the seed and how to run it alone."""
    try:
        return Run(program_of(seed)).run()
    except BaseException as error:
        error.add_note(f"fuzz seed {seed}; again: python tests/fuzz/fuzz.py {seed}")
        raise
