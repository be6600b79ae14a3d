"""TokenLogprobs: what the model thought of one token, and of the likeliest others in its place."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logs of the model's own probabilities: of its raw logits in float32, before temperature,
    penalties, bias and cuts. They are a pure function of the tokens before."""

    token_id: int
    logprob: float
    rank: int | None = None
    """1 + how many tokens are likelier; ``None`` where no alternatives were asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens as ``(token id, logprob)``, likeliest first, of equals the lower id; as many as
    were asked for. The token itself is among them only where it belongs there."""


def token_logprobs(
    token_id: int,
    logprob: float,
    num_logprobs: int,
    rank: int,
    top_ids: NDArray[np.int32],
    top_logprobs: NDArray[np.float32],
) -> TokenLogprobs:
    """One entry from a row of ``StepResult``. ``num_logprobs`` (at least 1) counts the token itself."""
    if num_logprobs == 1:
        return TokenLogprobs(token_id, logprob)
    ids: Seq[int] = top_ids[: num_logprobs - 1].tolist()
    values: Seq[float] = top_logprobs[: num_logprobs - 1].tolist()
    return TokenLogprobs(token_id, logprob, rank, tuple(zip(ids, values, strict=True)))
