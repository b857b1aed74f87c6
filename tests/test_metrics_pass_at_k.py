"""pass@k against every subset, exact fractions, and its own definition as an average."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import MetricError
from collapsediag.metrics.pass_at_k import pass_at_k, pass_at_k_metrics, powers_of_two

ROUNDING = 1e-12


@pytest.mark.parametrize("n", range(1, 13))
def test_equals_the_share_of_subsets_with_a_success(n: int) -> None:
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        for c in range(n + 1):
            share = sum(subset[0] < c for subset in subsets) / len(subsets)  # the first c samples are the solved ones
            assert pass_at_k([n], [c], k)[0] == pytest.approx(share, abs=ROUNDING), (n, c, k)


@pytest.mark.parametrize("k", [1, 2, 8, 64, 512, 999, 1000])
def test_stays_exact_at_a_thousand_samples(k: int) -> None:
    c = np.array([0, 1, 2, 10, 250, 500, 990, 999, 1000])
    exact = [float(1 - Fraction(math.comb(1000 - s, k), math.comb(1000, k))) for s in c.tolist()]
    np.testing.assert_allclose(pass_at_k(np.full(c.size, 1000), c, k), exact, rtol=1e-11, atol=1e-13)


def test_one_solved_of_a_thousand_is_not_lost_to_rounding() -> None:
    assert pass_at_k([1000], [1], 1)[0] == pytest.approx(1e-3, rel=1e-12)
    assert pass_at_k([10**6], [1], 1)[0] == pytest.approx(1e-6, rel=1e-9)


def test_prompts_keep_their_places_and_repeats_are_alike() -> None:
    n, c = np.array([4, 8, 4, 8, 4]), np.array([1, 3, 0, 3, 4])
    together = pass_at_k(n, c, 2)
    alone = [pass_at_k([a], [b], 2)[0] for a, b in zip(n.tolist(), c.tolist(), strict=True)]
    np.testing.assert_array_equal(together, alone)


def test_is_unbiased_for_a_known_success_rate() -> None:
    # Mean of the estimate over the binomial distribution of c is the true 1 - (1-p)^k.
    n, p = 10, 0.2
    weight = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in (1, 3, 7, 10):
        estimate = pass_at_k(np.full(n + 1, n), np.arange(n + 1), k)
        assert float(estimate @ weight) == pytest.approx(1 - (1 - p) ** k, abs=ROUNDING)


def test_means_over_prompts_for_powers_of_two_up_to_the_smallest_group() -> None:
    values = pass_at_k_metrics([6, 8, 4], [3, 8, 0])
    assert [name for name in values if "/" not in name] == ["pass@1", "pass@2", "pass@4"]
    assert values["pass@1"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert values["pass@2"] == pytest.approx((1 - 3 / 15 + 1.0 + 0.0) / 3)
    assert values["pass@4"] == pytest.approx(2 / 3)
    assert list(pass_at_k_metrics([6, 8], [3, 8], ks=[3])) == ["pass@3", "pass@3/ci_low", "pass@3/ci_high"]


@pytest.mark.parametrize(("largest", "ks"), [(0, ()), (1, (1,)), (7, (1, 2, 4)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8))])
def test_powers_of_two(largest: int, ks: tuple[int, ...]) -> None:
    assert powers_of_two(largest) == ks


def test_the_interval_resamples_prompts() -> None:
    # Half of 40 prompts always solved, half never: the mean of prompts is binomial with n = 40, whatever n and k are.
    values = pass_at_k_metrics([8] * 40, [8] * 20 + [0] * 20, n_resamples=4000, seed=1)
    half = 1.96 * math.sqrt(0.25 / 40)
    for k in (1, 8):
        assert values[f"pass@{k}"] == 0.5
        assert values[f"pass@{k}/ci_low"] == pytest.approx(0.5 - half, abs=0.03)
        assert values[f"pass@{k}/ci_high"] == pytest.approx(0.5 + half, abs=0.03)
    assert values == pass_at_k_metrics([8] * 40, [8] * 20 + [0] * 20, n_resamples=4000, seed=1)


def test_a_single_prompt_has_no_interval_and_an_unlabelled_one_is_left_out() -> None:
    assert pass_at_k_metrics([4], [2]) == {"pass@1": 0.5, "pass@2": pytest.approx(5 / 6), "pass@4": 1.0}
    assert pass_at_k_metrics([0, 4], [0, 2]) == pass_at_k_metrics([4], [2])
    assert pass_at_k_metrics([0], [0]) == {}
    assert pass_at_k_metrics([], []) == {}


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        ([4], [5], 1, "prompt 0 has 5 solved of 4 samples"),
        ([4, 3], [1, 1], 4, r"pass@4 needs at least 4 samples of every prompt, and k >= 1; prompt 1 has 3"),
        ([4], [1], 0, "k >= 1"),
        ([4], [-1], 1, "c_P must be a flat list of counts"),
        ([4.0], [1], 1, "n_P must be a flat list of counts"),
        ([4, 4], [1], 1, "n_P has shape"),
    ],
)
def test_counts_that_cannot_be_are_refused(n: Any, c: Any, k: int, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        pass_at_k(n, c, k)
