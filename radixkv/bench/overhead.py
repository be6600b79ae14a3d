"""How many requests a second the scheduler and the ledger can serve, the model's time left out.

A request has a prompt of 1,000 tokens, half of it shared with others, and wants one token. What counts is
the CPU time of this thread in ``add``, ``schedule`` (which builds the batch) and ``update``. What stands
in for the model returns the same token for every row, and its time is left out. No model, no torch.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from radixkv.bench.command import check_writable, exit_status, write_json
from radixkv.config import EngineConfig, ModelSpec
from radixkv.errors import ConfigError
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import Batch, StepResult
from radixkv.sched.scheduler import Scheduler
from radixkv.sequence import Request

TARGET_PER_SECOND = 3000.0
_VOCABULARY = 1 << 17
_SPEC = ModelSpec(
    name="none", vocab_size=_VOCABULARY, num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=1,
    max_positions=1 << 20,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the scheduler."""

    num_requests: int = 4000
    prompt_tokens: int = 1000
    shared_tokens: int = 500
    """Leading tokens that a prompt shares with the others of its kind."""
    num_kinds: int = 8
    """Different shared beginnings, in turn."""
    num_waiting: int = 128
    """Requests that are kept waiting or running: a new one arrives when one ends."""
    page_size: int = 16
    num_pages: int = 8192
    max_batch_tokens: int = 8192
    max_running: int = 64

    def config(self) -> EngineConfig:
        return EngineConfig(
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
        )


@dataclass(frozen=True, kw_only=True)
class Spent:
    """CPU seconds of one run, by what was called."""

    load: Load
    num_steps: int
    hit_rate: float
    add_s: float
    schedule_s: float
    update_s: float

    @property
    def per_second(self) -> float:
        return self.load.num_requests / (self.add_s + self.schedule_s + self.update_s)

    @property
    def us_per_step(self) -> float:
        return (self.schedule_s + self.update_s) / self.num_steps * 1e6


def requests_of(load: Load, seed: int = 0) -> list[Request]:
    """The requests, in order of arrival; made before the clock starts."""
    rng = np.random.default_rng(seed)
    kinds = [rng.integers(0, _VOCABULARY, load.shared_tokens, dtype=np.int32) for _ in range(load.num_kinds)]
    own = load.prompt_tokens - load.shared_tokens
    one_token = SamplingParams(max_tokens=1)
    return [
        Request(
            request_id=number,
            prompt_ids=np.concatenate(
                (kinds[number % load.num_kinds], rng.integers(0, _VOCABULARY, own, dtype=np.int32))
            ),
            sampling=one_token,
        )
        for number in range(load.num_requests)
    ]


def scheduler_of(load: Load) -> Scheduler:
    kv = KVCacheManager(PagePool(load.num_pages), RadixTree(load.page_size))
    return Scheduler(load.config(), kv, _SPEC)


def result_of(batch: Batch) -> StepResult:
    """Token 0 for every row that samples."""
    return StepResult(np.zeros(len(batch.sample_rows), np.int32))


def serve(load: Load, profile: cProfile.Profile | None = None) -> Spent:
    """Serve the whole load; every request must come to its end."""
    requests = requests_of(load)
    scheduler = scheduler_of(load)
    arriving = iter(requests)
    add_s = schedule_s = update_s = 0.0
    num_steps = num_live = num_ended = 0
    with profile or nullcontext():
        while num_ended < load.num_requests:
            begin = time.thread_time()
            for request in _first(arriving, load.num_waiting - num_live):
                scheduler.add(request)
                num_live += 1
            added = time.thread_time()
            batch = scheduler.schedule()
            scheduled = time.thread_time()
            assert batch is not None, "nothing to do, and yet not all have ended"
            result = result_of(batch)
            executed = time.thread_time()
            outputs = scheduler.update(batch, result)
            update_s += time.thread_time() - executed
            ended = sum(output.finish_reason is not None for output in outputs)
            num_ended, num_live, num_steps = num_ended + ended, num_live - ended, num_steps + 1
            add_s += added - begin
            schedule_s += scheduled - added
    scheduler.check()
    scheduler.kv.check([])
    return Spent(
        load=load, num_steps=num_steps, hit_rate=scheduler.counters.hit_rate, add_s=add_s,
        schedule_s=schedule_s, update_s=update_s,
    )  # fmt: skip


def _first(requests: Iterator[Request], num: int) -> Iterator[Request]:
    for _ in range(num):
        request = next(requests, None)
        if request is None:
            return
        yield request


def table(runs: Sequence[Spent]) -> str:
    """The runs as text."""
    head = f"{'tokens a step':>14}{'waiting':>9}{'steps':>8}{'hit rate':>10}{'add us':>9}{'schedule us':>13}"
    lines = [head + f"{'update us':>11}{'us a step':>11}{'requests/s':>12}"]
    for run in runs:
        each = 1e6 / run.load.num_requests
        lines.append(
            f"{run.load.max_batch_tokens:>14,}{run.load.num_waiting:>9,}{run.num_steps:>8,}"
            f"{run.hit_rate:>10.2%}{run.add_s * each:>9.1f}{run.schedule_s * each:>13.1f}"
            f"{run.update_s * each:>11.1f}{run.us_per_step:>11.1f}{run.per_second:>12,.0f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print the table; returns 0 when the bound is kept, else 1, and 2 where an option makes no
    sense."""
    parser = argparse.ArgumentParser(prog="overhead", description=__doc__)
    parser.add_argument("--requests", type=int, default=4000, metavar="N")
    parser.add_argument("--page-size", type=int, default=16, metavar="P")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="the median run is reported")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args(argv)
    for name in ("requests", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return exit_status("overhead", lambda: _run(args))


def loads(num_requests: int, page_size: int) -> list[Load]:
    """The load that the bound is for first; then steps as small as the default, and a longer queue."""
    if page_size > 64:
        raise ConfigError(f"--page-size must be at most 64 here, got {page_size}")
    base = Load(num_requests=num_requests, page_size=page_size, num_pages=131_072 // page_size)
    return [
        base,
        Load(**{**asdict(base), "max_batch_tokens": 1024}),
        Load(**{**asdict(base), "num_waiting": 1024}),
    ]


def _run(args: argparse.Namespace) -> int:
    check_writable(args.json)
    medians: list[Spent] = []
    cases = loads(args.requests, args.page_size)
    with tqdm(total=len(cases) * args.repeats, disable=None, leave=False, unit=" runs") as bar:
        for load in cases:
            runs: list[Spent] = []
            for _ in range(args.repeats):
                runs.append(serve(load))
                bar.update()
            medians.append(sorted(runs, key=lambda run: run.per_second)[len(runs) // 2])
    print(f"page size {args.page_size}, Python {platform.python_version()}, numpy {np.__version__}, CPU time")
    print(table(medians))
    kept = medians[0].per_second >= TARGET_PER_SECOND
    print(f"bound: {TARGET_PER_SECOND:,.0f} requests/s in the first line: {'kept' if kept else 'MISSED'}")
    if args.profile:
        profile = cProfile.Profile(time.thread_time)
        serve(cases[0], profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if args.json is not None:
        rows = [{**asdict(run), "requests_per_s": run.per_second} for run in medians]
        write_json(args.json, {"runs": rows, "bound_per_s": TARGET_PER_SECOND, "kept": kept})
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
