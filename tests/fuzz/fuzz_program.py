"""Random programs for an engine: what is asked, in which order, under which settings.

A program is a pure function of its seed, made before anything runs, so that a seed is all that a failure
needs to be seen again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeAlias, get_args

from radixkv.beam_params import BeamParams
from radixkv.config import EvictionPolicyName, PolicyName
from radixkv.namespace import namespace_of
from radixkv.types import Namespace

PAGE_SIZES = (1, 4, 16, 64)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
EVICTION_POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)
NAMESPACES: tuple[Namespace, ...] = ((), (), (), ("x",), ("y", 1))
NUM_ADAPTERS = 2
LONGEST = {1: 20, 4: 30, 16: 44, 64: 140}
"""Tokens of the longest prompt, by page size."""

Verb: TypeAlias = Literal[
    "add", "step", "abort", "retract", "flush", "pin", "unpin", "tick", "interrupt before", "interrupt after",
    "fail before", "fail after",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int
    namespace: Namespace = ()
    adapter: int = 0
    """0, the base model, or one of ``NUM_ADAPTERS``, which then stands in ``namespace``."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further fields of ``SamplingParams``."""
    fields: tuple[tuple[str, Any], ...] = ()
    """Further fields of ``Request``."""
    follows: int | None = None
    """The next turn of this request: its prompt and what it gave so far come before ``prompt``."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One thing that happens between two steps, or in the next one."""

    verb: Verb
    ask: Ask | None = None
    """For ``add`` the request, for ``pin`` what is pinned."""
    which: int = 0
    """For ``abort`` a request's number, for ``retract`` and ``unpin`` a number to choose by."""
    seconds: float = 0.0
    """For ``tick`` how long, for ``pin`` its time limit (0: none)."""

    @property
    def some_ask(self) -> Ask:
        assert self.ask is not None, f"{self.verb} asks for nothing"
        return self.ask


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that a run needs."""

    seed: int
    config: dict[str, Any]
    fake: dict[str, Any]
    ops: tuple[Op, ...]

    @property
    def num_requests(self) -> int:
        return sum(op.verb == "add" for op in self.ops)


class _Maker:
    """Draws one program; every draw comes from one generator."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.page_size = self.rng.choice(PAGE_SIZES)
        self.longest = LONGEST[self.page_size]
        self.texts = [[self.rng.randint(1, 3) for _ in range(self.longest)] for _ in range(2)]
        self.has_cache = self.rng.random() < 0.9
        self.has_adapters = self.rng.random() < 0.2
        self.asked: list[Ask] = []

    def config(self) -> dict[str, Any]:
        rng, size = self.rng, self.page_size
        fits = -(-(self.longest + 6) // size)
        max_pinned = rng.choice((0, 1, fits // 2)) if self.has_cache else 0
        return {
            "num_pages": fits + max_pinned + rng.choice((0, 1, rng.randint(0, 2 * self.longest) // size)),
            "page_size": size,
            "max_pinned_pages": max_pinned,
            "max_batch_tokens": rng.choice(
                (rng.randint(1, 4) * max(2, size // 3), rng.randint(12, 40), 1000)
            ),
            "max_running": rng.randint(1, 6),
            "decode_reserve_tokens": rng.choice((0, 0, 4, 32, None)),
            "policy": rng.choice(POLICIES),
            "eviction_policy": rng.choice(EVICTION_POLICIES),
            "max_skips": rng.choice((0, 1, 2, 64)),
            "max_wait_s": rng.choice((0.0, 5.0, 30.0)),
            "min_wait_tokens": rng.choice((0, 4, 32)),
            "max_waiting": rng.choice((None, None, None, 1, 3)),
            "queue_timeout_s": rng.choice((None, None, 3.0)),
            "prefix_cache": self.has_cache,
            "events": rng.random() < 0.3,
        }

    def program(self) -> Program:
        config = self.config()
        fake = {"vocab_size": self.rng.choice((4, 50)), "eos_one_in": 9}
        ops: list[Op] = []
        num_requests = self.rng.choice((2, 2, 3, 3, 4))
        while len(self.asked) < num_requests:
            ops.append(self.op())
        ops += [self.op(adds=False) for _ in range(self.rng.randint(1, 4))]
        return Program(seed=self.seed, config=config, fake=fake, ops=tuple(ops))

    def op(self, adds: bool = True) -> Op:
        rng = self.rng
        verbs: dict[Verb, int] = {
            "add": 40 if adds else 0, "step": 30, "abort": 4, "retract": 6, "flush": 2,
            "pin": 6 if self.has_cache else 0, "unpin": 3, "tick": 5, "interrupt before": 2,
            "interrupt after": 2, "fail before": 1, "fail after": 1,
        }  # fmt: skip
        verb = rng.choices(list(verbs), list(verbs.values()))[0]
        if verb == "add":
            self.asked.append(self.ask())
            return Op(verb=verb, ask=self.asked[-1])
        if verb == "pin":
            known = rng.choice(self.asked) if self.asked else None
            ask = Ask(
                prompt=self.prompt() if known is None else known.prompt,
                max_tokens=0,
                namespace=() if known is None else known.namespace,
            )
            return Op(verb=verb, ask=ask, seconds=rng.choice((0.0, 3.0)))
        return Op(verb=verb, which=rng.randrange(max(len(self.asked), 1)), seconds=rng.choice((1.0, 4.0)))

    def prompt(self) -> tuple[int, ...]:
        """The beginning of a text that others begin with too, and maybe a tail of its own."""
        rng = self.rng
        shared = rng.randint(0, self.longest)
        own = rng.choice((0, rng.randint(0, self.longest - shared)))
        tail = [rng.randint(1, 3) for _ in range(max(own, shared == 0))]
        return (*rng.choice(self.texts)[:shared], *tail)

    def ask(self) -> Ask:
        rng = self.rng
        prompt, max_tokens = (
            self.prompt(),
            rng.choice((rng.randint(0, 6), rng.randint(0, 6), rng.randint(7, 12))),
        )
        options: list[tuple[str, Any]] = []
        fields: list[tuple[str, Any]] = []
        if rng.random() < 0.2:
            options.append(("stop_token_ids", (rng.randint(1, 3),)))
        elif rng.random() < 0.2:
            options.append(("ignore_eos", True))
        if rng.random() < 0.1:
            options.append(("min_tokens", rng.randint(0, max_tokens)))
        if rng.random() < 0.4:
            fields.append(("priority", rng.randint(0, 2)))
        if rng.random() < 0.1:
            fields.append(("queue_timeout_s", rng.choice((1.0, 6.0))))
        kind = rng.random()
        if kind < 0.12 and max_tokens > 0:
            width = rng.randint(1, 3)
            fields.append(("beam", BeamParams(width=width, early_stopping=rng.random() < 0.5)))
        elif kind < 0.22:
            options += [("n", rng.randint(2, 3)), ("temperature", 1.0), ("seed", rng.randint(0, 99))]
        elif kind < 0.3:
            options += [("temperature", 1.0), ("seed", rng.randint(0, 99))]
        if kind >= 0.12 and rng.random() < 0.15:
            options.append(("logprobs", rng.randint(0, 2)))
        follows = rng.randrange(len(self.asked)) if len(self.asked) > 1 and rng.random() < 0.2 else None
        if follows is not None:
            prompt = prompt[: rng.randint(1, 8)]
        if rng.random() < 0.2:
            fields.append(("logprob_start", rng.randrange(len(prompt))))
        elif rng.random() < 0.1:
            start = rng.randrange(len(prompt))
            options += [("prompt_logprobs", rng.randint(0, 2)), ("prompt_logprobs_start", start)]
        adapter = rng.randint(1, NUM_ADAPTERS) if self.has_adapters and rng.random() < 0.5 else 0
        salt = rng.choice((None, None, "x"))
        return Ask(
            follows=follows,
            prompt=prompt,
            max_tokens=max_tokens,
            adapter=adapter,
            namespace=(
                namespace_of(adapter=f"adapter {adapter}", adapter_version=1, cache_salt=salt)
                if adapter
                else rng.choice(NAMESPACES)
            ),
            options=tuple(options),
            fields=tuple(fields),
        )


def program_of(seed: int) -> Program:
    """The program of ``seed``."""
    return _Maker(seed).program()
