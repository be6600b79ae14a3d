"""Random programs against the oracle, and the faults that they must notice.

2,000 programs, 40,000 with ``--long``; ``tests/fuzz/fuzz.py`` runs as many as one has time for. A run in
which some kind of event is too rare proves nothing about it, so that fails too.
"""

from __future__ import annotations

from collections import Counter

import pytest
from fuzz_faults import FAULTS
from fuzz_program import EVICTION_POLICIES, POLICIES, program_of
from fuzz_run import run_seed

from radixkv.errors import RadixKVError

NUM_PARTS = 8
NUM_PROGRAMS = 2000
AT_LEAST = {
    "aborted": 25, "beam searches done": 8, "cached tokens": 500, "copies on write": 50, "ended by abort": 25,
    "ended by error": 10, "ended by length": 100, "ended by stop": 50, "ended by timeout": 8,
    "entries of outputs": 100, "entries of prompts": 100, "evicted pages": 200, "failed steps": 10,
    "flushed while at work": 10, "further turns": 20, "interrupts": 25, "partial copies": 25,
    "pinned tokens": 50, "pins expired": 3, "pins refused": 3, "preemptions": 5, "queue full": 15,
    "refused": 3, "retracted": 25, "runs with events": 40, "runs without a cache": 5, "scored": 25,
    "several samples done": 20, "step": 300, "unpinned": 5,
    **{f"runs with {policy}": 15 for policy in POLICIES},
    **{f"evictions by {policy}": 4 for policy in EVICTION_POLICIES},
}  # fmt: skip
"""For each of ``NUM_PARTS`` parts."""


def run_seeds(seeds: range) -> Counter[str]:
    counts = Counter[str]()
    for seed in seeds:
        counts += run_seed(seed)
    return counts


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_b045_random_programs_equal_the_oracle(part: int, long_run: bool) -> None:
    """Fault seen: each of ``FAULTS``, planted one at a time by the test below."""
    num_programs = (20 if long_run else 1) * NUM_PROGRAMS // NUM_PARTS
    counts = run_seeds(range(part * num_programs, (part + 1) * num_programs))
    rare = {name: counts[name] for name, least in AT_LEAST.items() if counts[name] < least}
    assert not rare, f"too rare to prove anything: {rare} of {dict(counts)}"


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, RadixKVError, LookupError)) as raised:
        run_seeds(range(400))
    assert any("fuzz seed" in note for note in raised.value.__notes__)


def test_a_program_is_a_pure_function_of_its_seed() -> None:
    assert program_of(7) == program_of(7) != program_of(8)
    assert run_seed(7) == run_seed(7)
