"""open_service: from a model's name and the options of ``LLM`` and ``AsyncLLM`` to a ``Service``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypedDict

from radixkv.config import EngineConfig, EvictionPolicyName, PolicyName
from radixkv.errors import ConfigError
from radixkv.executor.attention import BACKENDS
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.loader import load_model, refuse_other_kind
from radixkv.service import Service
from radixkv.settings import pin_budget_pages, pin_tokens, whole_or_none
from radixkv.text import Tokenizer


class OpenOptions(TypedDict, total=False):
    """What ``LLM`` and ``AsyncLLM`` may be opened with; every option may be left out."""

    revision: str | None
    """Of a model on the hub."""
    device: str
    dtype: str
    page_size: int
    """Tokens in a page: a power of two up to 256; 16 unless given."""
    num_tokens: int | None
    """Size of the K/V store; ``None`` takes half of the memory that is left, at most 8 GiB."""
    policy: PolicyName
    """Order of the waiting queue; ``lpm`` unless given."""
    policy_seed: int
    """Of the order ``random``; 0 unless given."""
    priority_preemption: bool
    """With ``priority``: whether running requests make way; they do unless told otherwise."""
    max_waiting: int | None
    """Requests that may wait at once; as many as come unless given."""
    queue_timeout_s: float | None
    """How long a request waits for its start before it ends with ``timeout``; for ever unless given."""
    prefix_cache: bool
    """False: nothing is found again."""
    eviction_policy: EvictionPolicyName
    """What the cache forgets first; ``lru`` unless given."""
    events: bool
    """True: what enters and leaves the cache is recorded for ``take_events``."""
    max_running: int
    """Sequences that may run at once; 64 unless given."""
    max_batch_tokens: int
    """Tokens computed in one step; 1024 unless given."""
    max_pinned_tokens: int | None
    """How much of the store pins may hold (whole pages, at least one or 0), which no request can count on;
    ``None`` is a quarter, or nothing without a prefix cache."""
    attention: str
    num_threads: int | None
    progress: bool | None
    """Bars; ``None`` shows them on a terminal only."""


def open_service(
    model: str | os.PathLike[str] | LoadedModel,
    *,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    page_size: int = 16,
    num_tokens: int | None = None,
    policy: PolicyName = "lpm",
    policy_seed: int = 0,
    priority_preemption: bool = True,
    max_waiting: int | None = None,
    queue_timeout_s: float | None = None,
    prefix_cache: bool = True,
    eviction_policy: EvictionPolicyName = "lru",
    events: bool = False,
    max_running: int = 64,
    max_batch_tokens: int = 1024,
    max_pinned_tokens: int | None = None,
    attention: str = "cpu",
    num_threads: int | None = None,
    progress: bool | None = None,
) -> Service:
    """Load ``model`` (see ``load_model``; or a ``LoadedModel``, which services may share). The options are
    those of ``OpenOptions``, checked before anything is loaded.

    Raises ``ConfigError``, ``ModelLoadError``, ``UnsupportedModelError``.
    """
    config = EngineConfig(  # the number of pages comes last
        num_pages=1,
        page_size=page_size,
        policy=policy,
        policy_seed=policy_seed,
        priority_preemption=priority_preemption,
        max_waiting=max_waiting,
        queue_timeout_s=queue_timeout_s,
        prefix_cache=prefix_cache,
        eviction_policy=eviction_policy,
        events=events,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
    )
    num_tokens = whole_or_none("num_tokens", num_tokens, 1)
    num_threads = whole_or_none("num_threads", num_threads, 1)
    max_pinned_tokens = pin_tokens(max_pinned_tokens, config.page_size, prefix_cache)
    if attention not in BACKENDS:
        raise ConfigError(f"attention must be one of {', '.join(BACKENDS)}, got {attention!r}")
    if isinstance(model, LoadedModel):
        refuse_other_kind(model, revision, dtype, device)
        loaded = model
    else:
        loaded = load_model(model, revision=revision, dtype=dtype, device=device, progress=progress)
    from radixkv.executor.sizing import build_executor  # loads torch, whose time load_model reports

    executor, sizing = build_executor(
        loaded,
        num_tokens=num_tokens,
        page_size=config.page_size,
        attention=attention,
        num_threads=num_threads,
    )
    pinned = pin_budget_pages(max_pinned_tokens, executor.num_pages, config.page_size, prefix_cache)
    config = replace(config, num_pages=executor.num_pages, max_pinned_pages=pinned)
    tokenizer = Tokenizer(loaded.tokenizer) if loaded.tokenizer is not None else None
    load = {f"{phase}_s": seconds for phase, seconds in loaded.load_report.items()}
    return Service(executor, tokenizer, config, load=load, sizing=sizing)
