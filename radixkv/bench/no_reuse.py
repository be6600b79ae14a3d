"""The no-reuse benchmark: what the prefix cache costs where nothing repeats.

Unrelated prompts, served with the cache on and off, in pairs, the order within a pair alternating. It passes
where the scheduler and the ledger together take under 1 % of a run's time, and the interval of the paired
wall ratio (on / off) includes 1.00 or lies below 1.01. Exit status: 0 passed (or too few or too small runs to
judge), 1 failed or no model, 2 an option makes no sense.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.bench.arm import Arm, parse_arms
from radixkv.bench.command import check_writable, exit_status, write_json
from radixkv.bench.comparison import Comparison, Runs, judge
from radixkv.bench.harness import Run, Settings, run_arm, score_gaps, small_workload
from radixkv.bench.machine import check_load, environment, load_average, usable_cores
from radixkv.bench.model_rig import DEFAULT_MODEL, open_rig
from radixkv.bench.progress import Progress
from radixkv.bench.rig import Rig
from radixkv.bench.workloads import Workload, unrelated_workload
from radixkv.errors import ConfigError

SCHEMA = 1
MIN_PAIRS = 9
MAX_RATIO = 1.01
MAX_BOOKKEEPING = 0.01
NUM_RESAMPLES = 10_000
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 256, 8
OpenRig = Callable[[argparse.Namespace], Rig]


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        return self.low <= 1.0 <= self.high or self.high < MAX_RATIO


def paired_ratio(on: Sequence[float], off: Sequence[float], *, seed: int = 0) -> Ratio:
    """Median of ``on[i] / off[i]``; the interval by bootstrap over the pairs (Efron, 1979), from ``seed``."""
    ratios = np.asarray(on) / np.asarray(off)
    picks = np.random.default_rng(seed).integers(len(ratios), size=(NUM_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def run_pairs(
    arms: tuple[Arm, Arm],
    workload: Workload,
    rig: Rig,
    settings: Settings,
    *,
    num_pairs: int,
    on_finished: Callable[[], None] = lambda: None,
) -> Runs:
    """Both arms ``num_pairs`` times; each pair begins with the arm that the pair before ended with."""
    if num_pairs < 1:
        raise ConfigError(f"pairs must be at least 1, got {num_pairs}")
    for arm in arms:
        run_arm(arm, small_workload(workload), rig, settings)
    runs: Runs = {arm.name: [] for arm in arms}
    for pair in range(num_pairs):
        for arm in arms if pair % 2 == 0 else arms[::-1]:
            runs[arm.name].append(run_arm(arm, workload, rig, settings, on_finished))
    return runs


def main(argv: Sequence[str] | None = None, *, make_rig: OpenRig | None = None) -> int:
    """Run the benchmark; ``make_rig`` stands in for the real model in tests."""
    options = _parser().parse_args(argv)
    return exit_status("no_reuse", lambda: _run(options, make_rig or _open))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixkv bench no-reuse",
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="hub id, folder, GGUF file or packaged name")
    add("--pairs", type=int, default=MIN_PAIRS, metavar="N", help=f"at least {MIN_PAIRS} for a verdict")
    add("--size", type=float, default=1.0, help="share of the 64 prompts; under 1 gives no verdict")
    add("--page-size", type=int, default=16, metavar="N", help="tokens in a page")
    add("--max-batch-tokens", type=int, default=1024, metavar="N", help="tokens computed in one step")
    add("--attention", default="cpu", metavar="NAME", help="backend: cpu, or reference, which is slow")
    add("--num-threads", type=int, metavar="N")
    add("--record", action="store_true", help="refuse to run on a busy machine")
    add("--json", type=Path, metavar="FILE", help="write the result here too")
    return parser


def _open(options: argparse.Namespace) -> Rig:
    return open_rig(
        options.model,
        attention=options.attention,
        num_threads=options.num_threads,
        max_batch_tokens=options.max_batch_tokens,
        max_running=NUM_PROMPTS,
    )


def _run(options: argparse.Namespace, make_rig: OpenRig) -> int:
    if not 0.0 < options.size <= 1.0:
        raise ConfigError(f"size must lie above 0 and up to 1, got {options.size}")
    check_writable(options.json)
    on, off = parse_arms("radix,no-cache", page_size=options.page_size)
    load = load_average()
    warning = check_load(load, num_cores=usable_cores(), record=options.record)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    rig = make_rig(options)
    workload = unrelated_workload(
        rig.encode,
        num_prompts=max(1, round(NUM_PROMPTS * options.size)),
        num_tokens=PROMPT_TOKENS,
        max_tokens=OUTPUT_TOKENS,
    )
    settings = Settings(max_batch_tokens=options.max_batch_tokens, max_running=NUM_PROMPTS)
    with Progress(2 * options.pairs * workload.num_requests) as bar:
        runs = run_pairs(
            (on, off),
            workload,
            rig,
            settings,
            num_pairs=options.pairs,
            on_finished=bar.tick,
        )
    comparison = judge((on, off), workload, runs, lambda forks: score_gaps(forks, rig, settings))
    about = {
        "schema": SCHEMA,
        "benchmark": "no-reuse",
        "load_average": load,
        "environment": environment(num_threads=rig.num_threads, model=rig.name, model_digest=rig.digest),
    }
    return _report(options, comparison, on, off, about)


def _report(
    options: argparse.Namespace, comparison: Comparison, on: Arm, off: Arm, about: dict[str, Any]
) -> int:
    workload, runs = comparison.workload, comparison.runs
    for equality in comparison.equalities:
        print(equality.describe())
    result = about | {
        "equal_outputs": comparison.equal_outputs,
        "near_ties": comparison.near_ties,
        "num_prompts": workload.num_requests,
        "prompt_tokens": workload.num_prompt_tokens,
        "hit_tokens": runs[on.name][0].hit_tokens,
        "pairs": len(runs[on.name]),
    }
    if not comparison.equal_outputs:
        print("the outputs differ: no speed is shown", file=sys.stderr)
        write_json(options.json, result | {"passed": False})
        return 1
    ratio = paired_ratio([run.wall_s for run in runs[on.name]], [run.wall_s for run in runs[off.name]])
    judged = result["pairs"] >= MIN_PAIRS and options.size == 1.0
    arms = {name: _summary(found) for name, found in runs.items()}
    shares = [arm["bookkeeping_share_of_wall"] for arm in arms.values()]
    passed = ratio.passed and max(shares) < MAX_BOOKKEEPING
    result |= {
        "arms": arms,
        "wall_ratio": ratio.median,
        "wall_ratio_low": ratio.low,
        "wall_ratio_high": ratio.high,
        "passed": passed if judged else None,
    }
    print(_text(result, judged=judged))
    write_json(options.json, result)
    return 1 if judged and not passed else 0


def _summary(runs: list[Run]) -> dict[str, Any]:
    return {
        "wall_s": statistics.median(run.wall_s for run in runs),
        "wall_s_all": [run.wall_s for run in runs],
        "cpu_s": statistics.median(run.cpu_s for run in runs),
        "bookkeeping_cpu_s": statistics.median(run.bookkeeping_cpu_s for run in runs),
        "bookkeeping_share_of_wall": statistics.median(run.bookkeeping_cpu_s / run.wall_s for run in runs),
        "bookkeeping_share_of_cpu": statistics.median(run.bookkeeping_cpu_s / run.cpu_s for run in runs),
        "num_steps": runs[0].num_steps,
        "peak_bytes": max(run.peak_bytes for run in runs),
    }


def _text(result: dict[str, Any], *, judged: bool) -> str:
    lines = [
        f"{result['num_prompts']} unrelated prompts, {result['prompt_tokens']} prompt tokens, "
        f"{result['hit_tokens']} hit by chance; {result['pairs']} pairs"
    ]
    lines += [
        f"{name:9} {arm['wall_s']:.2f} s ({min(arm['wall_s_all']):.2f} .. {max(arm['wall_s_all']):.2f}); "
        f"schedule, update and ledger {arm['bookkeeping_cpu_s'] * 1e3:.0f} ms of CPU, "
        f"{arm['bookkeeping_share_of_wall']:.3%} of the wall time"
        for name, arm in result["arms"].items()
    ]
    lines.append(
        f"wall time, cache on / off: {result['wall_ratio']:.4f} "
        f"(95 % interval {result['wall_ratio_low']:.4f} .. {result['wall_ratio_high']:.4f})"
    )
    if judged:
        lines.append("passed" if result["passed"] else "FAILED")
    else:
        lines.append(f"no verdict: that takes {MIN_PAIRS} pairs of full size")
    load = result["load_average"]
    about = result["environment"]
    lines.append(
        f"{about['model']}, threads: {about['num_threads']} on {about['cpu']}, commit {about['commit']}, "
        f"load average before: {'unknown' if load is None else f'{load:.2f}'}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
