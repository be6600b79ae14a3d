"""From logits to the log-probabilities of given tokens, and of the likeliest others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RowLogprobs:
    """Of ``n`` rows, in the layout of ``StepResult``: ``logprobs`` and ``ranks`` ``[n]``, ``top_ids`` and
    ``top_logprobs`` ``[n, K]``."""

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def blank(cls, num_rows: int, num_logprobs: NDArray[np.int32]) -> RowLogprobs:
        """NaN and zeros, to be filled; with no room for anything where ``num_logprobs`` asks for nothing."""
        num_rows = num_rows if num_logprobs.any() else 0
        num_top = max(int(num_logprobs.max(initial=0)) - 1, 0)
        return cls(
            np.full(num_rows, np.nan, np.float32),
            np.zeros(num_rows, np.int32),
            np.zeros((num_rows, num_top), np.int32),
            np.full((num_rows, num_top), np.nan, np.float32),
        )

    def fill(
        self,
        rows: NDArray[np.int64],
        logits: torch.Tensor,
        token_ids: NDArray[np.int32],
        num_logprobs: NDArray[np.int32],
    ) -> None:
        """Set ``rows`` (``[m]``) from their raw ``logits`` ``[m, vocab]``. ``token_ids`` and ``num_logprobs``
        are ``[m]``, the latter at least 1 each. Sums in float32, by way of the largest logit."""
        logits = logits.float()
        normaliser = torch.logsumexp(logits, dim=1)
        targets = torch.as_tensor(token_ids, device=logits.device).long()
        picked = logits.gather(1, targets[:, None])[:, 0]
        self.logprobs[rows] = (picked - normaliser).cpu().numpy()
        for i in np.flatnonzero(num_logprobs > 1).tolist():
            num_top, row = int(num_logprobs[i]) - 1, int(rows[i])
            self.ranks[row] = 1 + int((logits[i] > picked[i]).sum())
            best = _best(logits[i], num_top)
            self.top_ids[row, :num_top] = best.cpu().numpy()
            self.top_logprobs[row, :num_top] = (logits[i, best] - normaliser[i]).cpu().numpy()


def _best(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """Ids of the ``num_top`` largest of ``logits`` (``[vocab]``), largest first, of equals the lower id."""
    least = torch.topk(logits, num_top).values[-1]
    candidates = torch.nonzero(logits >= least)[:, 0]
    order = torch.sort(logits[candidates], descending=True, stable=True).indices[:num_top]
    return candidates[order]
