"""How much room for outputs is kept free, and that a tight pool neither churns nor idles."""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import Harness, random_ids

from radixkv.errors import InternalError
from radixkv.sampling import SamplingParams
from radixkv.sched.reservation import (
    DECAY_PER_STEP,
    MAX_TOKENS,
    MIN_RATIO,
    MIN_TOKENS,
    RAISE,
    START_RATIO,
    WEIGHT_OF_END,
    Reservation,
)
from radixkv.sequence import Request, Sequence


def sequence(
    num_prompt: int, max_tokens: int, num_output: int = 0, page_size: int = 4, n: int = 1
) -> Sequence:
    request = Request(
        request_id=0,
        prompt_ids=np.ones(num_prompt, np.int32),
        sampling=SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0 if n == 1 else 1.0),
    )
    seq = Sequence(request, page_size)
    for _ in range(num_output):
        seq.append(1)
    return seq


def test_a_constant_is_expected_of_each_but_no_more_than_it_may_have() -> None:
    reservation = Reservation(32)
    assert not reservation.is_adaptive
    assert reservation.tokens(sequence(10, 100)) == 32
    assert reservation.tokens(sequence(10, 20, 5)) == 14  # the last token is never computed
    assert reservation.tokens(sequence(10, 1, 1)) == 0
    for _ in range(10):
        reservation.stepped()
    assert reservation.tokens(sequence(10, 100)) == 32


def test_a_share_is_expected_between_the_least_and_the_most() -> None:
    reservation = Reservation(None)
    assert reservation.is_adaptive and reservation.ratio == START_RATIO
    assert reservation.tokens(sequence(10, 101)) == 70
    assert reservation.tokens(sequence(10, 101, 50)) == 35
    assert reservation.tokens(sequence(10, 9)) == MIN_TOKENS
    assert reservation.tokens(sequence(10, 4)) == 3
    assert reservation.tokens(sequence(10, 10 * MAX_TOKENS)) == np.ceil(START_RATIO * MAX_TOKENS)


def test_pages_count_the_rest_of_the_prompt_and_every_sample() -> None:
    reservation = Reservation(8)
    assert reservation.pages(sequence(10, 100)) == 5  # 18 tokens
    assert reservation.pages(sequence(10, 100, n=3)) == 5 + 2 * 2
    seq = sequence(10, 100)
    seq.page_table.extend(np.arange(4, dtype=np.int32))
    assert reservation.pages(seq) == 1
    seq.page_table.extend(np.arange(4, 9, dtype=np.int32))
    assert reservation.pages(seq) == 0


def test_the_ratio_decays_by_step_and_by_early_ends_and_never_below_the_minimum() -> None:
    reservation = Reservation(None)
    reservation.stepped()
    assert reservation.ratio == START_RATIO - DECAY_PER_STEP
    before = reservation.ratio
    reservation.ended(sequence(5, 10, 10))
    assert reservation.ratio == before  # it took all
    reservation.ended(sequence(5, 10, 2))
    assert reservation.ratio == pytest.approx(before - (before - 0.2) * WEIGHT_OF_END)
    for _ in range(1000):
        reservation.stepped()
    assert reservation.ratio == MIN_RATIO
    reservation.ended(sequence(5, 10, 0))
    reservation.ended(sequence(5, 0))
    assert reservation.ratio == MIN_RATIO
    reservation.check()


def test_a_preemption_raises_it_to_what_was_taken() -> None:
    reservation = Reservation(None)
    reservation.preempted([sequence(5, 100, 90), sequence(5, 100, 70)])
    assert reservation.ratio == 0.8
    reservation.preempted([sequence(5, 100, 1)])
    assert reservation.ratio == pytest.approx(0.8 + RAISE)
    for _ in range(9):
        reservation.preempted([sequence(5, 0)])
    assert reservation.ratio == 1.0
    assert reservation.stats() == {"reserve_ratio": 1.0, "num_reserve_raises": 11}
    reservation.check()
    reservation.ratio = 1.5
    with pytest.raises(InternalError, match="R1"):
        reservation.check()


def through_a_tight_pool(reserve: int | None, eos_one_in: int | None) -> tuple[int, int]:
    """Steps and preemptions of 40 requests of which seven or so fit to their limit."""
    h = Harness(
        num_pages=50, page_size=16, decode_reserve_tokens=reserve, max_batch_tokens=256, max_running=24,
        check_every=50, fake={"eos_one_in": eos_one_in},
    )  # fmt: skip
    rng = np.random.default_rng(1)
    for i in range(40):
        h.add(random_ids(i, int(rng.integers(4, 40))), 90)
    h.run()
    h.assert_as_oracle()
    num_preemptions: int = h.stats["num_preemptions"]
    return h.num_steps, num_preemptions


@pytest.mark.parametrize("eos_one_in", [None, 25])
def test_a_tight_pool_neither_churns_nor_idles(eos_one_in: int | None) -> None:
    """Against constants from nothing to the whole limit, whether requests use their limit or end early.

    Fault seen: ``ended`` and ``stepped`` change nothing (it idles: as the whole limit, nearly); ``ratio`` is
    always 0 (it churns).
    """
    constants = [through_a_tight_pool(reserve, eos_one_in) for reserve in (0, 30, 90)]
    num_steps, num_preemptions = through_a_tight_pool(None, eos_one_in)
    assert num_steps <= 1.35 * min(steps for steps, _ in constants)
    assert num_preemptions <= 10 and 3 * num_preemptions <= constants[0][1]
