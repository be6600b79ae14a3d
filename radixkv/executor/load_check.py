"""Refuse, at load, a model that would not run exactly over the paged store: by name, then by trying it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from radixkv.config import ModelSpec
from radixkv.errors import UnsupportedModelError
from radixkv.executor.attention import make_backend
from radixkv.executor.attention.base import AttentionBackend
from radixkv.executor.hook import plain_attention
from radixkv.executor.kv_store import KVStore
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.sched.batch import Batch
from radixkv.types import TokenIds

if TYPE_CHECKING:
    from radixkv.executor.prepared import PreparedModel

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a logit between a paged and a plain run, as a share of the largest plain logit
(or of 1, where that is less)."""
MOVING_ROPE = ("dynamic", "longrope")
"""Rotary frequencies that follow the longest position of the forward: a neighbour would change one's K."""
KNOWN_LAYERS = ("full_attention", "sliding_attention")
MODEL_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)
"""What a model's own code raises where it wants something that a paged run does not have."""
PAGE_SIZE = 4
PROBE_CHUNKS = (((0, 7), (0, 4)), ((7, 10), (4, 5)), ((10, 11), (5, 6)))
"""Per step the positions of the first and of the second sequence: chunks, a mixed step, two decodes."""


def refuse_by_name(model: Any, spec: ModelSpec) -> None:
    """Raise ``UnsupportedModelError`` for what the configuration or the modules give away."""
    reasons = [*_from_config(model.config), *_from_modules(model)]
    if model.dtype not in TOLERANCE:
        reasons.append(f"dtype {model.dtype} is none of float32, float16, bfloat16")
    if reasons:
        raise UnsupportedModelError(f"{spec.name} ({type(model).__name__}): {'; '.join(reasons)}")


def _from_config(config: Any) -> list[str]:
    reasons = []
    text = config.get_text_config()
    if text is not config:
        reasons.append("multimodal model: only text models are supported")
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "add_cross_attention", False):
        reasons.append("cross attention")
    if getattr(config, "quantization_config", None) is not None:
        reasons.append("quantised checkpoint")
    moving = sorted(_rope_types(text) & set(MOVING_ROPE))
    if moving:
        reasons.append(f"rope type {', '.join(moving)}: frequencies follow the longest sequence of the batch")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - set(KNOWN_LAYERS))
    if unknown:
        reasons.append(f"layers of type {', '.join(unknown)}: only full and sliding attention are supported")
    if getattr(text, "use_bidirectional_attention", None) or getattr(text, "is_causal", True) is False:
        reasons.append("bidirectional attention")
    return reasons


def _rope_types(text: Any) -> set[str]:
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(group.get("rope_type") or group.get("type")) for group in groups}


def _from_modules(model: Any) -> list[str]:
    reasons = []
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        reasons.append("attention sinks")
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        reasons.append("bidirectional attention in a layer")
    if getattr(model, "hf_quantizer", None) is not None:
        reasons.append("quantised checkpoint")
    return reasons


class _Recorder:
    """A backend that notes which layers arrive and with what shapes, and passes them on."""

    def __init__(self, backend: AttentionBackend, spec: ModelSpec) -> None:
        self.backend = backend
        self.spec = spec
        self.layers: list[int] = []

    def plan(self, batch: Batch) -> None:
        self.layers = []
        self.backend.plan(batch)

    def run(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        spec = self.spec
        self.layers.append(layer_idx)
        wanted = (spec.num_query_heads, spec.num_kv_heads, spec.num_kv_heads, spec.head_dim)
        found = (query.shape[1], key.shape[1], value.shape[1])
        if any((*found, tensor.shape[2]) != wanted for tensor in (query, key, value)):
            shapes = [tuple(tensor.shape[1:]) for tensor in (query, key, value)]
            raise UnsupportedModelError(
                f"{spec.name}: layer {layer_idx} has query, key and value heads of {shapes}, expected "
                f"{spec.num_query_heads} and {spec.num_kv_heads} heads of {spec.head_dim}"
            )
        return self.backend.run(layer_idx, query, key, value, **options)


def check_paged_run(prepared: PreparedModel, attention: str) -> None:
    """Run two sequences of random ids, in chunks on scattered pages, and each alone the plain way.

    Raises ``UnsupportedModelError`` when a layer does not reach the attention function exactly once, when
    the model's code fails, when logits are not finite, or when they differ by more than ``TOLERANCE``.
    """
    spec = prepared.spec
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, spec.vocab_size, length).astype(np.int32) for length in (11, 6)]
    with torch.inference_mode():
        try:
            paged = _paged_logits(prepared, attention, sequences)
        except MODEL_ERRORS as error:
            raise UnsupportedModelError(f"{spec.name}: a paged forward failed with {error!r}") from error
        with plain_attention(prepared.model):
            plain = [_plain_logits(prepared, token_ids) for token_ids in sequences]
    for paged_rows, plain_rows in zip(paged, plain, strict=True):
        if not (bool(torch.isfinite(plain_rows).all()) and bool(torch.isfinite(paged_rows).all())):
            raise UnsupportedModelError(f"{spec.name}: logits of random ids are not finite in {spec.dtype}")
        largest = max(1.0, float(plain_rows.abs().max()))
        difference = float((paged_rows - plain_rows).abs().max()) / largest
        if difference > TOLERANCE[prepared.dtype]:
            raise UnsupportedModelError(
                f"{spec.name}: a paged run with attention {attention!r} differs from a plain one by "
                f"{difference:.1e} of the largest logit, the limit for {spec.dtype} is "
                f"{TOLERANCE[prepared.dtype]:.0e}"
            )


