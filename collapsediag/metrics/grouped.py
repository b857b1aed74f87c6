"""Arithmetic over groups of rollouts: vectorised, without state.

Legend: N rollouts, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from collapsediag.statistics import wilson_interval

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def with_wilson(name: str, hits: int, n: int) -> dict[str, float]:
    """A share and its 95% Wilson interval as `<name>`, `<name>/ci_low`, `<name>/ci_high`; empty where n is 0.

    >>> sorted(with_wilson("share", 1, 4))
    ['share', 'share/ci_high', 'share/ci_low']
    """
    if n == 0:
        return {}
    low, high = wilson_interval(hits, n)
    return {name: hits / n, f"{name}/ci_low": float(low), f"{name}/ci_high": float(high)}


def group_numbers(keys: Iterable[object]) -> IntArray:
    """[N] group number of each row: 0, 1, ... in order of first appearance. Rows of a group need not be adjacent.

    >>> group_numbers(["b", "a", "b"]).tolist()
    [0, 1, 0]
    """
    seen: dict[object, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def group_count(group_N: IntArray) -> IntArray:
    """[G] rows of each group; G is the largest group number plus one."""
    return np.bincount(group_N).astype(np.int64)


def group_mean(values_N: FloatArray, group_N: IntArray, n_groups: int) -> FloatArray:
    """[G] mean of each group, NaN for a group without a row."""
    with np.errstate(invalid="ignore", divide="ignore"):
        sums = np.bincount(group_N, weights=values_N, minlength=n_groups)
        return np.asarray(sums / np.bincount(group_N, minlength=n_groups), dtype=np.float64)


def group_variance(values_N: FloatArray, group_N: IntArray, n_groups: int) -> FloatArray:
    """[G] sample variance (ddof=1) of each group; NaN for groups of fewer than two rows.

    Deviations are taken from the group's own first value, so that equal values give exactly 0 however large they are.
    """
    count = np.bincount(group_N, minlength=n_groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = values_N - group_first(values_N, group_N, n_groups)[group_N]
        deviation = shifted - group_mean(shifted, group_N, n_groups)[group_N]
        squares = np.bincount(group_N, weights=deviation**2, minlength=n_groups)
        return np.asarray(np.where(count >= 2, squares / (count - 1), np.nan), dtype=np.float64)


def group_first(values_N: FloatArray, group_N: IntArray, n_groups: int) -> FloatArray:
    """[G] the first value of each group, NaN for a group without a row."""
    first = np.full(n_groups, np.nan)
    first[group_N[::-1]] = values_N[::-1]  # of repeated indices the last assignment wins: that of the first row
    return first
