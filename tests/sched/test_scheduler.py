"""What is scheduled in each step, computed by hand."""

from __future__ import annotations

import pytest
from engine_kit import Harness, random_ids

from radixkv.errors import DuplicateRequestError, InternalError, InvalidRequestError, RequestTooLargeError
from radixkv.kv.finding import Finding
from radixkv.sequence import Request, Status


def test_chunks_and_decodes_share_a_step() -> None:
    h = Harness(num_pages=40, page_size=4, max_batch_tokens=8, decode_reserve_tokens=0)
    a = h.add(random_ids(1, 10), 3)
    b = h.add(random_ids(2, 9), 3)
    h.step()
    assert h.grants == {a: 8}
    h.step()
    assert h.grants == {a: 2, b: 6}
    h.step()
    assert h.grants == {b: 3, a: 1} and h.last_batch.num_extend_seqs == 1
    h.step()
    assert h.grants == {a: 1, b: 1}
    h.step()
    assert h.grants == {b: 1}
    assert not h.engine.has_work
    h.assert_as_oracle()


def test_decodes_claim_the_budget_before_chunks() -> None:
    h = Harness(num_pages=100, page_size=4, max_batch_tokens=8)
    first = [h.add(random_ids(i, 2), 9) for i in range(3)]
    h.step()
    late = h.add(random_ids(9, 20), 2)
    for _ in range(4):
        h.step()
        assert h.grants == {late: 5, **dict.fromkeys(first, 1)}
    h.step()
    assert h.grants == dict.fromkeys([*first, late], 1)
    h.run()
    h.assert_as_oracle()


def test_no_more_run_than_the_budget_has_tokens() -> None:
    h = Harness(num_pages=100, page_size=4, max_batch_tokens=3, max_running=64)
    for i in range(6):
        h.add(random_ids(i, 1), 4)
    while h.engine.has_work:
        h.step()
        assert h.last_batch.num_rows <= 3
    h.assert_as_oracle()


def test_every_running_sequence_computes_in_every_step() -> None:
    h = Harness(num_pages=200, page_size=4, max_batch_tokens=6, max_running=6)
    for i in range(12):
        h.add(random_ids(i, 3 + 5 * (i % 3)), 6)
    while h.engine.has_work:
        running = {seq.request.request_id for seq in h.engine.scheduler.running}
        h.step()
        assert running <= h.grants.keys()
    h.assert_as_oracle()


def test_fcfs_admits_in_order_of_arrival_and_lpm_by_hit() -> None:
    warm, cold = random_ids(1, 16), random_ids(2, 16)
    for policy, first in (("fcfs", 1), ("lpm", 2)):
        h = Harness(num_pages=50, page_size=4, max_running=1, policy=policy)
        h.generate(warm, 1)
        h.add([*cold, 5], 1)
        h.add([*warm, 5], 1)
        h.step()
        assert list(h.grants) == [first]
        h.run()
        h.assert_as_oracle()


def test_hits_are_looked_up_once_while_nothing_near_them_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(num_pages=4, page_size=64, max_candidates=3)
    a = h.add(random_ids(0, 40), 90)
    h.step()
    waiting = [h.add(random_ids(i, 200), 1) for i in range(1, 7)]  # 4 pages each: none fits beside a
    looked_up: list[int] = []
    find = h.engine.kv.find

    def counting_find(request: Request) -> Finding:
        looked_up.append(request.request_id)
        return find(request)

    monkeypatch.setattr(h.engine.kv, "find", counting_find)
    for _ in range(20):
        h.step()
    assert looked_up == waiting[:3]
    while h.engine.kv.version == 0:  # until a's first page is full
        h.step()
    h.step()
    assert looked_up == waiting[:3]  # that page begins with another token than theirs
    h.engine.kv.flush()
    h.step()
    assert looked_up == waiting[:3] * 2
    h.abort(a)
    h.run()
    h.assert_as_oracle()


def test_the_second_of_two_equal_prefixes_waits_for_the_first() -> None:
    shared = random_ids(1, 64)
    h = Harness(num_pages=60, page_size=16)
    a = h.add([*shared, 3, 4], 2)
    b = h.add([*shared, 5, 6, 7], 2)
    c = h.add(random_ids(2, 40), 2)
    h.step()
    assert h.grants == {a: 66, c: 40}
    h.step()
    assert h.grants == {b: 3, a: 1, c: 1}
    h.run()
    assert h.finals[b].usage.cached_tokens == 64
    h.assert_as_oracle()


def test_a_follower_waits_chunk_by_chunk_and_no_longer_than_it_pays() -> None:
    shared = random_ids(1, 100)
    h = Harness(num_pages=60, page_size=16, max_batch_tokens=40, min_wait_tokens=32)
    a = h.add([*shared, *random_ids(5, 60)], 2)
    b = h.add([*shared, *random_ids(6, 60)], 2)
    steps = []
    for _ in range(4):
        h.step()
        steps.append(h.grants)
    # 40; then a chunk to 80 would leave 20 shared tokens, so it ends at 68; then the whole budget again.
    assert steps == [{a: 40}, {a: 28}, {a: 40}, {a: 40}]
    h.step()
    assert h.grants == {a: 12, b: 28}
    h.run()
    assert h.finals[b].usage.cached_tokens == 100
    h.assert_as_oracle()


