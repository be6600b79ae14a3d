"""Frozen settings, validated once in ``__post_init__`` and never written again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from radixkv.errors import ConfigError
from radixkv.plain import plain_real, plain_whole, shown

PolicyName: TypeAlias = Literal["fcfs", "lpm", "dfs-weight", "lof", "priority", "random"]
POLICIES: tuple[str, ...] = get_args(PolicyName)
EvictionPolicyName: TypeAlias = Literal["lru", "lfu", "slru", "fifo", "priority", "cost"]
EVICTION_POLICIES: tuple[str, ...] = get_args(EvictionPolicyName)
MAX_PAGE_SIZE = 256
MAX_SETTING = 2**31 - 1
"""Largest of every whole setting: ids and counts of pages are int32."""
_AT_LEAST_ONE = frozenset(
    {"num_pages", "page_size", "max_running", "max_batch_tokens", "max_candidates", "max_waiting"}
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the scheduler and the ledger need to know. Units stand in the names."""

    num_pages: int
    """Pages in the pool; the K/V store has one more, for padding."""
    page_size: int = 16
    """Tokens in a page: a power of two up to 256."""
    max_running: int = 64
    """Sequences that may run at once."""
    max_batch_tokens: int = 1024
    """Tokens computed in one step, prompt chunks and decodes together."""
    decode_reserve_tokens: int | None = None
    """Room for its output that a request must find at admission (less where its max_tokens is less).
    ``None``: a share of max_tokens, re-estimated all the time, that must be there for those that run, too."""
    policy: PolicyName = "lpm"
    """Order of the waiting queue. ``fcfs``: first come, first served. ``lpm``: longest cached prefix first.
    ``dfs-weight``: the cached prefixes depth first, the one that more requests wait for before the others.
    ``lof``: longest output (``max_tokens``) first. ``priority``: highest ``Request.priority`` first.
    ``random``: by ``policy_seed`` and number of arrival. D4 bounds them all."""
    policy_seed: int = 0
    """Of the order ``random``."""
    priority_preemption: bool = True
    """With policy ``priority``: a request that finds no place or pages takes those of running ones of lower
    priority. Without it, it waits until one ends."""
    max_waiting: int | None = None
    """Requests that may wait at once, preempted ones among them; one more is refused (``QueueFullError``).
    All that arrive between two steps wait, also where there are places for them. ``None``: no limit."""
    queue_timeout_s: float | None = None
    """A request that has waited longer for its first admission ends with ``timeout``, and is not computed.
    ``None``: it waits as long as it takes. ``Request.queue_timeout_s`` goes before this."""
    max_skips: int = 64
    """At most this many later arrivals may overtake a waiting request."""
    max_wait_s: float = 30.0
    """After this many seconds nothing overtakes a waiting request any more."""
    min_wait_tokens: int = 32
    """A request waits for a running one only if that will compute at least this many tokens of its prompt."""
    max_candidates: int = 128
    """Waiting requests whose hit is looked up in one step."""
    max_pinned_pages: int = 0
    """Budget of pages that pins may hold; 0 forbids pins. Without a prefix cache it must be 0."""
    prefix_cache: bool = True
    """False: the tree is a null tree; same kernels, every request computes its own prompt."""
    eviction_memory: int = 1024
    """How many evictions ``explain`` remembers."""
    eviction_policy: EvictionPolicyName = "lru"
    """What goes first when room is needed: ``radixkv.kv.eviction_policy`` says what each means."""
    events: bool = False
    """Record what enters and leaves the cache, for ``take_events``."""
    check_when_idle: bool = False
    """Verify every invariant (``Engine.check``) whenever no request is left, which takes some 50 ms for
    each thousand prefixes in the cache. Without it only the pages' counts are compared with their holders."""

    def __post_init__(self) -> None:
        """Numbers of numpy's kinds become Python's own. Raises ``ConfigError``."""
        for field in fields(self):
            given, kind = getattr(self, field.name), str(field.type)
            if given is None and kind.endswith("| None"):
                continue
            if kind.startswith("int"):
                self._set_number(field.name, given, plain_whole(given), "a whole number")
            elif kind.startswith("float"):
                self._set_number(field.name, given, plain_real(given), "a number")
            elif kind == "bool" and not isinstance(given, bool):
                raise ConfigError(f"{field.name} must be True or False, got {shown(given)}")
        if self.queue_timeout_s == 0:
            raise ConfigError("queue_timeout_s must be above 0 or None, got 0: nothing would ever start")
        if self.page_size > MAX_PAGE_SIZE or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two up to {MAX_PAGE_SIZE}, got {self.page_size}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {shown(self.policy)}")
        if self.eviction_policy not in EVICTION_POLICIES:
            allowed = ", ".join(EVICTION_POLICIES)
            raise ConfigError(f"eviction_policy must be one of {allowed}, got {shown(self.eviction_policy)}")
        if self.max_pinned_pages >= self.num_pages:
            raise ConfigError(
                f"max_pinned_pages must be below num_pages ({self.num_pages}), got {self.max_pinned_pages}"
            )
        if self.max_pinned_pages and not self.prefix_cache:
            raise ConfigError(
                f"max_pinned_pages must be 0 with prefix_cache=False, got {self.max_pinned_pages}: "
                "without a cache nothing can be pinned"
            )

    def _set_number(self, name: str, given: object, value: int | float | None, kind: str) -> None:
        if value is None:
            raise ConfigError(f"{name} must be {kind}, got {shown(given)}")
        low = 1 if name in _AT_LEAST_ONE else 0
        if not value >= low:
            raise ConfigError(f"{name} must be at least {low}, got {shown(value)}")
        if isinstance(value, int) and value > MAX_SETTING:
            raise ConfigError(f"{name} must be at most {MAX_SETTING}, got {shown(value)}")
        object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the runtime needs to know of a loaded model."""

    name: str
    vocab_size: int
    """Valid token ids are ``0 <= id < vocab_size``."""
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Longest sequence, prompt and output together."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    family: str = "llama"
