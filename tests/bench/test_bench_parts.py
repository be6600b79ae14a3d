"""Arms by name, the stopwatch, the load check, paired ratios, cut lengths."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.bench.arm import parse_arms
from radixkv.bench.machine import check_load
from radixkv.bench.no_reuse import Ratio, paired_ratio
from radixkv.bench.residues import cut_lengths
from radixkv.bench.rig import Floor
from radixkv.bench.stopwatch import Stopwatch
from radixkv.errors import ConfigError


def test_arms_by_name() -> None:
    no_cache, radix, fcfs, small, peer = parse_arms(
        "no-cache, radix,fcfs,radix-p64,transformers", page_size=16
    )
    assert (no_cache.prefix_cache, no_cache.page_size) == (False, 16)
    assert (radix.prefix_cache, radix.page_size, radix.policy) == (True, 16, "lpm")
    assert fcfs.policy == "fcfs"
    assert small.page_size == 64
    assert peer.is_peer and not radix.is_peer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no arm was given"),
        ("radix,lru", "unknown arm 'lru'"),
        ("radix,radix", "'radix' is given more than once"),
    ],
)
def test_arms_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arms(text, page_size=16)


def test_stopwatch_takes_the_inner_part_off_the_outer_one() -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    inner = watch.wrap("inner", lambda: pass_time(2.0))

    def outer() -> None:
        pass_time(1.0)
        inner()
        pass_time(4.0)

    watch.wrap("outer", outer)()
    pass_time(100.0)
    inner()
    assert watch.seconds == {"outer": 5.0, "inner": 4.0}


def test_stopwatch_charges_a_part_that_raises() -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])

    def fail() -> None:
        now[0] += 3.0
        raise KeyError

    with pytest.raises(KeyError):
        watch.wrap("part", fail)()
    assert watch.seconds["part"] == 3.0


def test_a_busy_machine_is_a_warning_and_with_record_a_refusal() -> None:
    assert check_load(2.5, num_cores=2, record=True) is None
    assert check_load(None, num_cores=2, record=True) is None
    warning = check_load(2.51, num_cores=2, record=False)
    assert warning is not None and "2.51 on 2 cores" in warning
    with pytest.raises(ConfigError, match="refusing to record"):
        check_load(2.51, num_cores=2, record=True)


def test_paired_ratio_pairs_before_it_takes_the_median() -> None:
    ratio = paired_ratio([1.0, 20.0, 3.0], [1.0, 10.0, 4.0])
    assert ratio.median == 1.0
    assert (ratio.low, ratio.high) == (0.75, 2.0)


def test_paired_ratio_interval_covers_noise_about_one() -> None:
    rng = np.random.default_rng(1)
    off = rng.uniform(5.0, 10.0, 40)  # drifts far more than the pairs differ
    on = off * rng.normal(1.0, 0.01, 40)
    ratio = paired_ratio(on.tolist(), off.tolist())
    assert ratio.low <= 1.0 <= ratio.high
    assert ratio.high - ratio.low < 0.02
    assert paired_ratio(on.tolist(), off.tolist()) == ratio


@pytest.mark.parametrize(
    ("ratio", "passed"),
    [
        (Ratio(1.02, 0.99, 1.05), True),
        (Ratio(1.005, 1.001, 1.009), True),
        (Ratio(0.9, 0.8, 0.95), True),
        (Ratio(1.01, 1.001, 1.02), False),
    ],
)
def test_ratio_passes_when_it_includes_one_or_lies_below_a_hundredth_more(ratio: Ratio, passed: bool) -> None:
    assert ratio.passed is passed


def test_cut_lengths_leave_0_1_and_all_but_one() -> None:
    assert cut_lengths(1, 1100) == [1100]
    assert cut_lengths(16, 1100) == [1088, 1089, 1087]
    assert cut_lengths(64, 1100) == [1088, 1089, 1087]
    assert cut_lengths(64, 1087) == [1024, 1025, 1087]
    with pytest.raises(ConfigError, match="too short"):
        cut_lengths(64, 40)


def test_floor_adds_chunks_first_tokens_and_decode_steps() -> None:
    floor = Floor(chunk_rows=1000, chunk_s=2.0, step_rows=32, step_s=0.1, head_s=0.01)
    assert floor.seconds(prompt_tokens=2500, max_tokens=11) == pytest.approx(5.0 + 0.01 + 1.0)
