"""Situations that broke real systems, on the whole engine over FakeExecutor: accounting, hits, chunks.

Each says which one-line fault it was seen failing against.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.errors import EngineDeadError, InvalidRequestError, OutOfPages, RequestTooLargeError
from radixkv.sched.batch import Batch
from radixkv.sequence import Request

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


@every_page_size
def test_b002_pages_are_conserved_after_every_step(page_size: int) -> None:
    """Fault seen: ``_end`` does not release a running sequence."""
    rng = np.random.default_rng(2)
    num_requests = 200 if page_size == 16 else 50
    h = Harness(num_pages=800 // page_size, page_size=page_size, max_batch_tokens=24, max_running=8)
    added = 0
    while added < num_requests or h.engine.has_work:
        for _ in range(int(rng.integers(0, 4))):
            if added < num_requests:
                beginning = random_ids(int(rng.integers(0, 3)), int(rng.choice([15, 16, 17, 31, 33])))
                h.add(
                    [*beginning[: int(rng.integers(1, 34))], int(rng.integers(1, 1000))],
                    int(rng.integers(0, 6)),
                )
                added += 1
        h.step()
        stats = h.engine.kv.stats()
        total = stats["num_pages_free"] + stats["num_pages_idle"] + stats["num_pages_used"]
        assert total == stats["num_pages"] and stats["num_pages_used"] <= sum(
            seq.page_table.num_pages for seq in h.engine.scheduler.running
        )
    h.assert_as_oracle()


@every_page_size
@pytest.mark.parametrize("first", ["finish", "retract"])
def test_b004_finish_and_retract_release_once(page_size: int, first: str) -> None:
    """Fault seen: ``release`` reads the table's pages and does not empty it."""
    h = Harness(num_pages=400 // page_size, page_size=page_size)
    a = h.add(random_ids(1, 40), 8)
    b = h.add(random_ids(2, 40), 8)
    h.step()
    seq = h.engine.scheduler.running[0]
    if first == "finish":
        h.abort(a)
        h.engine.kv.release(seq)
    else:
        h.engine.kv.release(seq)
        h.abort(a)
    h.engine.check()
    assert h.abort(a) is None
    h.run()
    assert h.num_finals == {a: 1, b: 1}
    h.assert_as_oracle()


@every_page_size
@pytest.mark.parametrize("way", ["abort", "no pages", "exception"])
def test_b019_a_request_dropped_between_match_and_allocation_holds_nothing(
    page_size: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault seen: ``_try_admit`` does not release where ``reserve`` raises."""
    h = Harness(num_pages=400 // page_size, page_size=page_size)
    prompt = random_ids(1, 70)
    h.generate(prompt, 2)
    a = h.add([*prompt, 5], 2)

    def no_room(*args: object) -> None:
        raise OutOfPages(9, 0) if way != "exception" else RuntimeError("torn")

    with monkeypatch.context() as patched:
        patched.setattr(h.engine.kv, "reserve", no_room)
        if way == "abort":  # waits behind a running one, without pages of its own
            patched.undo()
            h.add(random_ids(2, 10), 50)
            h.step()
            patched.setattr(h.engine.kv, "reserve", lambda *args: None)
            h.abort(a)
        else:
            outputs = h.engine.step()
            assert [(o.request_id, o.finish_reason) for o in outputs] == [(a, "error")]
            assert outputs[0].usage.cached_tokens == 0
    assert h.engine.is_dead == (way == "exception")
    if way == "exception":
        assert isinstance(outputs[0].error, EngineDeadError)
    else:
        h.run()
    h.engine.check()
    assert h.engine.kv.stats()["num_pages_used"] == 0


@every_page_size
@pytest.mark.parametrize("when", ["before", "after"])
def test_b023_a_raise_inside_the_model_step_leaves_only_the_cache(page_size: int, when: str) -> None:
    """Fault seen: ``_end`` does not release a running sequence."""
    h = Harness(num_pages=600 // page_size, page_size=page_size)
    shared = random_ids(1, 75)
    h.generate(shared, 4)
    for i in range(4):
        h.add([*shared, i + 1], 4)

    def fall_over(batch: Batch) -> None:
        raise RuntimeError("the device fell over")

    setattr(h.executor, when, fall_over)
    h.step()
    setattr(h.executor, when, None)
    assert [h.finals[i].finish_reason for i in range(1, 5)] == ["error"] * 4
    h.assert_nothing_held()
    for i in range(4):
        h.add([*shared, i + 1], 4)
    h.run()
    h.assert_as_oracle()


@every_page_size
def test_b025_admission_counts_pages_not_tokens(page_size: int) -> None:
    """Fault seen: a request that finds no pages fails even while others run."""
    h = Harness(num_pages=64, page_size=page_size, max_batch_tokens=4096)
    for i in range(40):
        h.add(random_ids(i, page_size + 1), 3)  # one token in its last page
    while h.engine.has_work:
        h.step()
        assert len(h.engine.scheduler.running) <= 32
    assert {final.finish_reason for final in h.finals.values()} == {"length"}
    h.assert_as_oracle()


@every_page_size
def test_b034_a_hit_is_held_before_its_request_evicts(page_size: int) -> None:
    """Fault seen: ``acquire`` does not hold the pages that it matched."""
    h = Harness(num_pages=20, page_size=page_size, decode_reserve_tokens=0, max_batch_tokens=4096)
    hot = random_ids(1, 10 * page_size)
    h.generate(hot, 0)
    h.generate(random_ids(2, 10 * page_size), 0)  # the pool is full of idle pages; hot is the oldest
    assert h.engine.kv.pool.num_free == 0
    final = h.generate([*hot, *random_ids(3, 10 * page_size)], 1)
    assert final.usage.cached_tokens == 10 * page_size
    h.assert_as_oracle()


@every_page_size
def test_b034_a_hit_that_cannot_be_completed_waits(page_size: int) -> None:
    """Fault seen: ``_try_admit`` does not release where ``reserve`` raises."""
    h = Harness(num_pages=21, page_size=page_size, decode_reserve_tokens=0, max_batch_tokens=4096)
    hot = random_ids(1, 10 * page_size)
    h.generate(hot, 0)
    a = h.add(random_ids(2, 9 * page_size), 2 * page_size)
    h.step()
    b = h.add([*hot, *random_ids(3, 9 * page_size)], 1)
    h.step()
    assert list(h.grants) == [a]
    h.run()
    assert h.finals[b].usage.cached_tokens == 10 * page_size
    h.assert_as_oracle()


@every_page_size
@pytest.mark.parametrize("pages", [0, 1, 2])
def test_b037_one_token_at_least_is_computed(page_size: int, pages: int) -> None:
    """Fault seen: ``max_hit_tokens`` is the whole prompt."""
    prompt = random_ids(1, max(1, pages * page_size))
    h = Harness(num_pages=400 // page_size, page_size=page_size)
    h.generate(prompt, 5)
    final = h.generate(prompt, 5)
    assert final.usage.cached_tokens == len(prompt) - 1  # to the token, at every page size
    assert h.tokens[0] == h.tokens[1]
    h.assert_as_oracle()


@every_page_size
@pytest.mark.parametrize("num_tokens", [5, 66, 130])
def test_b041_equal_prompts_at_once_do_not_read_what_is_not_written(page_size: int, num_tokens: int) -> None:
    """Fault seen: ``leader_of`` finds nobody."""
    prompt = random_ids(1, num_tokens)
    h = Harness(num_pages=800 // page_size, page_size=page_size)
    for _ in range(3):
        h.add(prompt, 4)
    h.run()
    waits = num_tokens - 1 >= max(page_size, 32)
    hit = min(num_tokens // page_size * page_size, num_tokens - 1) if waits else 0
    assert [h.finals[i].usage.cached_tokens for i in range(3)] == [0, hit, hit]
    h.assert_as_oracle()


@every_page_size
def test_b048_what_an_aborted_prompt_computed_stays(page_size: int) -> None:
    """Fault seen: ``commit`` does not count the tree as a holder of what it adopts."""
    prompt = random_ids(1, 100)
    h = Harness(num_pages=800 // page_size, page_size=page_size, max_batch_tokens=32)
    a = h.add(prompt, 3)
    h.step()
    h.step()
    assert h.abort(a) is not None
    h.assert_nothing_held()
    kv = h.engine.kv
    assert kv.num_available - kv.pool.num_free == -(-64 // page_size)  # only what is cached is kept
    b = h.add(prompt, 3)
    h.run()
    assert h.finals[b].usage.cached_tokens == 64
    h.assert_as_oracle()


@every_page_size
def test_b048_an_aborted_chunk_inside_a_page_is_found_again(page_size: int) -> None:
    """Fault seen: ``_end`` releases with ``num_computed`` cut down to whole pages."""
    prompt = random_ids(1, 100)
    h = Harness(num_pages=800 // page_size, page_size=page_size, max_batch_tokens=31)
    a = h.add(prompt, 3)
    h.step()
    h.step()
    h.abort(a)
    assert h.generate(prompt, 3).usage.cached_tokens == 62
    h.assert_as_oracle()


@every_page_size
def test_b050_a_prompt_preempted_between_chunks_has_one_owner(page_size: int) -> None:
    """Fault seen: ``_preempt`` leaves the victim among the running."""
    h = Harness(
        num_pages=12,
        page_size=page_size,
        decode_reserve_tokens=0,
        max_batch_tokens=page_size + 1,
        max_running=2,
    )
    a = h.add(random_ids(1, max(1, 3 * page_size - 2)), 3 * page_size + 3)
    while not h.tokens[a]:
        h.step()
    b = h.add(random_ids(2, 9 * page_size), 2)
    seen_mid_chunk = False
    while h.engine.has_work:
        h.step()
        waiting = [seq for seq in h.engine.scheduler._queue if seq.num_preemptions]
        seen_mid_chunk |= bool(waiting) and not h.tokens[b]
    assert seen_mid_chunk and h.stats["num_preemptions"] >= 1
    h.assert_as_oracle()


@every_page_size
def test_b051_outputs_are_the_same_with_the_cache_off(page_size: int) -> None:
    """Fault seen: ``build`` takes the radix tree whatever ``prefix_cache`` says."""
    shared = random_ids(1, 70)
    outputs = []
    for prefix_cache in (True, False):
        h = Harness(
            num_pages=1200 // page_size, page_size=page_size, max_batch_tokens=48, prefix_cache=prefix_cache
        )
        for i in range(12):
            h.add([*shared[: 10 * (i % 8)], i + 1], 6, logprob_start=0 if i % 4 == 0 else None)
            h.step()
            if i % 5 == 4:
                h.abort(i)
        h.run()
        h.assert_as_oracle()
        assert (h.stats["cached_tokens"] > 0) == prefix_cache
        outputs.append(({i: h.tokens[i] for i in range(12) if i % 5 != 4}, h.finals[0].logprobs))
    assert outputs[0] == outputs[1]


def test_b069_a_request_whose_output_would_never_fit_is_refused() -> None:
    """Fault seen: ``refuse_unfit`` does not look at the pool."""
    h = Harness(num_pages=10, page_size=4)
    with pytest.raises(RequestTooLargeError, match=r"needs 11 pages .* the pool has 10"):
        h.add(random_ids(1, 36), 6, request_id=50)  # its prompt fits, its sixth token would not
    assert len(h.generate(random_ids(1, 36), 5).new_token_ids) == 1
    h.assert_as_oracle()


def test_b075_a_prompt_larger_than_the_pool_is_refused_and_the_rest_proceed() -> None:
    """Fault seen: ``refuse_unfit`` does not look at the pool."""
    h = Harness(num_pages=25, page_size=4)
    h.add(random_ids(2, 20), 3)
    with pytest.raises(RequestTooLargeError) as caught:
        h.add(random_ids(1, 120), 1, request_id=50)
    for number in ("30 pages", "120 of prompt", "the pool has 25"):
        assert number in str(caught.value)
    h.add(random_ids(1, 100), 1)
    h.run()
    h.assert_as_oracle()


@pytest.mark.parametrize("bad", [[], [[]], None, "", [1, None]])
def test_b077_what_is_no_prompt_is_refused_and_the_next_request_works(bad: object) -> None:
    """Fault seen: ``token_ids_of`` does not look at the size, or at the number of dimensions."""
    h = Harness(num_pages=10, page_size=4)
    with pytest.raises(InvalidRequestError):
        h.engine.add(Request(request_id=1, prompt_ids=bad))  # type: ignore[arg-type]
    h.generate([1, 2, 3], 2)
    h.assert_as_oracle()


@every_page_size
def test_b093_a_follow_up_finds_all_that_was_computed(page_size: int) -> None:
    """Fault seen: ``release`` inserts whole pages only."""
    h = Harness(num_pages=800 // page_size, page_size=page_size)
    h.generate(random_ids(1, 64), 64)
    turn = [*random_ids(1, 64), *h.tokens[0], *random_ids(2, 8)]
    final = h.generate(turn, 4)
    assert final.usage.cached_tokens == 127  # the last sampled token has no K/V
    h.assert_as_oracle()


@every_page_size
def test_b096_two_sessions_with_one_system_prompt_at_the_same_time(page_size: int) -> None:
    """Fault seen: ``leader_of`` finds nobody."""
    system = random_ids(1, 130)
    h = Harness(num_pages=1200 // page_size, page_size=page_size, max_batch_tokens=64)
    a = h.add([*system, *random_ids(2, 9)], 5)
    h.step()
    b = h.add([*system, *random_ids(3, 9)], 5)
    h.run()
    assert h.finals[a].usage.cached_tokens == 0
    # b waits until a has passed the shared part, and finds all of it that stands on full pages of a's 139.
    assert h.finals[b].usage.cached_tokens == min(130, 139 // page_size * page_size)
    h.assert_as_oracle()
