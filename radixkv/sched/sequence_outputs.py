"""SequenceOutput from what a sequence or a beam search has to say."""

from __future__ import annotations

import math

from radixkv.sched.batch import SequenceOutput, Usage
from radixkv.sched.beam_group import BeamGroup
from radixkv.sched.logprob_results import prompt_entries
from radixkv.sequence import FinishReason, Sequence
from radixkv.token_logprobs import TokenLogprobs


def output_of(
    seq: Sequence,
    new_ids: tuple[int, ...],
    error: BaseException | None = None,
    entry: TokenLogprobs | None = None,
    *,
    fork: int = 0,
) -> SequenceOutput:
    """What ``seq`` has new, or its last output. ``entry``: the new token's log-probability; ``fork``: which
    of the samples that it still stands for."""
    is_last = seq.finish_reason is not None
    return SequenceOutput(
        seq.request.request_id,
        new_ids,
        seq.finish_reason,
        Usage(seq.num_prompt, seq.num_cached or 0, seq.num_output),
        logprobs=tuple(seq.logprobs) if is_last else (),
        error=error,
        sample_index=seq.sample_index + fork,
        cumulative_logprob=seq.cumulative_logprob if seq.num_logprobs else None,
        token_logprobs=() if entry is None else (entry,),
        prompt_logprobs=prompt_entries(seq) if is_last else (),
    )


def last_outputs(
    seq: Sequence, new_ids: tuple[int, ...], error: BaseException | None, entry: TokenLogprobs | None = None
) -> list[SequenceOutput]:
    """One for each sample that ``seq``, which has ended, stands for."""
    return [output_of(seq, new_ids, error, entry, fork=i) for i in range(seq.num_samples)]


def beam_outputs(
    group: BeamGroup, reason: FinishReason | None, error: BaseException | None
) -> list[SequenceOutput]:
    """The results of a beam search, best first, by ``sample_index``; ``width`` of them, whatever happens.

    ``reason``: why it ended before it was over, in which case there are no tokens; ``None``: it is over.
    Where there are fewer continuations than beams, the missing ones have no tokens and probability 0.
    """
    first = group.first
    outputs = []
    for place in range(group.search.params.width):
        found = group.search.finished[place : place + 1] if reason is None else []
        token_ids = found[0].token_ids if found else ()
        at_end: FinishReason = "stop" if found and found[0].has_ended else "length"
        outputs.append(
            SequenceOutput(
                first.request.request_id,
                token_ids,
                at_end if reason is None else reason,
                Usage(first.num_prompt, first.num_cached or 0, len(token_ids)),
                logprobs=tuple(first.logprobs),
                error=error,
                sample_index=place,
                cumulative_logprob=found[0].cumulative_logprob if found else -math.inf,
                prompt_logprobs=prompt_entries(first),
            )
        )
    return outputs
