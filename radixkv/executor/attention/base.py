"""AttentionBackend: attention over the paged store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from radixkv.sched.batch import Batch

if TYPE_CHECKING:
    import torch


class AttentionBackend(Protocol):
    """A1: writes only ``slot_mapping``, reads only the batch's pages, keeps no request state.
    A2: agrees with ``reference.py`` within a stated bound per dtype."""

    def plan(self, batch: Batch) -> None:
        """Once a step, before the forward: everything that all layers share."""

    def run(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write this layer's K/V, then attend.

        ``query`` is ``[R, num_query_heads, head_dim]``, ``key`` and ``value``
        ``[R, num_kv_heads, head_dim]``; returns ``[R, num_query_heads, head_dim]``. A row at position
        ``p`` sees positions ``max(0, p - sliding_window + 1) .. p`` (no window: ``0 .. p``).
        """
