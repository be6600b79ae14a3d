"""BeamSearch: ranking, ends and ties, by hand."""

from __future__ import annotations

import math

import pytest

from radixkv.beam_params import BeamParams
from radixkv.errors import InternalError
from radixkv.sched.beam_search import BeamSearch, Continuation, Hypothesis


def search(width: int = 2, *, max_tokens: int = 9, min_tokens: int = 0, **params: float) -> BeamSearch:
    beam = BeamParams(width=width, **params)  # type: ignore[arg-type]
    return BeamSearch(beam, frozenset({0}), max_tokens, min_tokens)


def test_of_equals_the_earlier_beam_and_the_likelier_token_come_first() -> None:
    """Fault seen: equals are ordered by token id."""
    going = search().step([(5,), (6,)], [-1.0, -1.0], [[9, 8], [3, 2]], [[-1.0, -1.0], [-1.0, -1.0]])
    assert going == [Continuation(0, 9, -2.0), Continuation(0, 8, -2.0)]


def test_an_end_token_finishes_a_beam_only_among_the_first() -> None:
    """Fault seen: every end token finishes its beam."""
    one = search()
    going = one.step([(5,), (6,)], [-1.0, -1.0], [[0, 8], [3, 0]], [[-0.1, -2.0], [-0.2, -0.9]])
    assert going == [Continuation(1, 3, -1.2), Continuation(0, 8, -3.0)]
    assert one.finished == [Hypothesis((5, 0), -1.1, -0.55, True)]


def test_before_min_tokens_nothing_ends() -> None:
    """Fault seen: ``too_early`` is one token too short."""
    one = search(min_tokens=2)
    assert one.step([(5,)], [0.0], [[0, 8]], [[-0.1, -2.0]]) == [Continuation(0, 8, -2.0)]
    assert one.finished == []
    one.step([(5, 8)], [-2.0], [[0, 8]], [[-0.1, -2.0]])
    assert [done.token_ids for done in one.finished] == [(5, 8, 0)]


def test_what_is_impossible_never_goes_on_and_a_search_may_run_dry() -> None:
    """Fault seen: ``_ranked`` keeps probability 0."""
    one = search()
    assert one.step([(5,)], [0.0], [[8, 7]], [[-math.inf, -math.inf]]) == []
    assert one.is_over and one.finished == []


@pytest.mark.parametrize(("early_stopping", "over"), [(True, True), (False, False)])
def test_when_it_stops(early_stopping: bool, over: bool) -> None:
    """Fault seen: a full list of finished beams always ends the search."""
    one = search(early_stopping=early_stopping, length_penalty=1.0)
    one.finished = [Hypothesis((0,), -8.0, -8.0, True)]
    one.step([(5,), (6,)], [-1.0, -9.0], [[0, 8], [3, 2]], [[-3.0, -1.0], [-1.0, -1.0]])
    assert [done.score for done in one.finished] == [-2.0, -8.0]
    assert one.is_over == over  # the best that goes on has -2.0 over 2 tokens: better than -8.0


def test_check_notices_disorder() -> None:
    one = search(1)
    one.finished = [Hypothesis((1,), -1.0, -1.0, True), Hypothesis((2,), -0.5, -0.5, True)]
    with pytest.raises(InternalError, match="G1"):
        one.check()