def check_adapter(prepared: PreparedModel, adapter: int, layers: set[str]) -> None:
    """Run a few tokens with the adapter beside a few without it. Raises ``UnsupportedModelError`` when a
    layer that it wants is not reached row by row, when the other rows change in a single bit, or when logits
    are not finite."""
    spec = prepared.spec
    sequences = [np.arange(length, dtype=np.int32) % spec.vocab_size for length in (5, 4)]
    shelf = prepared.adapters
    with torch.inference_mode():
        store = KVStore(spec, num_pages=4, page_size=PAGE_SIZE, dtype=prepared.dtype, device=prepared.device)
        backend = make_backend("reference", store)
        pages = [np.array(ids, np.int32) for ids in ((2, 0), (1, 3))]
        seqs = [ProbeSeq(i, ids, 0, len(ids), pages[i]) for i, ids in enumerate(sequences)]
        batch = probe_batch(PAGE_SIZE, seqs, vocab_size=spec.vocab_size)
        token_ids = torch.as_tensor(batch.token_ids, device=prepared.device).long()
        positions = torch.as_tensor(batch.positions, device=prepared.device)
        found = []
        for index in (0, adapter):
            shelf.touched.clear()
            with shelf.rows(np.array([index] * 5 + [0] * 4, np.int32)):
                backend.plan(batch)
                found.append(prepared.logits(prepared.forward(token_ids, positions, backend)).float())
    without, beside = found
    missed = sorted(layers - shelf.touched)
    if missed:
        raise UnsupportedModelError(f"{spec.name}: the adapter's layers {', '.join(missed)} are not reached")
    if not torch.equal(without[5:], beside[5:]):
        raise UnsupportedModelError(f"{spec.name}: rows beside the adapter's change")
    if not bool(torch.isfinite(beside).all()):
        raise UnsupportedModelError(f"{spec.name}: logits with the adapter are not finite in {spec.dtype}")


def _paged_logits(prepared: PreparedModel, attention: str, sequences: list[TokenIds]) -> list[torch.Tensor]:
    spec = prepared.spec
    store = KVStore(spec, num_pages=8, page_size=PAGE_SIZE, dtype=prepared.dtype, device=prepared.device)
    recorder = _Recorder(make_backend(attention, store), spec)
    pages = [np.array(ids, np.int32) for ids in ((5, 2, 7), (3, 6))]
    parts: list[list[torch.Tensor]] = [[], []]
    for chunks in PROBE_CHUNKS:
        seqs = [ProbeSeq(i, sequences[i], start, stop, pages[i]) for i, (start, stop) in enumerate(chunks)]
        batch = probe_batch(PAGE_SIZE, seqs, vocab_size=spec.vocab_size)
        recorder.plan(batch)
        token_ids = torch.as_tensor(batch.token_ids, device=prepared.device).long()
        positions = torch.as_tensor(batch.positions, device=prepared.device)
        logits = prepared.logits(prepared.forward(token_ids, positions, recorder)).float()
        if sorted(recorder.layers) != list(range(spec.num_layers)):
            raise UnsupportedModelError(
                f"{spec.name}: layers {sorted(recorder.layers)} reached the attention function, expected "
                f"each of 0..{spec.num_layers - 1} once"
            )
        for part, rows in zip(parts, torch.split(logits, np.diff(batch.query_indptr).tolist()), strict=True):
            part.append(rows)
    return [torch.cat(part) for part in parts]


def _plain_logits(prepared: PreparedModel, token_ids: TokenIds) -> torch.Tensor:
    ids = torch.as_tensor(token_ids, device=prepared.device).long()
    logits: torch.Tensor = prepared.model(input_ids=ids[None], use_cache=False).logits[0]
    return logits.float()
