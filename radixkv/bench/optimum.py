"""The best hit rate that any prefix cache could reach, by replaying what was submitted.

The hit of a prompt is at best its longest prefix among all prompts submitted before it and, of those
requests that had finished by then, among their prompts with their outputs less the last token (whose K/V
nobody computes); and at most its length less one, since one token must be computed to say what comes next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.errors import InternalError
from radixkv.types import TokenIds


@dataclass(frozen=True, eq=False)
class Replayed:
    """One request as it happened; times are seconds from any one origin."""

    prompt_ids: TokenIds
    submitted_s: float
    output_ids: tuple[int, ...]
    finished_s: float


class PrefixSet:
    """Token sequences in sorted order, asked for the longest prefix they share with another one.

    The neighbours in lexicographic order share the longest prefix. Keys are big-endian, because the order
    of such bytes is the order of the ids.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def add(self, ids: TokenIds) -> None:
        insort(self._keys, ids.astype(">i4").tobytes())

    def longest_prefix(self, ids: TokenIds) -> int:
        """Tokens that ``ids`` shares with the member most like it; 0 where there is none."""
        key = ids.astype(">i4").tobytes()
        at = bisect_left(self._keys, key)
        return max((_shared_tokens(key, near) for near in self._keys[max(at - 1, 0) : at + 1]), default=0)


def optimal_hits(requests: Sequence[Replayed]) -> list[int]:
    """The optimum of each request, which must stand in submission order."""
    known = PrefixSet()
    finished = sorted(requests, key=lambda request: request.finished_s, reverse=True)
    hits: list[int] = []
    submitted_s = float("-inf")
    for request in requests:
        if request.submitted_s < submitted_s:
            raise InternalError("the replay needs its requests in submission order")
        submitted_s = request.submitted_s
        while finished and finished[-1].finished_s <= submitted_s:
            done = finished.pop()
            if done.output_ids:
                outputs = np.asarray(done.output_ids[:-1], np.int32)
                known.add(np.concatenate([done.prompt_ids, outputs]))
        hits.append(min(known.longest_prefix(request.prompt_ids), len(request.prompt_ids) - 1))
        known.add(request.prompt_ids)
    return hits


def share_of_optimum(hit_tokens: int, optimal_tokens: int) -> float:
    """``hit_tokens / optimal_tokens``; 1.0 where there was nothing to hit.

    Raises ``InternalError`` over 1: then tokens were counted wrongly, here or in the engine.
    """
    if hit_tokens > optimal_tokens:
        raise InternalError(f"{hit_tokens} tokens were counted as hits, but the optimum is {optimal_tokens}")
    return hit_tokens / optimal_tokens if optimal_tokens else 1.0


def _shared_tokens(one: bytes, other: bytes) -> int:
    num_bytes = min(len(one), len(other))
    differing = np.flatnonzero(
        np.frombuffer(one, np.uint32, num_bytes // 4) != np.frombuffer(other, np.uint32, num_bytes // 4)
    )
    return int(differing[0]) if len(differing) else num_bytes // 4
