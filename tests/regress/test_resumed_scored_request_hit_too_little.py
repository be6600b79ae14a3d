"""A preempted request that scores its prompt found only what lies before its first scored position, though
those positions had their log-probability already."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.kv.manager import KVCacheManager
from radixkv.kv.page_pool import PagePool
from radixkv.kv.radix_tree import RadixTree
from radixkv.sequence import Request, Sequence


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("num_scored", "num_output", "hit"), [(0, 0, 2), (4, 0, 6), (7, 0, 9), (7, 3, 12)])
def test_it_hits_all_but_what_is_still_to_be_scored(
    num_scored: int, num_output: int, hit: int, page_size: int
) -> None:
    """Fault seen: ``request.max_hit_tokens`` as the limit."""
    kv = KVCacheManager(PagePool(32), RadixTree(page_size))
    request = Request(request_id=0, prompt_ids=np.arange(10, dtype=np.int32), logprob_start=3)
    seq = Sequence(request, page_size)
    for token in range(num_output):
        seq.append(token)
    kv.acquire(seq)
    kv.reserve(seq, seq.num_tokens)
    seq.num_computed = seq.num_tokens
    seq.logprobs += [-1.0] * num_scored
    kv.commit(seq)
    kv.release(seq)
    kv.acquire(seq)
    assert seq.num_computed == hit
    kv.check([seq])
