"""What callers of the ledger pass, checked. Errors name the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from radixkv.config import MAX_PAGE_SIZE
from radixkv.errors import ConfigError, InvalidRequestError, MisuseError
from radixkv.plain import plain_real, plain_whole, shown
from radixkv.types import Namespace, TokenIds


def as_page_size(value: object) -> int:
    """Raises ``ConfigError`` unless ``value`` is a power of two up to ``MAX_PAGE_SIZE``."""
    page_size = plain_whole(value)
    if page_size is None or not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ConfigError(f"page_size must be a power of two up to {MAX_PAGE_SIZE}, got {shown(value)}")
    return page_size


def as_setting(name: str, value: object, high: int | None = None) -> int:
    """Raises ``ConfigError`` unless ``value`` is a whole number from 0 to ``high`` (``None``: no limit)."""
    whole = plain_whole(value)
    if whole is None:
        raise ConfigError(f"{name} must be a whole number, got {shown(value)}")
    if high is not None and not 0 <= whole <= high:
        raise ConfigError(f"{name} must lie in 0..{high}, got {shown(whole)}")
    if whole < 0:
        raise ConfigError(f"{name} must be at least 0, got {shown(whole)}")
    return whole


def as_num_tokens(verb: str, value: object) -> int:
    """Raises ``MisuseError`` unless ``value`` is a whole number of at least 0."""
    whole = plain_whole(value)
    if whole is None or whole < 0:
        raise MisuseError(f"cannot {verb} {shown(value)} tokens")
    return whole


def as_timeout_s(value: object) -> float | None:
    """Raises ``InvalidRequestError`` unless ``value`` is ``None`` or a finite number above 0."""
    if value is None:
        return None
    seconds = plain_real(value)
    if seconds is None or not 0 < seconds <= 1e300:
        raise InvalidRequestError(f"timeout_s must be above 0 and finite, got {shown(value)}")
    return float(seconds)


def as_namespace(value: object) -> Namespace:
    """A tuple of Python's own text, whole numbers and ``None``, or ``InvalidRequestError``."""
    if not isinstance(value, tuple):
        raise InvalidRequestError(f"a namespace is a tuple, got {shown(value)}")
    for field in value:
        if field is not None and not isinstance(field, str) and plain_whole(field) is None:
            raise InvalidRequestError(f"a namespace is of text, whole numbers and None, got {shown(field)}")
    return tuple(
        field if field is None else str.__str__(field) if isinstance(field, str) else plain_whole(field)
        for field in value
    )


def as_token_ids(values: object) -> TokenIds:
    """A flat int32 array, maybe empty, of an array or any iterable of whole numbers. Raises
    ``InvalidRequestError`` for anything else; a masked array is refused, as in a request."""
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidRequestError("token ids must not be a masked array")
    ids = values if isinstance(values, np.ndarray) else np.array(_whole_numbers(values), np.int32)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"token ids must be a flat list of whole numbers, got {ids.dtype} {ids.shape}"
        )
    if len(ids) and (int(ids.min()) < -(2**31) or int(ids.max()) >= 2**31):
        raise InvalidRequestError(f"token ids must fit into 32 bits, got {ids.min()}..{ids.max()}")
    return ids.astype(np.int32, copy=False)


def _whole_numbers(values: object) -> list[int]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"token ids must be a flat list of whole numbers, got {shown(values)}")
    out: list[int] = []
    for value in values:
        whole = plain_whole(value)
        if whole is None:
            raise InvalidRequestError(
                f"token ids must be a flat list of whole numbers, got {shown(value)} in it"
            )
        if not -(2**31) <= whole < 2**31:
            raise InvalidRequestError(f"token ids must fit into 32 bits, got {shown(whole)}")
        out.append(whole)
    return out
