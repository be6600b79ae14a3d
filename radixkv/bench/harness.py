"""Run one arm over one workload on a fresh engine, and write down all that happened."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np

from radixkv.bench.arm import Arm, pages_needed
from radixkv.bench.equality import Fork
from radixkv.bench.machine import peak_memory_bytes, reset_peak_memory
from radixkv.bench.optimum import Replayed
from radixkv.bench.recorder import RecordingExecutor
from radixkv.bench.rig import Rig
from radixkv.bench.stopwatch import Stopwatch
from radixkv.bench.workloads import Workload
from radixkv.engine import Engine
from radixkv.errors import InternalError
from radixkv.executor.base import ModelExecutor
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sampling import SamplingParams
from radixkv.sched.scheduler import Scheduler
from radixkv.sequence import Request

_MEASURED = ("matmul", "attention", "sampling")
_SCHEDULER_CALLS = ("add", "schedule", "update")
_LEDGER_CALLS = ("acquire", "reserve", "take_copies", "commit", "release", "peek", "fork", "truncate")


@dataclass(frozen=True)
class Settings:
    """What all arms of a benchmark have in common."""

    max_batch_tokens: int = 1024
    max_running: int = 64
    make_tree: Callable[[int], RadixTree] = RadixTree
    """Page size to tree."""


@dataclass(frozen=True, eq=False)
class Run:
    """One arm's run over a workload. Times are seconds."""

    arm: Arm
    requests: tuple[Replayed, ...]
    cached: tuple[int, ...] | None
    """Hit tokens of each request; ``None`` where the arm does not say."""
    prompt_tokens: int
    prompt_tokens_computed: int | None
    wall_s: float
    cpu_s: float
    ttft_s: tuple[float, ...]
    peak_bytes: int
    num_steps: int | None = None
    parts_s: dict[str, float] | None = None
    """Wall seconds of matmul, attention and sampling (where the executor tells them apart), forward_rest,
    scheduler, ledger and outside; they add up to ``wall_s``."""
    bookkeeping_cpu_s: float = 0.0
    """CPU seconds inside the scheduler's add, schedule and update, the ledger included."""

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        return tuple(request.output_ids for request in self.requests)

    @property
    def hit_tokens(self) -> int | None:
        return None if self.cached is None else sum(self.cached)


def build_engine(arm: Arm, executor: ModelExecutor, settings: Settings) -> Engine:
    """A fresh pool, tree, manager and scheduler over ``executor``; the null tree for ``no-cache``."""
    config = arm.config(
        num_pages=executor.num_pages,
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
    )
    tree = settings.make_tree(arm.page_size) if arm.prefix_cache else NullTree(arm.page_size)
    kv = KVCacheManager(PagePool(config.num_pages), tree)
    return Engine(Scheduler(config, kv, executor.spec), executor)


def run_arm(
    arm: Arm,
    workload: Workload,
    rig: Rig,
    settings: Settings,
    on_finished: Callable[[], None] = lambda: None,
) -> Run:
    """Submit all prompts at once, step until all have their tokens. Tokenising is not part of it.

    Raises ``InternalError`` where a request fails or the counted tokens do not add up.
    """
    prompts = workload.prompts
    num_pages = pages_needed(workload, page_size=arm.page_size, max_running=settings.max_running)
    gc.collect()  # the store of the run before
    reset_peak_memory()
    recorder = RecordingExecutor(rig.make_executor(num_pages, arm.page_size), prompts)
    engine = build_engine(arm, recorder, settings)
    wall, cpu = Stopwatch(perf_counter), Stopwatch(thread_time)
    wall.wrap_methods("ledger", engine.kv, _LEDGER_CALLS)
    wall.wrap_methods("forward", recorder, ("execute",))
    for watch in (wall, cpu):
        watch.wrap_methods("scheduler", engine.scheduler, _SCHEDULER_CALLS)
    before, cpu_start = forward_seconds(recorder), process_time()
    log = _serve(engine, prompts, workload.max_tokens, on_finished)
    cpu_s = process_time() - cpu_start
    run = Run(
        arm=arm,
        requests=log.requests,
        cached=log.cached,
        prompt_tokens=workload.num_prompt_tokens,
        prompt_tokens_computed=recorder.num_prompt_rows,
        wall_s=log.wall_s,
        cpu_s=cpu_s,
        ttft_s=log.ttft_s,
        peak_bytes=peak_memory_bytes(),
        num_steps=recorder.num_steps,
        parts_s=_parts(log.wall_s, wall, before, forward_seconds(recorder)),
        bookkeeping_cpu_s=cpu.seconds["scheduler"],
    )
    _check_counts(run, recorder)
    engine.check()
    return run


