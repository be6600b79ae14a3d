"""The one attention function that transformers' models call, and the switch to and from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from radixkv.errors import UnsupportedModelError
from radixkv.executor.forward_times import ForwardTimes

if TYPE_CHECKING:
    from radixkv.executor.attention.base import AttentionBackend

HOOK_NAME = "radixkv_paged"
"""Name under which transformers knows the function."""


@dataclass(frozen=True)
class PagedStep:
    """What reaches every layer of one forward, as the extra keyword ``paged_step``."""

    backend: AttentionBackend
    times: ForwardTimes


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_step: PagedStep | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over a backend.

    ``query`` is ``[1, num_query_heads, R, head_dim]``, ``key`` and ``value``
    ``[1, num_kv_heads, R, head_dim]``; returns ``[1, R, num_query_heads, head_dim]``. ``sliding_window``
    counts the tokens that a row sees, itself included, in transformers as in the backends. Rows of many
    sequences stand side by side, so a mask would be meaningless; what a row sees is in the plan.
    """
    if paged_step is None:
        raise UnsupportedModelError(
            "this model is set up for paged runs: leave them with plain_attention(model), or its keywords "
            "do not reach the attention layers"
        )
    if attention_mask is not None:
        raise UnsupportedModelError("the model makes its own attention mask")
    if s_aux is not None:
        raise UnsupportedModelError("attention sinks are not supported")
    assert query.shape[0] == 1, query.shape
    start = perf_counter()
    output = paged_step.backend.run(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    paged_step.times.attention += perf_counter() - start
    return output[None], None


def use_paged_attention(model: Any) -> None:
    """Register the function (again, if need be) and switch the model to it.

    No mask function is registered under the name, so transformers makes no mask and hands on ``None``.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(HOOK_NAME, paged_attention)
    model.set_attn_implementation(HOOK_NAME)
    if model.config._attn_implementation != HOOK_NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take its attention from transformers' attention interface"
        )


@contextmanager
def plain_attention(model: Any, implementation: str = "eager") -> Iterator[None]:
    """Run ``model`` the ordinary way inside the block; afterwards it is as before."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
