"""How ``check()`` reports a broken invariant: by its name, with the state."""

from __future__ import annotations

from radixkv.errors import InternalError


def require(holds: object, name: str, state: object) -> None:
    """Raise ``InternalError`` that names the invariant unless ``holds`` is true."""
    if not holds:
        raise InternalError(f"{name} does not hold: {state}")
