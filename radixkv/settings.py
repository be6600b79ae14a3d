"""Settings of ``LLM`` that come in tokens, checked and turned into pages."""

from __future__ import annotations

from radixkv.errors import ConfigError

PIN_SHARE = 0.25
"""Share of the store that pins may hold when no budget is given."""


def pin_budget_pages(
    max_pinned_tokens: int | None, num_pages: int, page_size: int, prefix_cache: bool
) -> int:
    """Whole pages that pins may hold. ``None``: ``PIN_SHARE`` of the store, or none without a cache.
    Raises ``ConfigError`` for a budget that leaves requests nothing."""
    num_tokens = num_pages * page_size
    if max_pinned_tokens is None:
        return int(num_pages * PIN_SHARE) if prefix_cache else 0
    if max_pinned_tokens >= num_tokens:
        raise ConfigError(
            f"max_pinned_tokens must be below the store's {num_tokens} tokens, got {max_pinned_tokens}"
        )
    return max_pinned_tokens // page_size


def refuse_unless_whole(name: str, value: object, low: int) -> None:
    """Raise ``ConfigError`` unless ``value`` is ``None`` or a whole number of at least ``low``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low} or None, got {value!r}")
