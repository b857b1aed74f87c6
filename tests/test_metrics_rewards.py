"""Reward numbers against loops over plain Python floats, enumeration, scipy's Wilson interval, and real batches."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from collapsediag.errors import MetricError
from collapsediag.metrics.rewards import (
    component_metrics,
    expected_all_equal,
    grouped_reward_metrics,
    reward_metrics,
    success_by_threshold,
    variance_spread,
)

DATA = Path(__file__).parent / "data" / "rollouts"
ROUNDING = 1e-12


def reference(groups: list[list[float | None]], success: list[list[bool | None]] | None = None) -> dict[str, float]:
    """Every reward number but the filter's, from the definitions, one group after the other."""
    scored = [[r for r in group if r is not None and not math.isnan(r)] for group in groups]
    flat = [r for group in scored for r in group]
    plural = [group for group in scored if len(group) > 1]
    variances = [statistics.variance(group) for group in plural]
    values = {
        "reward/n_unscored": float(sum(map(len, groups)) - len(flat)),
        "reward/mean": statistics.fmean(flat),
        "reward/std": statistics.pstdev(flat),
        "reward/modal_share": Counter(flat).most_common(1)[0][1] / len(flat),
        "reward/n_single_groups": float(sum(len(group) == 1 for group in scored)),
        "reward/between_group_std": statistics.pstdev(statistics.fmean(group) for group in scored if group),
        "reward/within_group_std": statistics.fmean(map(math.sqrt, variances)),
        "reward/all_equal_fraction": sum(v <= 1e-12 for v in variances) / len(plural),
    }
    if sum(variances) > 0:
        values["reward/variance_spread"] = statistics.pstdev(variances) / statistics.fmean(variances)
    if success is not None:
        pairs = [
            [(r, s) for r, s in zip(group, labels, strict=True) if r is not None and not math.isnan(r)]
            for group, labels in zip(groups, success, strict=True)
        ]
        equal = [[s for _, s in g if s is not None] for g in pairs if len(g) > 1 and len({r for r, _ in g}) == 1]
        values["reward/all_success_fraction"] = sum(bool(g) and all(g) for g in equal) / len(plural)
        values["reward/all_fail_fraction"] = sum(bool(g) and not any(g) for g in equal) / len(plural)
        labels_of_scored = [s for g in pairs for _, s in g if s is not None]
        p = sum(labels_of_scored) / len(labels_of_scored)
        values["reward/expected_all_equal_fraction"] = statistics.fmean(
            p ** len(g) + (1 - p) ** len(g) for g in pairs if len(g) > 1
        )
    return values


def random_batch(seed: int) -> tuple[list[list[float | None]], list[list[bool | None]]]:
    rng = np.random.default_rng(seed)
    levels = rng.choice([-1.0, 0.0, 0.25, 1.0, 3.5], size=rng.integers(1, 5), replace=False)
    groups: list[list[float | None]] = []
    labels: list[list[bool | None]] = []
    for _ in range(int(rng.integers(2, 9))):
        size = int(rng.integers(1, 7))
        rewards: list[float | None] = [float(r) for r in rng.choice(levels, size)]
        for i in np.flatnonzero(rng.random(size) < 0.15):
            rewards[i] = None if rng.random() < 0.5 else math.nan
        groups.append(rewards)
        labels.append([None if rng.random() < 0.2 else bool(rng.random() < 0.6) for _ in rewards])
    groups.append([0.0, 1.0])  # at least one pair and one label, so that every number is defined
    labels.append([False, True])
    return groups, labels


@pytest.mark.parametrize("seed", range(60))
def test_every_number_equals_its_definition_on_ragged_batches_with_gaps(seed: int) -> None:
    groups, labels = random_batch(seed)
    values = reward_metrics(groups, success_PG=labels)
    expected = reference(groups, labels)
    assert set(expected) == {name for name in values if "filter" not in name and "/ci_" not in name}
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=ROUNDING, atol=ROUNDING, err_msg=name)


@pytest.mark.parametrize("seed", range(10))
def test_neither_the_order_of_rows_nor_the_names_of_groups_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    reward = rng.choice([0.0, 0.5, 1.0], 24)
    group = np.repeat([0, 1, 2, 3, 4, 5], 4)
    order = rng.permutation(24)
    names = np.array([9, 4, 7, 100, 2, 30])
    values = grouped_reward_metrics(reward, group, success_N=reward)
    shuffled = grouped_reward_metrics(reward[order], names[group][order], success_N=reward[order])
    assert set(values) == set(shuffled)
    for name in values:
        np.testing.assert_allclose(shuffled[name], values[name], rtol=1e-9, err_msg=name)


