"""The sampler against a slow one written out in numpy, and the promises of its docstring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixkv.errors import NonFiniteLogitsError
from radixkv.executor import sampler
from radixkv.executor.probe_batch import greedy_rows
from radixkv.sched.batch import SamplingRows
from radixkv.types import TokenIds

V = 40


def rows_of(n: int, **arrays: Any) -> SamplingRows:
    """Greedy rows with some fields given, a number standing for every row."""
    plain = greedy_rows(n, V)
    given = {}
    for name, value in arrays.items():
        like = getattr(plain, name)
        given[name] = np.full(n, value, like.dtype) if np.isscalar(value) else np.asarray(value, like.dtype)
    return replace(plain, **given)


def sample(logits: torch.Tensor, rows: SamplingRows, request_ids: NDArray[np.int64]) -> TokenIds:
    return sampler.sample(logits, rows, request_ids, request_ids + 1000)


def ids(n: int) -> NDArray[np.int64]:
    return np.arange(100, 100 + n)


def random_logits(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * 2


def slow(logits: NDArray[np.float32], t: float, top_k: int, top_p: float, min_p: float, draw: float) -> int:
    """One row, by sorting everything."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / t)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))[:top_k]
    total, run, kept = sum(p[i] for i in order), 0.0, []
    for i in order:
        if run >= top_p * total:
            break
        kept.append(i)
        run += p[i]
    kept = sorted(i for i in kept if p[i] >= min_p * p.max())
    target, run = draw * sum(p[i] for i in kept), 0.0
    for i in kept:
        run += p[i]
        if run > target:
            return i
    return kept[-1]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, V)
    logits[0, [7, 9]] = 3.0
    assert sample(logits, rows_of(2), ids(2)).tolist() == [7, 0]


def test_result_is_int32_and_logits_stay() -> None:
    logits = random_logits(3)
    before = logits.clone()
    rows = rows_of(
        3, temperature=0.7, draws=0.4, bias_row=[1], bias_token=[2], bias_value=[3.0], seen_row=[0],
        seen_token=[1], seen_in_output=[2], frequency_penalty=1.0,
    )  # fmt: skip
    out = sample(logits, rows, ids(3))
    assert out.dtype == np.int32 and out.shape == (3,)
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, V), rows_of(0), ids(0)).shape == (0,)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.6},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
    ],
)
def test_equals_the_slow_sampler(options: dict[str, float]) -> None:
    """200 rows per setting. Fault seen: ``searchsorted`` in ``_kept`` without the ``+ 1``."""
    n = 200
    logits = random_logits(n, seed=3)
    settings = {"temperature": 1.0, "top_k": V, "top_p": 1.0, "min_p": 0.0, **options}
    draws = np.random.default_rng(0).random(n)
    out = sample(logits, rows_of(n, draws=draws, **settings), ids(n))
    expected = [
        slow(logits[i].numpy(), settings["temperature"], int(settings["top_k"]), settings["top_p"],
             settings["min_p"], draws[i])
        for i in range(n)
    ]  # fmt: skip
    assert out.tolist() == expected


def test_frequencies_follow_the_distribution() -> None:
    """Evenly spaced draws must give each token its share to within one draw."""
    n = 2000
    logits = random_logits(1, seed=5).expand(n, V)
    out = sample(logits, rows_of(n, temperature=1.3, draws=(np.arange(n) + 0.5) / n), ids(n))
    share = torch.softmax(logits[0].double() / 1.3, 0).numpy()
    assert np.abs(np.bincount(out, minlength=V) - share * n).max() <= 1.0


def test_ties_at_the_edge_of_top_k_keep_the_lower_ids() -> None:
    logits = torch.zeros(50, V)
    out = sample(logits, rows_of(50, temperature=1.0, top_k=3, draws=np.linspace(0, 0.999, 50)), ids(50))
    assert set(out.tolist()) == {0, 1, 2}


def test_top_p_keeps_the_token_that_crosses_the_limit() -> None:
    """Shares 0.5, 0.3, 0.2: a limit of 0.6 keeps two tokens, one of 0.5 keeps one."""
    logits = torch.full((20, V), -1e9)
    logits[:, :3] = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    draws = np.linspace(0, 0.999, 20)
    assert set(sample(logits, rows_of(20, temperature=1.0, top_p=0.6, draws=draws), ids(20)).tolist()) == {
        0,
        1,
    }
    assert set(sample(logits, rows_of(20, temperature=1.0, top_p=0.49, draws=draws), ids(20)).tolist()) == {0}


@pytest.mark.parametrize("draw", [0.0, np.nextafter(1.0, 0.0)])
def test_extreme_draws_never_hit_a_token_of_no_weight(draw: float) -> None:
    logits = torch.full((1, V), -torch.inf)
    logits[0, 11:14] = torch.tensor([0.1, 2.0, -1.0])
    out = sample(logits, rows_of(1, temperature=0.9, draws=draw), ids(1))
    assert out[0] == (11 if draw == 0.0 else 13)


