"""The state machine over the manager, driven by seeds and by hypothesis; every step is checked whole.

20,000 steps by default, 500,000 with ``--long``. A run in which a transition is too rare proves nothing
about it, so that fails too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from random import Random

import pytest
from driver import EVICTION_POLICIES, SETTINGS, Driver, Setting, run_many
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from machine import LedgerMachine

from radixkv.config import EvictionPolicyName
from radixkv.kv import radix_tree
from radixkv.kv.null_tree import NullTree
from radixkv.testing.page_oracle import OracleInsertion, PageOracle
from radixkv.types import Namespace, TokenIds

TRANSITIONS = (
    "partial copy",
    "takeover",
    "partial tail kept and hit",
    "repoint",
    "mid-edge split",
    "merge",
    "trim beside a held head",
    "OutOfPages",
    "copy-on-write from a fork",
    "truncate into a committed page",
    "pin expiry",
    "flush while running",
    "preempt after reserve",
)
AT_LEAST = 50


class LedgerRules(RuleBasedStateMachine):
    """The driver's operations, chosen and shrunk by hypothesis."""

    driver: Driver

    @initialize(setting=st.sampled_from(SETTINGS), policy=st.sampled_from(EVICTION_POLICIES))
    def build(self, setting: Setting, policy: EvictionPolicyName) -> None:
        self.driver = Driver(setting.machine(policy), setting, seed=0)

    def _with(self, rng: Random) -> Driver:
        self.driver.rng = rng
        return self.driver

    @rule(rng=st.randoms())
    def start(self, rng: Random) -> None:
        self._with(rng).start()

    @rule(rng=st.randoms())
    def reserve(self, rng: Random) -> None:
        self._with(rng).reserve()

    @rule(rng=st.randoms())
    def squeeze(self, rng: Random) -> None:
        self._with(rng).squeeze()

    @rule(rng=st.randoms())
    def forward(self, rng: Random) -> None:
        self._with(rng).forward()

    @rule(rng=st.randoms())
    def fork(self, rng: Random) -> None:
        self._with(rng).fork()

    @rule(rng=st.randoms())
    def append(self, rng: Random) -> None:
        self._with(rng).append()

    @rule(rng=st.randoms())
    def truncate(self, rng: Random) -> None:
        self._with(rng).truncate()

    @rule(rng=st.randoms())
    def preempt(self, rng: Random) -> None:
        self._with(rng).preempt()

    @rule(rng=st.randoms())
    def abort(self, rng: Random) -> None:
        self._with(rng).abort()

    @rule(rng=st.randoms())
    def resume(self, rng: Random) -> None:
        self._with(rng).resume()

    @rule(rng=st.randoms())
    def pin(self, rng: Random) -> None:
        self._with(rng).pin()

    @rule(rng=st.randoms())
    def unpin(self, rng: Random) -> None:
        self._with(rng).unpin()

    @rule(rng=st.randoms())
    def pass_time(self, rng: Random) -> None:
        self._with(rng).pass_time()

    @rule(rng=st.randoms())
    def flush(self, rng: Random) -> None:
        self._with(rng).flush()

    @rule(rng=st.randoms())
    def explain(self, rng: Random) -> None:
        self._with(rng).explain()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.machine.drain()


class NullOracle(PageOracle):
    """Predicts a null tree: it keeps nothing, and a sequence keeps its own pages."""

    def insert(
        self, token_ids: TokenIds, page_ids: Seq[int], namespace: Namespace = (), priority: int = 0
    ) -> OracleInsertion:
        return OracleInsertion(tuple(page_ids[: len(token_ids) // self.page_size]), (), None)


class NullMachine(LedgerMachine):
    make_tree = staticmethod(lambda page_size, policy: NullTree(page_size))
    make_oracle = NullOracle


class LongEdgeMachine(LedgerMachine):
    merges_every_chain = False


def run_all_settings(kind: type[LedgerMachine], steps_each: int) -> Counter[str]:
    counts = Counter[str]()
    for seed, setting in enumerate(SETTINGS):
        policy = EVICTION_POLICIES[seed % len(EVICTION_POLICIES)]
        machine = kind(setting.page_size, setting.num_pages, setting.num_pages // 3, policy)
        Driver(machine, setting, seed).run(steps_each)
        counts += machine.counts
    return counts


def test_without_a_cache_nothing_is_hit_and_nothing_leaks() -> None:
    counts = run_all_settings(NullMachine, 300)
    assert counts["copy-on-write from a fork"] > 10 and counts["OutOfPages"] > 0
    assert counts["partial copy"] == counts["repoint"] == counts["takeover"] == 0


def test_edges_too_long_to_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with prompts of many thousand tokens: chains of nodes stay, and nothing else changes."""
    monkeypatch.setattr(radix_tree, "_MERGED_BYTES", 4 * 24)
    counts = run_all_settings(LongEdgeMachine, 500)
    assert counts["partial copy"] > 10 and counts["trim beside a held head"] > 5


def test_hypothesis_finds_no_way_to_break_the_ledger(long_run: bool) -> None:
    steps = Counter[str]()

    class Counted(LedgerRules):
        def teardown(self) -> None:
            super().teardown()
            steps["done"] += self.driver.machine.num_steps

    run_state_machine_as_test(
        Counted, settings=settings(max_examples=2000 if long_run else 100, stateful_step_count=40)
    )
    print(f"\nhypothesis: {steps['done']} steps")
    assert steps["done"] >= 1000


def test_seeded_steps_meet_every_transition(long_run: bool) -> None:
    wanted = 500_000 if long_run else 20_000
    num_steps, counts = run_many(wanted, seed=1_000_000 if long_run else 0)
    print(f"\n{num_steps} steps: " + ", ".join(f"{name} {counts[name]}" for name in sorted(counts)))
    assert num_steps >= wanted
    rare = {name: counts[name] for name in TRANSITIONS if counts[name] < AT_LEAST}
    assert not rare, f"too rare to prove anything: {rare}"
