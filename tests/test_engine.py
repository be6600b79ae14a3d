"""Engine: what a step delivers, what a failure costs, and Ctrl-C."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.errors import (
    ConfigError,
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    NonFiniteLogitsError,
)
from radixkv.sched.batch import Batch, SequenceOutput, StepResult
from radixkv.sequence import Request
from radixkv.testing.fake_executor import FakeExecutor


def raise_once(h: Harness, error: BaseException, *, when: str = "before") -> None:
    """The executor's next step raises, before it does anything or when all is written."""

    def hook(batch: Batch) -> None:
        setattr(h.executor, when, None)
        raise error

    setattr(h.executor, when, hook)


def three_at_work(page_size: int = 4) -> Harness:
    """A decode behind a prefix hit, another behind the same, and a prompt half computed."""
    h = Harness(num_pages=600 // page_size, page_size=page_size, max_batch_tokens=16)
    shared = random_ids(1, 21)
    h.generate([*shared, 7], 2)
    h.add([*shared, 8], 12)
    h.add([*shared, 9], 12)
    h.add(random_ids(2, 50), 3)
    h.step()
    h.step()
    return h


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_outputs_are_those_of_an_engine_without_a_cache(page_size: int) -> None:
    h = three_at_work(page_size)
    h.run()
    h.assert_as_oracle()
    assert h.stats["cached_tokens"] == 42


def test_outputs_carry_new_tokens_usage_and_one_end() -> None:
    h = Harness(num_pages=20, page_size=4)
    a = h.add(random_ids(1, 6), 2)
    first, second = h.step(), h.step()
    expected = h.expected(a)
    assert [output.new_token_ids for output in (*first, *second)] == [(expected[0],), (expected[1],)]
    assert first[0].finish_reason is None and second[0].finish_reason == "length"
    assert second[0].usage.prompt_tokens == 6 and second[0].usage.completion_tokens == 2
    assert h.step() == [] and not h.engine.has_work


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("chunk", [5, 1000])
def test_scored_prompts_get_every_logprob_once_and_in_order(page_size: int, chunk: int) -> None:
    h = Harness(num_pages=1000 // page_size, page_size=page_size, max_batch_tokens=chunk)
    prompt = random_ids(1, 50)
    cached = []
    for start in (49, 20, 1, 0):
        for max_tokens in (0, 2):
            final = h.generate(prompt, max_tokens, logprob_start=start)
            assert list(final.logprobs) == h.executor.expected_logprobs(h.requests[0].prompt_ids, start)
            cached.append(final.usage.cached_tokens)
    # All before the row that scores the first position that was never scored; and 0 asks for the same as 1.
    assert cached == [0, 49, 19, 49, 0, 49, 49, 49]
    h.assert_as_oracle()


def test_scores_survive_preemption() -> None:
    h = Harness(num_pages=14, page_size=4, max_batch_tokens=8, decode_reserve_tokens=0)
    prompt = random_ids(2, 24)
    a = h.add(random_ids(1, 12), 20)
    b = h.add(prompt, 10, logprob_start=5)
    h.run()
    assert h.stats["num_preemptions"] > 0
    assert list(h.finals[b].logprobs) == h.executor.expected_logprobs(h.requests[b].prompt_ids, 5)
    assert h.finals[a].logprobs == ()
    h.assert_as_oracle()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_failed_step_fails_its_batch_and_nobody_else(page_size: int, when: str) -> None:
    h = three_at_work(page_size)
    waiting = h.add(random_ids(5, 40), 3)  # no budget is left for it in the next step
    error = RuntimeError("the device fell over")
    raise_once(h, error, when=when)
    failed = h.step()
    assert {output.request_id for output in failed} == {1, 2, 3}
    assert all(output.finish_reason == "error" and output.error is error for output in failed)
    h.generate([*random_ids(1, 21), 8, 3], 3)
    assert h.finals[waiting].finish_reason == "length"
    assert h.engine.stats()["num_failed_steps"] == 1
    h.assert_as_oracle()


def test_an_error_that_names_requests_fails_only_those() -> None:
    h = three_at_work()
    raise_once(h, NonFiniteLogitsError((2,), (2,)), when="after")
    (failed,) = h.step()
    assert failed.request_id == 2 and failed.finish_reason == "error"
    h.run()
    assert [h.finals[i].finish_reason for i in (1, 3)] == ["length", "length"]
    h.assert_as_oracle()


@pytest.mark.parametrize(
    "wrong",
    [
        StepResult(np.zeros(5, np.int32)),
        StepResult(np.array([1000], np.int32)),
        StepResult(np.array([-1], np.int32)),
        StepResult(np.array([1], np.int32), np.zeros(1, np.float32)),
    ],
)
def test_an_executor_that_returns_nonsense_has_failed(
    wrong: StepResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = Harness(num_pages=20, page_size=4)
    h.add(random_ids(1, 6), 3)
    with monkeypatch.context() as patched:
        patched.setattr(h.executor, "execute", lambda batch: wrong)
        (output,) = h.step()
    assert output.finish_reason == "error" and isinstance(output.error, InternalError)
    h.generate(random_ids(1, 6), 3)
    h.assert_as_oracle()


def test_an_engine_whose_invariants_broke_is_dead_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    h = three_at_work()
    h.add(random_ids(5, 8), 3)
    error = RuntimeError("the device fell over")
    raise_once(h, error)
    monkeypatch.setattr(h.engine.kv, "check", lambda sequences: (_ for _ in ()).throw(InternalError("M1")))
    outputs = h.engine.step()
    ends = {output.request_id: output for output in outputs}
    assert ends.keys() == {1, 2, 3, 4} and len(outputs) == 4
    assert {output.finish_reason for output in outputs} == {"error"}
    dead = [output.error for output in outputs if isinstance(output.error, EngineDeadError)]
    assert dead and all(
        isinstance(e.__cause__, InternalError) and e.__cause__.__cause__ is error for e in dead
    )
    assert h.engine.is_dead and not h.engine.has_work and h.engine.stats()["is_dead"]
    for call in (h.engine.step, lambda: h.engine.abort(1), lambda: h.add([1])):
        with pytest.raises(EngineDeadError, match="M1") as caught:
            call()
        assert isinstance(caught.value.__cause__, InternalError)


@pytest.mark.parametrize("method", ["reserve", "commit", "take_copies"])
def test_a_ledger_that_raises_kills_the_engine(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    h = three_at_work(1)

    def broken(*args: object) -> None:
        raise InternalError(f"{method} broke")

    monkeypatch.setattr(h.engine.kv, method, broken)
    outputs = h.engine.step()
    assert {output.request_id for output in outputs if output.finish_reason == "error"} == {1, 2, 3}
    with pytest.raises(EngineDeadError, match=f"{method} broke"):
        h.engine.step()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ctrl_c_in_a_forward_loses_nothing(page_size: int, when: str) -> None:
    h = three_at_work(page_size)
    raise_once(h, KeyboardInterrupt(), when=when)
    with pytest.raises(KeyboardInterrupt):
        h.step()
    h.engine.check()
    assert {seq.request.request_id for seq in h.engine.scheduler.running} == {1, 2, 3}
    h.run()
    h.assert_as_oracle()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ctrl_c_in_the_step_of_a_page_copy(page_size: int, when: str) -> None:
    """The copy may not have been done: it is done again."""
    h = Harness(num_pages=400 // page_size, page_size=page_size)
    shared = random_ids(1, 71)
    h.generate(shared, 1)
    a = h.add([*shared, 5, 6], 4)
    raise_once(h, KeyboardInterrupt(), when=when)
    with pytest.raises(KeyboardInterrupt):
        h.step()
    assert bool(h.last_batch.page_copies) == (page_size > 1)
    h.step()
    assert h.grants == {a: 2}
    h.run()
    h.assert_as_oracle()


def test_after_ctrl_c_the_running_are_aborted_and_the_engine_goes_on() -> None:
    h = three_at_work()
    raise_once(h, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        h.step()
    for request_id in (1, 2, 3):
        output = h.abort(request_id)
        assert output is not None and output.finish_reason == "abort"
    assert not h.engine.has_work
    assert h.generate([*random_ids(1, 21), 8], 3).usage.cached_tokens >= 21
    h.assert_as_oracle()


@pytest.fixture
def pythons_own_handler() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own_handler")
def test_a_signal_while_the_ledger_changes_waits_for_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    h = three_at_work()
    reserve = h.engine.kv.reserve

    def interrupted_reserve(*args: object) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        reserve(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(h.engine.kv, "reserve", interrupted_reserve)
    batches = len(h.executor.batches)
    with pytest.raises(KeyboardInterrupt):
        h.step()
    assert len(h.executor.batches) == batches  # it came out before the forward
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    h.engine.check()
    h.run()
    h.assert_as_oracle()


@pytest.mark.usefixtures("pythons_own_handler")
def test_a_signal_in_a_forward_and_one_in_update(monkeypatch: pytest.MonkeyPatch) -> None:
    h = three_at_work()
    h.executor.before = lambda batch: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        h.step()
    h.executor.before = None
    update = h.engine.scheduler.update

    def interrupted_update(batch: Batch, result: StepResult) -> list[SequenceOutput]:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return update(batch, result)

    monkeypatch.setattr(h.engine.scheduler, "update", interrupted_update)
    with pytest.raises(KeyboardInterrupt):
        h.step()
    h.run()  # what the second kept back comes with the next step
    h.assert_as_oracle()


@pytest.mark.usefixtures("pythons_own_handler")
def test_outputs_kept_back_by_a_last_interrupt_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(num_pages=20, page_size=4)
    h.add(random_ids(1, 6), 1)
    update = h.engine.scheduler.update

    def interrupted_update(batch: Batch, result: StepResult) -> list[SequenceOutput]:
        signal.raise_signal(signal.SIGINT)
        return update(batch, result)

    monkeypatch.setattr(h.engine.scheduler, "update", interrupted_update)
    with pytest.raises(KeyboardInterrupt):
        h.step()
    assert h.engine.has_work
    h.run()
    h.assert_as_oracle()


def test_a_thread_other_than_the_main_one_may_step() -> None:
    h = Harness(num_pages=20, page_size=4)
    h.add(random_ids(1, 6), 3)
    thread = threading.Thread(target=h.run)
    thread.start()
    thread.join()
    h.assert_as_oracle()


def test_an_abort_from_inside_the_forward_takes_effect_at_its_end() -> None:
    h = three_at_work()
    h.executor.after = lambda batch: setattr(h, "returned", h.engine.abort(1))
    outputs = h.step()
    assert h.returned == ()  # type: ignore[attr-defined]
    assert [o.finish_reason for o in outputs if o.request_id == 1] == ["abort"]
    assert [o.new_token_ids for o in outputs if o.request_id == 1] == [()]
    h.executor.after = None
    h.run()
    h.assert_as_oracle()


@pytest.mark.parametrize("error", [RuntimeError("late"), KeyboardInterrupt()])
def test_an_abort_inside_a_forward_that_then_fails_is_still_an_abort(error: BaseException) -> None:
    h = three_at_work()

    def abort_and_raise(batch: Batch) -> None:
        h.executor.after = None
        assert h.engine.abort(1) == ()
        raise error

    h.executor.after = abort_and_raise
    try:
        h.step()
    except KeyboardInterrupt:
        h.step()
    h.run()
    assert h.finals[1].finish_reason == "abort"
    assert h.finals[2].finish_reason == ("error" if isinstance(error, RuntimeError) else "length")
    h.assert_as_oracle()


def test_an_abort_of_what_is_not_there_does_nothing() -> None:
    h = Harness(num_pages=20, page_size=4)
    assert h.abort(3) is None
    h.generate(random_ids(1, 6), 2)
    assert h.abort(0) is None
    h.assert_as_oracle()


def test_pins_expire_as_the_engine_steps() -> None:
    h = Harness(num_pages=40, page_size=4, max_pinned_pages=10)
    h.generate(random_ids(1, 16), 0)
    h.engine.kv.pin(np.array(random_ids(1, 16), np.int32), timeout_s=5.0)
    assert h.engine.kv.num_pinned_pages == 4
    h.clock.now = 6.0
    h.generate(random_ids(2, 4), 1)
    assert h.engine.kv.num_pinned_pages == 0


def test_build_refuses_a_store_that_does_not_fit() -> None:
    executor = FakeExecutor(num_pages=10, page_size=4)
    with pytest.raises(ConfigError, match="num_pages is 11, the executor's store has 10"):
        Engine.build(EngineConfig(num_pages=11, page_size=4), executor)
    with pytest.raises(ConfigError, match="page_size is 16, the executor's is 4"):
        Engine.build(EngineConfig(num_pages=10, page_size=16), executor)


@pytest.mark.parametrize("bad", [[], [[]], [[1], [2, 3]], None, "", "text", [1.5], [True], [-1], [2**31]])
def test_a_request_refuses_what_is_not_a_prompt(bad: object) -> None:
    with pytest.raises(InvalidRequestError):
        Request(request_id=1, prompt_ids=bad)  # type: ignore[arg-type]


def test_a_request_keeps_its_own_copy_of_the_prompt() -> None:
    ids = np.array([1, 2, 3], np.int32)
    request = Request(request_id=1, prompt_ids=ids)
    ids[0] = 9
    assert request.prompt_ids.tolist() == [1, 2, 3] and not request.prompt_ids.flags.writeable


@pytest.mark.parametrize("start", [-1, 3])
def test_logprob_start_lies_in_the_prompt(start: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"0\.\.2 .* got {start}"):
        Request(request_id=1, prompt_ids=np.array([1, 2, 3], np.int32), logprob_start=start)