def test_b048_a_row_does_not_depend_on_its_batch_mates() -> None:
    """Every row alone, in a batch, and in another order gives the same token.

    Fault seen: weights normalised by the largest logit of the whole batch.
    """
    n = 24
    logits = random_logits(n, seed=9) * torch.linspace(0.1, 40, n)[:, None]
    rng = np.random.default_rng(1)
    columns = {
        "temperature": np.where(np.arange(n) % 3 == 0, 0.0, rng.uniform(0.2, 2, n)),
        "top_k": rng.integers(1, V, n),
        "top_p": rng.uniform(0.3, 1, n),
        "min_p": rng.uniform(0, 0.2, n),
        "draws": rng.random(n),
    }
    together = sample(logits, rows_of(n, **columns), ids(n))
    order = rng.permutation(n)
    mixed = sample(logits[order], rows_of(n, **{k: v[order] for k, v in columns.items()}), ids(n))
    assert mixed.tolist() == together[order].tolist()
    for i in range(n):
        alone = sample(logits[i : i + 1], rows_of(1, **{k: v[i : i + 1] for k, v in columns.items()}), ids(1))
        assert alone[0] == together[i]
        if columns["temperature"][i] == 0.0:
            assert together[i] == int(logits[i].argmax())


def test_bias_is_added() -> None:
    logits = torch.zeros(2, V)
    rows = rows_of(2, bias_row=[1, 1], bias_token=[4, 6], bias_value=[1.0, 2.0])
    assert sample(logits, rows, ids(2)).tolist() == [0, 6]
    assert sample(logits, rows_of(2, bias_row=[0], bias_token=[0], bias_value=[-1.0]), ids(2)).tolist() == [
        1,
        0,
    ]


def test_repetition_penalty_divides_gains_and_multiplies_losses() -> None:
    logits = torch.full((1, V), -5.0)
    logits[0, :3] = torch.tensor([4.0, 3.0, -1.0])
    seen = {"seen_row": [0], "seen_token": [0], "seen_in_output": [0]}
    assert sample(logits, rows_of(1, repetition_penalty=1.3, **seen), ids(1))[0] == 0  # 3.08
    assert sample(logits, rows_of(1, repetition_penalty=1.4, **seen), ids(1))[0] == 1  # 2.86
    logits = torch.full((1, V), -5.0)
    logits[0, :2] = torch.tensor([-1.0, -1.5])
    assert sample(logits, rows_of(1, repetition_penalty=1.4, **seen), ids(1))[0] == 0  # -1.4
    assert sample(logits, rows_of(1, repetition_penalty=1.6, **seen), ids(1))[0] == 1  # -1.6


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, V)
    logits[0, :2] = torch.tensor([2.0, 1.0])
    in_prompt = {"seen_row": [0], "seen_token": [0], "seen_in_output": [0]}
    in_output = {"seen_row": [0], "seen_token": [0], "seen_in_output": [3]}
    assert (
        sample(logits, rows_of(1, presence_penalty=1.5, frequency_penalty=1.5, **in_prompt), ids(1))[0] == 0
    )
    assert sample(logits, rows_of(1, presence_penalty=0.9, **in_output), ids(1))[0] == 0
    assert sample(logits, rows_of(1, presence_penalty=1.1, **in_output), ids(1))[0] == 1
    assert sample(logits, rows_of(1, frequency_penalty=0.3, **in_output), ids(1))[0] == 0
    assert sample(logits, rows_of(1, frequency_penalty=0.4, **in_output), ids(1))[0] == 1


def test_penalties_touch_only_their_row() -> None:
    logits = torch.zeros(2, V)
    logits[:, 5] = 1.0
    rows = rows_of(2, seen_row=[1], seen_token=[5], seen_in_output=[1], presence_penalty=[0.0, 2.0])
    assert sample(logits, rows, ids(2)).tolist() == [5, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b048_a_bad_logit_names_its_request(bad: float, temperature: float) -> None:
    """Fault seen: the check of ``best_logit`` left out."""
    logits = random_logits(4)
    logits[2, 17] = bad
    with pytest.raises(NonFiniteLogitsError, match="102") as caught:
        sample(logits, rows_of(4, temperature=temperature), ids(4))
    assert caught.value.request_ids == (102,)


def test_a_row_without_any_possible_token_names_its_request() -> None:
    logits = random_logits(2)
    logits[0] = -torch.inf
    with pytest.raises(NonFiniteLogitsError) as caught:
        sample(logits, rows_of(2), ids(2))
    assert caught.value.request_ids == (100,)


def test_half_precision_logits() -> None:
    logits = random_logits(6, seed=2).bfloat16()
    greedy = sample(logits, rows_of(6), ids(6))
    assert [float(logits[i, t]) for i, t in enumerate(greedy)] == logits.max(dim=1).values.tolist()
    drawn = sample(logits, rows_of(6, temperature=1.0, top_k=1), ids(6))
    assert [float(logits[i, t]) for i, t in enumerate(drawn)] == logits.max(dim=1).values.tolist()


def test_barred_tokens_are_never_chosen() -> None:
    """Minus infinity as a bias: greedy takes the next best, a draw one of the others, a large bias of the
    caller's notwithstanding."""
    logits = torch.zeros(1, V)
    logits[0, [7, 9]] = torch.tensor([5.0, 3.0])
    barred = {"bias_row": [0, 0], "bias_token": [7, 7], "bias_value": [1e4, -np.inf]}
    assert sample(logits, rows_of(1, **barred), ids(1)).tolist() == [9]
    for draw in np.linspace(0.0, 0.999999, 200):
        for cut in ({}, {"top_k": V - 1}, {"top_p": 0.9999}):
            rows = rows_of(1, temperature=1.0, draws=draw, **barred, **cut)
            assert sample(logits, rows, ids(1)).tolist() != [7]
