"""HFExecutor: runs a Batch with a Hugging Face model over the paged store."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.config import ModelSpec
from radixkv.errors import ConfigError, NonFiniteLogitsError
from radixkv.executor.allocator import keep_freed_memory
from radixkv.executor.attention import make_backend
from radixkv.executor.base import WeightUpdate
from radixkv.executor.kv_store import KVStore
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.logprobs import RowLogprobs
from radixkv.executor.memory import num_pages_for
from radixkv.executor.prepared import prepare
from radixkv.executor.sampler import sample
from radixkv.executor.threads import set_num_threads
from radixkv.sched.batch import Batch, StepResult
from radixkv.types import TokenIds

__all__ = ["HFExecutor", "num_pages_for"]

SCORE_CHUNK_BYTES = 64 * 2**20
"""Bound of the float32 logits that exist at once while prompts are scored."""


class HFExecutor:
    """A ``ModelExecutor``: its own K/V store and attention backend over a model that may be shared.

    It keeps no state of any request (A1). One ``execute`` at a time, also among the executors that share
    a ``LoadedModel``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int,
        page_size: int = 16,
        attention: str = "cpu",
        num_threads: int | None = None,
        pack: bool | None = None,
    ) -> None:
        """``num_threads``: see ``set_num_threads``. ``pack``: see ``prepare``; only the first executor of a
        model decides it.

        Raises ``UnsupportedModelError`` when the model does not pass the checks at load, ``ConfigError``
        for a setting that is out of range.
        """
        self.num_threads = set_num_threads(num_threads)
        self.keeps_freed_memory = keep_freed_memory()
        self._prepared = prepare(loaded, attention=attention, pack=pack)
        self.store = KVStore(
            loaded.spec,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self._prepared.dtype,
            device=self._prepared.device,
        )
        self.attention = attention
        self._backend = make_backend(attention, self.store)
        self._seconds = dict.fromkeys(("copies", "matmul", "attention", "rest", "sampling", "total"), 0.0)
        self._num_steps = 0
        self._num_rows = 0

    @property
    def spec(self) -> ModelSpec:
        return self.store.spec

    @property
    def num_pages(self) -> int:
        return self.store.num_pages

    @property
    def page_size(self) -> int:
        return self.store.page_size

    def execute(self, batch: Batch) -> StepResult:
        """Page copies, plan, one flat forward, then logits of the sample and score rows only.

        Raises ``NonFiniteLogitsError``, naming the requests, when the model gives NaN or infinity in any row:
        also where nothing is sampled, for the K/V written beside such a row must not get into the cache.
        """
        if batch.page_size != self.page_size:
            raise ConfigError(f"the batch has pages of {batch.page_size} tokens, the store {self.page_size}")
        assert int(batch.positions.max()) < self.spec.max_positions, "the scheduler refuses such a request"
        times = self._prepared.times
        matmul, attention = times.matmul, times.attention
        start = perf_counter()
        with torch.inference_mode():
            self.store.copy_pages(batch.page_copies)
            copied = perf_counter()
            self._backend.plan(batch)
            planned = perf_counter()
            rows_of = _adapter_rows(batch)
            hidden = self._forward(batch)
            _refuse_unless_finite(hidden, batch)
            logits = self._logits(hidden, batch.sample_rows, rows_of)
            forwarded = perf_counter()
            sampled_ids = sample(logits, batch.sampling, *_names(batch, batch.sample_seqs))
            sampled = perf_counter()
            of_sampled = self._of_sampled(logits, sampled_ids, batch)
            scores = self._score(hidden, batch, rows_of)
        end = perf_counter()
        matmul, attention = times.matmul - matmul, times.attention - attention + (planned - copied)
        self._add(
            copies=copied - start,
            matmul=matmul,
            attention=attention,
            rest=end - sampled + forwarded - copied - matmul - attention,
            sampling=sampled - forwarded,
            total=end - start,
        )
        self._num_steps += 1
        self._num_rows += batch.num_rows
        return StepResult(
            sampled_ids,
            score_logprobs=scores.logprobs,
            sampled_logprobs=of_sampled.logprobs,
            sampled_ranks=of_sampled.ranks,
            top_ids=of_sampled.top_ids,
            top_logprobs=of_sampled.top_logprobs,
            score_ranks=scores.ranks,
            score_top_ids=scores.top_ids,
            score_top_logprobs=scores.top_logprobs,
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        """The step without sampling: float32 logits of every row, ``[R, vocab_size]``. K/V is written as in
        ``execute``; ``stats`` does not count it. For comparing with plain runs."""
        with torch.inference_mode():
            self.store.copy_pages(batch.page_copies)
            self._backend.plan(batch)
            rows_of = _adapter_rows(batch)
            hidden = self._forward(batch)
            return self._logits(hidden, np.arange(batch.num_rows), rows_of).float()

    @property
    def weights_version(self) -> int:
        """Raised whenever weights of the model were replaced, through whichever of its executors."""
        return self._prepared.weights_version

    def update_weights(self, weights: WeightUpdate) -> None:
        """See ``PreparedModel.update_weights``. K and V stay: they are the ledger's to forget."""
        self._prepared.update_weights(weights)

    def load_adapter(self, path: str | os.PathLike[str]) -> int:
        """See ``PreparedModel.load_adapter``."""
        return self._prepared.load_adapter(path)

    def has_adapter(self, adapter: int) -> bool:
        """Whether an adapter of this index is loaded."""
        return self._prepared.adapters.has(adapter)

    def unload_adapter(self, adapter: int) -> None:
        """Forget an adapter; no sequence may use it any more. Raises ``MisuseError``."""
        self._prepared.adapters.drop(adapter)

    def _forward(self, batch: Batch) -> torch.Tensor:
        token_ids = self._tensor(batch.token_ids).long()
        with self._prepared.adapters.rows(_adapter_rows(batch)):
            return self._prepared.forward(token_ids, self._tensor(batch.positions), self._backend)

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, device=self.store.device)

    def _logits(self, hidden: torch.Tensor, rows: Any, rows_of: NDArray[np.int32]) -> torch.Tensor:
        """``rows_of``: the adapter of each row of ``hidden``."""
        if len(rows) == 0:
            return hidden.new_empty(0, self.spec.vocab_size)
        with self._prepared.adapters.rows(rows_of[rows]):
            return self._prepared.logits(hidden[self._tensor(rows)])

    def _of_sampled(self, logits: torch.Tensor, sampled_ids: TokenIds, batch: Batch) -> RowLogprobs:
        """Log-probabilities of the sampled tokens, of those rows that ask."""
        wanted = batch.sampling.num_logprobs
        found = RowLogprobs.blank(len(wanted), wanted)
        rows = np.flatnonzero(wanted)
        if len(rows):
            found.fill(rows, logits[self._tensor(rows)], sampled_ids[rows], wanted[rows])
            _refuse_unless_all_finite(found.logprobs[rows], batch, batch.sample_seqs[rows])
        return found

    def _score(self, hidden: torch.Tensor, batch: Batch, rows_of: NDArray[np.int32]) -> RowLogprobs:
        """Log-probability of each score row's target, a bounded number of rows at a time."""
        num_rows = len(batch.score_rows)
        found = RowLogprobs.blank(num_rows, batch.score_num_logprobs)
        chunk = max(1, SCORE_CHUNK_BYTES // (4 * self.spec.vocab_size))
        for first in range(0, num_rows, chunk):
            rows = np.arange(first, min(first + chunk, num_rows))
            logits = self._logits(hidden, batch.score_rows[rows], rows_of)
            found.fill(rows, logits, batch.score_targets[rows], batch.score_num_logprobs[rows])
        _refuse_unless_all_finite(found.logprobs, batch, batch.score_seqs)
        return found

    def _add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self._seconds[name] += value

    def check(self) -> None:
        """The store is whole."""
        self.store.check()

    def stats(self) -> dict[str, Any]:
        """Steps, rows, and cumulative ``seconds_*``: page ``copies``, ``matmul`` (linear layers, head
        included), ``attention`` (plan, K/V writes and attention), ``rest`` of the forward (Python and
        elementwise work), ``sampling``, and ``total``, which is their sum."""
        packing = self._prepared.packing
        return {
            "num_steps": self._num_steps,
            "num_rows": self._num_rows,
            **{f"seconds_{name}": value for name, value in self._seconds.items()},
            "attention": self.attention,
            "num_threads": self.num_threads,
            "keeps_freed_memory": self.keeps_freed_memory,
            "num_linears": self._prepared.num_linears,
            **self._prepared.adapters.stats(),
            "packed": packing.use,
            "packing_reason": packing.reason,
            "store": self.store.stats(),
        }


def _adapter_rows(batch: Batch) -> NDArray[np.int32]:
    """``[R]`` adapter of each row."""
    return np.repeat(batch.adapter_ids, np.diff(batch.query_indptr))


def _refuse_unless_all_finite(logprobs: NDArray[np.float32], batch: Batch, seqs: NDArray[np.int64]) -> None:
    """``logprobs`` and ``seqs`` are ``[n]``. What a request wants may be unlikely, but not impossible."""
    bad = ~np.isfinite(logprobs)
    if bad.any():
        raise NonFiniteLogitsError.of(*_names(batch, seqs[bad]))


def _names(batch: Batch, seqs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What an error about these sequences of the batch says: their requests' ids, and their own."""
    return batch.request_ids[seqs], batch.seq_ids[seqs]


def _refuse_unless_finite(hidden: torch.Tensor, batch: Batch) -> None:
    """Every row's hidden state, ``[R, hidden]``. What the head and the bias make of them is checked where
    tokens are sampled and scored."""
    bad = ~torch.isfinite(hidden).all(dim=1).cpu().numpy()
    if bad.any():
        seqs = np.searchsorted(batch.query_indptr, np.flatnonzero(bad), side="right") - 1
        raise NonFiniteLogitsError.of(*_names(batch, seqs))
