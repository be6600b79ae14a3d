"""The seeded driver of LedgerMachine: random operations, weighted so that the rare transitions happen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
from ledger_model import Row, prefix_of
from machine import LedgerMachine

from radixkv.config import EvictionPolicyName
from radixkv.types import Namespace, TokenIds

EVICTION_POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)
NAMESPACES: tuple[Namespace, ...] = ((), (), (), ("1",), (1,))


@dataclass(frozen=True)
class Setting:
    """One kind of machine. ``alphabet`` is small, so that prompts collide."""

    page_size: int
    num_pages: int
    max_rows: int = 5
    alphabet: int = 2
    max_pages_of_prompt: int = 4

    def machine(self, policy: EvictionPolicyName) -> LedgerMachine:
        return LedgerMachine(self.page_size, self.num_pages, self.num_pages // 3, policy)


SETTINGS = (
    Setting(page_size=1, num_pages=30, max_pages_of_prompt=14),
    Setting(page_size=4, num_pages=11),
    Setting(page_size=4, num_pages=22, alphabet=3),
    Setting(page_size=16, num_pages=10),
    Setting(page_size=16, num_pages=20, max_rows=6),
    Setting(page_size=64, num_pages=9, max_pages_of_prompt=3),
)


class Driver:
    """Chooses operations for one machine from one seed."""

    def __init__(self, machine: LedgerMachine, setting: Setting, seed: int) -> None:
        self.machine = machine
        self.setting = setting
        self.rng = random.Random(seed)
        self.texts: list[list[int]] = [[]]
        """What prompts are made of: earlier ones, and what sequences became."""
        self.choices: list[tuple[int, Callable[[], None]]] = [
            (20, self.start),
            (24, self.reserve),
            (4, self.squeeze),
            (26, self.forward),
            (5, self.fork),
            (5, self.append),
            (11, self.truncate),
            (7, self.preempt),
            (4, self.abort),
            (4, self.resume),
            (4, self.pin),
            (2, self.unpin),
            (3, self.pass_time),
            (1, self.flush),
            (3, self.explain),
        ]

    def run(self, num_steps: int) -> None:
        """At least so many steps of the machine, then the order of eviction to the end."""
        weights = [weight for weight, _ in self.choices]
        actions = [action for _, action in self.choices]
        stop = self.machine.num_steps + num_steps
        while self.machine.num_steps < stop:
            self.rng.choices(actions, weights)[0]()
        self.machine.drain()

    def tokens(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(self.setting.alphabet) for _ in range(num_tokens)]

    def prompt(self) -> TokenIds:
        """The beginning of a known text, cut where it hurts, and some new tokens."""
        rng, size = self.rng, self.setting.page_size
        text = rng.choice(self.texts)
        cut = rng.randrange(len(text) + 1)
        if rng.random() < 0.6:
            cut = min(max(cut // size * size + rng.choice((-1, 0, 0, 1)), 0), len(text))
        if rng.random() < 0.4:
            cut = len(text)
        longest = self.setting.max_pages_of_prompt * size
        cut = min(cut, longest)
        fresh = self.tokens(rng.choice((0, 1, 2, size - 1, size, size + 1, rng.randrange(2 * size + 2))))
        prompt = (text[:cut] + fresh)[:longest] or self.tokens(1)
        self.remember(prompt)
        return np.array(prompt, np.int32)

    def remember(self, text: list[int]) -> None:
        self.texts.append(text)
        if len(self.texts) > 12:
            del self.texts[self.rng.randrange(len(self.texts))]

    def any_row(self, wanted: Callable[[Row], bool]) -> Row | None:
        rows = [row for row in self.machine.rows if wanted(row)]
        return self.rng.choice(rows) if rows else None

    # ---- the operations -------------------------------------------------------------------------------

    def start(self) -> None:
        if len(self.machine.rows) >= self.setting.max_rows:
            self.abort()
            return
        prompt = self.prompt()
        logprob_start = self.rng.randrange(len(prompt)) if self.rng.random() < 0.1 else None
        priority = self.rng.choice((0, 0, -1, 5))
        row = self.machine.start(prompt, self.rng.choice(NAMESPACES), logprob_start, priority)
        if self.rng.random() < 0.6:
            self.reserve_some(row)

    def reserve(self) -> None:
        row = self.any_row(lambda row: row.held)
        if row is not None:
            self.reserve_some(row)

    def reserve_some(self, row: Row) -> None:
        left = row.seq.num_tokens - row.seq.num_computed
        num_tokens = left if self.rng.random() < 0.6 else self.rng.randint(1, left + 1)
        if not self.machine.reserve(row, num_tokens) and self.rng.random() < 0.7:
            self.machine.release(row, keep_row=True)

    def squeeze(self) -> None:
        """A hit that ends inside a page, and one page less than its copy needs."""
        rng, size = self.rng, self.setting.page_size
        row = self.any_row(lambda row: row.source is not None and row.copy is None)
        wants_tail = rng.random() < 0.7
        nodes = [n for n in self.machine.oracle.nodes() if (len(n[1].token_ids) < size) == wants_tail]
        if nodes and size > 1 and rng.random() < 0.8:
            namespace, node = rng.choice(nodes)
            prefix = prefix_of(node)[: None if wants_tail else -rng.randrange(1, size)]
            prompt = [*prefix, *self.tokens(rng.randint(1, 3))]
            row = self.machine.start(np.array(prompt, np.int32), namespace[:-1])
        if row is not None:
            kv, seq = self.machine.kv, row.seq
            num_pages = seq.page_table.num_pages + kv.num_available + self.rng.choice((0, 1, 1, 1, 2))
            num_tokens = num_pages * kv.page_size - seq.num_computed
            if num_tokens > 0 and not self.machine.reserve(row, num_tokens):
                self.machine.release(row)

    def forward(self) -> None:
        """Often several decode steps on end, as in life."""
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 3))):
            for row in [row for row in self.machine.rows if row.held and not row.num_reserved]:
                if rng.random() < 0.7:
                    self.reserve_some(row)
            reserved = [row for row in self.machine.rows if row.num_reserved]
            if not reserved:
                return
            ends = tuple(n for n in range(len(reserved)) if rng.random() < 0.12)
            for number in ends:
                self.remember(reserved[number].seq.token_ids.tolist())
            rejects = rng.choice((0, 0, 0, 0, 0, 1, 3))
            fails = rng.random() < 0.03
            self.machine.forward(self.tokens(len(reserved)), ends=ends, rejects=rejects, fails=fails)

    def fork(self) -> None:
        row = self.any_row(lambda row: row.held and row.seq.num_computed > 0)
        if row is not None and len(self.machine.rows) <= self.setting.max_rows:
            self.machine.fork(row)

    def append(self) -> None:
        row = self.any_row(lambda row: row.held)
        if row is not None:
            self.machine.append(row, self.tokens(self.rng.randint(1, self.setting.page_size + 2)))

    def truncate(self) -> None:
        row = self.any_row(lambda row: row.held and row.seq.num_output > 0)
        if row is not None:
            self.machine.truncate(row, self.rng.randint(row.seq.num_prompt, row.seq.num_tokens))

    def preempt(self) -> None:
        row = self.any_row(lambda row: row.held)
        if row is not None:
            self.remember(row.seq.token_ids.tolist())
            self.machine.release(row, keep_row=True)

    def abort(self) -> None:
        row = self.any_row(lambda row: True)
        if row is not None:
            self.remember(row.seq.token_ids.tolist())
            self.machine.release(row)

    def resume(self) -> None:
        row = self.any_row(lambda row: not row.held)
        if row is not None:
            self.machine.acquire(row)

    def pin(self) -> None:
        timeout_s = self.rng.choice((None, 1.0, 2.0, 2.0, 5.0))
        self.machine.pin(self.prompt(), self.rng.choice(NAMESPACES), timeout_s)

    def unpin(self) -> None:
        if self.machine.pins:
            self.machine.unpin(self.rng.choice(list(self.machine.pins.values())))

    def pass_time(self) -> None:
        self.machine.pass_time(self.rng.choice((0.5, 1.0, 3.0)))

    def flush(self) -> None:
        self.machine.flush()

    def explain(self) -> None:
        self.machine.explain(self.prompt(), self.rng.choice(NAMESPACES))


def run_many(num_steps: int, *, seed: int = 0, steps_each: int = 250) -> tuple[int, Counter[str]]:
    """Machines of all settings in turn until ``num_steps`` are done; returns steps and transitions."""
    done, counts = 0, Counter[str]()
    while done < num_steps:
        setting = SETTINGS[seed % len(SETTINGS)]
        # Settings and policies in turn, so that each of either meets each of the other.
        policy = EVICTION_POLICIES[(seed + seed // len(SETTINGS)) % len(EVICTION_POLICIES)]
        machine = setting.machine(policy)
        run_one(machine, setting, seed, steps_each)
        done += machine.num_steps
        counts += machine.counts
        seed += 1
    return done, counts


def run_one(machine: LedgerMachine, setting: Setting, seed: int, num_steps: int) -> None:
    """One machine to its end; counts what only the tree sees."""
    Driver(machine, setting, seed).run(num_steps)
    stats = machine.kv.stats()
    machine.counts["mid-edge split"] += stats["tree_num_splits"]
    machine.counts["merge"] += stats["tree_num_merges"]
