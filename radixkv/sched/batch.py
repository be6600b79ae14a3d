"""Batch and StepResult: all that crosses to the device and back. Frozen, plain numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixkv.kv.page_copy import PageCopy
from radixkv.sequence import FinishReason
from radixkv.token_logprobs import TokenLogprobs
from radixkv.types import PageIds, SlotMapping, TokenIds


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences ``first_seq .. first_seq + num_seqs - 1`` of the batch (at least two) share their first
    ``num_pages`` whole pages, whose tokens all lie before every row that those sequences compute."""

    first_seq: int
    num_seqs: int
    num_pages: int


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """How to choose a token for each of the batch's ``sample_rows``; every array is ``[num_samples]``,
    but for the sparse triples, whose ``*_row`` index ``sample_rows``."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    """``vocab_size`` where all are kept."""
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    draws: NDArray[np.float64]
    """Uniform in [0, 1): a pure function of (seed, sample index, output position)."""
    bias_row: NDArray[np.int64]
    bias_token: NDArray[np.int64]
    bias_value: NDArray[np.float32]
    """Logit bias, added up where a token stands twice; minus infinity bars a token."""
    seen_row: NDArray[np.int64]
    seen_token: NDArray[np.int64]
    seen_in_output: NDArray[np.int32]
    """(row, token) pairs, each once, of rows with penalties: every token of prompt or output and how
    often it stands in the output."""
    repetition_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    num_logprobs: NDArray[np.int32]
    """How many log-probabilities a row wants: 0 none, 1 the chosen token's, 1 + k also the k highest."""

    @property
    def all_greedy(self) -> bool:
        return not bool(np.any(self.temperature > 0.0))


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's work. Rows are tokens; sequence ``i`` owns ``query_indptr[i] .. query_indptr[i + 1] - 1``.

    C1: complete; the executor never sees a Sequence. Sequences stand in this order: those that compute
    more than one token (extend), then those that compute one (decode), each part in depth-first order of
    shared pages. With ``S`` sequences and ``R`` rows:
    """

    page_size: int
    seq_ids: NDArray[np.int64]
    """``[S]`` numbers that tell the sequences apart."""
    request_ids: NDArray[np.int64]
    """``[S]``; the samples of one request have the same."""
    adapter_ids: NDArray[np.int32]
    """``[S]`` adapter of each sequence, 0 for none. Sequences of one adapter stand together among those that
    extend, and among those that decode."""
    token_ids: TokenIds
    """``[R]``"""
    positions: NDArray[np.int64]
    """``[R]``"""
    slot_mapping: SlotMapping
    """``[R]`` slot each row's K/V is written to; never on a page that anybody else holds (W1)."""
    query_indptr: NDArray[np.int32]
    """``[S + 1]``"""
    page_indptr: NDArray[np.int32]
    """``[S + 1]`` into ``page_indices``."""
    page_indices: PageIds
    """Pages of each sequence up to and including the last row's page."""
    last_page_len: NDArray[np.int32]
    """``[S]`` valid tokens in the last page after this step, ``1..page_size``."""
    sample_rows: NDArray[np.int64]
    """Rows whose logits choose a token; a row that several samples fork at stands once for each of them."""
    sample_seqs: NDArray[np.int64]
    """For each of ``sample_rows``, the index of its sequence (into ``seq_ids``)."""
    sampling: SamplingRows
    score_rows: NDArray[np.int64]
    """Rows whose logits give the log-probability of ``score_targets``."""
    score_targets: TokenIds
    score_seqs: NDArray[np.int64]
    """For each of ``score_rows``, the index of its sequence."""
    score_num_logprobs: NDArray[np.int32]
    """For each of ``score_rows``: 1 for the target's log-probability alone, 1 + k also for the k highest."""
    page_copies: tuple[PageCopy, ...]
    prefix_groups: tuple[PrefixGroup, ...]
    """Disjoint, in order; a group never spans the border between extend and decode."""
    num_extend_seqs: int
    num_extend_rows: int

    @property
    def num_seqs(self) -> int:
        return len(self.seq_ids)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def seq_lens(self) -> NDArray[np.int64]:
        """``[S]`` tokens of each sequence that are computed once this step is done."""
        num_pages = np.diff(self.page_indptr).astype(np.int64)
        return (num_pages - 1) * self.page_size + self.last_page_len


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step gives back: ``sampled_ids`` aligned with ``sample_rows``, ``score_logprobs`` with
    ``score_rows``. Log-probabilities are natural logs, of the raw logits in float32.

    With ``n`` sample rows and ``K`` the most alternatives that any of them asked for (a row that asked for
    fewer has its own in front). Left empty where no row asked; else a row that did not holds NaN and zeros.
    The ``score_*`` fields are the same for the score rows.
    """

    sampled_ids: TokenIds
    score_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    sampled_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """``[n]``, of the sampled token."""
    sampled_ranks: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """``[n]``: 1 + how many tokens have a higher logit; only rows with alternatives have one."""
    top_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    """``[n, K]``, likeliest first, of equals the lower id."""
    top_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """``[n, K]``"""
    score_ranks: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    score_top_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    score_top_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, or of one sample with its prompt; ``cached_tokens`` is counted once, at
    first admission."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @classmethod
    def of_request(cls, samples: Iterable[Usage]) -> Usage:
        """Of all samples of one request together: the prompt counts once, every sample's output counts."""
        samples = list(samples)
        completion_tokens = sum(usage.completion_tokens for usage in samples)
        return cls(samples[0].prompt_tokens, samples[0].cached_tokens, completion_tokens)


@dataclass(frozen=True)
class SequenceOutput:
    """What one sequence has new after a step. ``finish_reason`` is ``None`` while it goes on."""

    request_id: int
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage
    logprobs: tuple[float, ...] = ()
    """Set on the last output: log-probabilities of the prompt from ``logprob_start`` on."""
    error: BaseException | None = None
    """Set where ``finish_reason`` is ``error``."""
    sample_index: int = 0
    """Which of the request's samples (beams) this is, from 0. Each has one last output, in any order, and
    the request ends with the last one's."""
    cumulative_logprob: float | None = None
    """Of all output tokens, where their log-probabilities are wanted."""
    token_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``new_token_ids`` where ``SamplingParams.logprobs`` asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Set on the last output where ``SamplingParams.prompt_logprobs`` asks for them: one for each prompt
    token from ``logprob_start`` on, but none for position 0."""
