"""The gate: which differences pass, which do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.bench.equality import Fork, compare

PROMPTS = [np.array([1, 2], np.int32), np.array([3], np.int32)]


def _no_gaps(forks: Sequence[Fork]) -> list[float]:
    raise AssertionError("nothing parts, so nobody may be asked")


def test_equal_outputs_pass_without_asking_for_gaps() -> None:
    result = compare("radix", [[4, 5], [6, 7]], "no-cache", [[4, 5], [6, 7]], PROMPTS, _no_gaps)
    assert result.passed
    assert (result.num_compared, result.near_ties) == (2, 0)


def test_only_the_first_divergence_of_a_request_is_looked_at() -> None:
    asked: list[Fork] = []

    def gaps(forks: Sequence[Fork]) -> list[float]:
        asked.extend(forks)
        return [5e-4] * len(forks)

    result = compare("radix", [[4, 5, 8], [6, 7, 9]], "no-cache", [[4, 1, 2], [6, 7, 9]], PROMPTS, gaps)
    assert [(fork.request, fork.position, fork.token_a, fork.token_b) for fork in asked] == [(0, 1, 5, 1)]
    assert asked[0].context_ids.tolist() == [1, 2, 4]
    assert result.passed
    assert result.near_ties == 1


def test_a_clear_difference_fails() -> None:
    result = compare("radix", [[4], [6]], "no-cache", [[5], [7]], PROMPTS, lambda forks: [9e-4, -2e-3])
    assert not result.passed
    assert result.near_ties == 1
    assert "NOT EQUAL" in result.describe()


def test_an_output_that_ends_early_is_never_excused() -> None:
    result = compare("radix", [[4, 5], [6]], "no-cache", [[4, 5], [6, 7]], PROMPTS, _no_gaps)
    assert not result.passed


def test_an_arm_that_ran_fewer_requests_is_compared_on_those() -> None:
    result = compare("transformers", [[4, 5]], "no-cache", [[4, 5], [6, 7]], PROMPTS, _no_gaps)
    assert result.passed
    assert result.num_compared == 1