def small_workload(workload: Workload) -> Workload:
    """A few short requests of tokens unrelated to ``workload``'s, to get code and kernels warm."""
    highest = max(int(prompt.max()) for prompt in workload.prompts)
    questions = tuple(
        ((np.arange(64 + 40 * number) * 7919 + number) % highest + 1).astype(np.int32) for number in range(4)
    )
    return replace(
        workload,
        prefix_ids=np.empty(0, np.int32),
        question_ids=questions,
        max_tokens=min(4, workload.max_tokens),
        answers=(None,) * len(questions),
    )


def score_gaps(forks: Sequence[Fork], rig: Rig, settings: Settings) -> list[float]:
    """How much more likely ``token_a`` is than ``token_b`` after each context, in natural log, by scoring
    both on a fresh engine without a cache."""
    arm = Arm("gaps", page_size=16, prefix_cache=False)
    contexts: list[Any] = []
    for fork in forks:
        contexts += [np.append(fork.context_ids, token) for token in (fork.token_a, fork.token_b)]
    num_pages = sum(-(-len(ids) // arm.page_size) + 1 for ids in contexts)
    engine = build_engine(arm, rig.make_executor(num_pages, arm.page_size), settings)
    for number, ids in enumerate(contexts):
        engine.add(
            Request(
                request_id=number,
                prompt_ids=ids,
                sampling=SamplingParams(max_tokens=0),
                logprob_start=len(ids) - 1,
            )
        )
    found: dict[int, float] = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                if output.error is not None:
                    raise InternalError(f"scoring a divergence failed: {output.error}") from output.error
                found[output.request_id] = output.logprobs[-1]
    return [found[2 * number] - found[2 * number + 1] for number in range(len(forks))]


def forward_seconds(executor: ModelExecutor) -> dict[str, float]:
    """Seconds so far of what the executor measures apart; empty where it measures nothing."""
    stats = executor.stats()
    return {part: float(stats[f"seconds_{part}"]) for part in _MEASURED if f"seconds_{part}" in stats}


@dataclass(frozen=True, eq=False)
class _Log:
    requests: tuple[Replayed, ...]
    cached: tuple[int, ...]
    ttft_s: tuple[float, ...]
    wall_s: float


def _serve(engine: Engine, prompts: Sequence[Any], max_tokens: int, on_finished: Callable[[], None]) -> _Log:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    num_requests = len(prompts)
    submitted, first, finished = [0.0] * num_requests, [0.0] * num_requests, [0.0] * num_requests
    cached = [0] * num_requests
    outputs: list[list[int]] = [[] for _ in prompts]
    start = perf_counter()
    for number, prompt in enumerate(prompts):
        submitted[number] = perf_counter() - start
        engine.add(Request(request_id=number, prompt_ids=prompt, sampling=sampling))
    while engine.has_work:
        step_outputs = engine.step()
        now = perf_counter() - start
        for output in step_outputs:
            number = output.request_id
            if output.new_token_ids and not outputs[number]:
                first[number] = now
            outputs[number].extend(output.new_token_ids)
            if output.finish_reason is None:
                continue
            if output.finish_reason != "length" or len(outputs[number]) != max_tokens:
                raise InternalError(
                    f"request {number} ended with {output.finish_reason!r} after {len(outputs[number])} of "
                    f"{max_tokens} tokens: {output.error}"
                ) from output.error
            finished[number] = now
            cached[number] = output.usage.cached_tokens
            on_finished()
    wall_s = perf_counter() - start
    requests = tuple(
        Replayed(prompt, submitted[number], tuple(outputs[number]), finished[number])
        for number, prompt in enumerate(prompts)
    )
    ttft = tuple(one - other for one, other in zip(first, submitted, strict=True))
    return _Log(requests, tuple(cached), ttft, wall_s)


def _parts(
    wall_s: float, watch: Stopwatch, before: dict[str, float], after: dict[str, float]
) -> dict[str, float]:
    forward, scheduler, ledger = (watch.seconds[part] for part in ("forward", "scheduler", "ledger"))
    parts = {part: after[part] - before[part] for part in after}
    parts["forward_rest"] = forward - sum(parts.values())
    parts |= {"scheduler": scheduler, "ledger": ledger}
    parts["outside"] = wall_s - forward - scheduler - ledger
    return parts


def _check_counts(run: Run, recorder: RecordingExecutor) -> None:
    """Every prompt token was hit or computed, once; counted by the engine and by the recorder apart."""
    if recorder.num_repeated_rows:
        raise InternalError(f"{run.arm.name}: {recorder.num_repeated_rows} rows were computed twice")
    total = sum(run.cached or ()) + recorder.num_prompt_rows
    if total != run.prompt_tokens:
        raise InternalError(
            f"{run.arm.name}: {sum(run.cached or ())} hits and {recorder.num_prompt_rows} computed do not "
            f"add up to {run.prompt_tokens} prompt tokens"
        )
