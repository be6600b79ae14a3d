"""Urgency: what a caller says about his place in the queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Urgency:
    """Fields of a ``Request``, which checks them."""

    priority: int = 0
    queue_timeout_s: float | None = None


NO_URGENCY = Urgency()
