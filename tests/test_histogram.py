from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import InternalError
from radixkv.histogram import Histogram

values = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60)


def test_buckets_end_where_they_say() -> None:
    h = Histogram(1.0, 4.0)
    assert h.bounds == pytest.approx([1.0, 2**0.25, 2**0.5, 2**0.75, 2.0, 2**1.25, 2**1.5, 2**1.75, 4.0])
    for value in (0.0, 1.0, 1.1, 4.0, 4.1):
        h.record(value)
    counts = [count for _, count in h.buckets()]
    assert counts == [2, 3, 3, 3, 3, 3, 3, 3, 4, 5]  # a value on a bound lies below it
    assert h.buckets()[-1] == (math.inf, 5)
    h.check()


def test_the_last_bound_is_the_first_at_or_above_the_highest() -> None:
    assert Histogram(1.0, 1.5).bounds[-1] == pytest.approx(2**0.75)
    assert len(Histogram(0.001, 0.002).bounds) == 5


def test_before_any_value_everything_is_zero() -> None:
    h = Histogram(0.1, 10.0)
    assert h.stats() == {"count": 0, "sum": 0.0, "mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}
    h.record_many([])
    assert h.count == 0
    h.check()


@given(values, st.floats(0.0, 1.0))
def test_a_quantile_is_never_below_and_at_most_one_bucket_above(seen: list[float], share: float) -> None:
    h = Histogram(0.01, 1e6)
    for value in seen:
        h.record(value)
    h.check()
    exact = sorted(seen)[max(1, math.ceil(share * len(seen) - 1e-9)) - 1]
    assert exact <= h.quantile(share) <= max(exact * 2**0.25 * (1 + 1e-12), 0.01)
    assert h.quantile(1.0) == max(seen) == h.stats()["max"]
    assert h.sum == pytest.approx(sum(seen)) and h.mean == pytest.approx(sum(seen) / len(seen))


@given(values)
def test_many_at_once_is_each_by_itself(seen: list[float]) -> None:
    one, many, times = (Histogram(0.5, 1000.0) for _ in range(3))
    for value in seen:
        one.record(value)
        times.record(value, 3)
    many.record_many(np.array(seen))
    many.check()
    assert many.buckets() == one.buckets()
    assert many.stats() == pytest.approx(one.stats())
    assert [count for _, count in times.buckets()] == [3 * count for _, count in one.buckets()]
    assert times.count == 3 * one.count and times.sum == pytest.approx(3 * one.sum)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_what_is_no_size_is_refused(value: float) -> None:
    h = Histogram(1.0, 2.0)
    with pytest.raises(AssertionError):
        h.record(value)
    with pytest.raises(AssertionError):
        h.record_many([1.0, value])
    assert h.count == 0


def test_check_sees_a_count_that_is_off() -> None:
    h = Histogram(1.0, 2.0)
    h.record(1.5)
    h.count = 2
    with pytest.raises(InternalError, match="H1"):
        h.check()
    with pytest.raises(InternalError, match="H1"):
        h.quantile(1.0)


def test_check_sees_a_largest_that_no_bucket_holds() -> None:
    h = Histogram(1.0, 2.0)
    h.record(1.5)
    h.largest = 5.0
    with pytest.raises(InternalError, match="H1"):
        h.check()
