"""The state machine over the manager, driven by seeds and by hypothesis; every step is checked whole.

20,000 steps by default, 500,000 with ``--long``. A run in which a transition is too rare proves nothing
about it, so that fails too.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from driver import SETTINGS, Driver, Setting, run_many
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

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

    @initialize(setting=st.sampled_from(SETTINGS))
    def build(self, setting: Setting) -> None:
        self.driver = Driver(setting.machine(), setting, seed=0)

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
