from __future__ import annotations

import numpy as np
import pytest

from radixkv.sched.sharing import common_prefix, end_of_chunk, leader_of
from radixkv.sequence import Request, Sequence
from radixkv.types import Namespace

SHARED = list(range(1, 101))


def sequence(
    prompt: list[int], computed: int = 0, namespace: Namespace = (), logprob_start: int | None = None
) -> Sequence:
    ids = np.array(prompt, np.int32)
    request = Request(request_id=1, prompt_ids=ids, namespace=namespace, logprob_start=logprob_start)
    seq = Sequence(request, 16)
    seq.num_computed = computed
    return seq


@pytest.mark.parametrize(
    ("computed", "hit", "waits"),
    [
        (0, 0, True),
        (68, 64, True),  # 32 shared tokens are left
        (69, 64, False),  # 31 are
        (0, 68, True),
        (0, 69, False),  # the rest is cached already
        (100, 96, False),
    ],
)
def test_a_follower_waits_while_enough_of_its_prompt_will_be_computed(
    computed: int, hit: int, waits: bool
) -> None:
    leader = sequence([*SHARED, 900, 901], computed)
    follower = sequence([*SHARED, 800])
    assert (leader_of(follower, hit, [leader], 32) is leader) == waits


def test_an_equal_prompt_counts_up_to_its_last_token_but_one() -> None:
    leader = sequence(SHARED[:33])
    assert leader_of(sequence(SHARED[:33]), 0, [leader], 32) is leader
    assert leader_of(sequence(SHARED[:32]), 0, [leader], 32) is None


def test_another_namespace_or_another_beginning_shares_nothing() -> None:
    leader = sequence(SHARED, namespace=("a",))
    assert leader_of(sequence(SHARED, namespace=("b",)), 0, [leader], 32) is None
    assert leader_of(sequence(SHARED, namespace=("a",)), 0, [leader], 32) is leader
    assert leader_of(sequence([999, *SHARED[1:]], namespace=("a",)), 0, [leader], 32) is None
    assert leader_of(sequence([999, *SHARED[1:]], namespace=("a",)), 40, [leader], 32) is None


def test_a_scored_prompt_waits_only_for_what_it_may_hit() -> None:
    leader = sequence(SHARED)
    assert leader_of(sequence(SHARED, logprob_start=33), 0, [leader], 32) is leader
    assert leader_of(sequence(SHARED, logprob_start=32), 0, [leader], 32) is None


def test_a_cut_chunk_ends_where_the_rest_is_worth_waiting_for() -> None:
    leader = sequence([*SHARED, *range(500, 600)])
    follower = sequence([*SHARED, 800])
    assert end_of_chunk(leader, 90, [follower], 32) == 68  # 10 would be left: leave 32
    assert end_of_chunk(leader, 68, [follower], 32) == 68
    assert end_of_chunk(leader, 40, [follower], 32) == 40
    assert end_of_chunk(leader, 100, [follower], 32) == 100  # all is computed


def test_a_cut_chunk_heeds_several_who_share_different_lengths() -> None:
    leader = sequence([*SHARED, *range(500, 600)])
    long = sequence([*SHARED, 800])
    assert end_of_chunk(leader, 90, [sequence([*SHARED[:60], 801]), long], 32) == 68  # the 60 are computed
    assert end_of_chunk(leader, 90, [sequence([*SHARED[:75], 801]), long], 32) == 43  # 75 - 32


def test_a_chunk_is_never_made_empty() -> None:
    leader = sequence([*SHARED, *range(500, 600)], computed=70)
    assert end_of_chunk(leader, 80, [sequence([*SHARED, 800])], 32) == 80


def test_a_chunk_ignores_those_who_share_nothing_that_it_computes() -> None:
    leader = sequence([*SHARED, *range(500, 600)], computed=64)
    others = [
        sequence([*SHARED[:50], *range(700, 760)]),
        sequence(SHARED[:10]),
        sequence([999, *SHARED[1:], 800]),
        sequence([*SHARED, 800], namespace=("x",)),
    ]
    assert end_of_chunk(leader, 90, others, 32) == 90


def test_common_prefix() -> None:
    a = np.array([1, 2, 3], np.int32)
    assert common_prefix(a, a) == 3
    assert common_prefix(a, np.array([1, 9, 3], np.int32)) == 1
    assert common_prefix(a[:0], a[:0]) == 0
