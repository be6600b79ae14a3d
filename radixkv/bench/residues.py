"""Residues: is the hit rate as good when the shared prefix ends in the middle of a page?

The prefix is cut to lengths that leave 0, 1 and P - 1 tokens in its last page, for pages of P = 1, 16 and 64
tokens, and each time the hits are held against the replayed optimum. Counts only: no speed is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from radixkv.bench.arm import Arm
from radixkv.bench.comparison import optimal_tokens
from radixkv.bench.harness import Settings, run_arm
from radixkv.bench.optimum import share_of_optimum
from radixkv.bench.rig import Rig
from radixkv.bench.workloads import Workload, cut_prefix
from radixkv.errors import ConfigError

PAGE_SIZES = (1, 16, 64)
MIN_SHARE = 0.99
RESIDUE_TOKENS = 2
"""Output tokens of a request: enough that it also decodes."""


@dataclass(frozen=True)
class Residue:
    """One length of prefix at one page size, and how near its hits came to the optimum."""

    page_size: int
    remainder: int
    prefix_tokens: int
    hit_tokens: int
    optimal_tokens: int
    prompt_tokens: int

    @property
    def share(self) -> float:
        return share_of_optimum(self.hit_tokens, self.optimal_tokens)

    @property
    def passed(self) -> bool:
        return self.share >= MIN_SHARE

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "share_of_optimum": self.share, "passed": self.passed}


def cut_lengths(page_size: int, num_prefix_tokens: int) -> list[int]:
    """The longest lengths up to ``num_prefix_tokens`` that leave 0, 1 and ``page_size - 1`` tokens over.

    Raises ``ConfigError`` where the prefix is too short for one of them.
    """
    lengths = []
    for remainder in sorted({0, 1 % page_size, page_size - 1}):
        length = num_prefix_tokens - (num_prefix_tokens - remainder) % page_size
        if length < max(remainder, 1):
            raise ConfigError(
                f"a prefix of {num_prefix_tokens} tokens is too short for {remainder} modulo {page_size}"
            )
        lengths.append(length)
    return lengths


def run_residues(
    workload: Workload, rig: Rig, settings: Settings, on_finished: Callable[[], None] = lambda: None
) -> list[Residue]:
    """Run the radix arm once for every length and page size."""
    found = []
    for page_size in PAGE_SIZES:
        for length in cut_lengths(page_size, len(workload.prefix_ids)):
            cut = cut_prefix(workload, length)
            run = run_arm(Arm(f"radix-p{page_size}", page_size), cut, rig, settings, on_finished)
            found.append(
                Residue(
                    page_size=page_size,
                    remainder=length % page_size,
                    prefix_tokens=length,
                    hit_tokens=run.hit_tokens or 0,
                    optimal_tokens=optimal_tokens(run),
                    prompt_tokens=run.prompt_tokens,
                )
            )
    return found


def format_residues(residues: list[Residue]) -> str:
    """One line for each, and what fails."""
    lines = ["page  left over  prefix  hit rate  optimum  percent of it"]
    lines += [
        f"{each.page_size:4}  {each.remainder:9}  {each.prefix_tokens:6}  "
        f"{each.hit_tokens / each.prompt_tokens:8.2%}  {each.optimal_tokens / each.prompt_tokens:7.2%}  "
        f"{each.share:13.2%}  {'ok' if each.passed else f'BELOW {MIN_SHARE:.0%}'}"
        for each in residues
    ]
    return "\n".join(lines)
