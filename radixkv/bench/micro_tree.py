"""The tree's own speed: match, insert, evict and a whole request's bookkeeping, by nodes and by tokens.

Times are CPU time of this thread, so that a busy machine blurs them less. No model, no torch.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from radixkv.bench.command import check_writable, exit_status, write_json
from radixkv.config import EngineConfig
from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.sequence import Sequence as KVSequence
from radixkv.types import TokenIds

_LEAF_PAGES = 4
_VOCABULARY = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One line of the table."""

    operation: str
    num_nodes: int
    num_tokens: int
    us: float
    """Mean CPU microseconds of one operation."""

    @property
    def per_second(self) -> float:
        return 1e6 / self.us


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound that the tree is built to keep."""

    what: str
    limit_us: float
    us: float

    @property
    def kept(self) -> bool:
        return self.us < self.limit_us


class Forest:
    """A pool, a tree and a manager with ``num_leaves`` unrelated prompts in the tree."""

    def __init__(self, num_leaves: int, leaf_pages: int, page_size: int, spare_pages: int) -> None:
        self.page_size = page_size
        self.rng = np.random.default_rng(0)
        self.pool = PagePool(num_leaves * leaf_pages + spare_pages)
        self.tree = RadixTree(page_size)
        self.kv = KVCacheManager(self.pool, self.tree)
        self.namespace = (self.kv.epoch,)  # the one in which the manager looks
        self.prompts = [self.prompt(leaf_pages * page_size) for _ in range(num_leaves)]
        for prompt in self.prompts:
            self.insert(prompt)

    def prompt(self, num_tokens: int) -> TokenIds:
        return self.rng.integers(0, _VOCABULARY, num_tokens, dtype=np.int32)

    def insert(self, prompt: TokenIds) -> None:
        """As a commit does: the tree's reference is the allocation's."""
        pages = self.pool.allocate(-(-len(prompt) // self.page_size))
        self.tree.insert(prompt, pages, 0, self.namespace)

    def match(self, prompt: TokenIds) -> int:
        return self.tree.match(prompt, self.namespace).num_tokens

    def evict(self, num_pages: int) -> None:
        self.pool.decref(self.tree.evict(num_pages, self.pool.ref_count))

    def request(self, number: int, prompt: TokenIds) -> None:
        """A request's whole bookkeeping with one output token: all but the model."""
        asked = Request(request_id=number, prompt_ids=prompt, sampling=SamplingParams(max_tokens=1))
        seq = KVSequence(asked, self.page_size)
        self.kv.acquire(seq)
        num = seq.num_tokens - seq.num_computed
        self.kv.reserve(seq, num)
        self.kv.take_copies()
        seq.num_computed += num
        seq.append(0)
        self.kv.commit(seq)
        self.kv.release(seq)


def mean_us(operation: Callable[[int], object], times: int) -> float:
    """Mean CPU microseconds of ``operation(0) .. operation(times - 1)``."""
    start = time.thread_time()
    for number in range(times):
        operation(number)
    return (time.thread_time() - start) / times * 1e6


def by_nodes(num_nodes: int, page_size: int, times: int) -> Iterator[Rate]:
    """Short prompts in a tree of many nodes."""
    num_tokens = _LEAF_PAGES * page_size
    forest = Forest(num_nodes, _LEAF_PAGES, page_size, 2 * times * _LEAF_PAGES)
    known = [forest.prompts[i] for i in forest.rng.integers(0, num_nodes, times)]
    new = [forest.prompt(num_tokens) for _ in range(2 * times)]
    operations: dict[str, Callable[[int], object]] = {
        "match": lambda i: forest.match(known[i]),
        "insert": lambda i: forest.insert(new[i]),
        "request, all new": lambda i: forest.request(i, new[times + i]),
        "request, all known": lambda i: forest.request(i, known[i]),
        "evict one page": lambda i: forest.evict(1),
    }
    for name, operation in operations.items():
        us = mean_us(operation, times)
        yield Rate(operation=name, num_nodes=num_nodes, num_tokens=num_tokens, us=us)
    forest.kv.check([])


