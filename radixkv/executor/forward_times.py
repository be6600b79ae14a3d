"""ForwardTimes: where the seconds of a forward went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ForwardTimes:
    """Cumulative seconds, added to by the matrix products and the attention hook of one model.

    On a device that works asynchronously these are seconds of the host. One model runs one forward at a
    time, so an executor reads them before and after its own.
    """

    matmul: float = 0.0
    attention: float = 0.0
