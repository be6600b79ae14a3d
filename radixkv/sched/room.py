"""Room: what is left of places, budget and pages while one step's admissions are made."""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.sched.reservation import Reservation
from radixkv.sequence import Sequence


class Room:
    """Lives for one step, inside ``Admission.admit``. Keeps ``grants`` (tokens that each sequence computes in
    it) up to date: at least 1 each, no more than the budget together."""

    def __init__(
        self,
        running: Iterable[Sequence],
        grants: dict[Sequence, int],
        *,
        max_running: int,
        max_batch_tokens: int,
        reservation: Reservation,
    ) -> None:
        self.running = list(running)
        self.before = tuple(self.running)
        """Those that ran when the step began; nobody else makes way, so that nobody starts for nothing."""
        self.grants = grants
        self.victims: set[Sequence] = set()
        """Running sequences that made way in this step."""
        self.places = max_running - sum(seq.num_samples for seq in self.running)
        self.budget = max_batch_tokens - sum(grants.values())
        self._reservation = reservation
        self._to_come: dict[Sequence, int] = {}
        """Pages that each who runs will want, once somebody has asked: neither the reservation nor a page
        table changes while it runs on in this step."""
        self._sum_to_come = 0

    def num_to_make_way(self, seq: Sequence, weaker: list[Sequence]) -> int | None:
        """How many of ``weaker``, from its start, have to go so that ``seq`` finds places and a token of the
        budget; ``None``: all of them would not do. Changes nothing."""
        num, places = 0, self.places
        while places < seq.num_samples:
            if num == len(weaker):
                return None
            places += weaker[num].num_samples
            num += 1
        budget = self.budget + num + sum(self.grants[other] - 1 for other in weaker)
        return num if budget >= 1 else None

    def pages_to_come(self, giving_way: list[Sequence]) -> int:
        """Pages that those who run will want, without ``giving_way``; 0 where the reserve is constant, which
        is taken at admission. Changes nothing."""
        if not self._reservation.is_adaptive:
            return 0
        for seq in self.running[len(self._to_come) :]:  # the others are known already
            self._to_come[seq] = num_pages = self._reservation.pages(seq)
            self._sum_to_come += num_pages
        return self._sum_to_come - sum(self._to_come[seq] for seq in giving_way)

    def make_way(self, seq: Sequence) -> None:
        """``seq`` runs no more."""
        self.running.remove(seq)
        self._sum_to_come -= self._to_come.pop(seq, 0)
        self.victims.add(seq)
        self.places += seq.num_samples
        self.budget += self.grants.pop(seq)

    def take(self, seq: Sequence, weaker: list[Sequence]) -> None:
        """``seq`` runs from now on. It is granted what it lacks, as far as the budget goes and what can be
        taken from those of ``weaker`` who compute more than one token."""
        lacking = seq.num_tokens - seq.num_computed
        for other in weaker:
            if self.budget >= lacking:
                break
            if other in self.grants:
                taken = min(self.grants[other] - 1, lacking - self.budget)
                self.grants[other] -= taken
                self.budget += taken
        self.grants[seq] = min(lacking, self.budget)
        self.running.append(seq)
        self.places -= seq.num_samples
        self.budget -= self.grants[seq]
