"""Explanation: how long a hit would be, and why it stops there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from radixkv.types import Namespace

Reason: TypeAlias = Literal["whole", "evicted", "other_namespace", "differs", "absent"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why the cache holds ``hit_tokens`` tokens of a prompt and no more.

    ``reason`` is the first of these that applies: ``whole`` (all of it is cached; a request still computes
    at least one token), ``evicted`` (the next token was cached, and is among the remembered evictions),
    ``other_namespace`` (another namespace that the caller may see has a longer hit), ``differs`` (the cache
    goes on with another token there), ``absent``. The other fields are filled whenever they are known.
    """

    hit_tokens: int
    reason: Reason
    position: int
    """First position that is not cached; the prompt's length when ``whole``."""
    cached_token: int | None = None
    """A token that the cache has at ``position`` behind the same beginning."""
    evictions_ago: int | None = None
    """How many pages were evicted since, the page in question included."""
    other_namespace: Namespace | None = None
    """Of the namespaces that the caller may see the one with the longest hit, if longer than
    ``hit_tokens``."""