def by_tokens(num_tokens: int, page_size: int, times: int) -> Iterator[Rate]:
    """Long prompts in a tree of few nodes."""
    num_pages = -(-num_tokens // page_size)
    forest = Forest(times, num_pages, page_size, (3 * times + 2) * num_pages)
    known = forest.prompts
    new = [forest.prompt(num_tokens) for _ in range(2 * times)]
    operations: dict[str, Callable[[int], object]] = {
        "match": lambda i: forest.match(known[i]),
        "insert": lambda i: forest.insert(new[i]),
        "request, all new": lambda i: forest.request(i, new[times + i]),
        "request, all known": lambda i: forest.request(i, known[i]),
        "evict all its pages": lambda i: forest.evict(num_pages),
    }
    for name, operation in operations.items():
        us = mean_us(operation, times)
        yield Rate(operation=name, num_nodes=times, num_tokens=num_tokens, us=us)
    forest.kv.check([])


def targets(scale: int) -> Iterator[Target]:
    """The bounds; ``scale`` divides their sizes (1 is the real thing)."""
    for num_held in (0, 10_000 // scale):
        yield _evict_target(40_000 // scale, num_held, 1000 // scale)
    yield _match_target(131_072 // scale, 1, 1000.0)
    yield _match_target(131_072 // scale, 8_000 // scale, 10_000.0)


def _evict_target(num_leaves: int, num_held: int, times: int) -> Target:
    forest = Forest(num_leaves + num_held, 1, 16, 0)
    oldest = forest.tree.held_pages[:num_held]
    forest.pool.incref(oldest)
    us = mean_us(lambda i: forest.evict(1), times)
    forest.kv.tree.check(forest.pool.ref_count)
    beside = f" beside {num_held:,} held older ones" if num_held else ""
    return Target(what=f"evict one page among {num_leaves:,} leaves{beside}", limit_us=50.0, us=us)


def _match_target(num_tokens: int, num_nodes: int, limit_us: float) -> Target:
    """One known prompt, whose path is ``num_nodes`` nodes long: other prompts branch off all along it."""
    page_size = 16
    num_pages = num_tokens // page_size
    num_tokens = num_pages * page_size
    forest = Forest(0, 1, page_size, num_pages + num_nodes)
    prompt = np.arange(num_tokens, dtype=np.int32)
    pages = forest.pool.allocate(num_pages)
    forest.tree.insert(prompt, pages)
    for branch in range(num_nodes - 1):
        other = np.full(page_size, _VOCABULARY, np.int32)
        path = np.append(pages[: branch + 1], forest.pool.allocate(1))
        forest.tree.insert(np.concatenate((prompt[: (branch + 1) * page_size], other)), path, branch + 1)
    assert forest.tree.peek(prompt) == num_tokens
    us = mean_us(lambda i: forest.tree.match(prompt), 20)
    path_nodes = "one node" if num_nodes == 1 else f"{num_nodes:,} nodes"
    return Target(what=f"match {num_tokens:,} tokens over {path_nodes}", limit_us=limit_us, us=us)


def table(rates: Sequence[Rate], bounds: Sequence[Target]) -> str:
    """Both results as text."""
    lines = [f"{'operation':22}{'nodes':>10}{'tokens':>10}{'us each':>12}{'per second':>14}"]
    lines += [
        f"{rate.operation:22}{rate.num_nodes:>10,}{rate.num_tokens:>10,}{rate.us:>12.1f}{rate.per_second:>14,.0f}"
        for rate in rates
    ]
    lines += ["", f"{'bound':62}{'limit us':>10}{'us':>10}"]
    lines += [
        f"{bound.what:62}{bound.limit_us:>10,.0f}{bound.us:>10.1f}  {'kept' if bound.kept else 'MISSED'}"
        for bound in bounds
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print the table; returns 0 when every bound is kept, else 1, and 2 where an option makes no
    sense."""
    parser = argparse.ArgumentParser(prog="micro_tree", description=__doc__)
    parser.add_argument("--page-size", type=int, default=16, metavar="P")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="divide every size by N")
    args = parser.parse_args(argv)
    if not 1 <= args.scale <= 100:
        parser.error(f"--scale must lie in 1..100, got {args.scale}")
    return exit_status("micro_tree", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    check_writable(args.json)
    EngineConfig(num_pages=1, page_size=args.page_size)  # refuses what is no page size
    sizes = [1_000, 10_000, 100_000]
    rates: list[Rate] = []
    bounds: list[Target] = []
    with tqdm(total=len(sizes) * 10 + 4, disable=None, leave=False, unit=" cases") as bar:
        for size in sizes:
            for rate in by_nodes(size // args.scale, args.page_size, 1000 // args.scale):
                rates.append(rate)
                bar.update()
        for size in sizes:
            for rate in by_tokens(size // args.scale, args.page_size, 20):
                rates.append(rate)
                bar.update()
        for bound in targets(args.scale):
            bounds.append(bound)
            bar.update()
    print(f"page size {args.page_size}, Python {platform.python_version()}, numpy {np.__version__}, CPU time")
    print(table(rates, bounds))
    if args.json is not None:
        result = {
            "page_size": args.page_size,
            "scale": args.scale,
            "rates": [{**asdict(rate), "per_second": rate.per_second} for rate in rates],
            "bounds": [{**asdict(bound), "kept": bound.kept} for bound in bounds],
        }
        write_json(args.json, result)
    return 0 if all(bound.kept for bound in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