@pytest.mark.parametrize("budget", [1000, 256, 100])
@pytest.mark.parametrize(("page_size", "residue"), [(p, r) for p in (1, 16, 64) for r in {0, 1 % p, p - 1}])
def test_many_questions_behind_one_prefix_reach_the_optimum(
    page_size: int, residue: int, budget: int
) -> None:
    """Wherever the prefix ends in its page, and wherever the budget cuts the first prompt.

    Fault seen: ``_shape_cut_chunks`` does nothing.
    """
    num_shared = 320 + residue
    h = Harness(num_pages=4000 // page_size, page_size=page_size, max_batch_tokens=budget, check_every=50)
    for i in range(12):
        h.add([*random_ids(1, num_shared), i + 1, *random_ids(i, 20)], 2)
    h.run()
    assert h.stats["cached_tokens"] >= 0.99 * 11 * num_shared
    h.assert_as_oracle()


def test_short_shared_parts_are_computed_twice() -> None:
    shared = random_ids(1, 31)
    h = Harness(num_pages=60, page_size=4)
    a, b = h.add([*shared, 3], 1), h.add([*shared, 5], 1)
    h.step()
    assert h.grants == {a: 32, b: 32}
    h.assert_as_oracle()


def test_nobody_waits_without_a_cache_or_across_namespaces() -> None:
    shared = random_ids(1, 64)
    h = Harness(num_pages=60, page_size=4, prefix_cache=False)
    a, b = h.add([*shared, 3], 1), h.add([*shared, 5], 1)
    h.step()
    assert h.grants == {a: 65, b: 65}
    h.assert_as_oracle()
    h = Harness(num_pages=60, page_size=4)
    a, b = h.add([*shared, 3], 1, namespace=("x",)), h.add([*shared, 5], 1, namespace=("y",))
    h.step()
    assert h.grants == {a: 65, b: 65}


def test_a_follower_starts_when_its_leader_is_aborted() -> None:
    shared = random_ids(1, 200)
    h = Harness(num_pages=60, page_size=16, max_batch_tokens=64)
    a, b = h.add([*shared, 3], 2), h.add([*shared, 5], 2)
    h.step()
    assert h.grants == {a: 64}
    h.abort(a)
    h.step()
    assert h.grants == {b: 64}
    h.run()
    assert h.finals[b].usage.cached_tokens == 64
    h.assert_as_oracle()


def test_nobody_waits_for_a_sequence_that_a_flush_cut_off() -> None:
    shared = random_ids(1, 200)
    h = Harness(num_pages=60, page_size=16, max_batch_tokens=64)
    a, b = h.add([*shared, 3], 2), h.add([*shared, 5], 2)
    h.step()
    h.engine.kv.flush()
    h.step()
    assert h.grants == {a: 64}  # no budget is left beside it
    h.step()
    h.step()
    assert h.grants == {a: 9, b: 55}  # b does not wait for a
    h.run()
    h.assert_as_oracle()


def test_admission_needs_pages_for_the_whole_prompt() -> None:
    h = Harness(num_pages=10, page_size=4, max_batch_tokens=8, decode_reserve_tokens=0)
    a = h.add(random_ids(1, 18), 3)  # 5 pages
    h.add(random_ids(2, 24), 1)  # 6 pages
    h.step()
    h.step()
    h.step()
    assert h.grants == {a: 2}  # b's first chunk would fit
    h.run()
    h.assert_as_oracle()


def test_admission_needs_the_decode_reserve_but_no_more_than_max_tokens() -> None:
    h = Harness(num_pages=10, page_size=4, decode_reserve_tokens=8)
    a = h.add(random_ids(1, 16), 20)  # 4 pages and 2 of reserve
    b = h.add(random_ids(2, 12), 9)  # 3 pages and 2 of reserve
    c = h.add(random_ids(3, 13), 2)  # 4 pages, its one further token fits
    h.step()
    assert h.grants == {a: 16}  # b finds 4 of its 5 pages; c does not slip past it
    h.abort(b)
    h.step()
    assert h.grants == {c: 13, a: 1}
    h.run()
    h.assert_as_oracle()


def test_the_victim_is_the_latest_arrival_and_resumes_first() -> None:
    h = Harness(num_pages=8, page_size=4, decode_reserve_tokens=0, max_running=2)
    a = h.add(random_ids(1, 12), 16)  # up to 7 pages
    b = h.add(random_ids(2, 12), 8)
    c = h.add(random_ids(3, 4), 2)
    h.step()
    assert h.grants == {a: 12, b: 12}
    while h.stats["num_preemptions"] == 0:
        h.step()
    assert h.grants == {a: 1}  # the step that preempts b admits nobody
    while c not in h.finals:
        h.step()
        assert c not in h.grants or b in h.grants  # c does not start while b waits
    assert b not in h.finals
    h.run()
    assert h.finals[b].usage.cached_tokens == 0  # counted at first admission
    h.assert_as_oracle()


def test_the_last_running_sequence_fails_only_if_somebody_outside_holds_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = Harness(num_pages=6, page_size=4, decode_reserve_tokens=0)
    monkeypatch.setattr(
        h.engine, "_check_idle", lambda: None
    )  # it would see the pages that nobody accounts for
    a = h.add(random_ids(1, 8), 12)
    h.step()
    held = h.engine.kv.pool.allocate(3)
    for _ in range(20):
        if a in h.finals:
            break
        h.take(h.engine.step())
    assert h.finals[a].finish_reason == "error"
    assert "needs 1 pages, only 0" in str(h.finals[a].error)
    b = h.add(random_ids(2, 16), 1)
    h.take(h.engine.step())
    assert h.finals[b].finish_reason == "error" and not h.engine.has_work
    h.engine.kv.pool.decref(held)
    monkeypatch.undo()
    h.generate(random_ids(2, 16), 4)
    h.assert_nothing_held()


def test_add_refuses_before_any_work() -> None:
    h = Harness(num_pages=10, page_size=4, fake={"vocab_size": 50, "max_positions": 100})
    h.add([1, 2, 3], 2, request_id=5)
    with pytest.raises(DuplicateRequestError, match="request id 5 is already in use"):
        h.add([1], 2, request_id=5)
    with pytest.raises(RequestTooLargeError, match=r"needs 11 pages .* the pool has 10"):
        h.add([1] * 40, 2, request_id=6)
    with pytest.raises(InvalidRequestError, match="token id 50 at position 1"):
        h.add([1, 50], 2, request_id=7)
    assert h.stats["num_refused"] == 3 and h.stats["num_added"] == 1
    h.run()
    h.add([1], 2, request_id=5)  # the id is free again
    h.run()
    h.assert_nothing_held()


def test_prefill_only_computes_the_whole_prompt_and_samples_nothing() -> None:
    h = Harness(num_pages=20, page_size=4)
    final = h.generate(random_ids(1, 10), 0)
    assert h.grants == {0: 10} and len(h.last_batch.sample_rows) == 0
    assert final.finish_reason == "length" and h.tokens[0] == []
    assert h.generate([*random_ids(1, 10), 7], 2).usage.cached_tokens == 10  # the partial page included
    h.assert_as_oracle()


def test_a_seed_is_drawn_where_one_is_needed_and_none_is_given() -> None:
    h = Harness(num_pages=20, page_size=4)
    for temperature, seed in ((0.0, None), (1.0, None), (1.0, None), (1.0, 17)):
        h.add([1, 2], 2, temperature=temperature, seed=seed)
    h.step()
    seeds = {seq.request.request_id: seq.request.sampling.seed for seq in h.engine.scheduler.running}
    assert seeds[0] is None and seeds[3] == 17
    assert seeds[1] is not None and seeds[2] is not None and seeds[1] != seeds[2]
    drawn = dict(zip(h.last_batch.request_ids.tolist(), h.last_batch.sampling.draws.tolist(), strict=True))
    assert drawn[0] == 0.0 and len(set(drawn.values())) == 4


def test_stop_reasons() -> None:
    h = Harness(num_pages=40, page_size=4)
    prompt = random_ids(1, 6)
    h.executor.force(0, 8, 0)  # the end token as the third output
    h.executor.force(1, 8, 0)
    h.executor.force(2, 7, 77)
    h.add(prompt, 5)
    h.add(prompt, 5, ignore_eos=True)
    h.add(prompt, 5, stop_token_ids=(77,))
    h.add(prompt, 2)
    h.run()
    assert [h.finals[i].finish_reason for i in range(4)] == ["stop", "length", "stop", "length"]
    assert [len(h.tokens[i]) for i in range(4)] == [3, 5, 2, 2]
    assert h.tokens[0][-1] == 0 and h.tokens[2][-1] == 77
    h.assert_nothing_held()


def test_counters_and_the_hit_rate_are_ratios_of_what_was_counted() -> None:
    shared = random_ids(1, 32)
    h = Harness(num_pages=60, page_size=4)
    h.generate([*shared, 3], 2)
    h.generate([*shared, 4], 2)
    h.abort(h.add(shared))
    stats = h.stats
    assert (stats["prompt_tokens"], stats["cached_tokens"]) == (66, 32)
    assert stats["hit_rate"] == 32 / 66
    assert stats["prompt_tokens_computed"] == 34 and stats["output_tokens"] == 4
    assert (stats["num_added"], stats["num_finished"], stats["num_aborted"]) == (3, 2, 1)
    assert stats["num_steps"] == 4 and stats["num_waiting"] == stats["num_running"] == 0
    assert stats["schedule_cpu_s"] > 0.0 and stats["update_cpu_s"] > 0.0


def test_check_sees_a_sequence_in_two_places() -> None:
    h = Harness(num_pages=20, page_size=4)
    h.add(random_ids(1, 6), 5)
    h.step()
    (seq,) = h.engine.scheduler.running
    seq.status = Status.WAITING
    with pytest.raises(InternalError, match="D1"):
        h.engine.check()
