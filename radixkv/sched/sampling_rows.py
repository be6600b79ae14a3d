"""SamplingRows from sequences: every number that choosing the next tokens needs, as arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from radixkv.sched.batch import SamplingRows
from radixkv.sched.draws import draws_of
from radixkv.sequence import Sequence

_NO_INT64 = np.empty(0, np.int64)
_NO_INT32 = np.empty(0, np.int32)
_NO_FLOAT32 = np.empty(0, np.float32)


def sampling_rows(
    sequences: Seq[Sequence], vocab_size: int, eos_token_ids: tuple[int, ...] = ()
) -> SamplingRows:
    """One row for each of ``sequences``, which all sample a token in this step, in their order. One that
    stands there several times in a row samples for as many samples that are to fork."""
    params = [seq.request.sampling for seq in sequences]
    num_rows = len(params)
    bias_row, bias_token, bias_value = _bias_triples(sequences, eos_token_ids)
    seen_row, seen_token, seen_in_output = _seen_triples(sequences)
    temperature = np.fromiter((p.temperature for p in params), np.float32, num_rows)
    return SamplingRows(
        temperature=temperature,
        top_k=np.fromiter((min(p.top_k or vocab_size, vocab_size) for p in params), np.int32, num_rows),
        top_p=np.fromiter((p.top_p for p in params), np.float32, num_rows),
        min_p=np.fromiter((p.min_p for p in params), np.float32, num_rows),
        draws=_draws(sequences, temperature),
        bias_row=bias_row,
        bias_token=bias_token,
        bias_value=bias_value,
        seen_row=seen_row,
        seen_token=seen_token,
        seen_in_output=seen_in_output,
        repetition_penalty=np.fromiter((p.repetition_penalty for p in params), np.float32, num_rows),
        presence_penalty=np.fromiter((p.presence_penalty for p in params), np.float32, num_rows),
        frequency_penalty=np.fromiter((p.frequency_penalty for p in params), np.float32, num_rows),
        num_logprobs=np.fromiter((seq.num_logprobs for seq in sequences), np.int32, num_rows),
    )


def _draws(sequences: Seq[Sequence], temperature: NDArray[np.float32]) -> NDArray[np.float64]:
    """Greedy rows get 0.0: they need no draw, and have no seed."""
    draws = np.zeros(len(sequences))
    random_rows = np.flatnonzero(temperature > 0.0)
    if len(random_rows) == 0:
        return draws
    chosen = [sequences[row] for row in random_rows.tolist()]
    seeds = []
    indices: list[int] = []
    for place, seq in enumerate(chosen):
        seed = seq.request.sampling.seed
        assert seed is not None, "a request that draws is given its seed when it is added"
        seeds.append(seed)
        repeats = place > 0 and chosen[place - 1] is seq
        indices.append(indices[-1] + 1 if repeats else seq.request.sample_index + seq.sample_index)
    draws[random_rows] = draws_of(
        np.array(seeds, np.uint64),
        np.array(indices, np.uint64),
        np.array([seq.num_output for seq in chosen], np.uint64),
    )
    return draws


def _bias_triples(
    sequences: Seq[Sequence], eos_token_ids: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    rows: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float32]] = []
    for row, seq in enumerate(sequences):
        bias = seq.request.sampling.logit_bias
        if bias:
            rows.append(np.full(len(bias), row, np.int64))
            tokens.append(np.fromiter(bias.keys(), np.int64, len(bias)))
            values.append(np.fromiter(bias.values(), np.float32, len(bias)))
        barred = _barred(seq, eos_token_ids)
        if barred:
            rows.append(np.full(len(barred), row, np.int64))
            tokens.append(np.array(barred, np.int64))
            values.append(np.full(len(barred), -np.inf, np.float32))
    if not rows:
        return _NO_INT64, _NO_INT64, _NO_FLOAT32
    return np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)


def _barred(seq: Sequence, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that would end ``seq`` before it has its ``min_tokens``."""
    sampling = seq.request.sampling
    if seq.num_output >= sampling.min_tokens:
        return ()
    ends = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)
    return tuple(dict.fromkeys(ends))


def _seen_triples(
    sequences: Seq[Sequence],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    rows: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int32]] = []
    for row, seq in enumerate(sequences):
        if seq.request.sampling.has_penalties:
            seen, place = np.unique(seq.token_ids, return_inverse=True)
            rows.append(np.full(len(seen), row, np.int64))
            tokens.append(seen.astype(np.int64))
            in_output = np.bincount(place[seq.num_prompt :], minlength=len(seen))
            counts.append(in_output.astype(np.int32))
    if not rows:
        return _NO_INT64, _NO_INT64, _NO_INT32
    return np.concatenate(rows), np.concatenate(tokens), np.concatenate(counts)
