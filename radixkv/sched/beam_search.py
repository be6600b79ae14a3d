"""BeamSearch: which continuations live on. Numbers and token ids only, no pages and no sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from radixkv.beam_params import BeamParams
from radixkv.kv.invariant import require


@dataclass(frozen=True)
class Continuation:
    """One beam of the next step: the token ``token_id`` after beam number ``parent`` of this step."""

    parent: int
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam."""

    token_ids: tuple[int, ...]
    """Its output, an end token included."""
    cumulative_logprob: float
    score: float
    has_ended: bool
    """True: by an end token; False: cut at ``max_tokens``."""


@dataclass(eq=False)
class BeamSearch:
    """The search of one request, step by step; deterministic.

    In each step every continuation of every beam is ranked by its cumulative log-probability, of equals the
    earlier beam's and the likelier token first. Those among the first ``width`` that end are finished; the
    first ``width`` that do not end go on. The search is over when no better result is to be expected: see
    ``BeamParams.early_stopping``; the rule, and that only the first ``width`` may finish, are those of
    transformers' beam search, after Sutskever et al. (2014) and Wu et al. (2016).

    - G1 at most ``width`` beams are finished, best first, and no more go on.
    """

    params: BeamParams
    end_ids: frozenset[int]
    """Tokens that end a beam."""
    max_tokens: int
    """Output tokens at most."""
    min_tokens: int = 0
    """End tokens do not count before this many."""
    finished: list[Hypothesis] = field(default_factory=list)
    is_over: bool = False

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that a step needs of each beam: even if every end token is among them, enough are
        left to go on with."""
        return self.params.width * (1 + len(self.end_ids))

    def step(
        self,
        outputs: Seq[tuple[int, ...]],
        cumulative: Seq[float],
        top_ids: Seq[Seq[int]],
        top_logprobs: Seq[Seq[float]],
    ) -> list[Continuation]:
        """The beams that go on, best first; none when the search is over.

        For each beam its output tokens so far (all of one length), its cumulative log-probability, and its
        likeliest next tokens with their log-probabilities, likeliest first.
        """
        num_tokens = len(outputs[0]) + 1
        width = self.params.width
        going: list[Continuation] = []
        ranked = self._ranked(num_tokens, cumulative, top_ids, top_logprobs)
        for place, one in enumerate(ranked):
            has_ended = one.token_id in self.end_ids
            if has_ended or num_tokens >= self.max_tokens:
                if place < width:
                    score = self.params.score(one.cumulative_logprob, num_tokens)
                    token_ids = (*outputs[one.parent], one.token_id)
                    self.finished.append(Hypothesis(token_ids, one.cumulative_logprob, score, has_ended))
            elif len(going) < width:
                going.append(one)
        self.finished = sorted(self.finished, key=lambda done: -done.score)[:width]  # keeps ties in order
        self.is_over = not going or self._is_good_enough(going[0].cumulative_logprob, num_tokens)
        return [] if self.is_over else going

    def _ranked(
        self,
        num_tokens: int,
        cumulative: Seq[float],
        top_ids: Seq[Seq[int]],
        top_logprobs: Seq[Seq[float]],
    ) -> list[Continuation]:
        too_early = num_tokens <= self.min_tokens
        ranked = [
            Continuation(parent, token_id, before + logprob)
            for parent, before in enumerate(cumulative)
            for token_id, logprob in zip(top_ids[parent], top_logprobs[parent], strict=True)
            if logprob > -math.inf and not (too_early and token_id in self.end_ids)
        ]
        ranked.sort(key=lambda one: -one.cumulative_logprob)  # keeps ties in order of beam and rank
        return ranked[: self.num_candidates]

    def _is_good_enough(self, best_going: float, num_tokens: int) -> bool:
        if len(self.finished) < self.params.width:
            return False
        return self.params.early_stopping or (
            self.params.score(best_going, num_tokens) <= self.finished[-1].score
        )

    def check(self) -> None:
        """G1. Raises ``InternalError``."""
        scores = [done.score for done in self.finished]
        require(len(scores) <= self.params.width, "G1", f"{len(scores)} beams have finished")
        require(scores == sorted(scores, reverse=True), "G1", f"finished beams out of order: {scores}")
