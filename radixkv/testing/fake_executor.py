"""FakeExecutor: an executor without a model, which checks every batch and every page that it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.config import ModelSpec
from radixkv.kv.page_table import slots_of
from radixkv.sched.batch import Batch, SamplingRows, StepResult
from radixkv.sched.draws import draws_of
from radixkv.testing.batch_check import BatchError, check_batch
from radixkv.testing.canary_store import CanaryStore, PrefixHasher
from radixkv.token_logprobs import TokenLogprobs
from radixkv.types import SlotMapping, TokenIds

_SCORE_STEPS = 1000


class FakeExecutor:
    """The next token is a pure function of the whole prefix, which it knows only from its K/V pages.

    Each slot of its ``CanaryStore`` holds the hash of the prefix that ends there. A step copies pages, reads
    each sequence's prefix through the batch's page table, and writes the new rows; a page that holds another
    prefix, is stale, or is written in the same step raises ``CanaryError``, a malformed batch ``BatchError``.
    Of sampling it heeds which tokens are barred, and the draw of a row with a temperature.
    ``expected_output`` says what comes out without a cache.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        vocab_size: int = 1000,
        max_positions: int = 1 << 20,
        eos_token_id: int = 0,
        eos_one_in: int | None = None,
        before: Callable[[Batch], None] | None = None,
        after: Callable[[Batch], None] | None = None,
    ) -> None:
        """``eos_one_in``: how rare the end token is among those sampled (``None``: it never is). ``before``
        and ``after`` are called in each step, before anything is done and once all is written; what they
        raise comes out of ``execute``."""
        self.spec = ModelSpec(
            name="fake",
            vocab_size=vocab_size,
            num_layers=1,
            num_query_heads=1,
            num_kv_heads=1,
            head_dim=1,
            max_positions=max_positions,
            eos_token_ids=(eos_token_id,),
            family="fake",
        )
        self.num_pages = num_pages
        self.page_size = page_size
        self.store = CanaryStore(num_pages, page_size)
        self.before = before
        self.after = after
        self.batches: list[Batch] = []
        """Every batch that was started, in order."""
        self.weights_version = 0
        self._adapters: set[int] = set()
        self._num_adapters_ever = 0
        self._hasher = PrefixHasher()
        self._eos_one_in = eos_one_in
        self._forced: dict[tuple[int, int], int] = {}

    def force(self, request_id: int, position: int, token_id: int) -> None:
        """The token sampled for ``position`` (counted from the start of the prompt) of that request."""
        self._forced[request_id, position] = token_id

    def load_adapter(self, path: object) -> int:
        """An adapter, whatever ``path`` is. Under it a prefix has other hashes, so that pages of another
        adapter, or of the base model, are noticed at the first read, and other tokens follow."""
        self._num_adapters_ever += 1
        self._adapters.add(self._num_adapters_ever)
        return self._num_adapters_ever

    def has_adapter(self, adapter: int) -> bool:
        return adapter in self._adapters

    def unload_adapter(self, adapter: int) -> None:
        self._adapters.remove(adapter)

    def update_weights(self, weights: object) -> None:
        """Whatever ``weights`` are, hashes and tokens stay as they were."""
        self.weights_version += 1

    @staticmethod
    def seed_of(adapter: int) -> int:
        """The hash of the empty prefix under ``adapter``; 0 for the base model."""
        return PrefixHasher.seed("adapter", adapter) if adapter else 0

    def execute(self, batch: Batch) -> StepResult:
        """One step. Raises ``BatchError``, ``CanaryError``, and whatever ``before`` and ``after`` raise."""
        self.batches.append(batch)
        if self.before is not None:
            self.before(batch)
        check_batch(batch, self.num_pages, self.spec.vocab_size)
        unknown = set(batch.adapter_ids.tolist()) - self._adapters - {0}
        if unknown:
            raise BatchError(f"adapters {sorted(unknown)} are not loaded")
        seeds = [self.seed_of(adapter) for adapter in batch.adapter_ids.tolist()]
        self.store.copy_pages(batch.page_copies)
        tables = [self._slots(batch, i) for i in range(batch.num_seqs)]
        starts = batch.positions[batch.query_indptr[:-1]].tolist()
        # All reads come before all writes: no sequence may depend on another's rows of the same step.
        prefixes = [
            self.store.read_chain(slots[:n], seed)
            for slots, n, seed in zip(tables, starts, seeds, strict=True)
        ]
        for i, (slots, start, prefix) in enumerate(zip(tables, starts, prefixes, strict=True)):
            rows = slice(int(batch.query_indptr[i]), int(batch.query_indptr[i + 1]))
            self.store.write(slots[start:], batch.token_ids[rows], prefix)
        for slots, seed in zip(tables, seeds, strict=True):
            self.store.read_chain(slots, seed)
        if self.after is not None:
            self.after(batch)
        hashes = self.store.hashes[batch.slot_mapping]
        barred = _barred_tokens(batch.sampling)
        sampled = [
            self._forced.get((request_id, position + 1), self._choose(int(prefix), barred.get(row, ()), draw))
            for row, request_id, position, prefix, draw in zip(
                range(len(batch.sample_rows)),
                batch.seq_ids[batch.sample_seqs].tolist(),
                batch.positions[batch.sample_rows].tolist(),
                hashes[batch.sample_rows].tolist(),
                batch.sampling.draws.tolist(),
                strict=True,
            )
        ]
        sampled_ids = np.array(sampled, np.int32)
        of_sampled = self._logprobs(hashes[batch.sample_rows], sampled_ids, batch.sampling.num_logprobs)
        scores = self._logprobs(hashes[batch.score_rows], batch.score_targets, batch.score_num_logprobs)
        return StepResult(sampled_ids, scores[0], *of_sampled, *scores[1:])

    def _slots(self, batch: Batch, i: int) -> SlotMapping:
        """Slots of all tokens of sequence ``i``, this step's rows included."""
        pages = batch.page_indices[batch.page_indptr[i] : batch.page_indptr[i + 1]]
        return slots_of(pages, np.arange(int(batch.seq_lens[i])), batch.page_size)

    def _choose(self, prefix_hash: int, barred: Collection[int] = (), draw: float = 0.0) -> int:
        """``draw`` is 0.0 without a temperature."""
        prefix_hash ^= int(draw * 2.0**53) * 0x9E3779B97F4A7C15 & 2**64 - 1
        eos = self.spec.eos_token_ids[0]
        if self._eos_one_in is not None and (prefix_hash >> 40) % self._eos_one_in == 0 and eos not in barred:
            return eos
        token_id = (prefix_hash >> 20) % (self.spec.vocab_size - 1)
        token_id += token_id >= eos  # any but the end token
        while token_id in barred:  # the next best, so to speak
            token_id = (token_id + 1) % self.spec.vocab_size
            token_id += token_id == eos
        return token_id % self.spec.vocab_size

    def _score(self, prefix_hash: int, target: int) -> float:
        return -(((prefix_hash >> 16) + 7919 * target) % _SCORE_STEPS) / _SCORE_STEPS

    def _logprobs(
        self, hashes: NDArray[np.uint64], token_ids: TokenIds, num_logprobs: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Log-probabilities, ranks, alternatives and theirs, in the layout of ``StepResult``; NaN wherever
        nothing was asked for."""
        num_rows = len(num_logprobs) if num_logprobs.any() else 0
        num_top = max(int(num_logprobs.max(initial=0)) - 1, 0)
        logprobs = np.full(num_rows, np.nan, np.float32)
        ranks = np.zeros(num_rows, np.int32)
        top_ids = np.zeros((num_rows, num_top), np.int32)
        top_logprobs = np.full((num_rows, num_top), np.nan, np.float32)
        for row in np.flatnonzero(num_logprobs).tolist():
            entry = self._entry(int(hashes[row]), int(token_ids[row]), int(num_logprobs[row]) - 1)
            logprobs[row], ranks[row] = entry.logprob, entry.rank or 0
            for place, (token_id, logprob) in enumerate(entry.top):
                top_ids[row, place], top_logprobs[row, place] = token_id, logprob
        return logprobs, ranks, top_ids, top_logprobs

    def _entry(self, prefix_hash: int, token_id: int, num_top: int) -> TokenLogprobs:
        """A pure function of prefix and token, float32 as a real executor's."""
        logprob = float(np.float32(self._score(prefix_hash, token_id)))
        if num_top == 0:
            return TokenLogprobs(token_id, logprob)
        steps = ((prefix_hash >> 16) % _SCORE_STEPS + 7919 * np.arange(self.spec.vocab_size)) % _SCORE_STEPS
        order = np.argsort(steps, kind="stable")[:num_top].tolist()
        top = tuple((i, float(np.float32(-int(steps[i]) / _SCORE_STEPS))) for i in order)
        return TokenLogprobs(token_id, logprob, 1 + int((steps < steps[token_id]).sum()), top)

    def expected_output(
        self,
        prompt_ids: TokenIds,
        max_tokens: int,
        *,
        forced: Mapping[int, int] | None = None,
        min_tokens: int = 0,
        seed: int | None = None,
        sample_index: int = 0,
        adapter: int = 0,
    ) -> list[int]:
        """What a request for ``max_tokens`` gives, from the prompt alone. ``forced``: position to token;
        ``seed`` and ``sample_index``: of the draws, where it has a temperature."""
        draws = np.zeros(max_tokens)
        if seed is not None:
            key = (np.full(max_tokens, seed, np.uint64), np.full(max_tokens, sample_index, np.uint64))
            draws = draws_of(*key, np.arange(max_tokens, dtype=np.uint64))
        ids = list(np.asarray(prompt_ids).tolist())
        num_prompt = len(ids)
        prefix_hash = int(self._hasher.extend(self.seed_of(adapter), np.array(ids, np.int32))[-1])
        while len(ids) < num_prompt + max_tokens:
            barred = self.spec.eos_token_ids if len(ids) < num_prompt + min_tokens else ()
            token_id = (forced or {}).get(
                len(ids), self._choose(prefix_hash, barred, float(draws[len(ids) - num_prompt]))
            )
            ids.append(token_id)
            if token_id in self.spec.eos_token_ids:
                break
            prefix_hash = int(self._hasher.extend(prefix_hash, np.array([token_id], np.int32))[-1])
        return ids[num_prompt:]

    def expected_logprobs(self, prompt_ids: TokenIds, logprob_start: int) -> list[float]:
        """The log-probabilities of a scored request's prompt, as float32 would hold them."""
        hashes = self._hasher.extend(0, np.asarray(prompt_ids, np.int32)).tolist()
        first = max(logprob_start, 1)
        targets = np.asarray(prompt_ids)[first:].tolist()
        scores = [self._score(h, t) for h, t in zip(hashes[first - 1 : -1], targets, strict=True)]
        return [float(score) for score in np.array(scores, np.float32)]

    def expected_token_logprobs(
        self, token_ids: TokenIds | Seq[int], start: int, num_top: int, *, adapter: int = 0
    ) -> list[TokenLogprobs]:
        """Of the tokens from position ``start`` (at least 1) on, given those before; prompt or output."""
        ids = np.asarray(token_ids, np.int32)
        hashes = self._hasher.extend(self.seed_of(adapter), ids).tolist()
        return [self._entry(hashes[p - 1], int(ids[p]), num_top) for p in range(start, len(ids))]

    def check(self) -> None:
        self.store.check()

    def stats(self) -> dict[str, Any]:
        return {"num_steps": len(self.batches), **self.store.stats()}


def _barred_tokens(sampling: SamplingRows) -> dict[int, set[int]]:
    """Sampling row to the tokens that may not be chosen there."""
    barred: dict[int, set[int]] = {}
    for at in np.flatnonzero(np.isneginf(sampling.bias_value)).tolist():
        barred.setdefault(int(sampling.bias_row[at]), set()).add(int(sampling.bias_token[at]))
    return barred
