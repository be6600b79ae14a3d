"""WaitingQueue: the requests that wait, in order of arrival, and how often each was overtaken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedDict, SortedList

from radixkv.kv.invariant import require
from radixkv.sequence import Sequence

MAX_BOOSTS = 3
"""So many times a preempted sequence goes back to the front; after that it waits in order of arrival."""


class WaitingQueue:
    """Q1: a sequence stands in it once. Q2: ``num_overtakers(seq)`` counts the different later arrivals that
    have been admitted while ``seq`` was not finished, each once, however often it was preempted and resumed.

    Since an arrival later than ``b`` is later than every ``a`` before ``b``, the earliest waiting request is
    always the one that was overtaken most and that has waited longest: a bound that holds for it holds for
    all. Operations cost O(log n).
    """

    def __init__(self) -> None:
        self._by_number: SortedDict[int, Sequence] = SortedDict()
        self._boosted: SortedDict[int, Sequence] = SortedDict()
        self._admitted: SortedList[int] = SortedList()
        """Numbers of all admitted arrivals later than the earliest waiting one."""

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
        if 0 < seq.num_preemptions <= MAX_BOOSTS:
            self._boosted[seq.number] = seq

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out without admitting it."""
        del self._by_number[seq.number]
        self._boosted.pop(seq.number, None)
        self._forget()

    def admit(self, seq: Sequence) -> None:
        """Take ``seq`` out and count it as an overtaker of all that came before it."""
        del self._by_number[seq.number]
        self._boosted.pop(seq.number, None)
        if seq.num_preemptions == 0:  # otherwise it counts already
            self._admitted.add(seq.number)
        self._forget()

    def clear(self) -> None:
        self._by_number.clear()
        self._boosted.clear()
        self._admitted.clear()

    def _forget(self) -> None:
        """Drop admissions that overtook nobody who still waits."""
        if not self._by_number:
            self._admitted.clear()
            return
        earliest = self._by_number.keys()[0]
        while self._admitted and self._admitted[0] < earliest:
            del self._admitted[0]

    @property
    def earliest(self) -> Sequence:
        """The earliest arrival that waits; the queue is not empty."""
        seq: Sequence = self._by_number.values()[0]
        return seq

    def num_overtakers(self, seq: Sequence) -> int:
        return len(self._admitted) - int(self._admitted.bisect_right(seq.number))

    def boosted(self) -> list[Sequence]:
        """Preempted sequences that go first, in order of arrival."""
        return list(self._boosted.values())

    def ordinary(self, limit: int) -> list[Sequence]:
        """The first ``limit`` of the others, in order of arrival."""
        others = (seq for number, seq in self._by_number.items() if number not in self._boosted)
        return list(islice(others, limit))

    def check(self) -> None:
        """Q1 and Q2. Raises ``InternalError``."""
        for number, seq in self._by_number.items():
            require(number == seq.number, "Q1", f"{seq.number} is filed under {number}")
            boosted = 0 < seq.num_preemptions <= MAX_BOOSTS
            require((number in self._boosted) == boosted, "Q1", f"{number} is boosted wrongly")
        require(self._boosted.keys() <= self._by_number.keys(), "Q1", "a boosted sequence does not wait")
        require(len(set(self._admitted)) == len(self._admitted), "Q2", "an overtaker counts twice")
