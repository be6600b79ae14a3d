"""Admission at its rarer forks: who is passed over, and what is granted beside whom."""

from __future__ import annotations

import pytest
from engine_kit import Harness, random_ids

from radixkv.sequence import Sequence

SHARED = random_ids(1, 100)


def running(h: Harness) -> list[int]:
    return [seq.request.request_id for seq in h.engine.scheduler.running]


@pytest.mark.parametrize("has_waited_long", [False, True])
def test_nobody_passes_one_that_waits_for_its_leader_when_it_may_not_be_overtaken_any_more(
    has_waited_long: bool,
) -> None:
    h = Harness(num_pages=100, page_size=16, max_batch_tokens=512, max_wait_s=5.0)
    leader = h.add(SHARED, 8)
    follower = h.add([*SHARED, 7], 8)
    if has_waited_long:
        h.clock.now = 6.0
    other = h.add(random_ids(2, 20), 8)
    h.step()
    assert h.grants == ({leader: 100} if has_waited_long else {leader: 100, other: 20})
    h.step()
    assert running(h) == [leader, follower, other] if has_waited_long else [leader, other, follower]
    h.run()
    assert h.finals[follower].usage.cached_tokens == 96
    h.assert_as_oracle()


def test_one_that_became_next_by_being_overtaken_is_not_tried_again_in_its_own_turn() -> None:
    h = Harness(num_pages=200, page_size=16, policy="lpm", max_skips=1, max_batch_tokens=512)
    h.generate(SHARED[:64], 1)
    h.generate(random_ids(2, 40), 1)
    unknown = h.add(random_ids(3, 20), 8)  # too short to lead itself
    longest = h.add([*SHARED[:64], 7], 8)
    shorter = h.add([*random_ids(2, 40), 7], 8)
    last = h.add(random_ids(4, 30), 8)
    h.step()
    assert running(h) == [longest, unknown, shorter, last]
    assert h.grants == {longest: 1, unknown: 20, shorter: 1, last: 30}
    h.run()
    h.assert_as_oracle()


def test_the_budget_of_one_that_made_way_is_taken_once() -> None:
    h = Harness(num_pages=200, page_size=4, policy="priority", max_running=2, max_batch_tokens=40)
    stays, goes = h.add(random_ids(1, 12), 9), h.add(random_ids(2, 12), 9)
    h.step()
    strong = h.add(random_ids(3, 100), 2, priority=1)
    h.step()
    assert h.grants == {stays: 1, strong: 39} and running(h) == [stays, strong]
    h.run()
    assert h.stats["num_preemptions"] == 1 and h.tokens[goes] == h.expected(goes)
    h.assert_as_oracle()


def test_every_chunk_that_the_budget_cut_is_shaped_for_those_who_share_it() -> None:
    h = Harness(
        num_pages=400,
        page_size=1,
        policy="priority",
        max_running=3,
        max_batch_tokens=43,
        min_wait_tokens=2,
        decode_reserve_tokens=0,
    )
    low = [h.add(random_ids(i, 10), 9) for i in (5, 6)]
    h.step()
    first = h.add(SHARED, 2, priority=9)
    h.step()
    assert h.grants == {low[0]: 1, low[1]: 1, first: 41}
    h.add([*SHARED[:83], 7], 1, priority=-1)
    second = h.add(random_ids(2, 30), 2, priority=5, n=2, temperature=1.0, seed=1)
    h.add([*random_ids(2, 3), 7], 1, priority=-1)
    h.step()  # the two places of the second come with two tokens; the first has 41 as before
    assert h.grants == {first: 40, second: 1}, "not 41 and 2, of which 83 and 3 tokens are shared"
    h.run()
    h.assert_as_oracle()


def test_what_a_failed_admission_held_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(num_pages=40, page_size=4, max_batch_tokens=512)
    h.generate(SHARED[:40], 1)
    request_id = h.add([*SHARED[:40], 7, 8], 2)

    def reserve(seq: Sequence, num_tokens: int) -> None:
        assert seq.page_table.num_pages == 10
        raise RuntimeError("no")

    monkeypatch.setattr(h.engine.kv, "reserve", reserve)
    with pytest.raises(RuntimeError, match="no"):
        h.engine.scheduler.schedule()
    monkeypatch.undo()
    h.engine.check()
    assert h.engine.kv.num_available == 40
    h.run()
    assert h.finals[request_id].usage.cached_tokens == 40
    h.assert_as_oracle()
