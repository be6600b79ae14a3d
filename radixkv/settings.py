"""Settings of ``LLM`` that come in tokens, checked and turned into pages."""

from __future__ import annotations

from radixkv.errors import ConfigError
from radixkv.plain import plain_whole, shown

PIN_SHARE = 0.25
"""Share of the store that pins may hold when no budget is given."""


def pin_budget_pages(
    max_pinned_tokens: int | None, num_pages: int, page_size: int, prefix_cache: bool
) -> int:
    """Whole pages that pins may hold. ``None``: ``PIN_SHARE`` of the store, or none without a cache.
    Raises ``ConfigError`` for a budget that leaves requests nothing, and what ``pin_tokens`` raises."""
    num_tokens = num_pages * page_size
    max_pinned_tokens = pin_tokens(max_pinned_tokens, page_size, prefix_cache)
    if max_pinned_tokens is None:
        return int(num_pages * PIN_SHARE) if prefix_cache else 0
    if max_pinned_tokens >= num_tokens:
        raise ConfigError(
            f"max_pinned_tokens must be below the store's {num_tokens} tokens, got {shown(max_pinned_tokens)}"
        )
    return max_pinned_tokens // page_size


def pin_tokens(value: object, page_size: int, prefix_cache: bool) -> int | None:
    """``max_pinned_tokens`` as a plain number or ``None``, as far as it can be judged before the store
    exists. Raises ``ConfigError`` for a budget that would hold nothing: above 0 but below one page, or
    above 0 where there is no cache."""
    num_tokens = whole_or_none("max_pinned_tokens", value, 0)
    if not num_tokens:  # None: a default that follows from the rest; 0: no pins
        return num_tokens
    if not prefix_cache:
        raise ConfigError(
            f"max_pinned_tokens must be 0 with prefix_cache=False, got {shown(num_tokens)}: "
            "without a cache nothing can be pinned"
        )
    if num_tokens < page_size:
        raise ConfigError(
            f"max_pinned_tokens must be 0 or at least one page of {page_size} tokens, got {num_tokens}"
        )
    return num_tokens


def whole_or_none(name: str, value: object, low: int) -> int | None:
    """``value`` as Python's own number (numpy's kinds are taken too). Raises ``ConfigError`` unless it is
    ``None`` or a whole number of at least ``low``."""
    if value is None:
        return None
    number = plain_whole(value)
    if number is None or number < low:
        raise ConfigError(f"{name} must be a whole number of at least {low} or None, got {shown(value)}")
    return number
