"""Plain Python numbers out of what a caller passes, and values shown in messages."""

from __future__ import annotations

import math
from numbers import Integral, Real

MAX_SHOWN = 80
"""Most characters of a value that a message repeats."""


def plain_whole(value: object) -> int | None:
    """``value`` as an ``int`` where it is a whole number, numpy's kinds too; ``None`` for anything else,
    ``bool`` among it."""
    if value.__class__ is int:  # nearly always
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def plain_real(value: object) -> int | float | None:
    """``value`` as an ``int`` or a ``float`` where it is a number, numpy's kinds too; ``None`` for anything
    else, ``bool`` among it. What is too large for a float is infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def shown(value: object) -> str:
    """``repr`` for a message: cut where it is long, and of a whole number that Python would not print, the
    size."""
    whole = plain_whole(value)
    if whole is not None and whole.bit_length() > 256:
        return f"a whole number of {whole.bit_length()} bits"
    try:
        text = repr(whole) if whole is not None else repr(value)
    except Exception:  # a caller's object may print badly, and the message is about something else
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
