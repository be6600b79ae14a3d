"""Random draws as a pure function of (seed, sample index, output position)."""

from __future__ import annotations

import dataclasses
import secrets

import numpy as np
from numpy.typing import NDArray

from radixkv.sampling import MAX_SEED
from radixkv.sequence import Request

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def with_seed(request: Request) -> Request:
    """``request``, with a fresh seed where it draws and was given none."""
    if request.sampling.temperature == 0.0 or request.sampling.seed is not None:
        return request
    sampling = dataclasses.replace(request.sampling, seed=secrets.randbelow(MAX_SEED + 1))
    return dataclasses.replace(request, sampling=sampling)


def draws_of(
    seeds: NDArray[np.uint64], sample_indices: NDArray[np.uint64], output_positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """``[n]`` numbers uniform in [0, 1), one for each (seed, sample index, output position), ``[n]`` each.

    No state: preemption, forks and neighbours in the batch cannot change them. Each word of the key goes
    through the finaliser of splitmix64 before the next is added (Steele, Lea and Flood, 2014): a
    counter-based generator in the sense of Salmon et al. (2011).
    """
    mixed = _mix(seeds + _GAMMA)
    mixed = _mix((mixed ^ sample_indices) + _GAMMA)
    mixed = _mix((mixed ^ output_positions) + _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
