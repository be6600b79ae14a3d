"""The fuzzer from the command line.

python tests/fuzz/fuzz.py 17                       program 17 alone, shown and run
python tests/fuzz/fuzz.py --first 0 --count 2000   many; stops at the first that fails
python tests/fuzz/fuzz.py --first 0 --minutes 60   as many as fit; prints where to go on
python tests/fuzz/fuzz.py --faults                 for each planted fault the first program that notices it
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # tests/, for engine_kit

import pytest
from fuzz_faults import FIRST_SEEN, NOTICED
from fuzz_program import program_of
from fuzz_run import run_seed


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns 0, and raises what the first failing program raised."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="one program, shown before it runs")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=2000, metavar="N")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so long, instead of --count")
    parser.add_argument("--faults", action="store_true", help="the first program that notices each fault")
    args = parser.parse_args(argv)
    if args.faults:
        for fault in FIRST_SEEN:
            print(f"    {fault.__name__}: {first_to_notice(fault, args.count)},", flush=True)
        return 0
    if args.seed is not None:
        program = program_of(args.seed)
        print(f"config {program.config}\nfake {program.fake}")
        print("\n".join(str(op) for op in program.ops))
        print(dict(sorted(run_seed(args.seed).items())))
        return 0
    counts, seed = run_many(args.first, args.count, args.minutes)
    print(f"\nprograms {args.first}..{seed - 1}: all as they must be; go on with --first {seed}")
    print(dict(sorted(counts.items())))
    return 0


def first_to_notice(fault: Callable[[pytest.MonkeyPatch], None], count: int) -> int | None:
    """The first of ``count`` programs that notices ``fault``."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        for seed in range(count):
            try:
                run_seed(seed)
            except NOTICED:
                return seed
    return None


def run_many(first: int, count: int, minutes: float | None) -> tuple[Counter[str], int]:
    """What happened, summed, and the seed to go on with."""
    counts = Counter[str]()
    end = None if minutes is None else time.monotonic() + 60 * minutes
    seed = first
    while seed < first + count if end is None else time.monotonic() < end:
        counts += run_seed(seed)
        seed += 1
        if seed % 1000 == 0:
            print(f"{seed - first:,} programs, up to seed {seed - 1}", file=sys.stderr)
    return counts, seed


if __name__ == "__main__":
    sys.exit(main())
