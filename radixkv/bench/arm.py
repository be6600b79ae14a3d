"""Arm: one way to serve the same prompts, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from radixkv.bench.workloads import Workload
from radixkv.config import EngineConfig, PolicyName
from radixkv.errors import ConfigError

NO_CACHE = "no-cache"
TRANSFORMERS = "transformers"
_NAMES = f"{NO_CACHE}, radix, fcfs, radix-pN, fcfs-pN with N tokens in a page, {TRANSFORMERS}"


@dataclass(frozen=True)
class Arm:
    """``no-cache`` runs over the null tree with the same kernels; the others differ in one setting each."""

    name: str
    page_size: int
    policy: PolicyName = "lpm"
    prefix_cache: bool = True

    @property
    def is_peer(self) -> bool:
        """Whether another system serves this arm."""
        return self.name == TRANSFORMERS

    def config(self, *, num_pages: int, max_batch_tokens: int, max_running: int) -> EngineConfig:
        return EngineConfig(
            num_pages=num_pages,
            page_size=self.page_size,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            policy=self.policy,
            prefix_cache=self.prefix_cache,
        )


def parse_arms(text: str, *, page_size: int) -> tuple[Arm, ...]:
    """``text`` is a comma-separated list of names; ``page_size`` is for names that do not say one.

    Raises ``ConfigError`` for an unknown name, one given twice, or none at all.
    """
    arms = tuple(_arm(name.strip(), page_size) for name in text.split(",") if name.strip())
    if not arms:
        raise ConfigError(f"no arm was given; known: {_NAMES}")
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"arm {name!r} is given more than once")
    return arms


def _arm(name: str, page_size: int) -> Arm:
    if name == TRANSFORMERS:
        return Arm(name, page_size)
    if name == NO_CACHE:
        return Arm(name, page_size, prefix_cache=False)
    found = re.fullmatch(r"(radix|fcfs)(?:-p(\d+))?", name)
    if found is None:
        raise ConfigError(f"unknown arm {name!r}; known: {_NAMES}")
    policy: PolicyName = "fcfs" if found[1] == "fcfs" else "lpm"
    return Arm(name, int(found[2]) if found[2] else page_size, policy=policy)


def pages_needed(workload: Workload, *, page_size: int, max_running: int) -> int:
    """Pages with which no arm evicts or preempts.

    Enough for every prompt and output on pages of its own; or, where that is less, for as many whole
    requests as may run at once beside one copy of everything that differs.
    """

    def pages(num_tokens: int) -> int:
        return -(-num_tokens // page_size) + 2  # one for a shared last page, one for a copy

    prefix = len(workload.prefix_ids)
    private = [pages(len(question) + workload.max_tokens) for question in workload.question_ids]
    whole = [pages(prefix + len(question) + workload.max_tokens) for question in workload.question_ids]
    return min(sum(whole), max(whole) * max_running + pages(prefix) + sum(private))
