"""build_executor: how large the K/V store becomes, from a token budget or from the memory there is."""

from __future__ import annotations

from typing import Any

import torch

from radixkv.errors import ConfigError
from radixkv.executor.hf import HFExecutor
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.memory import DEFAULT_FRACTION, available_memory_bytes, num_pages_for
from radixkv.executor.prepared import prepare
from radixkv.executor.threads import set_num_threads

MAX_STORE_BYTES = 8 * 2**30
"""Most that the store takes unasked; a token budget may ask for more."""


def build_executor(
    loaded: LoadedModel,
    *,
    num_tokens: int | None,
    page_size: int,
    attention: str = "cpu",
    num_threads: int | None = None,
) -> tuple[HFExecutor, dict[str, Any]]:
    """An executor and how its store was sized.

    ``num_tokens`` is rounded up to whole pages, and refused where they need more memory than is left once
    the model is ready (on a CPU the least of the machine's and the control group's, on a GPU the device's;
    not known on every system). ``None``: ``DEFAULT_FRACTION`` of that memory, at most ``MAX_STORE_BYTES``.
    Raises ``ConfigError`` and ``UnsupportedModelError``.
    """
    set_num_threads(num_threads)  # first: the probe for packed weights runs with as many
    prepared = prepare(loaded, attention=attention)
    sizing: dict[str, Any] = {"sized_by": "num_tokens"}
    available: int | None
    if num_tokens is None:
        available = _available_bytes(prepared.device)
        sizing = {
            "sized_by": "memory",
            "available_bytes": available,
            "fraction": DEFAULT_FRACTION,
            "max_bytes": MAX_STORE_BYTES,
        }
        available = min(available, int(MAX_STORE_BYTES / DEFAULT_FRACTION))
    else:
        try:
            available = _available_bytes(prepared.device)
        except ConfigError:  # not known here: the allocation itself has to tell
            available = None
    num_pages = num_pages_for(
        loaded.spec,
        page_size=page_size,
        dtype=prepared.dtype,
        num_tokens=num_tokens,
        available_bytes=available,
    )
    executor = HFExecutor(
        loaded, num_pages=num_pages, page_size=page_size, attention=attention, num_threads=num_threads
    )
    return executor, sizing


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes()
