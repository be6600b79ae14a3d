"""Counters: what a scheduler has done since it was made. They only grow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from radixkv.sequence import FinishReason


@dataclass
class Counters:
    """N1: ``num_added = num_ended + waiting + running``."""

    num_added: int = 0
    """Requests. Samples and beams of one prompt are one; of a ``score``, each continuation is one, and so is
    the prompt where there are several."""
    num_finished: int = 0
    """Ended by ``stop`` or ``length``."""
    num_aborted: int = 0
    num_failed: int = 0
    num_refused: int = 0
    """Not added: the request was wrong or could never fit, or the queue was full."""
    num_queue_full: int = 0
    """Of these, refused because the queue was full."""
    num_timed_out: int = 0
    """Waited too long for their first admission."""
    num_preemptions: int = 0
    num_priority_preemptions: int = 0
    """Of these, to make way for a request of higher priority."""
    num_steps: int = 0
    """Batches whose results arrived."""
    num_undone_steps: int = 0
    """Batches that failed or were interrupted."""
    prompt_tokens: int = 0
    """Of requests admitted, counted once, at first admission; so are ``cached_tokens``. A prompt of several
    samples or beams, or of several continuations to score, is counted once."""
    cached_tokens: int = 0
    prompt_tokens_computed: int = 0
    """Those computed again after a preemption included."""
    output_tokens: int = 0
    schedule_cpu_s: float = 0.0
    update_cpu_s: float = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the CPU time of this thread to the counter ``name``."""
        begin = time.thread_time()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.thread_time() - begin)

    def count_end(self, reason: FinishReason) -> None:
        if reason == "abort":
            self.num_aborted += 1
        elif reason == "error":
            self.num_failed += 1
        elif reason == "timeout":
            self.num_timed_out += 1
        else:
            self.num_finished += 1

    @property
    def num_ended(self) -> int:
        return self.num_finished + self.num_aborted + self.num_failed + self.num_timed_out

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens; 0.0 before any prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def stats(self) -> dict[str, int | float]:
        return {**vars(self), "hit_rate": self.hit_rate}
