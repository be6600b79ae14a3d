"""Beam search on the whole engine over FakeExecutor, against plain beam search over full recomputation.

Each says which one-line fault it was seen failing against.
"""

from __future__ import annotations

from typing import Any

import pytest
from beam_oracle import assert_beams_as_oracle
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.beam_params import BeamParams
from radixkv.errors import InvalidRequestError, RequestTooLargeError
from radixkv.sched.batch import Batch

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


@every_page_size
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b115_four_beams_over_every_last_page_residue(page_size: int, prefix_cache: bool) -> None:
    """Fault seen: ``_shared_page`` finds none; a beam that is dropped is not released."""
    residues = range(page_size) if page_size <= 4 else (0, page_size // 2, page_size - 1)
    for residue in residues:
        h = Harness(
            num_pages=1200 // page_size,
            page_size=page_size,
            prefix_cache=prefix_cache,
            check_every=16,
            fake={"vocab_size": 37},
        )
        a = h.add(random_ids(3, page_size + 5 + residue, 37), 64, beam=BeamParams(width=4))
        h.run()
        assert_beams_as_oracle(h, a)
        assert h.stats["prompt_tokens_computed"] == h.requests[a].prompt_ids.size


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_beams_rank_and_stop_as_the_oracle(width: int, length_penalty: float, early_stopping: bool) -> None:
    """Fault seen: a beam's token is appended before its siblings have forked."""
    for seed in range(4):
        h = Harness(num_pages=400, page_size=4, check_every=5, fake={"vocab_size": (3, 5, 17, 37)[seed]})
        beam = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        prompt = random_ids(seed, 9, h.executor.spec.vocab_size)
        a = h.add(prompt, 12, beam=beam)
        b = h.add(prompt[:5], 7, beam=beam, ignore_eos=True)
        c = h.add(prompt, 12, beam=beam, stop_token_ids=(1, 2))
        h.run()
        assert_beams_as_oracle(h, a, b, c)


@every_page_size
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_group_that_is_preempted_again_and_again_finds_the_same(page_size: int, prefix_cache: bool) -> None:
    for chunk in (5, 1000):
        h = Harness(
            num_pages=2000 // page_size,
            page_size=page_size,
            prefix_cache=prefix_cache,
            max_batch_tokens=chunk,
            check_every=9,
            fake={"vocab_size": 37},
        )
        a = h.add(random_ids(3, 21, 37), 20, beam=BeamParams(width=4), ignore_eos=True)
        b = h.add(random_ids(4, 30, 37), 8)
        for num_steps in range(110):
            h.step()
            running = [seq for seq in h.engine.scheduler.running if seq.request.request_id == a]
            if running and num_steps % 7 == 6 and h.stats["num_preemptions"] < 9:
                h.engine.scheduler._preempt(running[-1])
                h.engine.check()
                assert not any(seq.request.request_id == a for seq in h.engine.scheduler.running)
            if num_steps in (20, 61):  # before a preemption, the last one too
                h.engine.kv.flush()
        assert h.stats["num_preemptions"] >= 3
        assert h.finals[b].finish_reason == "length"
        assert_beams_as_oracle(h, a)


@every_page_size
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b036_beams_fork_in_a_pool_full_of_evictable_pages(page_size: int, prefix_cache: bool) -> None:
    """The pool is as small as ``add`` allows, and full of what earlier requests left.

    Fault seen: the bound of a beam search leaves out the pages that are being copied.
    """
    num_prompt, max_tokens, width = 2 * page_size + 3, page_size + 9, 5
    most = -(-(num_prompt + max_tokens - 1) // page_size)
    shared = num_prompt // page_size
    num_pages = shared + width * (most - shared) + width // 2
    h = Harness(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache, fake={"vocab_size": 37})
    for seed in range(4):
        h.generate(random_ids(seed, num_pages * page_size - 20, 37), 3)
    if prefix_cache:
        assert h.engine.kv.stats()["num_pages_idle"] > num_pages - 2
    a = h.add(random_ids(9, num_prompt, 37), max_tokens, beam=BeamParams(width=width), ignore_eos=True)
    smaller = Harness(num_pages=num_pages - 1, page_size=page_size, fake={"vocab_size": 37})
    with pytest.raises(RequestTooLargeError, match=f"{num_pages} pages .* has {num_pages - 1}"):
        smaller.add(random_ids(9, num_prompt, 37), max_tokens, beam=BeamParams(width=width))
    more = page_size + max_tokens
    with pytest.raises(RequestTooLargeError, match="pages"):
        h.add(random_ids(9, num_prompt, 37), more, beam=BeamParams(width=width), request_id=77)
    for _ in range(3):
        h.step()
    b = h.add(random_ids(10, num_prompt, 37), 3, n=3, temperature=1.0, seed=1)  # beside it there is no room
    h.run()
    assert {h.sample_finals[b, i][0].finish_reason for i in range(3)} <= {"length", "stop"}
    assert_beams_as_oracle(h, a)


@every_page_size
def test_beams_tell_the_tree_what_they_compute(page_size: int) -> None:
    """Fault seen: ``advance_beams`` commits nothing."""
    h = Harness(num_pages=1600 // page_size, page_size=page_size, fake={"vocab_size": 37})
    a = h.add(random_ids(1, 70, 37), 80, beam=BeamParams(width=3), ignore_eos=True)
    for _ in range(70):
        h.step()
        (best, *_) = h.engine.scheduler._running.beams[a].beams
        known = best.num_computed // page_size * page_size
        assert best.num_committed_pages * page_size == known
        assert h.engine.kv.explain(best.token_ids[:known]).hit_tokens == known
    h.run()
    assert_beams_as_oracle(h, a)


@every_page_size
def test_an_abort_ends_a_search_once_and_leaves_the_others(page_size: int) -> None:
    """Fault seen: ``_end_beams`` leaves the last beam."""
    fake = {"vocab_size": 37}
    h = Harness(num_pages=3000 // page_size, page_size=page_size, max_batch_tokens=16, fake=fake)
    other = h.add(random_ids(2, 50, 37), 20)
    kept = h.add(random_ids(5, 30, 37), 12, beam=BeamParams(width=3))
    for num_steps in range(8):
        a = h.add(random_ids(1, 40 + num_steps, 37), 20, beam=BeamParams(width=3), ignore_eos=True)
        for _ in range(num_steps):
            h.step()
        if num_steps == 7:
            h.executor.after = lambda batch: h.take(h.engine.abort(h.requests[a].request_id))  # noqa: B023
            h.step()
            h.executor.after = None
        else:
            outputs = h.engine.abort(a)
            h.take(outputs)
            assert [output.sample_index for output in outputs] == [0, 1, 2]
        assert {h.sample_finals[a, i][0].finish_reason for i in range(3)} == {"abort"}
        h.engine.check()
    h.run()
    assert h.finals[other].finish_reason == "length"
    assert_beams_as_oracle(h, kept)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_or_interrupted_step(when: str) -> None:
    """Fault seen: ``_abandon`` looks at beams whose group it has just preempted."""
    h = Harness(num_pages=400, page_size=4, fake={"vocab_size": 37})

    def add() -> int:
        return h.add(random_ids(1, 22, 37), 9, beam=BeamParams(width=3), ignore_eos=True)

    def raise_once(error: BaseException) -> None:
        def do(batch: Batch) -> None:
            h.executor.before = h.executor.after = None
            raise error

        setattr(h.executor, when, do)

    a = add()
    h.step()
    for _ in range(4):
        raise_once(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            h.step()
        h.engine.check()
        h.step()
    h.run()
    assert_beams_as_oracle(h, a)
    b, c = add(), h.add(random_ids(2, 22, 37), 9)
    h.step()
    h.step()
    raise_once(RuntimeError("torn"))
    h.step()
    assert {h.sample_finals[b, i][0].finish_reason for i in range(3)} == {"error"}
    assert h.finals[c].finish_reason == "error"
    h.assert_as_oracle()


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 1.0}, {"n": 2}, {"logit_bias": {1: 2.0}}, {"presence_penalty": 1.0}, {"logprobs": 1}],
)
def test_what_does_not_go_with_beams_is_refused(wrong: dict[str, Any]) -> None:
    h = Harness(num_pages=40, page_size=4)
    with pytest.raises(InvalidRequestError, match="beam"):
        h.add([1, 2, 3], 4, beam=BeamParams(width=2), **wrong)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        h.add([1, 2, 3], 0, beam=BeamParams(width=2))
    with pytest.raises(RequestTooLargeError, match="65 beams"):
        h.add([1, 2, 3], 4, beam=BeamParams(width=65))
