"""KVStore: the K/V tensors of all layers in one allocation; written by slot, copied by page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from radixkv.config import MAX_SETTING, ModelSpec
from radixkv.errors import ConfigError
from radixkv.kv.page_copy import PageCopy
from radixkv.plain import plain_whole, shown


class KVStore:
    """``data`` is ``[num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim]``.

    The last page is padding: the pool does not know it, and nothing a request reads lies there. K and V of
    a layer are views with equal strides. The store holds no counts and no request state: who may write
    which slot is the ledger's business (W1).
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates ``bytes_per_page(spec, page_size, dtype) * (num_pages + 1)`` bytes of zeros, which the
        system commits as pages are first written. Raises ``ConfigError`` when a size is below 1 or above
        ``MAX_SETTING``, or when that much memory cannot be had."""
        self.spec = spec
        self.num_pages = num_pages = _size("num_pages", num_pages)
        self.page_size = page_size = _size("page_size", page_size)
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (spec.num_layers, 2, num_pages + 1, page_size, spec.num_kv_heads, spec.head_dim)
        self.data = _zeros(shape, dtype, self.device)
        by_slot = self.data.view(spec.num_layers, 2, self.num_slots, spec.num_kv_heads, spec.head_dim)
        self._keys = tuple(by_slot[layer, 0] for layer in range(spec.num_layers))
        self._values = tuple(by_slot[layer, 1] for layer in range(spec.num_layers))

    @property
    def num_slots(self) -> int:
        """Slots of all pages, the padding page included."""
        return (self.num_pages + 1) * self.page_size

    @property
    def padding_page(self) -> int:
        """Id of the page that the pool never hands out."""
        return self.num_pages

    def key(self, layer_idx: int) -> torch.Tensor:
        """``[num_slots, num_kv_heads, head_dim]``; a view, contiguous, writing it writes the store."""
        return self._keys[layer_idx]

    def value(self, layer_idx: int) -> torch.Tensor:
        """``[num_slots, num_kv_heads, head_dim]``; a view, contiguous, writing it writes the store."""
        return self._values[layer_idx]

    def write(self, layer_idx: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put row ``i`` of ``key`` and ``value`` (``[R, num_kv_heads, head_dim]``) into ``slots[i]``.

        ``slots`` is ``[R]`` int64 on the store's device; the slots of one call are distinct.
        """
        self._keys[layer_idx].index_copy_(0, slots, key)
        self._values[layer_idx].index_copy_(0, slots, value)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first ``num_tokens`` slots of each ``src`` to ``dst``, in every layer.

        All sources are read before anything is written (C2), so a page may be source of one copy and
        destination of another. The rest of a destination page is left as it is.
        """
        if not copies:
            return
        for copy in copies:
            assert 0 <= copy.src <= self.num_pages and 0 <= copy.dst < self.num_pages, copy
            assert 1 <= copy.num_tokens <= self.page_size, copy
        assert len({copy.dst for copy in copies}) == len(copies), "C2: destinations must be distinct"
        read = [self.data[:, :, copy.src, : copy.num_tokens].clone() for copy in copies]
        for copy, tokens in zip(copies, read, strict=True):
            self.data[:, :, copy.dst, : copy.num_tokens] = tokens

    def prefault(self) -> None:
        """Write all of it once, so that the system commits its memory now and not while requests run. Only
        before the first use: it forgets every K and V."""
        self.data.zero_()

    def check(self) -> None:
        """K and V are views of the one allocation, with equal strides."""
        start = self.data.data_ptr()
        step = self.data.stride(1) * self.data.element_size()
        for layer_idx, (key, value) in enumerate(zip(self._keys, self._values, strict=True)):
            assert key.stride() == value.stride(), f"strides differ in layer {layer_idx}"
            assert key.data_ptr() == start + 2 * layer_idx * step, f"key {layer_idx} is not the store's"
            assert value.data_ptr() == start + (2 * layer_idx + 1) * step, f"value {layer_idx} is not"

    def stats(self) -> dict[str, Any]:
        """Sizes: ``num_pages`` and ``num_bytes`` (the padding page is in the bytes only)."""
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "num_bytes": self.data.numel() * self.data.element_size(),
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def _size(name: str, value: object) -> int:
    number = plain_whole(value)
    if number is None or not 1 <= number <= MAX_SETTING:
        raise ConfigError(f"{name} must be a whole number in 1..{MAX_SETTING}, got {shown(value)}")
    return number


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. In host memory they come from numpy, which asks the system for zeroed pages instead of writing
    every byte, so only what is used becomes resident. Raises ``ConfigError`` where there is not so much."""
    num_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        raise ConfigError(f"a K/V store of {num_bytes} bytes cannot be had on {device}: {error}") from error


def bytes_per_page(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of K and V that one page takes over all layers."""
    values = spec.num_layers * 2 * page_size * spec.num_kv_heads * spec.head_dim
    return values * torch.empty(0, dtype=dtype).element_size()
