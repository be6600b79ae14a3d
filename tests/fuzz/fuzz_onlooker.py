"""What somebody sees who looks at an engine from outside: requests, outputs, admissions, pins, events.

He counts again what the engine counts in its own books, and objects where it does not come out the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine_kit import FakeClock
from fuzz_oracle import Sample

from radixkv.config import EngineConfig
from radixkv.kv.events import Event, ReplayedPage, Stored, replay
from radixkv.kv.pins import Pin
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request


class Broken(AssertionError):
    """The engine did what it must not."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


class Onlooker:
    """Nothing in here is read from scheduler or manager; requests are numbered in order of arrival."""

    def __init__(self, config: EngineConfig, clock: FakeClock) -> None:
        self.config = config
        self.clock = clock
        self.requests: dict[int, Request] = {}
        self.samples: dict[int, list[Sample]] = {}
        self.arrivals: dict[int, float] = {}
        self.never_admitted: list[int] = []
        """In order of arrival."""
        self.overtakers: Counter[int] = Counter()
        self.admitted: set[int] = set()
        self.may_be_hit: set[int] = set()
        """Admitted since the last flush: what they compute may be found."""
        self.pins: dict[int, tuple[Pin, float | None]] = {}
        self.pages: dict[int, ReplayedPage] = {}
        """The cache as its events tell it."""

    # Requests

    def add(self, request: Request) -> None:
        number = request.request_id
        self.requests[number] = request
        self.samples[number] = [Sample() for _ in range(request.num_samples)]
        self.arrivals[number] = self.clock()
        self.never_admitted.append(number)

    def has_ended(self, number: int) -> bool:
        return all(sample.final is not None for sample in self.samples[number])

    @property
    def num_live(self) -> int:
        return sum(not self.has_ended(number) for number in self.requests)

    def take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            number = output.request_id
            require(number in self.requests, f"an output of {number}, which was never asked for")
            require(output.sample_index < len(self.samples[number]), f"{number} has no such sample: {output}")
            sample = self.samples[number][output.sample_index]
            require(sample.final is None, f"sample {output.sample_index} of {number} goes on after its end")
            sample.take(output)
            if output.finish_reason is not None and number in self.never_admitted:
                self.never_admitted.remove(number)

    # Admissions

    def admit(self, number: int, num_cached: int | None) -> None:
        """A request, or a sample of it, has just begun to run, or to run again."""
        if number not in self.admitted:
            self.admitted.add(number)
            self.never_admitted.remove(number)
            self._check_overtaking(number)
            self._check_hit(number, num_cached)
        self.may_be_hit.add(number)

    def _check_overtaking(self, number: int) -> None:
        for other in self.never_admitted:
            if other > number:
                break
            if self.is_overdue(other):  # has just ended by it; ``check_timeouts`` will see
                continue
            self.overtakers[other] += 1
            num, limit = self.overtakers[other], self.config.max_skips
            require(num <= limit, f"D4: {other} was overtaken by {num}, the limit is {limit}")
            waited = self.clock() - self.arrivals[other]
            require(waited < self.config.max_wait_s, f"D4: {number} overtook {other} after {waited} s")

    def _check_hit(self, number: int, num_cached: int | None) -> None:
        """A hit is of tokens that somebody in the same namespace had since the last flush."""
        require(num_cached is not None, f"{number} runs and was never looked up")
        if not num_cached:
            return
        require(self.config.prefix_cache, f"{number} hit {num_cached} tokens without a cache")
        prompt = self.requests[number].prompt_ids.tolist()[:num_cached]
        namespace = self.requests[number].namespace
        others = (other for other in self.may_be_hit if self.requests[other].namespace == namespace)
        found = any(self._had(other, prompt) for other in others)
        require(found, f"{number} hit {num_cached} tokens that nobody computed in {namespace}")

    def _had(self, number: int, tokens: list[int]) -> bool:
        """Whether the request's tokens begin so. What beams had that were given up, nobody can tell."""
        request = self.requests[number]
        prompt = request.prompt_ids.tolist()
        if request.beam is not None:
            begins: bool = tokens[: len(prompt)] == prompt[: len(tokens)]
            return begins
        return any((prompt + sample.tokens)[: len(tokens)] == tokens for sample in self.samples[number])

    def timeout_s(self, number: int) -> float | None:
        own = self.requests[number].queue_timeout_s
        return self.config.queue_timeout_s if own is None else own

    def is_overdue(self, number: int) -> bool:
        limit = self.timeout_s(number)
        return limit is not None and self.clock() - self.arrivals[number] > limit

    def check_timeouts(self) -> None:
        """After a step: nobody who was never admitted waits on beyond its time."""
        late = [number for number in self.never_admitted if self.is_overdue(number)]
        require(not late, f"{late} wait too long")

    # Pins, flushes, events

    def flush(self) -> None:
        self.may_be_hit.clear()
        self.pins.clear()

    def expire_pins(self) -> int:
        now = self.clock()
        late = [number for number, (_, end) in self.pins.items() if end is not None and end <= now]
        for number in late:
            del self.pins[number]
        return len(late)

    def follow(self, events: Iterable[Event], content: Iterable[Stored]) -> None:
        """Replay ``events``: they must lead to ``content``."""
        replay(events, self.config.page_size, self.pages)
        real = replay(content, self.config.page_size)
        require(self.pages == real, f"replayed {self.pages}, the tree holds {real}")
