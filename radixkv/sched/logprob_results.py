"""What a step says about log-probabilities, brought to the sequences that asked."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from radixkv.sched.batch import Batch, StepResult
from radixkv.sequence import Sequence
from radixkv.token_logprobs import TokenLogprobs, token_logprobs


def take_prompt_scores(batch: Batch, result: StepResult, sequences: Seq[Sequence]) -> None:
    """Give every scored prompt position its number. ``sequences`` are the batch's."""
    if len(batch.score_seqs) == 0:
        return
    scored, firsts = np.unique(batch.score_seqs, return_index=True)
    lasts = [*firsts[1:].tolist(), len(batch.score_seqs)]
    for i, first, last in zip(scored.tolist(), firsts.tolist(), lasts, strict=True):
        seq = sequences[i]
        if seq.request.num_prompt_alternatives:
            seq.prompt_entries += [_score_entry(batch, result, row) for row in range(first, last)]
        seq.logprobs += result.score_logprobs[first:last].tolist()


def sampled_entries(batch: Batch, result: StepResult) -> list[TokenLogprobs | None]:
    """Aligned with ``sample_rows``; ``None`` for those that did not ask. Empty where nobody did."""
    wanted = batch.sampling.num_logprobs
    if not wanted.any():
        return []
    return [
        token_logprobs(
            int(result.sampled_ids[row]),
            float(result.sampled_logprobs[row]),
            num_logprobs,
            int(result.sampled_ranks[row]),
            result.top_ids[row],
            result.top_logprobs[row],
        )
        if num_logprobs
        else None
        for row, num_logprobs in enumerate(wanted.tolist())
    ]


def prompt_entries(seq: Sequence) -> tuple[TokenLogprobs, ...]:
    """What is known of the prompt's tokens from ``logprob_start`` on, where ``sampling`` asks for it."""
    if seq.request.sampling.prompt_logprobs is None:
        return ()
    if seq.request.num_prompt_alternatives:
        return tuple(seq.prompt_entries)
    first = seq.next_scored - len(seq.logprobs)
    token_ids = seq.token_ids[first : seq.next_scored].tolist()
    return tuple(TokenLogprobs(*pair) for pair in zip(token_ids, seq.logprobs, strict=True))


def _score_entry(batch: Batch, result: StepResult, row: int) -> TokenLogprobs:
    return token_logprobs(
        int(batch.score_targets[row]),
        float(result.score_logprobs[row]),
        int(batch.score_num_logprobs[row]),
        int(result.score_ranks[row]),
        result.score_top_ids[row],
        result.score_top_logprobs[row],
    )
