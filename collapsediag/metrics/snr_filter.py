"""What SNR-aware filtering would keep of a batch. A preview: it returns indices and changes nothing.

Legend: P prompts, G rollouts of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from collapsediag.errors import SettingsError
from collapsediag.metrics.grouped import FloatArray, IntArray, group_variance
from collapsediag.metrics.reward_input import flatten_groups

Form = Literal["mass", "std"]

DEFAULT_RHO = 0.9
# RAGEN's rollout_filter_selection_eps and the std below which its code calls a group flat.
RAGEN_SELECTION_EPS = 0.01
RAGEN_ZERO_STD = 1e-10
# The share of k equal variances is k/P only up to rounding: without this 0.9 of ten equal prompts would keep ten.
SHARE_TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class SnrFilterPreview:
    """Which prompts the filter would keep.

    kept: indices of the kept prompts, ascending, int64.
    keep_fraction: kept prompts / all prompts.
    score_P: [P] what prompts are ranked by: within-prompt variance (form "mass") or std (form "std"), ddof=1. 0 for a
        prompt with fewer than two scored rollouts.
    rho, form: the settings it was made with.
    """

    kept: IntArray
    keep_fraction: float
    score_P: FloatArray
    rho: float
    form: Form


def snr_filter_preview(
    rewards: Any, rho: float = DEFAULT_RHO, form: Form = "mass", *, selection_eps: float = RAGEN_SELECTION_EPS
) -> SnrFilterPreview:
    """The prompts that filtering by reward variance would keep: the fewest that carry a share rho of the signal.

    form "mass" (RAGEN-2, SNR-aware filtering): rank prompts by within-prompt reward variance, descending, and keep the
    smallest set whose share of the total variance is at least rho.
    form "std" (RAGEN's code, top_p with linear scores and include_zero=False): drop prompts of std <= 1e-10, rank by
    std, and keep from the top until the kept sum reaches rho * total - selection_eps; rho = 1 keeps all that are left.
    Where selection_eps is the larger term nothing is kept, as in that code.

    Of equal scores the earlier prompt is kept first. Where no prompt has any variance nothing is kept: there is no
    signal to take a share of.

    rewards: [P, G] array or P lists; None and NaN are left out. Inputs are not changed.
    Raises MetricError for values that are no rewards, SettingsError for rho outside (0, 1] or another form.
    Source: RAGEN-2 (arXiv 2604.06268), SNR-aware filtering; mll-lab-nu/RAGEN, ragen/trainer/rollout_filter.py.

    >>> snr_filter_preview([[1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]], rho=0.9).kept.tolist()
    [0, 2]
    >>> snr_filter_preview([[1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]], rho=0.5).kept.tolist()
    [0]
    """
    if not 0.0 < rho <= 1.0:
        raise SettingsError(f"rho is {rho}; it is the share of reward variance to keep, above 0 and at most 1.")
    if form not in ("mass", "std"):
        raise SettingsError(f"form is {form!r}; the filter has the forms 'mass' (paper) and 'std' (RAGEN's code).")
    values, group, n_prompts = flatten_groups(rewards)
    scored = ~np.isnan(values)
    variance = group_variance(values[scored], group[scored], n_prompts)
    score = np.nan_to_num(variance if form == "mass" else np.sqrt(variance), nan=0.0)
    kept = keep_by_mass(score, rho) if form == "mass" else keep_by_std(score, rho, selection_eps)
    return SnrFilterPreview(
        kept=kept, keep_fraction=kept.size / n_prompts if n_prompts else 0.0, score_P=score, rho=rho, form=form
    )


def _descending(score_P: FloatArray) -> IntArray:
    """Order of descending score, of equal ones by number. Equal up to rounding is equal: the variances of one success
    in eight and of seven in eight are the same number, and differ in the last bit of a float."""
    mantissa, exponent = np.frexp(score_P)
    return np.argsort(-np.ldexp(np.round(mantissa * 2.0**40), exponent - 40), kind="stable")


def keep_by_mass(variance_P: FloatArray, rho: float) -> IntArray:
    """Indices of the fewest prompts whose share of `sum(variance_P)` is at least rho, ascending."""
    order = _descending(variance_P)
    total = float(variance_P.sum())
    if total <= 0.0:
        return np.empty(0, dtype=np.int64)
    share = np.cumsum(variance_P[order]) / total
    k = int(np.searchsorted(share, rho - SHARE_TOLERANCE)) + 1
    return np.sort(order[: min(k, int(np.count_nonzero(variance_P)))])


def keep_by_std(std_P: FloatArray, rho: float, selection_eps: float = RAGEN_SELECTION_EPS) -> IntArray:
    """Indices that RAGEN's linear top-p keeps of prompts with these within-prompt stds, ascending."""
    candidates = np.flatnonzero(std_P > RAGEN_ZERO_STD)
    if rho >= 1.0 or candidates.size == 0:
        return candidates
    order = candidates[_descending(std_P[candidates])]
    threshold = rho * float(std_P[candidates].sum()) - selection_eps
    before = np.concatenate([[0.0], np.cumsum(std_P[order])[:-1]])
    return np.sort(order[before < threshold])
