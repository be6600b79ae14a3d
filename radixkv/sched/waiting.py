"""WaitingQueue: the requests that wait, by arrival and by policy, and how often each was overtaken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedDict, SortedKeyList, SortedList

from radixkv.kv.invariant import require
from radixkv.sched.policy import Key, by_arrival, is_boosted
from radixkv.sequence import Sequence


class WaitingQueue:
    """Q1: a sequence stands in it once. Q2: ``num_overtakers(seq)`` counts the different later arrivals that
    have been admitted so far, each once, however often it or ``seq`` was preempted and resumed, up to
    ``max_skips``: more are not told apart, and so no more numbers than that are kept.

    Since an arrival later than ``b`` is later than every ``a`` before ``b``, the earliest waiting request is
    always the one that was overtaken most and that has waited longest: a bound that holds for it holds for
    all. Q3: who was never admitted and has a deadline stands in the list of deadlines once, nobody else does.
    Operations cost O(log n).
    """

    def __init__(self, key: Key = by_arrival, timeout_s: float = math.inf, max_skips: int = 64) -> None:
        """``key``: the order of ``ordinary``. ``timeout_s``: how long a request that says nothing else waits
        for its first admission, in seconds."""
        self._timeout_s = timeout_s
        self._max_skips = max_skips
        self._by_number: SortedDict[int, Sequence] = SortedDict()
        self._boosted: SortedDict[int, Sequence] = SortedDict()
        self._ordinary: SortedKeyList[Sequence, tuple[int, ...]] = SortedKeyList(key=key)
        """All that are not boosted."""
        self._deadlines: SortedList[tuple[float, int]] = SortedList()
        """Of those that were never admitted: clock time and number."""
        self._admitted: SortedList[int] = SortedList()
        """Numbers of the ``max_skips`` latest of all arrivals that were ever admitted."""

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of arrival."""
        return iter(self._by_number.values())

    def __contains__(self, seq: Sequence) -> bool:
        return seq.number in self._by_number

    def add(self, seq: Sequence) -> None:
        """Put ``seq`` in its place by arrival, whether it is new or was preempted."""
        assert seq.number not in self._by_number, f"Q1: sequence {seq.request.request_id} waits already"
        self._by_number[seq.number] = seq
        if is_boosted(seq):
            self._boosted[seq.number] = seq
        else:
            self._ordinary.add(seq)
        if self._has_deadline(seq):
            self._deadlines.add((self._deadline(seq), seq.number))

    def _has_deadline(self, seq: Sequence) -> bool:
        return seq.num_preemptions == 0 and self._deadline(seq) < math.inf

    def _deadline(self, seq: Sequence) -> float:
        timeout_s = seq.request.queue_timeout_s
        return seq.arrival + (self._timeout_s if timeout_s is None else timeout_s)

    def _take_out(self, seq: Sequence) -> None:
        del self._by_number[seq.number]
        if not self._boosted or self._boosted.pop(seq.number, None) is None:
            self._ordinary.remove(seq)
        if self._has_deadline(seq):
            self._deadlines.remove((self._deadline(seq), seq.number))

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out without admitting it."""
        self._take_out(seq)

    def admit(self, seq: Sequence) -> None:
        """Take ``seq`` out and count it as an overtaker of all that came before it."""
        self._take_out(seq)
        if seq.num_preemptions == 0:  # otherwise it counts already
            self._admitted.add(seq.number)
            if len(self._admitted) > self._max_skips:
                del self._admitted[0]

    def clear(self) -> None:
        self._by_number.clear()
        self._boosted.clear()
        self._ordinary.clear()
        self._deadlines.clear()
        self._admitted.clear()

    @property
    def earliest(self) -> Sequence:
        """The earliest arrival that waits; the queue is not empty."""
        seq: Sequence = self._by_number.peekitem(0)[1]
        return seq

    def num_overtakers(self, seq: Sequence) -> int:
        return len(self._admitted) - int(self._admitted.bisect_right(seq.number))

    def boosted(self) -> list[Sequence]:
        """Preempted sequences that go first, in order of arrival."""
        return list(self._boosted.values())

    def ordinary(self, limit: int) -> list[Sequence]:
        """The first ``limit`` of the others, in the order of ``key``."""
        return list(islice(self._ordinary, limit))

    def overdue(self, now: float) -> list[Sequence]:
        """Who was never admitted and has waited longer than it may, earliest deadline first. Takes nobody
        out."""
        late = self._deadlines.irange(maximum=(now, -1))  # a deadline that is ``now`` is not over
        return [self._by_number[number] for _, number in late]

    def check(self) -> None:
        """Q1, Q2 and Q3. Raises ``InternalError``. Costs O(n)."""
        for number, seq in self._by_number.items():
            require(number == seq.number, "Q1", f"{seq.number} is filed under {number}")
            require((number in self._boosted) == is_boosted(seq), "Q1", f"{number} is boosted wrongly")
        require(self._boosted.keys() <= self._by_number.keys(), "Q1", "a boosted sequence does not wait")
        require(len(set(self._admitted)) == len(self._admitted), "Q2", "an overtaker counts twice")
        require(len(self._admitted) <= self._max_skips, "Q2", len(self._admitted), "overtakers are kept")
        ordinary = sorted(number for number in self._by_number if number not in self._boosted)
        require(sorted(seq.number for seq in self._ordinary) == ordinary, "Q1", "not all are in order")
        due = sorted(
            (self._deadline(seq), n) for n, seq in self._by_number.items() if self._has_deadline(seq)
        )
        require(list(self._deadlines) == due, "Q3", "deadlines are", self._deadlines, "not", due)
