from __future__ import annotations

import numpy as np

from radixkv.sched.draws import draws_of


def draw(seed: int, sample: int, position: int) -> float:
    key = [np.array([word], np.uint64) for word in (seed, sample, position)]
    return float(draws_of(*key)[0])


def test_a_draw_depends_on_its_key_and_on_nothing_beside_it() -> None:
    seeds = np.array([1, 2**63 - 1, 7, 1], np.uint64)
    samples = np.array([0, 3, 1, 0], np.uint64)
    positions = np.array([0, 9, 4, 1], np.uint64)
    together = draws_of(seeds, samples, positions)
    alone = [draw(int(s), int(n), int(p)) for s, n, p in zip(seeds, samples, positions, strict=True)]
    assert together.tolist() == alone
    assert together.tolist() == draws_of(seeds, samples, positions).tolist()


def test_every_word_of_the_key_matters() -> None:
    keys = [(5, 0, 0), (6, 0, 0), (5, 1, 0), (5, 0, 1), (0, 5, 0), (0, 0, 5), (1, 5, 0), (0, 1, 5)]
    assert len({draw(*key) for key in keys}) == len(keys)


def test_known_values_stay() -> None:
    """A change here changes what every seed means to its user."""
    assert draw(0, 0, 0) == 0.13870941014555427
    assert draw(42, 1, 7) == 0.10584086659863745


def test_draws_are_uniform_and_neighbours_independent() -> None:
    n = 20_000
    zeros = np.zeros(n, np.uint64)
    count = np.arange(n, dtype=np.uint64)
    for keys in ((count, zeros, zeros), (zeros, count, zeros), (zeros, zeros, count)):
        draws = draws_of(*keys)
        assert draws.min() >= 0.0 and draws.max() < 1.0
        cells = np.bincount((draws * 20).astype(int), minlength=20)
        chi_square = float(((cells - n / 20) ** 2 / (n / 20)).sum())
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
