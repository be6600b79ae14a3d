"""The gate before any speed: greedy tokens of two arms are the same, but for near ties.

A row's logits differ in the last digits with the rows computed beside it, so two exact arms may part where
the two best tokens are all but equal. Such a first divergence is allowed and counted; any other is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from radixkv.types import TokenIds

MAX_GAP = 1e-3
"""Natural log of the quotient of two tokens' probabilities, which is the difference of their logits."""


@dataclass(frozen=True, eq=False)
class Fork:
    """Where two outputs part: after ``context_ids`` one goes on with ``token_a``, the other ``token_b``."""

    request: int
    position: int
    """Index into the output."""
    context_ids: TokenIds
    token_a: int
    token_b: int


Gaps: TypeAlias = Callable[[Sequence[Fork]], list[float]]
"""Log-probability of ``token_a`` less that of ``token_b`` after ``context_ids``, for each fork."""


@dataclass(frozen=True, eq=False)
class Equality:
    """What comparing one arm with another gave."""

    arm: str
    reference: str
    num_compared: int
    forks: tuple[Fork, ...]
    gaps: tuple[float, ...]

    @property
    def near_ties(self) -> int:
        """Divergences that the two tokens' gap excuses."""
        return sum(abs(gap) < MAX_GAP for gap in self.gaps)

    @property
    def passed(self) -> bool:
        return self.near_ties == len(self.gaps)

    def describe(self) -> str:
        """One line for the report, one more for each divergence."""
        same = self.num_compared - len(self.forks)
        verdict = "equal" if self.passed else "NOT EQUAL"
        lines = [f"{self.arm} against {self.reference}: {verdict}, {same} of {self.num_compared} identical"]
        if self.forks:
            lines[0] += f", {self.near_ties} part at a near tie (gap under {MAX_GAP:g})"
        lines.extend(
            f"  request {fork.request} parts at output token {fork.position}: "
            f"{fork.token_a} or {fork.token_b}, gap {gap:+.2e}"
            for fork, gap in zip(self.forks, self.gaps, strict=True)
        )
        return "\n".join(lines)


def compare(
    arm: str,
    outputs: Sequence[Sequence[int]],
    reference: str,
    reference_outputs: Sequence[Sequence[int]],
    prompts: Sequence[TokenIds],
    gaps: Gaps,
) -> Equality:
    """Compare the requests that both arms ran (a prefix of ``prompts``); ``gaps`` is asked only if some part.

    An output that merely ends early is never excused: its gap is infinite.
    """
    forks: list[Fork] = []
    short: list[Fork] = []
    for request, (one, other) in enumerate(zip(outputs, reference_outputs, strict=False)):
        shared = min(len(one), len(other))
        position = next((at for at in range(shared) if one[at] != other[at]), shared)
        if position == shared and len(one) == len(other):
            continue
        context = np.concatenate([prompts[request], np.asarray(one[:position], np.int32)])
        ended = position == shared
        tokens = (-1, -1) if ended else (int(one[position]), int(other[position]))
        (short if ended else forks).append(Fork(request, position, context, *tokens))
    found = gaps(forks) if forks else []
    return Equality(
        arm=arm,
        reference=reference,
        num_compared=min(len(outputs), len(reference_outputs)),
        forks=(*forks, *short),
        gaps=(*found, *[float("inf")] * len(short)),
    )
