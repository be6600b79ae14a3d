"""Why a sample stops after a token."""

from __future__ import annotations

from collections.abc import Container

from radixkv.sequence import FinishReason, Sequence


def reason_to_stop(seq: Sequence, token_id: int, eos_token_ids: Container[int]) -> FinishReason | None:
    """``token_id`` is the last of ``seq``; ``None``: it goes on."""
    sampling = seq.request.sampling
    if token_id in sampling.stop_token_ids:
        return "stop"
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return "stop"
    return "length" if seq.num_output >= sampling.max_tokens else None
