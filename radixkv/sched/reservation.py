"""Reservation: how much room for its output a request must find before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from radixkv.kv.invariant import require
from radixkv.sequence import Sequence

START_RATIO = 0.7
"""Before anything is known."""
MIN_RATIO = 0.1
DECAY_PER_STEP = 0.005
"""So much lower after each step: from the start to the minimum in 120 steps."""
WEIGHT_OF_END = 1 / 8
"""How far an end earlier than expected pulls the ratio towards what that request has used."""
RAISE = 0.05
"""Least that a preemption adds."""
MIN_TOKENS = 8
"""Expected of everybody who may have as many."""
MAX_TOKENS = 4096
"""Expected of nobody is more, however long he may go on."""


class Reservation:
    """Expects of each sequence that it takes ``ratio`` of the tokens that it may still sample.

    The ratio decays while all goes well, faster where requests end early, and is raised when a sequence had
    to be preempted for pages: to what those that ran had taken of their limits at that moment, and by
    ``RAISE`` at least. So a tight pool neither starts more than it can finish nor waits for room that nobody
    will use. The idea is that of SGLang's ``new_token_ratio``, and so are the start and the minimum.

    R1: ``MIN_RATIO <= ratio <= 1``; with a constant it is not used.
    """

    def __init__(self, constant_tokens: int | None) -> None:
        """``constant_tokens``: expect this many of each (or what it may have, if less), whatever happens;
        ``None``: adapt."""
        self.constant_tokens = constant_tokens
        self.ratio = START_RATIO
        self.num_raises = 0

    @property
    def is_adaptive(self) -> bool:
        return self.constant_tokens is None

    def tokens(self, seq: Sequence) -> int:
        """Tokens beyond those it has for which ``seq`` is expected to need room."""
        left = max(seq.request.max_computed_tokens - seq.num_tokens, 0)
        if self.constant_tokens is not None:
            return min(self.constant_tokens, left)
        return min(left, max(MIN_TOKENS, math.ceil(self.ratio * min(left, MAX_TOKENS))))

    def pages(self, seq: Sequence) -> int:
        """Pages that ``seq`` is expected to want beyond those of its table, the rest of its prompt included;
        of each of its samples those of the output."""
        page_size, tokens = seq.page_table.page_size, self.tokens(seq)
        for_itself = -(-(seq.num_tokens + tokens) // page_size) - seq.page_table.num_pages
        return max(for_itself, 0) + (seq.num_samples - 1) * -(-tokens // page_size)

    def pages_to_start(self, seq: Sequence) -> int:
        """Pages without which ``seq`` cannot start even alone: for the rest of its prompt, and for a constant
        reserve."""
        tokens = seq.num_tokens + (0 if self.is_adaptive else self.tokens(seq))
        return max(-(-tokens // seq.page_table.page_size) - seq.page_table.num_pages, 0)

    def stepped(self) -> None:
        """A step went by."""
        self.ratio = max(self.ratio - DECAY_PER_STEP, MIN_RATIO)

    def ended(self, seq: Sequence) -> None:
        """``seq`` ended of itself."""
        used = seq.num_output / max(seq.request.sampling.max_tokens, 1)
        if used < self.ratio:
            self.ratio = max(self.ratio + (used - self.ratio) * WEIGHT_OF_END, MIN_RATIO)

    def preempted(self, running: Iterable[Sequence]) -> None:
        """Pages ran out among ``running``, and one of them is preempted."""
        taken = limits = 0
        for seq in running:
            taken += seq.num_output
            limits += min(seq.request.sampling.max_tokens, MAX_TOKENS)
        self.ratio = min(max(self.ratio + RAISE, taken / max(limits, 1)), 1.0)
        self.num_raises += 1

    def check(self) -> None:
        """R1. Raises ``InternalError``."""
        require(MIN_RATIO <= self.ratio <= 1.0, "R1", self.ratio)

    def stats(self) -> dict[str, int | float]:
        return {"reserve_ratio": self.ratio, "num_reserve_raises": self.num_raises}
