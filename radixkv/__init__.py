"""radixkv: a runtime that never computes the same prefix twice.

The public names come lazily: ``import radixkv`` loads neither torch nor numpy, and ``radixkv.kv``, the
ledger, stands alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.adapters import Adapter
    from radixkv.async_chat import AsyncChat
    from radixkv.async_llm import AsyncLLM
    from radixkv.chat import Chat
    from radixkv.chat_stream import ChatStream
    from radixkv.config import EngineConfig, ModelSpec
    from radixkv.errors import (
        ConfigError,
        DuplicateRequestError,
        EngineDeadError,
        InternalError,
        InvalidRequestError,
        MisuseError,
        ModelLoadError,
        NonFiniteLogitsError,
        OutOfPages,
        PinBudgetExceeded,
        QueueFullError,
        QueueTimeoutError,
        RadixKVError,
        RequestAbortedError,
        RequestTooLargeError,
        UnsupportedModelError,
    )
    from radixkv.generation import Generation
    from radixkv.llm import LLM
    from radixkv.opening import OpenOptions
    from radixkv.outputs import (
        Beam,
        BeamOutput,
        Delta,
        Output,
        PrefillInfo,
        PromptExplanation,
        Sample,
        Score,
        Usage,
    )
    from radixkv.sampling import SamplingParams
    from radixkv.text import Tokenizer
    from radixkv.token_logprobs import TokenLogprobs

__all__ = [
    "LLM",
    "Adapter",
    "AsyncChat",
    "AsyncLLM",
    "Beam",
    "BeamOutput",
    "Chat",
    "ChatStream",
    "ConfigError",
    "Delta",
    "DuplicateRequestError",
    "EngineConfig",
    "EngineDeadError",
    "Generation",
    "InternalError",
    "InvalidRequestError",
    "MisuseError",
    "ModelLoadError",
    "ModelSpec",
    "NonFiniteLogitsError",
    "OpenOptions",
    "OutOfPages",
    "Output",
    "PinBudgetExceeded",
    "PrefillInfo",
    "PromptExplanation",
    "QueueFullError",
    "QueueTimeoutError",
    "RadixKVError",
    "RequestAbortedError",
    "RequestTooLargeError",
    "Sample",
    "SamplingParams",
    "Score",
    "TokenLogprobs",
    "Tokenizer",
    "UnsupportedModelError",
    "Usage",
]

_HOMES = {
    "adapters": ("Adapter",),
    "async_chat": ("AsyncChat",),
    "async_llm": ("AsyncLLM",),
    "chat": ("Chat",),
    "chat_stream": ("ChatStream",),
    "config": ("EngineConfig", "ModelSpec"),
    "generation": ("Generation",),
    "llm": ("LLM",),
    "opening": ("OpenOptions",),
    "outputs": (
        "Beam",
        "BeamOutput",
        "Delta",
        "Output",
        "PrefillInfo",
        "PromptExplanation",
        "Sample",
        "Score",
        "Usage",
    ),
    "sampling": ("SamplingParams",),
    "text": ("Tokenizer",),
    "token_logprobs": ("TokenLogprobs",),
}
"""Module to public names; every other name of ``__all__`` lives in ``errors``."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("radixkv")
    if name not in __all__:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "errors")
    return getattr(importlib.import_module(f"radixkv.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
