"""open_service: from a model's name and the options of ``LLM`` and ``AsyncLLM`` to a ``Service``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

from radixkv.config import EngineConfig, EvictionPolicyName, PolicyName
from radixkv.errors import ConfigError
from radixkv.executor.attention import BACKENDS
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.loader import load_model, refuse_other_kind
from radixkv.plain import shown
from radixkv.service import Service
from radixkv.settings import pin_budget_pages, pin_tokens, whole_or_none
from radixkv.text import Tokenizer


class OpenOptions(TypedDict, total=False):
    """What ``LLM`` and ``AsyncLLM`` may be opened with; every option may be left out.

    The model:

    - ``revision`` (none): branch, tag or commit of a model on the hub.
    - ``device`` ("cpu"), ``dtype`` ("float32"): where the weights go, and as what.
    - ``attention`` ("cpu"): the backend; ``num_threads`` (torch's own number): of the CPU.
    - ``progress`` (None): bars while it loads and, with ``LLM``, while it generates; ``None`` shows them on a
      terminal only.

    The cache:

    - ``num_tokens`` (None): size of the K/V store; ``None`` takes half of the memory that is left once the
      model is loaded, at most 8 GiB.
    - ``page_size`` (16): tokens in a page, a power of two up to 256.
    - ``prefix_cache`` (True): ``False`` finds nothing again.
    - ``eviction_policy`` ("lru"): what is forgotten first; lru, lfu, slru, fifo, priority or cost.
    - ``max_pinned_tokens`` (None): how much of the store pins may hold (whole pages, at least one, or 0),
      which no request can count on; ``None`` is a quarter, or nothing without a prefix cache.
    - ``events`` (False): record what enters and leaves the cache, for ``take_events``.

    The queue:

    - ``policy`` ("lpm"): its order; lpm, fcfs, dfs-weight, lof, priority or random.
    - ``policy_seed`` (0): of the order ``random``.
    - ``priority_preemption`` (True): with ``priority``, whether running requests make way.
    - ``max_waiting`` (None): requests that may wait at once; as many as come.
    - ``queue_timeout_s`` (None): how long a request waits for its start before it ends as ``timeout``.
    - ``max_running`` (64): sequences that may run at once.
    - ``max_batch_tokens`` (1024): tokens computed in one step.
    """

    revision: str | None
    device: str
    dtype: str
    attention: str
    num_threads: int | None
    progress: bool | None
    num_tokens: int | None
    page_size: int
    prefix_cache: bool
    eviction_policy: EvictionPolicyName
    max_pinned_tokens: int | None
    events: bool
    policy: PolicyName
    policy_seed: int
    priority_preemption: bool
    max_waiting: int | None
    queue_timeout_s: float | None
    max_running: int
    max_batch_tokens: int


_OF_ENGINE = (
    "page_size", "prefix_cache", "eviction_policy", "events", "policy", "policy_seed", "priority_preemption",
    "max_waiting", "queue_timeout_s", "max_running", "max_batch_tokens",
)  # fmt: skip
"""Options that are the engine's own settings, with its defaults."""


def open_service(
    owner: str, model: str | os.PathLike[str] | LoadedModel, options: Mapping[str, Any]
) -> Service:
    """Load ``model`` (see ``load_model``; or a ``LoadedModel``, which services may share). The options are
    those of ``OpenOptions``, checked before anything is loaded. ``owner`` is who takes them, for messages.

    Raises ``ConfigError``, ``ModelLoadError``, ``UnsupportedModelError``.
    """
    _refuse_unknown(owner, options)
    config = EngineConfig(  # the number of pages comes last
        num_pages=1, **{name: options[name] for name in _OF_ENGINE if name in options}
    )
    num_tokens = whole_or_none("num_tokens", options.get("num_tokens"), 1)
    num_threads = whole_or_none("num_threads", options.get("num_threads"), 1)
    max_pinned_tokens = pin_tokens(options.get("max_pinned_tokens"), config.page_size, config.prefix_cache)
    attention = options.get("attention", "cpu")
    if attention not in BACKENDS:
        raise ConfigError(f"attention must be one of {', '.join(BACKENDS)}, got {shown(attention)}")
    loaded = _loaded(model, options)
    from radixkv.executor.sizing import build_executor  # loads torch, whose time load_model reports

    executor, sizing = build_executor(
        loaded,
        num_tokens=num_tokens,
        page_size=config.page_size,
        attention=attention,
        num_threads=num_threads,
    )
    pinned = pin_budget_pages(max_pinned_tokens, executor.num_pages, config.page_size, config.prefix_cache)
    config = replace(config, num_pages=executor.num_pages, max_pinned_pages=pinned)
    tokenizer = Tokenizer(loaded.tokenizer) if loaded.tokenizer is not None else None
    load = {f"{phase}_s": seconds for phase, seconds in loaded.load_report.items()}
    return Service(executor, tokenizer, config, load=load, sizing=sizing)


def _loaded(model: str | os.PathLike[str] | LoadedModel, options: Mapping[str, Any]) -> LoadedModel:
    revision, dtype = options.get("revision"), options.get("dtype", "float32")
    device = options.get("device", "cpu")
    if isinstance(model, LoadedModel):
        refuse_other_kind(model, revision, dtype, device)
        return model
    return load_model(model, revision=revision, dtype=dtype, device=device, progress=options.get("progress"))


def _refuse_unknown(owner: str, options: Mapping[str, Any]) -> None:
    known = list(OpenOptions.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{owner} has no option {name!r}{hint} (options: {', '.join(sorted(known))})")