def test_a_shift_moves_only_the_mean_and_a_scale_every_std() -> None:
    rewards = np.random.default_rng(3).random((6, 5))
    values, moved = reward_metrics(rewards), reward_metrics(rewards * 4 + 10)
    assert moved["reward/mean"] == pytest.approx(values["reward/mean"] * 4 + 10)
    for name in ("std", "within_group_std", "between_group_std"):
        assert moved[f"reward/{name}"] == pytest.approx(4 * values[f"reward/{name}"])
    for name in ("variance_spread", "filter_kept_prompts", "all_equal_fraction"):
        assert moved[f"reward/{name}"] == pytest.approx(values[f"reward/{name}"])


@pytest.mark.parametrize(("equal", "n"), [(0, 3), (2, 5), (7, 7)])
def test_shares_of_groups_carry_the_wilson_interval(equal: int, n: int) -> None:
    values = reward_metrics([[1.0, 1.0]] * equal + [[0.0, 1.0]] * (n - equal), success_threshold=0.5)
    interval = stats.binomtest(equal, n).proportion_ci(method="wilson")
    for name in ("reward/all_equal_fraction", "reward/all_success_fraction"):
        assert values[name] == equal / n
        np.testing.assert_allclose(
            [values[f"{name}/ci_low"], values[f"{name}/ci_high"]], [interval.low, interval.high], atol=1e-12
        )
    shares = ("all_equal", "all_success", "all_fail", "filter_keep", "filter_std_keep")
    assert {f"reward/{s}_fraction/ci_low" for s in shares} <= set(values)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_expected_all_equal_counts_the_outcomes_that_agree(size: int) -> None:
    p = 0.3
    agree = sum(
        math.prod(p if solved else 1 - p for solved in outcome)
        for outcome in itertools.product([True, False], repeat=size)
        if len(set(outcome)) == 1
    )
    assert expected_all_equal(p, np.array([size]))[0] == pytest.approx(agree, abs=ROUNDING)


def test_expected_all_equal_uses_the_size_of_each_group() -> None:
    values = reward_metrics([[1.0, 0.0], [1.0, 0.0, 1.0, 0.0]], success_threshold=1.0)
    assert values["reward/expected_all_equal_fraction"] == pytest.approx((0.5 + 0.125) / 2)


def test_without_success_labels_only_all_equal_is_given() -> None:
    values = reward_metrics([[1.0, 1.0], [0.0, 1.0]])
    assert values["reward/all_equal_fraction"] == 0.5
    assert not [name for name in values if "success" in name or "fail" in name or "expected" in name]


def test_a_label_wins_over_the_threshold_and_fills_what_is_missing() -> None:
    success = success_by_threshold(np.array([0.9, 0.9, 0.1, np.nan]), 0.5, np.array([np.nan, 0.0, np.nan, 1.0]))
    np.testing.assert_array_equal(success, [1.0, 0.0, 0.0, 1.0])


def test_an_equal_group_with_contradicting_labels_is_neither_success_nor_fail() -> None:
    values = reward_metrics([[0.5, 0.5], [1.0, 0.0]], success_PG=[[True, False], [True, False]])
    assert (values["reward/all_equal_fraction"], values["reward/all_success_fraction"]) == (0.5, 0.0)
    assert values["reward/all_fail_fraction"] == 0.0


def test_float_noise_is_equal_and_a_real_difference_is_not() -> None:
    values = reward_metrics([[0.1 + 0.2, 0.3, 0.3], [1e12, 1e12, 1e12], [0.0, 1e-5, 0.0]])
    assert values["reward/all_equal_fraction"] == pytest.approx(2 / 3)


def test_variance_spread_of_a_planted_batch() -> None:
    # Variances 0, 0.5, 0.5, 1 with mean 0.5 and population std sqrt(0.125).
    assert variance_spread(np.array([0.0, 0.5, 0.5, 1.0])) == pytest.approx(math.sqrt(0.125) / 0.5)
    with pytest.raises(MetricError, match="no prompt has any reward variance"):
        variance_spread(np.zeros(3))
    assert "reward/variance_spread" not in reward_metrics([[1.0, 1.0], [0.0, 0.0]])


