"""All numbers of one log-likelihood matrix at once.

Legend: N usable traces (rows), P distinct contexts (columns), R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import MetricError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics import information, ragen, retrieval
from collapsediag.metrics.information import ZSCORE_EPS, Mixture, Normalization, RowValues, Scale
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.metrics.rows import usable_rows
from collapsediag.statistics import (
    DEFAULT_CONFIDENCE,
    DEFAULT_RESAMPLES,
    UNBOUNDED,
    EmaStd,
    bootstrap_groups,
    bootstrap_interval,
)

FloatArray = NDArray[np.float64]

_SHARES = ("retrieval_accuracy", "retrieval_accuracy_subset")


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Which of the two readings of the same names is meant.

    token: normalization of the values without `_seq`. scale: what `mi_zscore` divides by.
    """

    name: Literal["paper", "ragen"]
    token: Normalization
    mixture: Mixture
    scale: Scale

    @property
    def is_ragen(self) -> bool:
        """RAGEN's code, its flaws included, for parity."""
        return self.name == "ragen"


PAPER = Definition(name="paper", token="token", mixture="uniform", scale="gap")
RAGEN = Definition(
    name="ragen", token="token_mixture", mixture="multiplicity", scale="marginal"
)  # fmt: skip
DEFINITIONS = {definition.name: definition for definition in (PAPER, RAGEN)}


def matrix_metrics(
    matrix: LogLikelihoodMatrix,
    *,
    ema: EmaStd | None = None,
    definition: Literal["paper", "ragen"] = "paper",
    naming: Literal["collapsediag", "ragen"] = "collapsediag",
    intervals: bool = True,
    confidence: float = DEFAULT_CONFIDENCE,
    n_resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    tie_tolerance: float = 0.0,
    ks: Sequence[int] = retrieval.DEFAULT_KS,
) -> dict[str, float]:
    """Every metric that a log-likelihood matrix holds, by name, with the counts behind them.

    ema: memory of the `_ema` names, taken forward by exactly one step; without it those names are absent. Keep one for
        each namespace and definition.
    definition: "paper" (RAGEN-2's definitions made exact) or "ragen" (what RAGEN's code computes).
    naming: "ragen" returns RAGEN's own keys only, and always with RAGEN's definitions, so that they keep their meaning.
    intervals: add `<name>/ci_low` and `/ci_high` by a bootstrap over groups with the columns held fixed.
    tie_tolerance: log-likelihoods this close, in nats, count as tied in retrieval.
    ks: the k of `retrieval_accuracy@k`; those with k < P are given.

    n_traces counts the traces behind the numbers; n_empty and n_nonfinite those left out. What is not defined on this
    matrix although its neighbours are (a z-score without any spread, an interval from one group) is nan.
    A matrix scored on a budget has `retrieval_accuracy_subset` in place of the retrieval names.
    Raises MetricError with the reason where no matrix metric is defined, before `ema` is touched.

    >>> m = LogLikelihoodMatrix(logp_NP=[[-1.0, -9.0], [-9.0, -2.0]], length_N=[4, 4], own_N=[0, 1])
    >>> values = matrix_metrics(m, intervals=False)
    >>> values["retrieval_accuracy"], round(values["mi_saturation"], 3), values["n_traces"]
    (1.0, 0.999, 2.0)
    """
    chosen = _definition(definition, naming)
    rows = usable_rows(matrix)
    if chosen.is_ragen and not rows.is_complete:
        raise MetricError("RAGEN's definitions need every cell of the matrix, and this one was scored on a budget.")
    token = information.row_values(rows, normalization=chosen.token, mixture=chosen.mixture)
    sequence = information.row_values(rows, normalization="sequence", mixture=chosen.mixture)
    own_N = _own_scores(rows, chosen, 1, tie_tolerance)
    values = _retrieval_values(rows, chosen, own_N, tie_tolerance, ks)
    if rows.is_complete and naming != "ragen":
        values["retrieval_p_value"] = retrieval.retrieval_p_value(rows, tie_tolerance=tie_tolerance, seed=seed)
    values.update(_information_values(rows, chosen, token, sequence))
    values.update(_spread_values(chosen, token, sequence, ema))
    if naming == "ragen":
        values = ragen.ragen_keys(values)
    else:
        if intervals:
            samples = _resampled(rows, chosen, own_N, token, sequence, ema, n_resamples=n_resamples, seed=seed)
            values.update(_intervals(samples, values, len(np.unique(rows.group_N)), confidence))
        values.update(_counts(matrix))
    # Last, so that an error above leaves the memory as it was.
    if ema is not None:
        for name, value in _spreads(token, sequence).items():
            ema.update(name, value)
    return values


