"""Comparison: several arms over one workload, run in turn, judged for equality before any speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import numpy as np

from radixkv.bench.arm import NO_CACHE, Arm
from radixkv.bench.equality import Equality, Gaps, compare
from radixkv.bench.harness import Run, Settings, run_arm, small_workload
from radixkv.bench.machine import peak_memory_bytes, reset_peak_memory
from radixkv.bench.optimum import Replayed, optimal_hits, share_of_optimum
from radixkv.bench.rig import Floor, Peer, Rig
from radixkv.bench.workloads import Workload
from radixkv.errors import ConfigError

Runs = dict[str, list[Run]]
"""Arm's name to its runs, in the order in which they were made."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was run and what the gate said."""

    arms: tuple[Arm, ...]
    workload: Workload
    runs: Runs
    equalities: tuple[Equality, ...]
    """Every arm but the reference against it, and later runs of an arm that differ from its first."""

    @property
    def equal_outputs(self) -> bool | None:
        """Whether all arms gave the same tokens, near ties excused; ``None`` where one run stands alone."""
        return all(equality.passed for equality in self.equalities) if self.equalities else None

    @property
    def near_ties(self) -> int:
        return sum(equality.near_ties for equality in self.equalities)

    @property
    def reference(self) -> str:
        return reference_arm(self.arms).name


def reference_arm(arms: Sequence[Arm]) -> Arm:
    """The arm that the others are compared with: ``no-cache`` where it runs, else the first."""
    return next((arm for arm in arms if arm.name == NO_CACHE), arms[0])


def run_interleaved(
    arms: Sequence[Arm],
    workload: Workload,
    rig: Rig,
    settings: Settings,
    *,
    repeats: int,
    num_peer_requests: int,
    on_finished: Callable[[], None] = lambda: None,
) -> Runs:
    """Warm up, then run every arm once, then every arm again, and so on: never all of one first.

    transformers' arm runs the first ``num_peer_requests`` requests only, and once: it is slow.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    small = small_workload(workload)
    peer: Peer | None = None
    for arm in arms:
        if not arm.is_peer:
            run_arm(arm, small, rig, settings)
        elif rig.open_peer is None:
            raise ConfigError(f"arm {arm.name!r} needs a real model")
        else:
            peer = rig.open_peer(small)
    runs: Runs = {arm.name: [] for arm in arms}
    for repeat in range(repeats):
        for arm in arms:
            if not arm.is_peer:
                runs[arm.name].append(run_arm(arm, workload, rig, settings, on_finished))
            elif repeat == 0 and peer is not None:
                part = replace(
                    workload,
                    question_ids=workload.question_ids[:num_peer_requests],
                    answers=workload.answers[:num_peer_requests],
                )
                runs[arm.name].append(run_peer(arm, part, peer))
    return runs


def run_peer(arm: Arm, workload: Workload, peer: Peer) -> Run:
    """One run of another system, as far as it tells what it did."""
    reset_peak_memory()
    cpu_start = process_time()
    result = peer.run(workload)
    return Run(
        arm=arm,
        requests=tuple(
            Replayed(prompt, 0.0, output, finished)
            for prompt, output, finished in zip(
                workload.prompts, result.outputs, result.finished_s, strict=True
            )
        ),
        cached=None,
        prompt_tokens=workload.num_prompt_tokens,
        prompt_tokens_computed=None,
        wall_s=result.wall_s,
        cpu_s=process_time() - cpu_start,
        ttft_s=result.ttft_s,
        peak_bytes=peak_memory_bytes(),
    )


def judge(arms: Sequence[Arm], workload: Workload, runs: Runs, gaps: Gaps) -> Comparison:
    """Compare the outputs of all runs: arms with the reference arm, later runs with the first."""
    reference = reference_arm(arms)
    expected = runs[reference.name][0].outputs
    prompts = workload.prompts
    equalities: list[Equality] = []
    for arm in arms:
        first = runs[arm.name][0].outputs
        if arm is not reference:
            equalities.append(compare(arm.name, first, reference.name, expected, prompts, gaps))
        for number, run in enumerate(runs[arm.name][1:], start=2):
            if run.outputs != first:
                name = f"{arm.name}, run {number}"
                equalities.append(compare(name, run.outputs, f"{arm.name}, run 1", first, prompts, gaps))
    return Comparison(tuple(arms), workload, runs, tuple(equalities))


def optimal_tokens(run: Run) -> int:
    """Hit tokens that a perfect cache would have found in what ``run`` submitted."""
    return sum(optimal_hits(run.requests))


def summarise(comparison: Comparison, floor: Floor | None) -> dict[str, Any]:
    """The numbers of every arm. Speeds only where the gate did not fail."""
    arms: dict[str, Any] = {}
    for arm in comparison.arms:
        runs = comparison.runs[arm.name]
        arms[arm.name] = _counts(runs)
        if comparison.equal_outputs is not False:
            arms[arm.name] |= _speeds(runs) | _against_floor(runs, comparison.workload, floor)
    reference = comparison.runs[comparison.reference][0]
    best = optimal_tokens(reference)
    return {
        "equal_outputs": comparison.equal_outputs,
        "near_ties": comparison.near_ties,
        "reference": comparison.reference,
        "optimal_hit_tokens": best,
        "optimal_hit_rate": best / reference.prompt_tokens,
        "arms": arms,
    }


def _counts(runs: list[Run]) -> dict[str, Any]:
    """Exact counts; of several runs those of the worst (they differ only where time decided something)."""
    run = min(runs, key=lambda each: each.hit_tokens or 0)
    best, hits = optimal_tokens(run), run.hit_tokens
    return {
        "num_requests": len(run.requests),
        "num_prompt_tokens": run.prompt_tokens,
        "hit_tokens": hits,
        "hit_rate": None if hits is None else hits / run.prompt_tokens,
        "share_of_optimum": None if hits is None else share_of_optimum(hits, best),
        "prompt_tokens_computed": run.prompt_tokens_computed,
        "output_tokens": sum(map(len, run.outputs)),
        "num_steps": run.num_steps,
    }


def _speeds(runs: list[Run]) -> dict[str, Any]:
    walls = [run.wall_s for run in runs]
    wall_s = statistics.median(walls)
    middle = sorted(runs, key=lambda run: run.wall_s)[(len(runs) - 1) // 2]
    parts = middle.parts_s or {}
    ttft = {p: [float(np.percentile(run.ttft_s, p)) for run in runs] for p in (50, 95)}
    return {
        "wall_s": wall_s,
        "wall_s_min": min(walls),
        "wall_s_max": max(walls),
        "wall_s_all": walls,
        "output_tokens_per_s": sum(map(len, middle.outputs)) / wall_s,
        "ttft_p50_s": statistics.median(ttft[50]),
        "ttft_p95_s": statistics.median(ttft[95]),
        "cpu_s": statistics.median(run.cpu_s for run in runs),
        "bookkeeping_cpu_s": statistics.median(run.bookkeeping_cpu_s for run in runs),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "shares": {part: seconds / middle.wall_s for part, seconds in parts.items()},
    }


def _against_floor(runs: list[Run], workload: Workload, floor: Floor | None) -> dict[str, Any]:
    run = runs[0]
    if floor is None or len(run.requests) != workload.num_requests:
        return {}
    must_compute = run.prompt_tokens - (optimal_tokens(run) if run.arm.prefix_cache else 0)
    floor_s = floor.seconds(prompt_tokens=must_compute, max_tokens=workload.max_tokens)
    wall_s = statistics.median(each.wall_s for each in runs)
    return {"floor_s": floor_s, "wall_over_floor": wall_s / floor_s}
