"""From logits to token ids."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.errors import NonFiniteLogitsError
from radixkv.sched.batch import SamplingRows
from radixkv.types import TokenIds


def sample(
    logits: torch.Tensor, rows: SamplingRows, request_ids: NDArray[np.int64], seq_ids: NDArray[np.int64]
) -> TokenIds:
    """Choose one token per row. ``logits`` is ``[n, vocab]``, the result ``[n]`` int32.

    In this order: repetition penalty (Keskar et al., 2019), presence and frequency penalties, bias; then
    a row of temperature 0 takes its most probable token, the first of equals. Any other row is divided by
    its temperature, cut to ``top_k``, then ``top_p`` (Holtzman et al., 2020), then ``min_p`` (Nguyen et
    al., 2024), and its uniform draw picks a token by the inverse of the cumulative distribution, summed
    in float64 in the order of token ids. Each such row is worked on alone, so that its choice depends on
    its own logits and draw only.

    Raises ``NonFiniteLogitsError`` when the best logit of a row is no finite number; ``request_ids`` and
    ``seq_ids`` (``[n]``) are the names it reports. ``logits`` is not changed.
    """
    if logits.shape[0] == 0:
        return np.empty(0, np.int32)
    logits = _adjusted(logits, rows)
    best, best_logit = _best(logits)
    finite = np.isfinite(best_logit)
    if not finite.all():
        raise NonFiniteLogitsError.of(request_ids[~finite], seq_ids[~finite])
    chosen = best.astype(np.int32)
    if not rows.all_greedy:
        for row in np.flatnonzero(rows.temperature > 0.0):
            chosen[row] = _draw(
                logits[row],
                float(best_logit[row]),
                temperature=float(rows.temperature[row]),
                top_k=int(rows.top_k[row]),
                top_p=float(rows.top_p[row]),
                min_p=float(rows.min_p[row]),
                draw=float(rows.draws[row]),
            )
    return chosen


def _best(logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Index and value of each row's largest logit; NaN counts as the largest."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        values = logits.numpy()  # numpy's argmax is some ten times faster than torch's here
        index = values.argmax(axis=1)
        return index, values[np.arange(len(index)), index]
    best = logits.argmax(dim=1)
    best_logit = logits.gather(1, best[:, None])[:, 0]
    return best.cpu().numpy(), best_logit.float().cpu().numpy()


def _adjusted(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Penalties and bias, on a copy in float32; without any, the logits themselves."""
    if len(rows.seen_row) == 0 and len(rows.bias_row) == 0:
        return logits
    logits = logits.float().clone()
    device = logits.device
    if len(rows.seen_row):
        where = (
            torch.as_tensor(rows.seen_row, device=device),
            torch.as_tensor(rows.seen_token, device=device),
        )
        seen = logits[where]
        repetition = torch.as_tensor(rows.repetition_penalty[rows.seen_row], device=device)
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        count = rows.seen_in_output.astype(np.float32)
        off = (
            rows.presence_penalty[rows.seen_row] * (count > 0) + rows.frequency_penalty[rows.seen_row] * count
        )
        logits[where] = seen - torch.as_tensor(off.astype(np.float32), device=device)
    if len(rows.bias_row):
        where = (
            torch.as_tensor(rows.bias_row, device=device),
            torch.as_tensor(rows.bias_token, device=device),
        )
        logits.index_put_(where, torch.as_tensor(rows.bias_value, device=device), accumulate=True)
    return logits


def _draw(
    logits: torch.Tensor,
    best_logit: float,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draw: float,
) -> int:
    """One token of one row, ``logits`` ``[vocab]``."""
    weights = torch.exp((logits.float() - best_logit) / temperature)  # the best token weighs 1
    token_ids = None
    if top_k < len(weights) or top_p < 1.0:
        token_ids = _kept(weights, top_k, top_p)
        weights = weights[token_ids]
    if min_p > 0.0:
        weights = torch.where(weights >= min_p, weights, 0.0)
    cumulative = torch.cumsum(weights, 0, dtype=torch.float64)
    total = float(cumulative[-1])
    target = min(draw * total, math.nextafter(total, 0.0))  # rounding must not push it to the end
    at = int(torch.searchsorted(cumulative, target, right=True))
    return at if token_ids is None else int(token_ids[at])


def _kept(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Ids, ascending, that ``top_k`` and then ``top_p`` keep; of equal weights the lower id comes first."""
    candidates = torch.arange(len(weights), device=weights.device)
    if top_k < len(weights):
        least = torch.topk(weights, top_k).values[-1]
        candidates = candidates[weights >= least]
    elif top_p < 1.0:
        # All tokens below this share sum up to less than 1 - top_p, so none of them can be kept.
        least_share = (1.0 - top_p) / len(weights)
        candidates = candidates[weights >= least_share * weights.sum(dtype=torch.float64)]
    order = torch.sort(weights[candidates], descending=True, stable=True).indices[:top_k]
    candidates = candidates[order]
    if top_p < 1.0:
        cumulative = torch.cumsum(weights[candidates], 0, dtype=torch.float64)
        total = weights.sum(dtype=torch.float64) if top_k >= len(weights) else cumulative[-1]
        num_kept = int(torch.searchsorted(cumulative, top_p * total)) + 1
        candidates = candidates[:num_kept]
    return torch.sort(candidates).values
