"""Rewards: spread within and between groups, groups without any signal, and what a variance filter would keep.

Legend: N rollouts, P prompts (groups), G rollouts of one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collapsediag.errors import MetricError
from collapsediag.metrics.grouped import (
    BoolArray,
    FloatArray,
    IntArray,
    group_mean,
    group_variance,
    with_wilson,
)
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.metrics.reward_input import flat_success, flatten_groups, success_by_threshold
from collapsediag.metrics.snr_filter import DEFAULT_RHO, keep_by_mass, keep_by_std

# Below this sample std a group's rewards count as equal: float32 noise of a reward, not a difference.
ALL_EQUAL_STD = 1e-6
# Of `reward/variance_spread`. RAGEN-2 (arXiv 2604.06268, Table 8): filtering by it helped at 1.2 and hurt at 0.33.
SPREAD_HELPED, SPREAD_HURT = 1.2, 0.33
SPREAD_HIGH, SPREAD_LOW = 0.9, 0.5


def reward_metrics(
    rewards_PG: Any, *, success_PG: Any = None, success_threshold: float | None = None, rho: float = DEFAULT_RHO
) -> dict[str, float]:
    """Every `reward/` number of P groups of rollouts.

    rewards_PG: [P, G] array, or P lists of any lengths. None and NaN are left out and counted in `reward/n_unscored`.
    success_PG: the same shape, True, False or None. Without it `success_threshold` makes a success of every reward at
        or above it; without both only the numbers that need no success labels are given.
    rho: share of the variance that the filter preview keeps.
    Raises MetricError for infinities, strings, booleans and dicts among the rewards, naming the place.

    >>> values = reward_metrics([[1.0, 1.0], [1.0, 0.0]], success_threshold=0.5)
    >>> values["reward/mean"], values["reward/all_equal_fraction"], values["reward/all_success_fraction"]
    (0.75, 0.5, 0.5)
    """
    reward_N, group_N, _ = flatten_groups(rewards_PG)
    success_N = None if success_PG is None else flat_success(success_PG, reward_N.size)
    if success_threshold is not None:
        success_N = success_by_threshold(reward_N, success_threshold, success_N)
    return grouped_reward_metrics(reward_N, group_N, success_N=success_N, rho=rho)


def grouped_reward_metrics(
    reward_N: FloatArray, group_N: IntArray, *, success_N: FloatArray | None = None, rho: float = DEFAULT_RHO
) -> dict[str, float]:
    """The same from flat rows, which need not be ordered by group.

    reward_N: [N], NaN where unscored. group_N: [N] integers. success_N: [N] 1, 0, or NaN where nobody said.
    Groups with fewer than two scored rollouts have no spread: they are left out of all within-group numbers and
    counted in `reward/n_single_groups`. Without a scored rollout only the counts are given.
    """
    scored = ~np.isnan(reward_N)
    reward, group = reward_N[scored], group_N[scored]
    values = {"reward/n_unscored": float(reward_N.size - reward.size)}
    if reward.size == 0:
        return values
    group = np.unique(group, return_inverse=True)[1].reshape(-1)
    success = None if success_N is None else success_N[scored]
    _, counts = np.unique(reward, return_counts=True)
    values |= {
        "reward/mean": float(reward.mean()),
        "reward/std": float(reward.std()),
        "reward/modal_share": float(counts.max() / reward.size),
    }
    return values | _spread(reward, group, success, rho)


def _spread(reward: FloatArray, group: IntArray, success: FloatArray | None, rho: float) -> dict[str, float]:
    """Numbers of groups: reward and group [N] without gaps, success [N] or None."""
    n_groups = int(group.max()) + 1
    variance = group_variance(reward, group, n_groups)
    plural = ~np.isnan(variance)
    n = int(plural.sum())
    values = {
        "reward/n_single_groups": float(n_groups - n),
        "reward/between_group_std": float(group_mean(reward, group, n_groups).std()),
    }
    if n == 0:
        return values
    spread = variance[plural]
    values["reward/within_group_std"] = float(np.sqrt(spread).mean())
    if spread.mean() > 0:
        values["reward/variance_spread"] = variance_spread(spread)
    equal = plural & (np.sqrt(np.nan_to_num(variance)) <= ALL_EQUAL_STD)
    values |= with_wilson("reward/all_equal_fraction", int(equal.sum()), n)
    for infix, kept in (("", keep_by_mass(spread, rho)), ("_std", keep_by_std(np.sqrt(spread), rho))):
        values[f"reward/filter{infix}_kept_prompts"] = float(kept.size)
        values |= with_wilson(f"reward/filter{infix}_keep_fraction", int(kept.size), n)
    if success is not None and not np.isnan(success).all():
        values |= _saturation(success, group, equal, plural)
    return values


def _saturation(success: FloatArray, group: IntArray, equal: BoolArray, plural: BoolArray) -> dict[str, float]:
    """All-equal groups by what they are equal at, and how many chance alone would give."""
    labelled = ~np.isnan(success)
    rate_G = group_mean(success[labelled], group[labelled], equal.size)
    n = int(plural.sum())
    values = with_wilson("reward/all_success_fraction", int((equal & (rate_G == 1.0)).sum()), n)
    values |= with_wilson("reward/all_fail_fraction", int((equal & (rate_G == 0.0)).sum()), n)
    rate = float(success[labelled].mean())
    size = np.bincount(group, minlength=equal.size)[plural]
    values["reward/expected_all_equal_fraction"] = float(expected_all_equal(rate, size).mean())
    return values


def expected_all_equal(rate: float, size_G: IntArray) -> FloatArray:
    """[G] chance that all rollouts of a group of that size agree if each succeeds with the pooled rate: p^G + (1-p)^G.

    >>> expected_all_equal(0.5, np.array([2, 8])).tolist()
    [0.5, 0.0078125]
    """
    return np.asarray(rate**size_G + (1.0 - rate) ** size_G, dtype=np.float64)


def variance_spread(variance_P: FloatArray) -> float:
    """std over prompts of the within-prompt reward variance, divided by its mean (population std).

    About 1.2 on tasks where variance filtering helped, 0.33 where it hurt (RAGEN-2, arXiv 2604.06268, Table 8).
    Raises MetricError where no prompt has any variance: the ratio is not defined.

    >>> variance_spread(np.array([0.0, 0.5]))
    1.0
    """
    mean = float(np.mean(variance_P)) if np.size(variance_P) else 0.0
    if not mean > 0.0:
        raise MetricError("no prompt has any reward variance: its spread over prompts is not defined.")
    # Scaled first: variances of very large rewards would overflow when squared again.
    return float(np.std(np.asarray(variance_P) / mean))


def component_metrics(components: Mapping[str, FloatArray]) -> dict[str, float]:
    """`reward/<component>/mean` and `/std` (population) of each reward component, never mixed with another.

    components: name -> [N] values, NaN where that component gave none; those are left out and counted in
    `reward/<component>/n_unscored`.

    >>> component_metrics({"format": np.array([1.0, np.nan, 0.0])})
    {'reward/format/n_unscored': 1.0, 'reward/format/mean': 0.5, 'reward/format/std': 0.5}
    """
    values: dict[str, float] = {}
    for name, column in components.items():
        known = column[~np.isnan(column)]
        values[f"reward/{name}/n_unscored"] = float(column.size - known.size)
        if known.size:
            values[f"reward/{name}/mean"] = float(known.mean())
            values[f"reward/{name}/std"] = float(known.std())
    return values


def _info(name: str, title: str, unit: str, bad: Any, description: str, **more: Any) -> MetricInfo:
    fields: dict[str, Any] = {"family": "rewards", "needs": "rewards", "source": "this library", **more}
    return MetricInfo(name=f"reward/{name}", title=title, unit=unit, bad=bad, description=description, **fields)


_SHARE = (0.0, 1.0)
_RAGEN2 = "RAGEN-2, arXiv 2604.06268"
_RAGEN_CODE = "mll-lab-nu/RAGEN, ragen/trainer/rollout_filter.py"
_LABELS = "rewards, and success labels or success_threshold"

register(
    _info("mean", "Reward", "reward", "none", "Mean reward of the scored rollouts. Never proof of health."),
    _info("std", "Reward std", "reward", "none", "Population std over all rollouts.", bounds=(0.0, None)),
    _info(
        "modal_share",
        "Share of the most common reward",
        "fraction",
        "none",
        "Share of rollouts that hold the most common reward value.",
        bounds=_SHARE,
    ),
    _info(
        "within_group_std",
        "Reward std within prompts",
        "reward",
        "down",
        "Mean over prompts of the sample std (ddof=1) of their rewards: the signal a group-relative advantage has.",
        bounds=(0.0, None),
        source=_RAGEN_CODE,
    ),
    _info(
        "between_group_std",
        "Reward std between prompts",
        "reward",
        "none",
        "Population std over prompts of their mean reward: how far apart easy and hard prompts are.",
        bounds=(0.0, None),
    ),
    _info(
        "all_equal_fraction",
        "Prompts whose rewards are all equal",
        "fraction",
        "up",
        "Share of prompts (of two or more scored rollouts) whose rewards have a sample std of at most 1e-6: no "
        "group-relative gradient. Healthy saturation where they are all successes.",
        bounds=_SHARE,
        source="TRL frac_reward_zero_std, recomputed from rewards",
    ),
    _info(
        "all_success_fraction",
        "Prompts solved by every rollout",
        "fraction",
        "none",
        "Share of prompts whose rewards are all equal and whose rollouts all succeeded.",
        bounds=_SHARE,
        needs=_LABELS,
    ),
    _info(
        "all_fail_fraction",
        "Prompts solved by no rollout",
        "fraction",
        "up",
        "Share of prompts whose rewards are all equal and whose rollouts all failed.",
        bounds=_SHARE,
        needs=_LABELS,
    ),
    _info(
        "expected_all_equal_fraction",
        "All-equal prompts by chance alone",
        "fraction",
        "none",
        "Mean over prompts of p^G + (1-p)^G with p the pooled success rate: what chance gives at this group size if "
        "all prompts were equally hard.",
        bounds=_SHARE,
        needs=_LABELS,
    ),
    _info(
        "variance_spread",
        "Spread of reward variance",
        "ratio",
        "down",
        "Population std over prompts of the within-prompt reward variance (ddof=1), divided by its mean. About 1.2 on "
        "tasks where variance filtering helped, 0.33 where it hurt.",
        bounds=(0.0, None),
        source=f"{_RAGEN2}, Table 8",
        needs="rewards that differ within a prompt",
    ),
    _info(
        "filter_kept_prompts",
        "Prompts an SNR filter would keep",
        "count",
        "down",
        "Prompts that SNR-aware filtering by variance mass would keep at rho = 0.9. Reported, never applied.",
        bounds=(0.0, None),
        source=f"{_RAGEN2}, SNR-aware filtering",
    ),
    _info(
        "filter_keep_fraction",
        "Share of prompts an SNR filter would keep",
        "fraction",
        "down",
        "filter_kept_prompts / prompts of two or more scored rollouts.",
        bounds=_SHARE,
        source=f"{_RAGEN2}, SNR-aware filtering",
    ),
    _info(
        "filter_std_kept_prompts",
        "Prompts RAGEN's filter would keep",
        "count",
        "down",
        "The same by RAGEN's code: std instead of variance, zero groups dropped first, threshold lowered by 0.01.",
        bounds=(0.0, None),
        source=_RAGEN_CODE,
    ),
    _info(
        "filter_std_keep_fraction",
        "Share of prompts RAGEN's filter would keep",
        "fraction",
        "down",
        "filter_std_kept_prompts / prompts of two or more scored rollouts.",
        bounds=_SHARE,
        source=_RAGEN_CODE,
    ),
    _info(
        "n_unscored",
        "Rollouts without a reward",
        "count",
        "up",
        "Rollouts whose reward is None, NaN, infinite or beyond 1e150: left out. The notes name those that overflowed.",
    ),
    _info(
        "n_single_groups",
        "Prompts with one scored rollout",
        "count",
        "up",
        "Prompts with fewer than two scored rollouts: without spread, left out of all within-prompt numbers.",
    ),
    _info(
        "<component>/mean",
        "Mean of one reward component",
        "reward",
        "none",
        "Mean of this reward component over the rollouts it scored.",
        needs="reward components",
    ),
    _info(
        "<component>/std",
        "Std of one reward component",
        "reward",
        "none",
        "Population std of this reward component over the rollouts it scored.",
        bounds=(0.0, None),
        needs="reward components",
    ),
    _info(
        "<component>/n_unscored",
        "Rollouts this component did not score",
        "count",
        "up",
        "Rollouts for which this component gave no value.",
        needs="reward components",
    ),
)
