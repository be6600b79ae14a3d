"""Random programs against the oracle, and the faults that they must notice.

2,000 programs, 40,000 with ``--long``; ``tests/fuzz/fuzz.py`` runs as many as one has time for. A run in
which some kind of event is too rare proves nothing about it, so that fails too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from fuzz_faults import FIRST_SEEN, NOTICED, Patch
from fuzz_program import EVICTION_POLICIES, POLICIES, program_of
from fuzz_run import run_seed

NUM_PARTS = 8
NUM_PROGRAMS = 2000
AT_LEAST = {
    "aborted": 30, "beam searches done": 15, "cached tokens": 350, "copies on write": 49,
    "ended by abort": 34, "ended by error": 12, "ended by length": 208, "ended by stop": 100,
    "ended by timeout": 5, "entries of outputs": 90, "entries of prompts": 80, "evicted pages": 225,
    "failed steps": 7, "flushed while at work": 11, "further turns": 21, "interrupts": 40,
    "partial copies": 30, "pinned tokens": 35, "pins expired": 2, "pins refused": 10, "preemptions": 4,
    "queue full": 28, "refused": 32, "retracted": 33, "runs with events": 36, "runs without a cache": 6,
    "scored": 57, "several samples done": 17, "step": 424, "steps with several adapters": 13,
    "under an adapter": 18, "unpinned": 4,
    **{f"runs with {policy}": 14 for policy in POLICIES},
    **{f"evictions by {policy}": 3 for policy in EVICTION_POLICIES},
}  # fmt: skip
"""For each of ``NUM_PARTS`` parts: about half of what the poorest of them has."""


def run_seeds(seeds: range) -> Counter[str]:
    counts = Counter[str]()
    for seed in seeds:
        counts += run_seed(seed)
    return counts


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_b045_random_programs_equal_the_oracle(part: int, long_run: bool) -> None:
    """Fault seen: each of ``FIRST_SEEN``, planted one at a time by the test below."""
    num_programs = (20 if long_run else 1) * NUM_PROGRAMS // NUM_PARTS
    counts = run_seeds(range(part * num_programs, (part + 1) * num_programs))
    rare = {name: counts[name] for name, least in AT_LEAST.items() if counts[name] < least}
    assert not rare, f"too rare to prove anything: {rare} of {dict(counts)}"


@pytest.mark.parametrize("fault", FIRST_SEEN, ids=lambda fault: fault.__name__)
def test_planted_fault_is_noticed(fault: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = FIRST_SEEN[fault]
    assert seed < NUM_PROGRAMS, "without the fault the test above runs it"
    fault(monkeypatch)
    with pytest.raises(NOTICED) as raised:
        run_seed(seed)
    assert any("fuzz seed" in note for note in raised.value.__notes__)


def test_a_program_is_a_pure_function_of_its_seed() -> None:
    assert program_of(7) == program_of(7) != program_of(8)
    assert run_seed(7) == run_seed(7)
