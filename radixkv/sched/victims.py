"""Victims: which running sequences are preempted, for pages or for a request of higher priority. Pure
functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from radixkv.sched.policy import MAX_BOOSTS
from radixkv.sequence import Sequence


def victim_for_pages(running: Iterable[Sequence], *, by_priority: bool) -> Sequence:
    """Who gives up its pages where decoding runs out of them: the one with the fewest preemptions, of those
    the latest arrival, so that the same one is not hit again and again. ``by_priority``: the lowest priority
    before all that, but of those only that go to the front again after it, if there are any."""

    def weakness(seq: Sequence) -> tuple[int, ...]:
        rank = (seq.num_preemptions < MAX_BOOSTS, -seq.request.priority) if by_priority else ()
        return (*rank, -seq.num_preemptions, seq.number)

    return max(running, key=weakness)


def weaker_than(
    seq: Sequence, running: Iterable[Sequence], may_not_be_overtaken: Callable[[Sequence], bool]
) -> list[Sequence]:
    """Who of ``running`` may be preempted for ``seq``, first to go first: those of lower priority, the lowest
    first, of equals the one with the fewest preemptions, of those the latest arrival.

    No beam search is, for its beams would all have to go. Nobody is preempted who would not go to the front
    afterwards (``MAX_BOOSTS``), so nobody more often than that; nor whom D4 would put before
    ``seq`` at once, so that the two would change places for ever.
    """
    weaker = [
        other
        for other in running
        if other.request.priority < seq.request.priority
        and other.request.beam is None
        and other.num_preemptions < MAX_BOOSTS
        and not may_not_be_overtaken(other)
    ]
    weaker.sort(key=lambda other: (other.request.priority, other.num_preemptions, -other.number))
    return weaker
