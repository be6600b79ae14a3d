"""Attention over the paged store: the protocol, the plain oracle, the fast backends.

A backend's module is loaded when it is asked for, so that none asks for another's libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.executor.attention.base import AttentionBackend
    from radixkv.executor.kv_store import KVStore

BACKENDS = ("cpu", "reference")


def make_backend(name: str, store: KVStore) -> AttentionBackend:
    """The backend called ``name`` over ``store``. Raises ``ConfigError`` for a name it does not know."""
    if name == "reference":
        from radixkv.executor.attention.reference import ReferenceBackend

        return ReferenceBackend(store)
    if name == "cpu":
        from radixkv.executor.attention.cpu import CpuBackend

        return CpuBackend(store)
    raise ConfigError(f"attention must be one of {', '.join(BACKENDS)}, got {name!r}")
