"""Many short requests on one engine: its memory must not grow once everything has been used.

    python tests/soak/soak.py    200,000 requests in a pool of 1,000 pages

No model: ``FakeExecutor`` checks every page that it reads. Memory is what the system says (resident bytes)
and how many objects Python's collector knows, both looked at while requests run, after each part of them.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from radixkv.bench.command import check_writable, exit_status, write_json
from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.errors import ConfigError
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.testing.fake_executor import FakeExecutor

NUM_PARTS = 20
MAX_GROWTH_BYTES = 4 << 20
"""Resident memory may wander by so much in the second half: the allocator gives back in blocks.
Python's objects may by one for each page of the pool: the tree has now more nodes, now fewer."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at the engine."""

    num_requests: int
    resident_bytes: int
    num_objects: int
    num_nodes: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Growth over the second half: the most of its last quarter less the most of its first."""

    growth_bytes: int
    growth_objects: int
    num_pages: int
    most_nodes: int

    @property
    def is_flat(self) -> bool:
        return (
            self.growth_bytes <= MAX_GROWTH_BYTES
            and self.growth_objects <= self.num_pages
            and self.most_nodes <= self.num_pages
        )


def soak(num_requests: int, num_pages: int, page_size: int, seed: int = 0) -> Iterator[Reading]:
    """Serve ``num_requests``, at most 64 at a time, a reading after each of ``NUM_PARTS`` parts."""
    executor = FakeExecutor(num_pages=num_pages, page_size=page_size, eos_one_in=9)
    config = EngineConfig(num_pages=num_pages, page_size=page_size, max_batch_tokens=2048)
    engine = Engine.build(config, executor)
    rng = np.random.default_rng(seed)
    num_added = num_ended = 0
    for part in range(1, NUM_PARTS + 1):
        stop = num_requests * part // NUM_PARTS
        while num_ended < stop:
            while num_added < num_requests and num_added - num_ended < 64:
                ids = rng.integers(1, 1000, int(rng.integers(4, 40)), dtype=np.int32)
                params = SamplingParams(max_tokens=int(rng.integers(1, 4)))
                engine.add(Request(request_id=num_added, prompt_ids=ids, sampling=params))
                num_added += 1
            num_ended += sum(output.finish_reason is not None for output in engine.step())
            executor.batches.clear()  # which it keeps for tests
        engine.check()
        gc.collect()
        yield Reading(
            num_requests=num_ended,
            resident_bytes=_resident_bytes(),
            num_objects=len(gc.get_objects()),
            num_nodes=engine.kv.stats()["tree_num_nodes"],
        )
    assert not engine.has_work


def verdict(readings: Sequence[Reading], num_pages: int) -> Verdict:
    """``readings`` are all ``NUM_PARTS``."""
    second = readings[len(readings) // 2 :]
    third, fourth = second[: len(second) // 2], second[len(second) // 2 :]

    def most(part: Sequence[Reading], name: str) -> int:
        values: list[int] = [getattr(reading, name) for reading in part]
        return max(values)

    return Verdict(
        growth_bytes=most(fourth, "resident_bytes") - most(third, "resident_bytes"),
        growth_objects=most(fourth, "num_objects") - most(third, "num_objects"),
        num_pages=num_pages,
        most_nodes=most(readings, "num_nodes"),
    )


def _resident_bytes() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError as error:
        raise ConfigError(f"this system does not say how much memory is in use: {error}") from None
    raise ConfigError("this system does not say how much memory is in use")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the readings; returns 0 when memory is flat in the second half, else 1, and 2 where an
    option makes no sense."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000, metavar="N")
    parser.add_argument("--pages", type=int, default=1000, metavar="N")
    parser.add_argument("--page-size", type=int, default=16, metavar="P")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args(argv)
    if args.requests < NUM_PARTS:
        parser.error(f"--requests must be at least {NUM_PARTS}, got {args.requests}")
    return exit_status("soak", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_writable(args.json)
    readings: list[Reading] = []
    print(f"{'requests':>10}{'resident MiB':>14}{'objects':>10}{'nodes':>8}")
    with tqdm(total=NUM_PARTS, disable=None, leave=False, unit=" parts") as bar:
        for reading in soak(args.requests, args.pages, args.page_size):
            readings.append(reading)
            bar.update()
            print(
                f"{reading.num_requests:>10,}{reading.resident_bytes / 2**20:>14.1f}"
                f"{reading.num_objects:>10,}{reading.num_nodes:>8,}",
                flush=True,
            )
    found = verdict(readings, args.pages)
    print(
        f"second half: {found.growth_bytes / 2**20:+.1f} MiB, {found.growth_objects:+,} objects, at most "
        f"{found.most_nodes:,} nodes for {found.num_pages:,} pages: {'flat' if found.is_flat else 'GROWS'}"
    )
    if args.json is not None:
        write_json(args.json, {"readings": [asdict(r) for r in readings], **asdict(found)})
    return 0 if found.is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
