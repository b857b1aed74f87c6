"""Bootstrap over groups and the permutation test against enumeration, brute force and simulated truth."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from collapsediag.errors import MetricError, SettingsError
from collapsediag.statistics import (
    bootstrap_groups,
    bootstrap_interval,
    group_mean_interval,
    permutation_p_value,
)


def test_resamples_are_those_of_whole_groups_each_as_often_as_it_should() -> None:
    """Three groups of unequal size: 27 equally likely resamples, and nothing else."""
    values, groups = np.array([1.0, 5.0, 2.0, 2.5, 10.0, 20.0]), np.array(["c", "a", "a", "a", "b", "b"])
    rows = [np.flatnonzero(groups == name) for name in ("a", "b", "c")]
    expected = Counter(
        round(float(np.mean(np.concatenate([values[rows[g]] for g in drawn]))), 9)
        for drawn in itertools.product(range(3), repeat=3)
    )
    found = Counter(round(v, 9) for v in bootstrap_groups(values, groups, n_resamples=20_000, seed=3).tolist())
    assert set(found) == set(expected)
    for value, ways in expected.items():
        share, se = ways / 27, math.sqrt(ways / 27 * (1 - ways / 27) / 20_000)
        assert found[value] / 20_000 == pytest.approx(share, abs=4.5 * se)


def test_columns_share_their_resamples_and_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    values_NK, groups = rng.normal(size=(40, 3)), rng.integers(0, 6, size=40)
    means_RK = bootstrap_groups(values_NK, groups, n_resamples=50, seed=2)
    assert means_RK.shape == (50, 3)
    for k in range(3):
        np.testing.assert_allclose(bootstrap_groups(values_NK[:, k], groups, n_resamples=50, seed=2), means_RK[:, k])
    order = rng.permutation(40)
    np.testing.assert_allclose(
        bootstrap_groups(values_NK[order], groups[order], n_resamples=50, seed=2), means_RK, atol=1e-12
    )
    assert not np.allclose(bootstrap_groups(values_NK, groups, n_resamples=50, seed=3), means_RK)


def test_standard_error_is_that_of_group_means_not_of_rows() -> None:
    rng = np.random.default_rng(1)
    group_means = rng.normal(size=20)
    values = np.repeat(group_means, 16)  # 320 rows that say no more than 20
    samples = bootstrap_groups(values, np.repeat(np.arange(20), 16), n_resamples=4000, seed=1)
    assert samples.std() == pytest.approx(group_means.std() / math.sqrt(20), rel=0.05)
    assert samples.mean() == pytest.approx(group_means.mean(), abs=4 * samples.std() / math.sqrt(4000))


def test_chunks_give_the_same_kind_of_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    values, groups = np.arange(12.0), np.repeat(np.arange(4), 3)
    whole = bootstrap_groups(values, groups, n_resamples=2000, seed=5)
    monkeypatch.setattr("collapsediag.statistics._CHUNK_NUMBERS", 10)
    chunked = bootstrap_groups(values, groups, n_resamples=2000, seed=5)
    assert chunked.shape == (2000,)
    assert chunked.mean() == pytest.approx(whole.mean(), abs=0.25)
    assert chunked.std() == pytest.approx(whole.std(), rel=0.1)


def test_interval_is_percentiles_moved_out_for_few_groups() -> None:
    samples = np.linspace(0.0, 1.0, 100_001)
    for n_groups in (2, 3, 8, 30):
        tail = stats.norm.cdf(-math.sqrt(n_groups / (n_groups - 1)) * stats.t.ppf(0.975, n_groups - 1))
        np.testing.assert_allclose(bootstrap_interval(samples, n_groups), (tail, 1 - tail), atol=1e-9)
    np.testing.assert_allclose(bootstrap_interval(samples, 10**9), (0.025, 0.975), atol=1e-6)


@pytest.mark.parametrize("n_groups", [4, 5, 7])
def test_interval_of_few_groups_is_students_over_all_resamples(n_groups: int) -> None:
    """With every resample taken, the bootstrap's std is exact: the interval is that of a t-test on the group means."""
    means = np.random.default_rng(n_groups).normal(3.0, 2.0, size=n_groups)
    resamples = np.array([np.mean(drawn) for drawn in itertools.product(means, repeat=n_groups)])
    expected = stats.ttest_1samp(means, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(bootstrap_interval(resamples, n_groups), tuple(expected), rtol=1e-9)


def test_an_interval_stays_where_its_quantity_can_be() -> None:
    shares, groups = [0.5, 1.0, 1.0, 1.0], [0, 1, 2, 3]
    assert group_mean_interval(shares, groups)[1] > 1.0
    low, high = group_mean_interval(shares, groups, bounds=(0.0, 1.0))
    assert (low, high) == (group_mean_interval(shares, groups)[0], 1.0)


def test_one_group_gives_no_interval() -> None:
    assert all(math.isnan(end) for end in group_mean_interval([1.0, 2.0], ["a", "a"]))


@pytest.mark.parametrize(
    ("values", "groups", "message"),
    [([1.0, 2.0], [0], "one group per row"), ([], [], "at least one row"), ([1.0, math.nan], [0, 1], "NaN")],
)
def test_bootstrap_refuses(values: list[float], groups: list[int], message: str) -> None:
    with pytest.raises(MetricError, match=message):
        bootstrap_groups(values, groups)


def test_bootstrap_needs_a_resample() -> None:
    with pytest.raises(SettingsError, match="n_resamples"):
        bootstrap_groups([1.0, 2.0], [0, 1], n_resamples=0)


def test_a_thousand_resamples_of_a_thousand_rows_take_well_under_a_second() -> None:
    rng = np.random.default_rng(0)
    values_NK = rng.normal(size=(1024, 6))
    begun = time.process_time()
    bootstrap_groups(values_NK, np.arange(1024), seed=1)
    assert time.process_time() - begun < 0.8


def brute_force_p_value(score_NP: np.ndarray, own_N: np.ndarray, group_N: np.ndarray) -> float:
    """Every reassignment of columns to (group, column) units, by loops."""
    units = sorted(set(zip(group_N.tolist(), own_N.tolist(), strict=True)))

    def accuracy(columns: tuple[int, ...]) -> float:
        total = 0.0
        for unit, column in zip(units, columns, strict=True):
            for i in range(len(own_N)):
                if (group_N[i], own_N[i]) == unit:
                    total += score_NP[i, column]
        return total / len(own_N)

    observed = accuracy(tuple(column for _, column in units))
    reached = [
        accuracy(columns) >= observed - 1e-12 for columns in itertools.permutations([column for _, column in units])
    ]
    return sum(reached) / len(reached)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["one_each", "empty_column", "shared_column", "two_columns_a_group", "unequal"])