def _definition(definition: str, naming: str) -> Definition:
    if naming not in ("collapsediag", "ragen"):
        raise SettingsError(f"naming is {naming!r}; it is 'collapsediag' or 'ragen'.")
    if definition not in DEFINITIONS:
        raise SettingsError(f"definition is {definition!r}; it is 'paper' or 'ragen'.")
    return RAGEN if "ragen" in (definition, naming) else PAPER


def _own_scores(rows: LogLikelihoodMatrix, chosen: Definition, k: int, tie_tolerance: float) -> FloatArray:
    if not rows.is_complete:
        return retrieval.own_subset_scores(rows, tie_tolerance=tie_tolerance)
    if chosen.is_ragen:
        return ragen.ragen_own_scores(rows, k, tie_tolerance=tie_tolerance)
    return retrieval.own_scores(rows, k, tie_tolerance=tie_tolerance)


def _retrieval_values(
    rows: LogLikelihoodMatrix, chosen: Definition, own_N: FloatArray, tie_tolerance: float, ks: Sequence[int]
) -> dict[str, float]:
    if not rows.is_complete:
        return {
            "retrieval_accuracy_subset": float(own_N.mean()),
            "retrieval_subset_chance_level": retrieval.retrieval_subset_chance_level(rows),
        }
    values: dict[str, float] = {}
    n_columns = ragen.ragen_n_prompts(rows) if chosen.is_ragen else rows.n_contexts
    for k in (1, *(k for k in ks if 1 < k < n_columns)):
        at_k = "" if k == 1 else f"@{k}"
        scores_N = own_N if k == 1 else _own_scores(rows, chosen, k, tie_tolerance)
        chance = ragen.ragen_chance_level(rows, k) if chosen.is_ragen else k / rows.n_contexts
        values[f"retrieval_accuracy{at_k}"] = float(scores_N.mean())
        values[f"retrieval_chance_level{at_k}"] = chance
        values[f"retrieval_above_chance{at_k}"] = float(scores_N.mean()) - chance
    return values


def _information_values(
    rows: LogLikelihoodMatrix, chosen: Definition, token: RowValues, sequence: RowValues
) -> dict[str, float]:
    bound = ragen.ragen_upper_bound(rows) if chosen.is_ragen else information.mi_upper_bound(rows)
    return {
        "mi_estimate": float(token.gap_N.mean()),
        "mi_seq_estimate": float(sequence.gap_N.mean()),
        "mi_upper_bound": bound,
        "mi_saturation": float(sequence.gap_N.mean()) / bound,
        "conditional_entropy_est": float(-token.matched_N.mean()),
        "conditional_entropy_seq_est": float(-sequence.matched_N.mean()),
        "reasoning_entropy_est": float(-token.marginal_N.mean()),
        "reasoning_entropy_seq_est": float(-sequence.marginal_N.mean()),
        "matched_log_prob_mean": float(token.matched_N.mean()),
        "marginal_log_prob_mean": float(token.marginal_N.mean()),
    }


def _spreads(token: RowValues, sequence: RowValues) -> dict[str, float]:
    return {
        "gap_std": float(token.gap_N.std()),
        "gap_std_seq": float(sequence.gap_N.std()),
        "marginal_std": float(token.marginal_N.std()),
        "marginal_std_seq": float(sequence.marginal_N.std()),
    }


