"""BeamGroup: the sequences of one beam search, and their pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixkv.config import ModelSpec
from radixkv.kv.invariant import require
from radixkv.kv.manager import KVCacheManager
from radixkv.sched.beam_search import BeamSearch, Continuation
from radixkv.sched.forking import fork, share_pages
from radixkv.sequence import Sequence, Status
from radixkv.types import TokenIds


class BeamGroup:
    """One sequence computes the prompt; then each beam is one, a fork of its parent.

    All of them compute their last token in the same step, and so live at one length. They are preempted
    together: the group is *gathered* to its first beam, cut to the beginning that all of them share, so that
    it waits as one sequence, and holds the prompt's pages once. When that beginning has been computed again,
    the group *spreads*: every beam forks from it, gets its own further tokens back, and computes those.

    - G2 while the group is gathered, its first beam stands for all; spread, all beams run and are of the same
      length. Its beams together have ``width`` places, however few of them there are.
    """

    def __init__(self, root: Sequence, search: BeamSearch) -> None:
        self.search = search
        self.beams = [root]
        """Best first."""
        self._rests: list[TokenIds] = []
        """While gathered after a preemption: what each beam has beyond the shared beginning."""
        self._numbers = range(root.number, root.number + search.params.width)

    @classmethod
    def of(cls, root: Sequence, spec: ModelSpec) -> BeamGroup:
        """``root`` is a new request's; from now on it asks for the likeliest next tokens."""
        sampling, params = root.request.sampling, root.request.beam
        assert params is not None
        end_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else spec.eos_token_ids)}
        search = BeamSearch(params, frozenset(end_ids), sampling.max_tokens, sampling.min_tokens)
        root.num_logprobs = 1 + min(search.num_candidates, spec.vocab_size)
        return cls(root, search)

    @property
    def first(self) -> Sequence:
        return self.beams[0]

    @property
    def is_gathered(self) -> bool:
        """Whether the first beam waits, or computes what all of them share, for the others."""
        return bool(self._rests)

    # After a step

    def advance(
        self, kv: KVCacheManager, top_ids: NDArray[np.int32], top_logprobs: NDArray[np.float32]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """All beams have computed all of their tokens: go on with the best continuations.

        ``top_ids`` and ``top_logprobs``, ``[num_beams, num_candidates]``, are in the order of ``beams``.
        Returns the sequences that are new, which run, and those that are not needed any more, which are
        released. When the search is over nothing changes.
        """
        going = self.search.step(
            [tuple(beam.output_ids.tolist()) for beam in self.beams],
            [beam.cumulative_logprob for beam in self.beams],
            top_ids.tolist(),
            top_logprobs.tolist(),
        )
        if self.search.is_over:
            return [], []
        parents = self.beams
        dropped = [beam for place, beam in enumerate(parents) if all(one.parent != place for one in going)]
        for beam in dropped:
            kv.release(beam)
            beam.status = Status.FINISHED
        free = iter(sorted(set(self._numbers) - {beam.number for beam in parents if beam not in dropped}))
        self.beams, new = [], []
        used: set[int] = set()
        for one in going:
            beam = parents[one.parent]
            if one.parent in used:
                beam = fork(kv, beam, next(free), beam.sample_index)
                new.append(beam)
            used.add(one.parent)
            self.beams.append(beam)
        for beam, one in zip(self.beams, going, strict=True):  # forks need their parent as it was
            _append(beam, one)
        self._share_places()
        return new, dropped

    def spread(self, kv: KVCacheManager) -> list[Sequence]:
        """The shared beginning has been computed again: the other beams, which now run."""
        first, others = self.beams[0], self.beams[1:]
        rests, self._rests = self._rests, []
        for beam in others:
            share_pages(kv, first, beam)
        for token_id in rests[0].tolist():
            first.append(token_id)
        self._share_places()
        return others

    # Preemption

    def gather(self) -> Sequence:
        """All beams have been released: who waits for them."""
        if not self.is_gathered and len(self.beams) > 1:
            outputs = np.stack([beam.output_ids for beam in self.beams])
            differs = np.flatnonzero((outputs != outputs[0]).any(axis=0))
            shared = self.first.num_prompt + int(differs[0])  # distinct outputs differ somewhere
            self._rests = [beam.token_ids[shared:].copy() for beam in self.beams]
            self.first.truncate(shared)
        for beam in self.beams[1:]:
            beam.status = Status.WAITING
            beam.num_samples = 0
        self.first.num_samples = self.search.params.width
        return self.first

    def _share_places(self) -> None:
        for beam in self.beams:
            beam.num_samples = 1
        self.first.num_samples = self.search.params.width - len(self.beams) + 1

    # Reports

    def keep_step(self, grants: dict[Sequence, int]) -> None:
        """Where a beam does not get to its last token in this step, leave every other's for later too. At
        least that beam still computes something."""
        if self.is_gathered or all(
            grants.get(beam) == beam.num_tokens - beam.num_computed for beam in self.beams
        ):
            return
        for beam in self.beams:
            if grants.get(beam) == beam.num_tokens - beam.num_computed:
                grants[beam] -= 1
                if grants[beam] == 0:
                    del grants[beam]

    def check(self) -> None:
        """G1 and G2. Raises ``InternalError``."""
        self.search.check()
        state = [(beam.number, beam.num_tokens, beam.num_samples) for beam in self.beams]
        numbers = {beam.number for beam in self.beams}
        require(len(numbers) == len(self.beams) and numbers <= set(self._numbers), "G2", f"numbers: {state}")
        places = sum(beam.num_samples for beam in self.beams)
        require(places == self.search.params.width, "G2", f"{places} places: {state}")
        if not self.is_gathered:
            require(len({beam.num_tokens for beam in self.beams}) == 1, "G2", f"lengths: {state}")
        for beam in self.beams[1:]:
            apart = beam.page_table.num_pages == 0 and beam.status is Status.WAITING
            require(apart == self.is_gathered, "G2", "a beam is", beam.status, state)

    def stats(self) -> dict[str, int]:
        """``num_beams``, ``num_finished`` and whether the group ``is_gathered``."""
        return {
            "num_beams": len(self.beams),
            "num_finished": len(self.search.finished),
            "is_gathered": self.is_gathered,
        }


def _append(beam: Sequence, one: Continuation) -> None:
    beam.append(one.token_id)
    beam.cumulative_logprob = one.cumulative_logprob
