"""Forks: a second sequence on the pages of a first one. Copies nothing; whoever writes first does."""

from __future__ import annotations

from radixkv.kv.manager import KVCacheManager
from radixkv.sequence import Sequence


def fork(kv: KVCacheManager, parent: Sequence, number: int, sample_index: int) -> Sequence:
    """A running sequence with the tokens and the pages of ``parent``, which goes on as it was."""
    child = parent.copy(number, sample_index)
    share_pages(kv, parent, child)
    return child


def fork_samples(kv: KVCacheManager, first: Sequence) -> list[Sequence]:
    """The samples that ``first`` stood for, itself among them, in order. Its prompt is computed, and no token
    is sampled yet. They share all of its pages."""
    num_samples, first.num_samples = first.num_samples, 1
    others = [fork(kv, first, first.number + i, first.sample_index + i) for i in range(1, num_samples)]
    return [first, *others]


def share_pages(kv: KVCacheManager, parent: Sequence, child: Sequence) -> None:
    """Let ``child``, which holds nothing and begins with what ``parent`` has computed, hold its pages too."""
    child.page_table = kv.fork(parent)
    child.num_computed = parent.num_computed
    child.num_committed_pages = parent.num_committed_pages
    child.namespace = parent.namespace
    child.status = parent.status
