"""LLM.generate: order, kinds of prompts, usage, progress, errors while the model runs, Ctrl-C, threads."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest
from fronts import VOCAB_SIZE, assert_idle, fake_llm, word_tokenizer, words

from radixkv import EngineDeadError, MisuseError, Output, SamplingParams, Usage
from radixkv.sched.batch import Batch
from radixkv.testing import FakeExecutor

FOUR = SamplingParams(max_tokens=4)


def test_one_prompt_gives_one_output_and_a_list_a_list() -> None:
    llm, executor = fake_llm()
    expected = executor.expected_output(np.array([3, 4, 5]), 4)
    for prompt in (words(3, 4, 5), [3, 4, 5], (3, 4, 5), np.array([3, 4, 5]), np.array([3, 4, 5], np.uint8)):
        output = llm.generate(prompt, FOUR)
        assert isinstance(output, Output)
        assert list(output.token_ids) == expected
        assert output.text == words(*expected)
        assert output.finish_reason == "length"
        many = llm.generate([prompt], FOUR)
        assert isinstance(many, list)
        assert [o.token_ids for o in many] == [output.token_ids]
    assert_idle(llm)


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    """They finish in another: the first wants the most tokens. Text and ids may be mixed."""
    llm, executor = fake_llm()
    prompts: list[Any] = [words(3, 4), [5, 6, 7], np.array([8]), words(9)]
    params = [SamplingParams(max_tokens=n) for n in (9, 5, 2, 1)]
    outputs = llm.generate(prompts, params)
    ids = [[3, 4], [5, 6, 7], [8], [9]]
    for output, prompt, n in zip(outputs, ids, (9, 5, 2, 1), strict=True):
        assert list(output.token_ids) == executor.expected_output(np.array(prompt), n)
        assert output.usage.completion_tokens == n


def test_rows_of_an_array_are_prompts() -> None:
    llm, executor = fake_llm()
    rows: Any = np.arange(3, 15, dtype=np.int32).reshape(4, 3)
    outputs = llm.generate(rows, FOUR)
    assert [list(o.token_ids) for o in outputs] == [executor.expected_output(row, 4) for row in rows]


def test_no_prompts_give_no_outputs() -> None:
    llm, executor = fake_llm()
    nothing: list[Any] = [[], (), np.empty((0, 3), np.int32)]
    for prompts in nothing:
        assert llm.generate(prompts) == []
    assert executor.batches == []


def test_the_prompt_is_copied() -> None:
    llm, executor = fake_llm()
    prompt = np.array([3, 4, 5])
    expected = executor.expected_output(prompt.copy(), 4)
    executor.before = lambda batch: prompt.fill(9)
    assert list(llm.generate(prompt, FOUR).token_ids) == expected


def test_usage_counts_hits() -> None:
    llm, _ = fake_llm()
    prompt = list(range(3, 30))
    assert llm.generate(prompt, FOUR).usage == Usage(27, 0, 4)
    assert llm.generate(prompt, FOUR).usage == Usage(27, 26, 4)
    assert llm.generate([*prompt, 50, 51], FOUR).usage == Usage(29, 27, 4)


def test_without_a_cache_nothing_is_a_hit_and_outputs_are_the_same() -> None:
    prompts = [[*range(3, 30), i] for i in range(40, 50)]
    cached, _ = fake_llm(min_wait_tokens=4)
    plain, _ = fake_llm(prefix_cache=False)
    mine, yours = cached.generate(prompts, FOUR), plain.generate(prompts, FOUR)
    assert [o.token_ids for o in mine] == [o.token_ids for o in yours]
    assert {o.usage.cached_tokens for o in yours} == {0}
    # The leader computes 28 and everyone else the one token of its own: sharing within the first batch.
    assert sum(o.usage.cached_tokens for o in mine) == 9 * 27


def test_the_default_is_greedy_and_256_tokens() -> None:
    llm, executor = fake_llm(num_pages=200)
    output = llm.generate([3, 4])
    assert list(output.token_ids) == executor.expected_output(np.array([3, 4]), 256)


def test_an_end_token_stops_and_stays() -> None:
    executor = FakeExecutor(num_pages=64, page_size=4, vocab_size=VOCAB_SIZE, eos_one_in=3)
    llm, _ = fake_llm(executor=executor)
    output = llm.generate([7], SamplingParams(max_tokens=100))
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == 0
    assert output.text == words(*output.token_ids[:-1])
    assert llm.generate([7], SamplingParams(max_tokens=20, ignore_eos=True)).usage.completion_tokens == 20


def test_a_text_gets_the_tokens_that_its_tokenizer_adds() -> None:
    llm, executor = fake_llm(tokenizer=word_tokenizer(adds_bos=True))
    expected = executor.expected_output(np.array([1, 3, 4]), 4)
    assert list(llm.generate(words(3, 4), FOUR).token_ids) == expected
    assert llm.generate([3, 4], FOUR).usage.prompt_tokens == 2


def test_progress_goes_to_a_terminal_only_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    llm, _ = fake_llm()
    llm.generate([[3], [4]], FOUR)
    llm.generate([[3], [4]], FOUR, progress=False)
    assert capfd.readouterr().err == ""
    llm.generate([[3], [4]], FOUR, progress=True)
    assert "2/2" in capfd.readouterr().err


# Errors while the model runs


class Broken(Exception):
    pass


def _break_for(*request_ids: int) -> Any:
    def before(batch: Batch) -> None:
        if set(request_ids) & set(batch.request_ids.tolist()):
            raise Broken("the model broke")

    return before


def test_an_error_in_the_model_is_raised_and_the_rest_is_aborted() -> None:
    llm, executor = fake_llm(max_running=1)
    executor.before = _break_for(1)
    with pytest.raises(Broken, match="the model broke"):
        llm.generate([[3], [4], [5]], FOUR)
    executor.before = None
    assert_idle(llm)
    assert llm.stats()["scheduler"]["num_aborted"] == 1
    assert llm.generate([5], FOUR).finish_reason == "length"


def test_return_exceptions_keeps_the_others_going() -> None:
    llm, executor = fake_llm(max_running=1)
    executor.before = _break_for(1)
    outputs = llm.generate([[3], [4], [5]], FOUR, return_exceptions=True)
    assert [type(o) for o in outputs] == [Output, Broken, Output]
    assert_idle(llm)


def test_an_abort_from_outside_ends_one_prompt_only() -> None:
    llm, executor = fake_llm()

    def before(batch: Batch) -> None:
        if len(executor.batches) == 2:
            llm.engine.abort(1)

    executor.before = before
    outputs = llm.generate([[3], [4], [5]], FOUR)
    assert [o.finish_reason for o in outputs] == ["length", "abort", "length"]
    assert outputs[1].usage.completion_tokens < 4
    assert_idle(llm)


def test_after_close_every_call_says_so() -> None:
    llm, _ = fake_llm()
    pin = llm.prefill([3, 4])
    with llm:
        assert pin.num_tokens == 2
    calls: list[Any] = [
        lambda: llm.generate([3]),
        lambda: llm.generate([]),
        lambda: llm.prefill([3]),
        lambda: llm.score([3], [[4]]),
        lambda: llm.explain([3]),
        llm.flush,
        llm.stats,
        llm.check,
        lambda: llm.engine,
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="this LLM is closed"):
            call()
    llm.close()


# Ctrl-C


@pytest.fixture
def own_interrupts() -> Any:
    """Python's handler in place, whatever the runner has set up."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_ctrl_c_aborts_what_runs_and_leaves_the_llm_usable(
    own_interrupts: None, when: str, step: int
) -> None:
    """Fault seen: without the abort in run_to_end the interrupted requests stay in the engine."""
    llm, executor = fake_llm(max_running=2)

    def press(batch: Batch) -> None:
        if len(executor.batches) == step:
            signal.raise_signal(signal.SIGINT)

    setattr(executor, when, press)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3], [4], [5], [6]], SamplingParams(max_tokens=10))
    assert_idle(llm)
    assert len(executor.batches) == step
    setattr(executor, when, None)
    outputs = llm.generate([[3], [4]], FOUR)
    assert [list(o.token_ids) for o in outputs] == [
        executor.expected_output(np.array([i]), 4) for i in (3, 4)
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("verb", ["add", "abort"])
def test_ctrl_c_while_the_queue_is_changed_waits_for_its_end(
    own_interrupts: None, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault seen: without InterruptsHeld around the adds, one of three is lost half-way in."""
    llm, executor = fake_llm()
    scheduler = llm.engine.scheduler
    plain = getattr(scheduler, verb)
    calls: list[int] = []

    def pressed(argument: Any) -> Any:
        calls.append(1)
        if calls.count(1) == 2:
            signal.raise_signal(signal.SIGINT)
        result = plain(argument)
        calls.append(0)
        return result

    monkeypatch.setattr(scheduler, verb, pressed)
    if verb == "abort":
        executor.before = _break_for(0)
    with pytest.raises((KeyboardInterrupt, Broken)):
        llm.generate([[3], [4], [5]], FOUR)
    assert calls.count(1) == calls.count(0) == 3
    assert_idle(llm)


# Threads


def test_calls_from_several_threads_wait_for_each_other() -> None:
    llm, executor = fake_llm()
    inside = threading.Lock()

    def before(batch: Batch) -> None:
        assert inside.acquire(blocking=False), "two calls at once"

    executor.before = before
    executor.after = lambda batch: inside.release()
    results: dict[int, list[int]] = {}

    def call(i: int) -> None:
        results[i] = list(llm.generate([i, i + 1, i + 2], FOUR).token_ids)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {
        i: executor.expected_output(np.arange(i, i + 3, dtype=np.int32), 4) for i in range(3, 11)
    }
    assert_idle(llm)


@pytest.mark.parametrize("call", ["stats", "close"])
def test_a_call_from_inside_a_call_is_an_error_and_no_deadlock(call: str) -> None:
    llm, executor = fake_llm()
    executor.before = lambda batch: getattr(llm, call)()
    with pytest.raises(MisuseError, match="from inside one of its own calls"):
        llm.generate([3], FOUR)
    executor.before = None
    assert_idle(llm)
