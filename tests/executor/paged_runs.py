"""Random paged runs, made without ledger and scheduler: scattered pages, shared prefixes, mixed steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.executor.hook import plain_attention
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.kv.page_copy import PageCopy
from radixkv.sched.batch import Batch, PrefixGroup
from radixkv.types import PageIds, TokenIds

NUM_PAGES = 640


@dataclass(eq=False)
class Member:
    """One sequence. Its first ``num_shared`` tokens are the family's; the leader computes them."""

    seq_id: int
    family: int
    token_ids: TokenIds
    num_shared: int
    pages: PageIds
    is_leader: bool
    num_shared_pages: int = 0
    """Whole pages it holds together with its leader."""
    num_computed: int = 0
    copies: tuple[PageCopy, ...] = ()
    """Due before its first row."""

    @property
    def done(self) -> bool:
        return self.num_computed == len(self.token_ids)


class PagedRun:
    """A few families of sequences, computed in random chunks; ``steps`` yields one batch after the other.

    A member starts when its leader has passed the shared part: on the leader's whole pages, and with a
    page copy where the shared part ends inside a page.
    """

    def __init__(self, seed: int, *, page_size: int, vocab_size: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.vocab_size = vocab_size
        self._free = self.rng.permutation(NUM_PAGES).astype(np.int32)
        self.members = [member for family in range(3) for member in self._family(family)]

    def _take(self, num_pages: int) -> PageIds:
        taken, self._free = self._free[:num_pages], self._free[num_pages:]
        assert len(taken) == num_pages
        return taken

    def _family(self, family: int) -> list[Member]:
        shared = self.rng.integers(0, self.vocab_size, self.rng.integers(1, 100))
        members: list[Member] = []
        for i in range(1 + family):  # the first family is one sequence alone
            tail = self.rng.integers(0, self.vocab_size, self.rng.integers(1, 30))
            token_ids = np.concatenate([shared, tail]).astype(np.int32)
            num_pages = -(-len(token_ids) // self.page_size)
            member = Member(10 * family + i, family, token_ids, len(shared), self._take(num_pages), i == 0)
            if members:
                self._share(members[0], member)
            members.append(member)
        return members

    def _share(self, leader: Member, member: Member) -> None:
        whole, rest = divmod(member.num_shared, self.page_size)
        member.pages[:whole] = leader.pages[:whole]
        member.num_shared_pages = leader.num_shared_pages = whole
        member.num_computed = member.num_shared
        if rest:
            member.copies = (PageCopy(int(leader.pages[whole]), int(member.pages[whole]), rest),)

    def steps(self) -> Iterator[tuple[Batch, list[ProbeSeq]]]:
        leaders = {member.family: member for member in self.members if member.is_leader}
        while todo := [member for member in self.members if not member.done]:
            ready = [
                member
                for member in todo
                if member.is_leader or leaders[member.family].num_computed >= member.num_shared
            ]
            chosen = [member for member in ready if self.rng.random() < 0.8] or ready[:1]
            stops = {
                m.seq_id: min(len(m.token_ids), m.num_computed + int(self.rng.choice([1, 1, 1, 2, 5, 9, 40])))
                for m in chosen
            }
            extend = [m for m in chosen if stops[m.seq_id] - m.num_computed > 1]
            decode = [m for m in chosen if stops[m.seq_id] - m.num_computed == 1]
            groups = (*self._groups(extend, 0), *self._groups(decode, len(extend)))
            ordered = [*extend, *decode]
            seqs = [
                ProbeSeq(m.seq_id, m.token_ids, m.num_computed, stops[m.seq_id], m.pages) for m in ordered
            ]
            copies = tuple(copy for m in ordered for copy in m.copies)
            batch = probe_batch(
                self.page_size, seqs, vocab_size=self.vocab_size, page_copies=copies, prefix_groups=groups
            )
            yield batch, seqs
            for m in ordered:
                m.num_computed, m.copies = stops[m.seq_id], ()

    def _groups(self, members: list[Member], first_seq: int) -> Iterator[PrefixGroup]:
        """Neighbours of one family whose rows all lie behind their shared pages."""
        start = 0
        while start < len(members):
            stop = start + 1
            while stop < len(members) and members[stop].family == members[start].family:
                stop += 1
            block = members[start:stop]
            num_pages = min(member.num_shared_pages for member in block)
            behind = all(m.num_computed >= num_pages * self.page_size for m in block)
            if len(block) > 1 and num_pages > 0 and behind:
                yield PrefixGroup(first_seq + start, len(block), num_pages)
            start = stop


def plain_logits(loaded: LoadedModel, token_ids: TokenIds) -> torch.Tensor:
    """``[len(token_ids), vocab_size]`` of an ordinary forward with transformers' eager attention."""
    with torch.inference_mode(), plain_attention(loaded.model):
        ids = torch.as_tensor(token_ids).long()
        logits: torch.Tensor = loaded.model(input_ids=ids[None], use_cache=False).logits[0]
    return logits.float()