def test_exact_p_value_is_brute_force(seed: int, layout: str) -> None:
    rng = np.random.default_rng(seed)
    group_N, own_N = {
        "one_each": ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3]),
        "empty_column": ([0, 0, 1, 1, 2, 2], [0, 0, 4, 4, 2, 2]),
        "shared_column": ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 2, 2]),
        "two_columns_a_group": ([0, 0, 1, 1, 2, 2], [0, 3, 1, 1, 2, 4]),
        "unequal": ([0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2]),
    }[layout]
    group, own = np.array(group_N), np.array(own_N)
    logp = rng.normal(size=(own.size, 5)) + 1.0 * np.eye(5)[own]
    score = (logp == logp.max(axis=1, keepdims=True)).astype(float)
    expected = brute_force_p_value(score, own, group)
    assert permutation_p_value(score, own, group) == pytest.approx(expected, abs=1e-12)
    order = rng.permutation(own.size)
    assert permutation_p_value(score[order], own[order], group[order]) == pytest.approx(expected, abs=1e-12)


def test_drawn_p_value_is_near_the_exact_one() -> None:
    """Eight units: 40,320 permutations counted by loops over a matrix, 999 drawn by the function."""
    rng = np.random.default_rng(4)
    score = rng.random((8, 8)) + 0.15 * np.eye(8)
    observed = np.trace(score)
    exact = np.mean(
        [sum(score[i, j] for i, j in enumerate(order)) >= observed for order in itertools.permutations(range(8))]
    )
    assert 0.02 < exact < 0.5
    found = permutation_p_value(score, np.arange(8), seed=1)
    assert found == pytest.approx(exact, abs=4.5 * math.sqrt(exact * (1 - exact) / 999))
    assert found == permutation_p_value(score, np.arange(8), seed=1)
    assert found * 1000 == pytest.approx(round(found * 1000), abs=1e-9)


def test_seven_units_are_exact_and_eight_are_drawn() -> None:
    assert permutation_p_value(np.eye(7), np.arange(7)) == 1 / 5040
    assert permutation_p_value(np.eye(8), np.arange(8)) == 1 / 1000
    assert permutation_p_value(np.eye(8), np.arange(8), n_draws=99) == 1 / 100


