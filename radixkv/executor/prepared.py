"""PreparedModel: a transformers model ready for paged forwards; made once, shared by its executors."""

from __future__ import annotations

import copy
import os
from time import perf_counter
from typing import Any

import torch
from torch import nn

from radixkv.config import ModelSpec
from radixkv.executor.adapter_shelf import AdapterShelf, LoraPair
from radixkv.executor.attention.base import AttentionBackend
from radixkv.executor.base import WeightUpdate
from radixkv.executor.forward_times import ForwardTimes
from radixkv.executor.hook import PagedStep, use_paged_attention
from radixkv.executor.live_weights import LiveWeights
from radixkv.executor.load_check import check_adapter, check_paged_run, refuse_by_name
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.lora import read_lora
from radixkv.executor.packed import PackingReport, is_linear, plain_weight, probe_packing, replace_linears


class PreparedModel:
    """The two halves of a causal language model: ``forward`` (tokens to hidden states) and ``logits``
    (hidden states to logits, by the model's own code, so that soft caps and scales are honoured).

    One forward at a time: executors that share it share its ``times``.
    """

    def __init__(self, model: Any, spec: ModelSpec, *, pack: bool | None) -> None:
        """``pack``: ``None`` lets a probe decide, ``True`` and ``False`` do not ask it."""
        self.model = model.eval()
        self.spec = spec
        self.times = ForwardTimes()
        self.packing = _decide_packing(model, pack)
        self.weights = LiveWeights(model)
        self.weights_version = 0
        """Raised by ``update_weights``: what was computed before belongs to other weights."""
        self.adapters = AdapterShelf()
        self.linears = replace_linears(model, self.times, pack=self.packing.use, shelf=self.adapters)
        """``(out_features, in_features)`` of every linear layer, by name."""
        use_paged_attention(model)
        self._backbone = model.base_model
        self._head = _head_of(model)
        self.checked_backends: set[str] = set()
        """Names of the attention backends with which the check at load has passed."""

    @property
    def num_linears(self) -> int:
        return len(self.linears)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        """One flat forward over ``[R]`` int64 tokens and positions, after ``backend.plan``; returns the
        hidden states before the head, ``[R, hidden]``."""
        output = self._backbone(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            paged_step=PagedStep(backend, self.times),
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def update_weights(self, weights: WeightUpdate) -> None:
        """Replace some weights. ``weights``: by name, as in the model's ``state_dict``; or a function that is
        given all of them and returns those to replace. Raises ``ConfigError``, having changed nothing."""
        changed = weights(self.weights) if callable(weights) else weights
        self.weights.replace(changed)
        self.weights_version += 1

    def load_adapter(self, path: str | os.PathLike[str]) -> int:
        """Read a LoRA adapter from a folder; returns its index. Raises ``ModelLoadError`` and
        ``UnsupportedModelError``."""
        pairs = {
            name: LoraPair(pair.a.to(self.device, self.dtype), pair.b.to(self.device, self.dtype), pair.scale)
            for name, pair in read_lora(path, self.linears).items()
        }
        adapter = self.adapters.put(pairs)
        try:
            check_adapter(self, adapter, set(pairs))
        except BaseException:
            self.adapters.drop(adapter)
            raise
        return adapter

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` to ``[n, vocab_size]``, in the model's dtype."""
        given = self._head.base_model
        given.hidden = hidden[None]
        logits: torch.Tensor = self._head(input_ids=None, use_cache=False).logits[0]
        given.hidden = None
        return logits


class _GivenHidden(nn.Module):
    """Stands where the backbone stood and returns hidden states that are already known."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)
        output.router_logits = None  # asked for by the heads of mixtures of experts
        return output


def _head_of(model: Any) -> Any:
    """The same model object, its head and configuration shared, with a backbone that computes nothing."""
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = _GivenHidden()
    return head


def _decide_packing(model: Any, pack: bool | None) -> PackingReport:
    if pack is not None:
        return PackingReport(pack, "asked for" if pack else "switched off")
    return probe_packing([plain_weight(m) for m in model.base_model.modules() if is_linear(m)])


def prepare(loaded: LoadedModel, *, attention: str, pack: bool | None = None) -> PreparedModel:
    """Prepare ``loaded.model`` for paged runs; what was done already is not done again.

    The first call refuses what cannot work, replaces the linear layers and switches the attention; the
    first call with each ``attention`` backend compares a paged run with a plain one. The seconds are added
    to ``load_report`` as ``pack`` and ``check``.

    Raises ``UnsupportedModelError``.
    """
    start = perf_counter()
    if loaded.prepared is None:
        refuse_by_name(loaded.model, loaded.spec)
        loaded.prepared = PreparedModel(loaded.model, loaded.spec, pack=pack)
        loaded.load_report["pack"] = perf_counter() - start
    prepared = loaded.prepared
    if attention not in prepared.checked_backends:
        start = perf_counter()
        check_paged_run(prepared, attention)
        prepared.checked_backends.add(attention)
        loaded.load_report["check"] = loaded.load_report.get("check", 0.0) + perf_counter() - start
    return prepared
