"""Where attention's time goes: typical steps of the few-shot and no-reuse benchmarks, without a model.

Sizes are SmolLM2-135M's. For each step: milliseconds over all layers, beside those of bare matrix products of
the same sizes, which no exact attention can avoid.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from radixkv.config import ModelSpec

if TYPE_CHECKING:
    from radixkv.executor.attention_timing import TimedStep

SPEC = ModelSpec(
    name="SmolLM2-135M", vocab_size=49152, num_layers=30, num_query_heads=9, num_kv_heads=3, head_dim=64,
    max_positions=8192,
)  # fmt: skip
PAGE_SIZE = 16
NUM_PAGES = 3000


def typical_steps() -> list[TimedStep]:
    """The steps of a few-shot run with and without its cache, and of prompts that share nothing."""
    from radixkv.executor.attention_timing import TimedStep

    tails = tuple((60 + 40 * i // 31, 1) for i in range(32))
    unshared = tuple((1120 + 3 * i, 1) for i in range(32))
    return [
        TimedStep("decode 32, shared 1,104", 1104, tails, True),
        TimedStep("extend 16 x 64, shared 1,104", 1104, ((64, 64),) * 16, True),
        TimedStep("extend 16 unequal, shared 1,104", 1104, tuple((50 + i, 38 + i) for i in range(16)), True),
        TimedStep("first chunk 1,024", 0, ((1024, 1024),), False),
        TimedStep("second chunk 1,024", 0, ((2048, 1024),), False),
        TimedStep("second chunk, scattered", 0, ((2048, 1024),), True),
        TimedStep("three in a chunk", 0, ((1160, 136), (1160, 700), (188, 188)), True),
        TimedStep("decode 32, nothing shared", 0, unshared, False),
        TimedStep("decode 32, nothing shared, scattered", 0, unshared, True),
        TimedStep("chunk 4 x 256", 0, ((256, 256),) * 4, False),
        TimedStep("decode 64 x 260", 0, ((260, 1),) * 64, True),
        TimedStep("decode 1 x 1,160", 0, ((1160, 1),), True),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns 0."""
    parser = argparse.ArgumentParser(prog="attention_probe", description=__doc__.splitlines()[0])
    parser.add_argument("--attention", default="cpu", help="backend to time (default: cpu)")
    parser.add_argument("--repeats", type=int, default=5, help="each layer counts at its best of these")
    parser.add_argument("--only", default="", help="time only steps whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE too")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    from radixkv.executor.attention_timing import AttentionTiming

    timing = AttentionTiming(SPEC, num_pages=NUM_PAGES, page_size=PAGE_SIZE, attention=args.attention)
    print(f"{'step (ms over 30 layers)':40}{'run':>9}{'plan':>7}{'products':>10}{'ratio':>7}{'pieces':>8}")
    results = {}
    for step in typical_steps():
        if args.only not in step.name:
            continue
        took = timing.measure(step, args.repeats)
        results[step.name] = asdict(took)
        ratio = took.run_ms / took.matmul_ms
        print(
            f"{step.name:40}{took.run_ms:9.1f}{took.plan_ms:7.1f}{took.matmul_ms:10.1f}{ratio:7.2f}"
            f"{took.num_pieces:8d}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0
