"""Latencies: how long requests waited for their start, for their first token, and for each one after it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from radixkv.histogram import Histogram
from radixkv.kv.invariant import require
from radixkv.sequence import Sequence

SHORTEST_S, LONGEST_S = 1e-4, 1e4


class Latencies:
    """Seconds, by the scheduler's clock. A preemption is part of the time between two tokens.

    J1: the time of the last token is kept for live sequences only.
    """

    def __init__(self) -> None:
        self.queue_time_s = Histogram(SHORTEST_S, LONGEST_S)
        """From ``add`` to the first admission, or to the end as ``timeout``; once for each request."""
        self.ttft_s = Histogram(SHORTEST_S, LONGEST_S)
        """From ``add`` to the first token; once for each request, however many samples it has. A beam search
        has tokens only at its end, and is not in here, nor in ``inter_token_s``."""
        self.inter_token_s = Histogram(SHORTEST_S, LONGEST_S)
        self._last_token: dict[Sequence, float] = {}

    def waited(self, seq: Sequence, now: float) -> None:
        """``seq`` has started for the first time, or has waited too long."""
        self.queue_time_s.record(max(now - seq.arrival, 0.0))

    def token(self, seq: Sequence, now: float) -> None:
        """``seq`` has one token more."""
        before = self._last_token.get(seq)
        if before is None:
            if seq.sample_index == seq.request.sample_index:  # the others begin with the same step
                self.ttft_s.record(max(now - seq.arrival, 0.0))
        else:
            self.inter_token_s.record(max(now - before, 0.0))
        self._last_token[seq] = now

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self._last_token.pop(seq, None)

    def clear(self) -> None:
        """All have ended."""
        self._last_token.clear()

    def check(self, live: Container[Sequence]) -> None:
        """J1, and H1 of each histogram. Raises ``InternalError``."""
        for histogram in (self.queue_time_s, self.ttft_s, self.inter_token_s):
            histogram.check()
        ended = [seq.request.request_id for seq in self._last_token if seq not in live]
        require(not ended, "J1", f"times of requests {ended} are kept, which are not live")

    def stats(self) -> dict[str, Any]:
        return {
            "queue_time_s": self.queue_time_s.stats(),
            "ttft_s": self.ttft_s.stats(),
            "inter_token_s": self.inter_token_s.stats(),
        }
