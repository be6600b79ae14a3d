"""Several samples of one prompt, on the whole engine over FakeExecutor.

Each says which one-line fault it was seen failing against.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from beam_oracle import assert_beams_as_oracle
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.beam_params import BeamParams
from radixkv.errors import NonFiniteLogitsError, RequestTooLargeError
from radixkv.sched.batch import Batch

every_page_size = pytest.mark.parametrize("page_size", PAGE_SIZES)
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@every_page_size
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_prompt", [1000, 1024])
def test_b114_four_samples_compute_the_prompt_once(
    page_size: int, prefix_cache: bool, num_prompt: int
) -> None:
    """Fault seen: ``share_pages`` leaves the child's ``num_computed`` at 0; the rows of one sequence all draw
    with its first sample's index."""
    h = Harness(num_pages=3000 // page_size, page_size=page_size, prefix_cache=prefix_cache)
    a = h.add(random_ids(1, num_prompt), 12, n=4, **DRAWN)
    h.run()
    assert h.stats["prompt_tokens_computed"] == h.stats["prompt_tokens"] == num_prompt
    assert h.stats["output_tokens"] == 4 * 12
    finals = [h.sample_finals[a, i][0] for i in range(4)]
    assert [final.usage.prompt_tokens for final in finals] == [num_prompt] * 4
    assert len({tuple(h.sample_tokens[a, i]) for i in range(4)}) == 4
    copies = 4 if num_prompt % page_size else 0
    assert h.engine.kv.stats()["num_forked_copies"] == copies
    h.assert_as_oracle()


@every_page_size
def test_samples_equal_those_of_single_requests(page_size: int) -> None:
    """Fault seen: the rows of one sequence all draw with its first sample's index."""
    apart = Harness(num_pages=3000 // page_size, page_size=page_size, prefix_cache=False)
    together = Harness(num_pages=3000 // page_size, page_size=page_size)
    prompt = random_ids(1, 90)
    for index in range(5):
        apart.add(prompt, 30, sample_index=index, **DRAWN)
    together.add(prompt, 30, n=5, **DRAWN)
    apart.run()
    together.run()
    assert [apart.tokens[i] for i in range(5)] == [together.sample_tokens[0, i] for i in range(5)]
    together.assert_as_oracle()


@every_page_size
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("more", [0, 2])
def test_samples_end_one_after_the_other_in_a_pool_that_holds_one(
    page_size: int, prefix_cache: bool, more: int
) -> None:
    """The bound of D2 for samples: they are preempted down to the last one.

    Fault seen: ``_is_alone`` is always true.
    """
    num_prompt, max_tokens = 3 * page_size + page_size // 2 + 1, 2 * page_size + 3
    num_pages = -(-(num_prompt + max_tokens - 1) // page_size) + more
    h = Harness(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache, check_every=11)
    a = h.add(random_ids(1, num_prompt), max_tokens, n=4, **DRAWN)
    b = h.add(random_ids(2, num_prompt), max_tokens, n=2, **DRAWN)
    h.run()
    assert h.stats["num_preemptions"] > 0
    for key in [(a, i) for i in range(4)] + [(b, i) for i in range(2)]:
        assert h.sample_finals[key][0].finish_reason == "length"
    h.assert_as_oracle()


@every_page_size
def test_b057_an_abort_ends_all_samples_once(page_size: int) -> None:
    """Fault seen: ``_end_request`` ends the first sample; ``last_outputs`` gives one output."""
    h = Harness(num_pages=3000 // page_size, page_size=page_size, max_batch_tokens=64)
    other = h.add(random_ids(2, 50), 20)
    for num_steps in range(6):
        a = h.add(random_ids(1, 90 + num_steps), 20, n=3, **DRAWN)
        for _ in range(num_steps):
            h.step()
        outputs = h.engine.abort(a)
        h.take(outputs)
        assert sorted(output.sample_index for output in outputs) == [0, 1, 2]
        assert {output.finish_reason for output in outputs} == {"abort"}
        assert h.engine.abort(a) == ()
        h.engine.check()
    h.run()
    assert h.finals[other].finish_reason == "length"
    h.assert_as_oracle()


@every_page_size
def test_b057_an_abort_in_the_step_of_the_end_token_ends_each_sample_once(page_size: int) -> None:
    """Fault seen: ``abort`` ends those whose batch is out at once."""
    for num_steps in range(1, 5):
        h = Harness(num_pages=3000 // page_size, page_size=page_size)
        other = h.add(random_ids(2, 50), 20)
        a = h.add(random_ids(1, 90), num_steps, n=3, **DRAWN)
        for _ in range(num_steps - 1):
            h.step()
        h.executor.after = lambda batch: setattr(h, "returned", h.engine.abort(1))  # noqa: B023
        h.step()
        h.executor.after = None
        assert h.returned == ()  # type: ignore[attr-defined]
        assert {h.sample_finals[a, i][0].finish_reason for i in range(3)} == {"abort"}
        h.run()
        assert h.finals[other].finish_reason == "length"
        h.assert_as_oracle()


@every_page_size
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b071_samples_that_are_preempted_three_times_count_their_prompt_once(
    page_size: int, prefix_cache: bool
) -> None:
    """Fault seen: a copy of a sequence has not been admitted yet (``num_cached`` is ``None``)."""
    h = Harness(num_pages=3000 // page_size, page_size=page_size, prefix_cache=prefix_cache)
    h.generate(random_ids(1, 70), 1)
    a = h.add([*random_ids(1, 70), 5, 6, 7], 20, n=3, **DRAWN)
    for _ in range(3):
        h.step()
        h.step()
        for seq in h.engine.scheduler.running:
            h.engine.scheduler._preempt(seq)
            h.engine.check()
    h.run()
    cached = 70 if prefix_cache else 0
    assert h.stats["num_preemptions"] == 9
    assert h.stats["prompt_tokens"] == 143 and h.stats["cached_tokens"] == cached
    assert [h.sample_finals[a, i][0].usage.cached_tokens for i in range(3)] == [cached] * 3
    h.assert_as_oracle()


def test_a_sample_that_fails_leaves_the_others() -> None:
    """Fault seen: ``fail`` looks at the error's request ids alone."""
    h = Harness(num_pages=400, page_size=4)
    a = h.add(random_ids(1, 22), 9, n=3, **DRAWN)
    h.step()
    h.step()

    def fail(batch: Batch) -> None:
        h.executor.after = None
        at = batch.seq_ids == h.engine.scheduler.running[1].number
        raise NonFiniteLogitsError.of(batch.request_ids[at], batch.seq_ids[at])

    h.executor.after = fail
    (failed,) = h.step()
    assert failed.sample_index == 1 and failed.finish_reason == "error"
    h.run()
    assert [h.sample_finals[a, i][0].finish_reason for i in (0, 2)] == ["length", "length"]
    assert h.stats["num_failed"] == 1 and h.stats["num_finished"] == 0  # the request counts as its worst
    h.assert_as_oracle()


def test_one_sample_is_finished_and_the_others_go_on() -> None:
    """Fault seen: ``finish`` ends the sample that stands first."""
    h = Harness(num_pages=400, page_size=4)
    a = h.add(random_ids(1, 22), 9, n=3, **DRAWN)
    h.step()
    h.step()
    last = h.engine.finish(a, 1)
    assert last is not None and last.sample_index == 1 and last.usage.completion_tokens == 2
    assert h.engine.finish(a, 1) is None and h.engine.finish(a, 7) is None
    h.take([last])
    h.sample_finals[a, 1] = [replace(last, finish_reason="abort")]  # for the oracle: it is a beginning
    h.run()
    assert [len(h.sample_tokens[a, i]) for i in range(3)] == [9, 2, 9]
    h.assert_as_oracle()


def test_log_probabilities_of_samples_are_their_own() -> None:
    """Fault seen: a copy of a sequence forgets the log-probabilities of its prompt."""
    h = Harness(num_pages=400, page_size=4)
    prompt = random_ids(1, 22)
    a = h.add(prompt, 6, best_of=4, n=2, prompt_logprobs=0, **DRAWN)
    h.run()
    for i in range(4):
        (final,) = h.sample_finals[a, i]
        tokens = h.sample_tokens[a, i]
        entries = h.executor.expected_token_logprobs([*prompt, *tokens], len(prompt), 0)
        assert final.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in entries))
        assert list(final.logprobs) == h.executor.expected_logprobs(h.requests[a].prompt_ids, 0)
    h.assert_as_oracle()


@pytest.mark.parametrize("best_of", [5, 17])
def test_more_samples_than_places_are_refused(best_of: int) -> None:
    """Fault seen: ``refuse_unfit`` does not look at places."""
    h = Harness(num_pages=100, page_size=4, max_running=4, max_batch_tokens=16)
    with pytest.raises(RequestTooLargeError, match=f"{best_of} .* 4"):
        h.add([1, 2, 3], 2, best_of=best_of)
    h.add([1, 2, 3], 2, n=4)
    h.run()
    h.assert_as_oracle()


def interrupt(h: Harness, when: int) -> None:
    """Ctrl-C in the next forward, before or after its work, or none."""

    def raise_it(batch: Batch) -> None:
        h.executor.before = h.executor.after = None
        raise KeyboardInterrupt

    h.executor.before = raise_it if when == 0 else None
    h.executor.after = raise_it if when == 1 else None


def random_program(seed: int) -> dict[str, int]:
    """Long because the draws belong to one generator, in one order."""
    rng = np.random.default_rng(seed)

    def between(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    page_size = PAGE_SIZES[between(0, 3)]
    longest = {1: 20, 4: 30, 16: 44, 64: 140}[page_size]
    h = Harness(
        num_pages=-(-(longest + 6) // page_size) + between(0, 2 * longest) // page_size,
        page_size=page_size,
        max_batch_tokens=(between(4, 8) * max(2, page_size // 4), between(10, 40), 1000)[between(0, 2)],
        max_running=between(4, 8),
        decode_reserve_tokens=(0, 4, 32)[between(0, 2)],
        policy=("fcfs", "lpm")[between(0, 1)],
        min_wait_tokens=(0, 4, 32)[between(0, 2)],
        prefix_cache=between(0, 4) > 0,
        check_every=7,
        fake={"vocab_size": (4, 50)[between(0, 1)], "eos_one_in": 9},
    )
    prompts = [rng.integers(1, 4, longest).tolist() for _ in range(2)]
    left = between(3, 6)
    beams: list[int] = []
    num_too_large = 0
    while left or h.engine.has_work:
        while left and between(0, 1) == 0:
            left -= 1
            prompt = prompts[between(0, 1)][: between(1, longest)]
            if between(0, 3) == 0:
                beam = BeamParams(width=between(1, 4), length_penalty=(0.0, 1.0)[between(0, 1)])
                try:
                    beams.append(h.add(prompt, between(1, 7), beam=beam, ignore_eos=between(0, 1) == 0))
                except RequestTooLargeError:  # samples need less room than beams
                    num_too_large += 1
                continue
            drawn: dict[str, Any] = {"temperature": 1.0, "seed": between(0, 9)} if between(0, 3) else {}
            h.add(prompt, between(0, 7), n=between(1, 4), **drawn)
        interrupt(h, between(0, 19))
        try:
            h.step()
        except KeyboardInterrupt:
            h.engine.check()
        if between(0, 7) == 0 and h.requests:
            h.abort(between(0, len(h.requests) - 1))
        running = h.engine.scheduler.running
        if running and between(0, 5) == 0:
            h.engine.scheduler._preempt(running[between(0, len(running) - 1)])
        if between(0, 19) == 0:
            h.engine.kv.flush()
    h.assert_as_oracle()
    ended = [i for i in beams if h.finals[i].finish_reason != "abort"]
    assert_beams_as_oracle(h, *ended)
    kv = h.engine.kv.stats()
    return {
        "beams": len(ended),
        "too_large": num_too_large,
        "interrupts": h.stats["num_undone_steps"],
        "preemptions": h.stats["num_preemptions"],
        "aborts": h.stats["num_aborted"],
        "forked_copies": kv["num_forked_copies"],
    }


def test_b045_random_programs_of_samples_equal_the_oracle(long_run: bool) -> None:
    """Fault seen: all samples of a request have the index of the first, and so its draws."""
    totals: dict[str, int] = {}
    for seed in range(20_000 if long_run else 24):
        try:
            stats = random_program(seed)
        except BaseException:
            print(f"program {seed} failed")
            raise
        for name, value in stats.items():
            totals[name] = totals.get(name, 0) + value
    assert min(totals.values()) >= 4, totals
