"""Eviction policies: each is one function that gives a sort key. The page with the smallest key goes first.

A key is asked for when a path is used, for all of its pages at once, and a page keeps the largest key that
it was ever given. So a key that never rises along a path gives pages whose keys never rise along a path:
whatever hangs below a page goes before it, and nothing depends on how edges are split (T5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from radixkv.config import EvictionPolicyName

MAX_PRIORITY = 2**20
"""Priorities lie in ``-MAX_PRIORITY..MAX_PRIORITY``: a key has 63 bits for priority and time."""
MAX_HITS = 2**20
"""More hits than this are not told apart."""
SLRU_HITS = 2
"""Hits after which a page is protected."""
EVEN_COST_TOKENS = 16_384
"""Position at which a token's attention costs as much to compute as all the rest of it. It is proportional
to the model's width; this is about right for widths of 1,000 to 4,000."""
_TIME_BITS = 42
_COST_BITS = 20

Keys: TypeAlias = NDArray[np.int64]


class PathUse(NamedTuple):
    """One use of a path from a root: a match, or an insert. Arrays have an entry per page of the path."""

    now: int
    """This use's number; they count up."""
    num_new: int
    """Pages at the path's end that this use added; 0 for a match."""
    hits: NDArray[np.int64]
    """How many matches found each page since it was added, this one included."""
    priorities: NDArray[np.int64]
    """The highest priority of anybody who used each page."""
    page_size: int
    floor: int
    """The largest key that was evicted so far, plus 1 for each use since: what a page of no worth gets."""


Key: TypeAlias = Callable[[PathUse], Keys]


def lru(use: PathUse) -> Keys:
    """Least recently used first."""
    return np.full(len(use.hits), use.now, np.int64)


def fifo(use: PathUse) -> Keys:
    """Oldest first, however often it was used. A page counts as young as the youngest that was ever added
    below it."""
    return np.full(len(use.hits), use.now if use.num_new else 0, np.int64)


def lfu(use: PathUse) -> Keys:
    """Fewest hits first; of equal ones the least recently used. Nothing is forgotten: what was popular once
    stays long."""
    return np.minimum(use.hits, MAX_HITS) << _TIME_BITS | use.now


def slru(use: PathUse) -> Keys:
    """Segmented LRU (Karedla et al., "Caching strategies to improve disk system performance", 1994): what
    was hit fewer than ``SLRU_HITS`` times is on probation and goes first, the rest is protected; least
    recently used first within both. The protected part is not bounded."""
    return (use.hits >= SLRU_HITS).astype(np.int64) << _TIME_BITS | use.now


def priority(use: PathUse) -> Keys:
    """Lowest priority first (the highest that anybody used the page with); of equal ones the least recently
    used."""
    return (use.priorities << _TIME_BITS) + use.now


def cost(use: PathUse) -> Keys:
    """Cheapest to compute again first, with ageing: GreedyDual-Size (Cao and Irani, "Cost-aware WWW proxy
    caching algorithms", 1997) with frequency (Cherkasova, "Improving WWW proxies performance with
    Greedy-Dual-Size-Frequency caching policy", 1998). All pages are of one size. A page costs its tokens'
    work, in which attention grows with the position; its key is the floor plus hits (and 1 for having been
    computed) times cost. A page is worth as much as the dearest that hangs below it on the path, since that
    cannot stay without it."""
    positions = np.arange(len(use.hits), dtype=np.int64) * use.page_size
    costs = ((EVEN_COST_TOKENS + positions) << _COST_BITS) // EVEN_COST_TOKENS
    keys = use.floor + (np.minimum(use.hits, MAX_HITS) + 1) * costs
    return np.maximum.accumulate(keys[::-1])[::-1]


def key_of(name: EvictionPolicyName) -> Key:
    """The function of this name."""
    keys: dict[EvictionPolicyName, Key] = {
        "lru": lru, "lfu": lfu, "slru": slru, "fifo": fifo, "priority": priority, "cost": cost,
    }  # fmt: skip
    return keys[name]
