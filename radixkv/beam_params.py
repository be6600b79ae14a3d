"""BeamParams: what a beam search wants. Frozen."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import InvalidRequestError
from radixkv.plain import shown
from radixkv.sampling import real_within, whole_within

MAX_BEAM_WIDTH = 1024
MAX_LENGTH_PENALTY = 10.0
"""Of either sign; 2**31 tokens to this power are still a number."""


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How wide a beam search is, how it ranks, and when it stops. Raises ``InvalidRequestError``, naming
    the field, its value and the limit.

    A finished beam's score is its cumulative log-probability over ``length ** length_penalty``, the length
    counted in output tokens, an end token included (Wu et al., 2016, in the simple form that is usual now).
    """

    width: int
    """Beams that go on after each step, and results at the end; 1 to 1024."""
    length_penalty: float = 1.0
    """Above 0 favours long outputs, below 0 short ones; -10 to 10."""
    early_stopping: bool = False
    """True: stop as soon as ``width`` beams have finished. False: go on until the best running beam, scored
    at its present length, is no better than the worst finished one."""

    def __post_init__(self) -> None:
        self._keep("width", whole_within("beam width", self.width, 1, MAX_BEAM_WIDTH))
        penalty = real_within("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        self._keep("length_penalty", penalty)
        if not isinstance(self.early_stopping, bool):
            raise InvalidRequestError(
                f"early_stopping must be True or False, got {shown(self.early_stopping)}"
            )

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """Of an output of ``num_tokens`` (at least 1)."""
        divisor: float = float(num_tokens) ** self.length_penalty
        return cumulative_logprob / divisor
