"""Token ids as int32 bytes: what edges and keys are made of, and how far two of them agree."""

from __future__ import annotations

import numpy as np

from radixkv.errors import MisuseError
from radixkv.plain import shown
from radixkv.types import PageIds, TokenIds

TOKEN_BYTES = 4
_INT32 = np.dtype(np.int32)


def key_of(token_ids: TokenIds) -> bytes:
    """Raises ``MisuseError`` for anything but a flat int32 array."""
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype != _INT32 or token_ids.ndim != 1:
        raise MisuseError(f"token ids are a flat int32 array, got {shown(token_ids)}")
    return token_ids.tobytes()


def tokens_of(tokens: bytes) -> TokenIds:
    """The way back; a read-only view."""
    return np.frombuffer(tokens, np.int32)


def joined(parts: list[bytes]) -> PageIds:
    """Pieces of int32 ids as one read-only array."""
    return np.frombuffer(b"".join(parts), np.int32)


def agreement(edge: bytes, edge_start: int, key: bytes, key_start: int) -> int:
    """How many tokens ``edge`` and ``key`` have in common, each read from its byte ``start`` on."""
    if edge_start == 0 and key.startswith(edge, key_start):
        return len(edge) // TOKEN_BYTES
    num = min(len(edge) - edge_start, len(key) - key_start) // TOKEN_BYTES
    if num <= 0:
        return 0
    a = np.frombuffer(edge, np.int32, num, edge_start)
    b = np.frombuffer(key, np.int32, num, key_start)
    differ = a != b
    first = int(differ.argmax())
    return first if differ[first] else num


def page_agreement(page: bytes, other: bytes) -> int:
    """``agreement`` of two pages from their first tokens on, at a fifth of the cost."""
    num_bytes = min(len(page), len(other))
    if page[:TOKEN_BYTES] != other[:TOKEN_BYTES]:
        return 0
    differ = int.from_bytes(page[:num_bytes], "little") ^ int.from_bytes(other[:num_bytes], "little")
    if differ == 0:
        return num_bytes // TOKEN_BYTES
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)