def _spread_values(chosen: Definition, token: RowValues, sequence: RowValues, ema: EmaStd | None) -> dict[str, float]:
    """The four stds and the z-scores over them; with `ema` also their moving averages and the z-scores over those."""
    values = _spreads(token, sequence)
    memories: list[tuple[str, EmaStd | None]] = [("", None)] if ema is None else [("", None), ("_ema", ema)]
    batch = dict(values)
    for suffix, memory in memories:
        for seq, row in (("", token), ("_seq", sequence)):
            mean = float(row.gap_N.mean())
            for kind in ("gap", "marginal"):
                spread = batch[f"{kind}_std{seq}"]
                if memory is not None:
                    spread = memory.preview(f"{kind}_std{seq}", spread)
                    values[f"{kind}_std{suffix}{seq}"] = spread
                z = mean / (spread + ZSCORE_EPS) if chosen.is_ragen else information.z_score(mean, spread)
                if kind == "marginal":
                    values[f"mi_zscore_marginal{suffix}{seq}"] = z
                if kind == chosen.scale:
                    values[f"mi_zscore{suffix}{seq}"] = z
    return values


def _resampled(
    rows: LogLikelihoodMatrix,
    chosen: Definition,
    own_N: FloatArray,
    token: RowValues,
    sequence: RowValues,
    ema: EmaStd | None,
    *,
    n_resamples: int,
    seed: int,
) -> dict[str, FloatArray]:
    """[R] values of each metric that gets an interval, all from the same resamples of groups."""
    scale_N = token.gap_N if chosen.scale == "gap" else token.marginal_N
    # Centred, because a std from raw moments loses its digits where the mean is far from zero.
    centred_N = scale_N - scale_N.mean()
    columns_NK = np.column_stack([own_N, token.gap_N, sequence.gap_N, -token.matched_N, centred_N, centred_N**2])
    means_RK = bootstrap_groups(columns_NK, rows.group_N, n_resamples=n_resamples, seed=seed)
    accuracy = "retrieval_accuracy" if rows.is_complete else "retrieval_accuracy_subset"
    names = (accuracy, "mi_estimate", "mi_seq_estimate", "conditional_entropy_est")
    samples = {name: means_RK[:, index] for index, name in enumerate(names)}
    if ema is not None:
        std_R = np.sqrt(np.maximum(means_RK[:, 5] - means_RK[:, 4] ** 2, 0.0))
        # The average of earlier steps is fixed; this batch's share of it varies with the resample.
        spread_R = ema.preview(f"{chosen.scale}_std", std_R)
        samples["mi_zscore_ema"] = means_RK[:, 1] / (spread_R + ZSCORE_EPS)
    return samples


def _intervals(
    samples: Mapping[str, FloatArray], values: Mapping[str, float], n_groups: int, confidence: float
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, samples_R in samples.items():
        # A value that is not defined has no interval either.
        bounds = (0.0, 1.0) if name in _SHARES else UNBOUNDED
        low, high = bootstrap_interval(samples_R + 0.0 * values[name], n_groups, confidence, bounds=bounds)
        found[f"{name}/ci_low"], found[f"{name}/ci_high"] = low, high
    return found


def _counts(matrix: LogLikelihoodMatrix) -> dict[str, float]:
    return {
        "n_traces": float(matrix.usable_N.sum()),
        "n_contexts": float(matrix.n_contexts),
        "n_empty": float((matrix.length_N == 0).sum()),
        "n_nonfinite": float(matrix.nonfinite_N.sum()),
    }


def _count(name: str, title: str, bad: Literal["up", "none"], description: str) -> MetricInfo:
    return MetricInfo(
        name=name, title=title, unit="count", bad=bad, bounds=(0, None), description=description,
        source="collapsediag", family="Input dependence: counts", needs="a scored matrix",
    )  # fmt: skip


register(
    _count("n_traces", "Traces behind the numbers", "none", "Scored traces that are neither empty nor non-finite."),
    _count("n_contexts", "Distinct prompts", "none", "P, the number of columns: equal contexts are one."),
    _count("n_empty", "Empty traces", "up", "Traces without a reasoning token; left out."),
    _count("n_nonfinite", "Non-finite traces", "up", "Traces with a NaN or infinite log-likelihood; left out."),
)
