"""What may be asked of the scheduler while a batch is out, and what a beam group says of itself."""

from __future__ import annotations

import pytest
from engine_kit import Harness, random_ids

from radixkv.beam_params import BeamParams
from radixkv.errors import MisuseError, RequestTooLargeError
from radixkv.sched.batch import Batch


def out(h: Harness) -> Batch:
    batch = h.engine.scheduler.schedule()
    assert batch is not None
    return batch


@pytest.mark.parametrize("way", ["update", "undo", "fail"])
def test_an_abort_of_what_is_out_takes_effect_when_it_comes_back(way: str) -> None:
    h = Harness(num_pages=100, page_size=4)
    scheduler = h.engine.scheduler
    stays, goes = h.add(random_ids(1, 20), 4), h.add(random_ids(2, 20), 4)
    batch = out(h)
    assert scheduler.abort(goes) == scheduler.abort(goes) == ()
    assert [seq.page_table.num_pages > 0 for seq in scheduler.running] == [True, True]
    if way == "update":
        outputs = scheduler.update(batch, h.executor.execute(batch))
    elif way == "undo":
        scheduler.undo(batch)
        outputs = scheduler.take_outputs()
    else:
        outputs = scheduler.fail(batch, RuntimeError("no"))
    reasons = {output.request_id: output.finish_reason for output in outputs}
    expected = {"update": {goes: "abort", stays: None}, "undo": {goes: "abort"}}
    assert reasons == expected.get(way, {goes: "abort", stays: "error"})
    scheduler.check()
    assert scheduler.abort(goes) == ()
    h.take(outputs)
    h.run()
    h.assert_as_oracle()


def test_nobody_is_finished_while_a_batch_is_out() -> None:
    h = Harness(num_pages=100, page_size=4)
    request_id = h.add(random_ids(1, 20), 4)
    batch = out(h)
    with pytest.raises(MisuseError, match=f"request {request_id} cannot be finished"):
        h.engine.scheduler.finish(request_id)
    h.take(h.engine.scheduler.update(batch, h.executor.execute(batch)))
    final = h.engine.scheduler.finish(request_id)
    assert final is not None and final.finish_reason == "stop"
    h.take([final])
    assert h.engine.scheduler.finish(request_id) is None
    h.assert_nothing_held()


def test_a_search_that_waits_ends_as_one() -> None:
    h = Harness(num_pages=100, page_size=4, max_running=3, queue_timeout_s=5.0)
    first = h.add(random_ids(1, 20), 9)
    h.step()
    search = h.add(random_ids(2, 20), 9, beam=BeamParams(width=3))
    h.clock.now = 6.0
    h.run()
    assert h.finals[first].finish_reason == "length"
    assert h.finals[search].finish_reason == "timeout"
    h.assert_nothing_held()


def test_what_a_beam_group_says_of_itself() -> None:
    h = Harness(num_pages=100, page_size=4)
    search = h.add(random_ids(2, 20), 9, beam=BeamParams(width=3), ignore_eos=True)
    with pytest.raises(RequestTooLargeError, match="wants 3 beams, at most 2"):
        Harness(num_pages=100, page_size=4, max_running=2).add([1, 2], 2, beam=BeamParams(width=3))
    group = h.engine.scheduler._running.beams[search]
    assert group.stats() == {"num_beams": 1, "num_finished": 0, "is_gathered": False}
    h.step()
    assert group.stats() == {"num_beams": 3, "num_finished": 0, "is_gathered": False}
    h.step()
    h.engine.scheduler._preempt(h.engine.scheduler.running[0])
    h.engine.scheduler.check()
    assert group.stats() == {"num_beams": 3, "num_finished": 0, "is_gathered": True}
    assert all(beam.page_table.num_pages == 0 for beam in group.beams)
    h.run()
    assert group.stats()["num_finished"] == 3
    h.assert_nothing_held()


def test_when_all_is_given_up_a_search_ends_with_the_others() -> None:
    h = Harness(num_pages=100, page_size=4)
    search = h.add(random_ids(2, 20), 9, beam=BeamParams(width=3), ignore_eos=True)
    other = h.add(random_ids(3, 20), 9)
    h.step()
    error = RuntimeError("no")
    outputs = h.engine.scheduler.give_up(error)
    assert {output.request_id for output in outputs} == {search, other}
    assert all(output.finish_reason == "error" and output.error is error for output in outputs)
    assert not h.engine.scheduler.has_work and h.engine.scheduler.running == []
