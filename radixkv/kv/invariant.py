"""How ``check()`` reports a broken invariant: by its name, with the state."""

from __future__ import annotations

from radixkv.errors import InternalError


def require(holds: object, name: str, *state: object) -> None:
    """Raise ``InternalError`` that names the invariant unless ``holds`` is true. Only then the parts of
    ``state`` become text, and those that can be called are called first: a check that passes costs little."""
    if not holds:
        words = " ".join(str(part() if callable(part) else part) for part in state)
        raise InternalError(f"{name} does not hold: {words}")
