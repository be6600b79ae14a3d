"""LiveRequest: a request that has not ended, and the sequences that are at work for it."""

from __future__ import annotations

from radixkv.sched.beam_group import BeamGroup
from radixkv.sequence import FinishReason, Request, Sequence, Status

_WORSE: tuple[FinishReason, ...] = ("stop", "length", "timeout", "abort", "error")


class LiveRequest:
    """One sequence until its prompt is computed; then one for each sample or beam that has not ended."""

    __slots__ = ("beams", "reason", "request", "samples")

    def __init__(self, first: Sequence, beams: BeamGroup | None) -> None:
        self.request: Request = first.request
        self.samples = [first]
        """In order of ``sample_index``; of a beam search, see ``beams``."""
        self.beams = beams
        self.reason: FinishReason = "stop"
        """The worst that a sample has ended with: what the request counts as when all have."""

    @property
    def sequences(self) -> list[Sequence]:
        """Those that run or wait in the queue."""
        if self.beams is None:
            return self.samples
        return [self.beams.first] if self.beams.is_gathered else self.beams.beams

    @property
    def is_running(self) -> bool:
        """Whether any of its sequences is."""
        return any(seq.status is Status.RUNNING for seq in self.sequences)

    def sample(self, sample_index: int) -> Sequence | None:
        """The sequence of this sample alone; ``None`` where it has ended or does not exist yet."""
        for seq in self.samples:
            if seq.sample_index == sample_index and seq.num_samples == 1 and self.beams is None:
                return seq
        return None

    def remove(self, seq: Sequence, reason: FinishReason) -> None:
        """``seq`` has ended."""
        self.samples.remove(seq)
        self.reason = max(self.reason, reason, key=_WORSE.index)