def test_traces_that_all_prefer_one_column_are_no_evidence() -> None:
    """The favourite column may have any number of groups: it attracts as many after a permutation as before."""
    own = np.array([0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    magnet = np.zeros((12, 10))
    magnet[:, 0] = 1.0
    assert permutation_p_value(magnet, own, np.arange(12), seed=0) == 1.0
    assert permutation_p_value(np.full((12, 10), 0.1), own, np.arange(12)) == 1.0


def test_traces_of_a_group_move_together() -> None:
    """Two prompts, one of them retrieved by all 50 of its traces: 1 of 2 permutations, whatever the trace count."""
    score = np.zeros((100, 2))
    score[:50, 0] = 1.0
    score[50:, :] = 0.5
    own = np.repeat([0, 1], 50)
    assert permutation_p_value(score, own) == 0.5


def test_one_unit_has_nothing_to_permute() -> None:
    assert permutation_p_value(np.ones((3, 2)), np.zeros(3, dtype=int)) == 1.0


def test_permutation_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(MetricError, match="shapes do not fit"):
        permutation_p_value(np.eye(3), [0, 1])


def null_p_values(simulations: int, *, continuous: bool, n_contexts: int = 9, group_size: int = 4) -> np.ndarray:
    """Log-likelihoods that depend on trace and context, not on which context is the trace's own."""
    rng = np.random.default_rng(17)
    own = np.repeat(np.arange(n_contexts), group_size)
    found = []
    for simulation in range(simulations):
        attraction = rng.normal(size=n_contexts)
        group_effect = np.repeat(rng.normal(size=(n_contexts, n_contexts)), group_size, axis=0)
        logp = attraction + group_effect + rng.normal(size=(own.size, n_contexts))
        score = logp if continuous else (logp == logp.max(axis=1, keepdims=True)).astype(float)
        found.append(permutation_p_value(score, own, seed=simulation))
    return np.array(found)


@pytest.mark.calibration
def test_p_value_is_uniform_under_the_null() -> None:
    """A statistic without ties: uniform on {1/1000, ..., 1}. Accuracy, which has ties: never below uniform."""
    p = null_p_values(300, continuous=True)
    counts = np.histogram(p, bins=10, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 0.001
    discrete = null_p_values(300, continuous=False)
    for alpha in (0.05, 0.1, 0.3, 0.5):
        assert (discrete <= alpha).mean() <= alpha + 3.5 * math.sqrt(alpha * (1 - alpha) / 300)


@pytest.mark.slow
@pytest.mark.calibration
def test_p_value_is_uniform_under_the_null_in_2000_simulations() -> None:
    p = null_p_values(2000, continuous=True)
    assert stats.kstest(p, "uniform").pvalue > 0.001
    assert (p <= 0.05).mean() == pytest.approx(0.05, abs=3.5 * math.sqrt(0.05 * 0.95 / 2000))
    discrete = null_p_values(2000, continuous=False)
    for alpha in (0.01, 0.05, 0.1, 0.3, 0.5):
        assert (discrete <= alpha).mean() <= alpha + 3.5 * math.sqrt(alpha * (1 - alpha) / 2000)
    # Not so careful that it could never find anything either.
    assert (discrete <= 0.3).mean() > 0.15


def coverage(simulations: int, n_groups: int, group_size: int = 8, n_resamples: int = 500) -> float:
    """Share of intervals that hold the true mean, with groups that differ from each other."""
    rng = np.random.default_rng(23)
    groups = np.repeat(np.arange(n_groups), group_size)
    covered = 0
    for simulation in range(simulations):
        values = np.repeat(rng.normal(size=n_groups), group_size) + rng.normal(size=groups.size)
        low, high = group_mean_interval(values, groups, n_resamples=n_resamples, seed=simulation)
        covered += low <= 0.0 <= high
    return covered / simulations


@pytest.mark.calibration
def test_interval_covers_the_true_mean() -> None:
    # 0.95 +/- 3.5 binomial standard errors of 400 simulations.
    assert 0.912 <= coverage(400, n_groups=12) <= 0.988


@pytest.mark.slow
@pytest.mark.calibration
@pytest.mark.parametrize("n_groups", [4, 5, 8, 16, 64])
def test_interval_covers_the_true_mean_in_2000_simulations(n_groups: int) -> None:
    assert 0.93 <= coverage(2000, n_groups=n_groups, n_resamples=1000) <= 0.97
