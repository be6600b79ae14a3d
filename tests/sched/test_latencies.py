from __future__ import annotations

import numpy as np
import pytest
from engine_kit import Harness, random_ids

from radixkv.errors import InternalError
from radixkv.sched.latencies import Latencies
from radixkv.sequence import Request, Sequence


def test_times_are_those_of_the_clock() -> None:
    """Two requests, one place; each step takes a second."""
    h = Harness(num_pages=40, page_size=4, max_running=1)
    h.add(random_ids(1, 8), 3)
    h.add(random_ids(2, 8), 2)
    h.executor.after = lambda batch: setattr(h.clock, "now", h.clock.now + 1.0)
    h.run()
    stats = h.stats
    assert stats["queue_time_s"]["count"] == 2 and stats["queue_time_s"]["sum"] == 3.0
    assert stats["ttft_s"]["count"] == 2 and stats["ttft_s"]["sum"] == 1.0 + 4.0
    assert stats["inter_token_s"]["count"] == 3 and stats["inter_token_s"]["max"] == 1.0
    h.assert_as_oracle()


def test_a_preemption_is_part_of_the_time_between_two_tokens_and_no_second_start() -> None:
    h = Harness(num_pages=40, page_size=4, max_running=1, policy="priority", max_wait_s=1e9)
    h.add(random_ids(1, 8), 4)
    h.step()
    h.add(random_ids(2, 8), 1, priority=1)
    h.clock.now = 50.0
    h.step()
    h.clock.now = 60.0
    h.run()
    stats = h.stats
    assert stats["queue_time_s"]["count"] == 2 and stats["ttft_s"]["count"] == 2
    assert stats["inter_token_s"]["max"] == 60.0
    h.assert_as_oracle()


def test_the_hit_rate_is_one_ratio_of_two_counters() -> None:
    h = Harness(num_pages=40, page_size=4)
    assert h.stats["hit_rate"] == 0.0
    h.generate(random_ids(1, 16), 2)
    h.generate([*random_ids(1, 16), 7], 2)
    assert h.stats["hit_rate"] == h.stats["cached_tokens"] / h.stats["prompt_tokens"] == 16 / 33


def test_check_sees_times_of_what_has_ended() -> None:
    latencies = Latencies()
    seq = Sequence(Request(request_id=7, prompt_ids=np.array([1], np.int32)), 4)
    latencies.token(seq, 1.0)
    latencies.check({seq})
    with pytest.raises(InternalError, match=r"J1.*7"):
        latencies.check(set())
    latencies.forget(seq)
    latencies.check(set())
    latencies.token(seq, 2.0)
    latencies.clear()
    latencies.check(set())