def test_groups_without_a_pair_are_counted_and_left_out() -> None:
    values = reward_metrics([[1.0], [None, 0.0], [None, None], [0.0, 1.0]])
    assert values["reward/n_unscored"] == 3.0
    assert values["reward/n_single_groups"] == 2.0
    assert values["reward/within_group_std"] == pytest.approx(math.sqrt(0.5))
    assert values["reward/all_equal_fraction"] == 0.0
    only_singles = reward_metrics([[1.0], [0.0]])
    assert "reward/within_group_std" not in only_singles
    assert only_singles["reward/mean"] == 0.5
    assert reward_metrics([[None, math.nan]]) == {"reward/n_unscored": 2.0}
    assert reward_metrics([]) == {"reward/n_unscored": 0.0}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (math.inf, r"rewards\[1\]\[0\] is inf: its variance is not finite"),
        (-math.inf, r"rewards\[1\]\[0\] is -inf"),
        (-2e150, r"rewards\[1\]\[0\] is -2e\+150: its variance"),
        (10**400, r"rewards\[1\]\[0\] is inf"),
        ("1.0", r"rewards\[1\]\[0\] is '1.0' \(str\)"),
        (True, r"rewards\[1\]\[0\] is the boolean True: that is a success label"),
        (np.bool_(False), r"rewards\[1\]\[0\] is the boolean False"),
        ({"format": 1.0}, r"rewards\[1\]\[0\] is a dict of components \('format'\)"),
        ([1.0], r"rewards\[1\]\[0\] is \[1.0\] \(list\)"),
        (1j, r"rewards\[1\]\[0\] is 1j \(complex\)"),
    ],
)
def test_what_is_no_reward_is_refused_by_its_place(reward: Any, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        reward_metrics([[0.0, 1.0], [reward, 1.0]])


@pytest.mark.parametrize("rewards", [[1.0, 0.0], "10", {"a": [1.0]}, 3.0, [{"a": 1.0}], ["10"]])
def test_rewards_that_are_not_cut_into_groups_are_refused(rewards: Any) -> None:
    with pytest.raises(MetricError, match="rewards"):
        reward_metrics(rewards)


def test_every_kind_of_number_is_taken() -> None:
    torch = pytest.importorskip("torch")
    mixed = [[np.float32(1.0), 0, np.int64(1)], [torch.tensor(1.0), np.float64(0.5), None]]
    plain = [[1.0, 0.0, 1.0], [1.0, 0.5, None]]
    assert reward_metrics(mixed) == reward_metrics(plain)
    array = np.array([[1.0, 0.0], [1.0, 1.0]])
    assert reward_metrics(array) == reward_metrics(array.tolist()) == reward_metrics(torch.tensor(array))


@pytest.mark.parametrize("label", [0.5, "yes", 2, math.nan])
def test_a_graded_success_label_is_refused(label: Any) -> None:
    with pytest.raises(MetricError, match="success label of label 1"):
        reward_metrics([[0.0, 1.0]], success_PG=[[True, label]])
    with pytest.raises(MetricError, match="success has 1 labels but there are 2 rewards"):
        reward_metrics([[0.0, 1.0]], success_PG=[[True]])


def test_components_are_never_mixed() -> None:
    values = component_metrics({"format": np.array([1.0, 0.0, np.nan]), "answer": np.array([3.0, 3.0, 6.0])})
    assert values["reward/format/mean"] == 0.5
    assert values["reward/format/std"] == 0.5
    assert values["reward/format/n_unscored"] == 1.0
    assert values["reward/answer/mean"] == 4.0
    assert values["reward/answer/std"] == pytest.approx(math.sqrt(2))


def test_very_large_rewards_give_finite_numbers() -> None:
    values = reward_metrics([[1e150, -1e150], [1e150, 1e150], [0.0, 1.0]])
    assert values["reward/all_equal_fraction"] == pytest.approx(1 / 3)
    assert all(math.isfinite(value) for value in values.values())


def test_a_healthy_saturated_math_batch() -> None:
    rows = [json.loads(line) for line in (DATA / "simplerl_math_100x8_endings.jsonl").read_text().splitlines()]
    rewards = [[float(score) for score in row["score"]] for row in rows]
    values = reward_metrics(rewards, success_threshold=1.0)
    assert round(values["reward/mean"], 2) == 0.91
    assert round(values["reward/all_equal_fraction"], 2) == 0.90
    assert values["reward/all_success_fraction"] == 0.86
    assert values["reward/all_fail_fraction"] == 0.04


def test_two_of_six_groups_of_the_agent_batch_are_all_equal() -> None:
    scores = json.loads((DATA / "atropos_rubiks_6x4_scores.json").read_text())
    values = reward_metrics(scores)
    assert values["reward/all_equal_fraction"] == 2 / 6
    assert values["reward/n_single_groups"] == 0.0
