"""Mutual information between prompt and reasoning, and the entropies it splits into.

Legend: N traces (rows), P distinct contexts (columns), T tokens of a trace. Values are in nats: per token
(normalization "token": a trace's sum divided by its length, the RAGEN-2 paper's definition), per trace ("sequence"), or
per token of RAGEN's code ("token_mixture": the mixture of token-averaged likelihoods, kept for parity only).
The mixture over contexts is "uniform" (each distinct context weighs 1/P) or "multiplicity" (by the number of groups
that share it). Every function takes a LogLikelihoodMatrix, or `logp_NP`, `own_N`, `length_N`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from collapsediag.errors import MetricError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.metrics.rows import usable_rows

FloatArray = NDArray[np.float64]

Normalization = Literal["token", "sequence", "token_mixture"]
Mixture = Literal["uniform", "multiplicity"]
Scale = Literal["gap", "marginal"]

ZSCORE_EPS = 1e-3
# A spread below this is the rounding of equal numbers: there is no scale to divide by.
SPREAD_FLOOR = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class RowValues:
    """Per trace, in the units of one normalization: matched - marginal = gap.

    matched_N: log-likelihood under the own context. marginal_N: under the mixture of all contexts.
    """

    matched_N: FloatArray
    marginal_N: FloatArray
    gap_N: FloatArray


def row_values(
    matrix: LogLikelihoodMatrix | Any,
    own_N: Any = None,
    length_N: Any = None,
    *,
    normalization: Normalization = "token",
    mixture: Mixture = "uniform",
) -> RowValues:
    """Matched, marginal and gap of every usable trace: the three numbers all others are means and stds of.

    `m = L[i, own]`, `M = logsumexp_j(L[i, j] + log pi[j])`, `g = m - M`; "sequence" as they are, "token" divided by T,
    "token_mixture" with L/T in place of L.
    In budget mode the K scored others stand for all P-1: each weighs (P-1)/K times 1/P.
    Raises MetricError for fewer than 2 contexts, no usable row, or a setting that does not fit.

    >>> values = row_values([[-2.0, -4.0]], [0], [2])
    >>> round(float(values.gap_N[0]), 4), float(values.matched_N[0])
    (0.2831, -1.0)
    """
    if normalization not in get_args(Normalization):
        raise MetricError(f"normalization is {normalization!r}; it is one of {', '.join(get_args(Normalization))}.")
    if not isinstance(matrix, LogLikelihoodMatrix) and length_N is None and normalization != "sequence":
        raise MetricError(f"normalization={normalization!r} is per token and needs length_N beside plain arrays.")
    rows = usable_rows(matrix, own_N, length_N)
    length = rows.length_N.astype(np.float64)
    inner, outer = (length, 1.0) if normalization == "token_mixture" else (np.ones(rows.n_traces), length)
    if normalization == "sequence":
        outer = 1.0
    logp_NP = rows.logp_NP / inner[:, None]
    matched_N = logp_NP[np.arange(rows.n_traces), rows.own_N]
    # Differences to the own column first: exact where columns agree, and nothing overflows.
    difference_NP = np.where(rows.scored_NP, logp_NP - matched_N[:, None], -np.inf)
    gap_N = -np.asarray(logsumexp(difference_NP + log_mixture_weights(rows, mixture), axis=1))
    return RowValues(matched_N=matched_N / outer, marginal_N=(matched_N - gap_N) / outer, gap_N=gap_N / outer)


def log_mixture_weights(rows: LogLikelihoodMatrix, mixture: Mixture = "uniform") -> FloatArray:
    """log pi as [1, P], or [N, P] with the others reweighted in budget mode.

    Raises MetricError for a budgeted matrix with a mixture that is not uniform, or with a row that has no other cell.
    """
    if rows.is_complete:
        return np.log(mixture_weights(rows, mixture))[None, :]
    if mixture != "uniform":
        raise MetricError(
            f"mixture={mixture!r} needs every cell of the matrix: the (P-1)/K reweighting of a budgeted one stands for "
            "contexts drawn uniformly. Use mixture='uniform', or score all contexts."
        )
    n, p = rows.logp_NP.shape
    others_N = rows.scored_NP.sum(axis=1) - 1
    if int(others_N.min()) < 1:
        raise MetricError(
            f"row {int(others_N.argmin())} was scored under its own context only; at least one other is needed."
        )
    weights_NP = np.repeat((p - 1) / others_N / p, p).reshape(n, p)
    weights_NP[np.arange(n), rows.own_N] = 1.0 / p
    log_NP: FloatArray = np.log(weights_NP)
    return log_NP


def mixture_weights(matrix: LogLikelihoodMatrix, mixture: Mixture = "uniform") -> FloatArray:
    """[P] weight of each context in the mixture; they sum to 1."""
    if mixture not in get_args(Mixture):
        raise MetricError(f"mixture is {mixture!r}; it is one of {', '.join(get_args(Mixture))}.")
    weight_P = np.ones(matrix.n_contexts) if mixture == "uniform" else matrix.multiplicity_P.astype(np.float64)
    normalised: FloatArray = weight_P / weight_P.sum()
    return normalised


def mutual_information(
    matrix: LogLikelihoodMatrix | Any,
    own_N: Any = None,
    length_N: Any = None,
    *,
    normalization: Normalization = "token",
    mixture: Mixture = "uniform",
) -> float:
    """Estimate of I(X; Z), what the reasoning says about its prompt: mean of log p(Z|X) - log p(Z).

    `mean_i (m[i] - M[i])`, per token divided by T[i] first. 0: the reasoning does not depend on the prompt (template
    collapse, if it is diverse); slightly negative values are noise about 0. The sequence value is at most log P.
    Falling is bad news. Raises MetricError as `row_values` does. Source: RAGEN-2 (arXiv 2604.06268), Table 1.

    >>> round(mutual_information([[-1.0, -50.0], [-50.0, -1.0]], [0, 1], normalization="sequence"), 4)
    0.6931
    """
    values = row_values(matrix, own_N, length_N, normalization=normalization, mixture=mixture)
    return float(values.gap_N.mean())


def conditional_entropy(
    matrix: LogLikelihoodMatrix | Any,
    own_N: Any = None,
    length_N: Any = None,
    *,
    normalization: Normalization = "token",
) -> float:
    """Estimate of H(Z|X), the diversity of the reasoning for a given prompt: -mean m. Falling is bad news.

    >>> conditional_entropy([[-2.0, -4.0]], [0], [2])
    1.0
    """
    return float(-row_values(matrix, own_N, length_N, normalization=normalization).matched_N.mean())


def reasoning_entropy(
    matrix: LogLikelihoodMatrix | Any,
    own_N: Any = None,
    length_N: Any = None,
    *,
    normalization: Normalization = "token",
    mixture: Mixture = "uniform",
) -> float:
    """Estimate of H(Z), the diversity of the reasoning over all prompts: -mean M = H(Z|X) + I(X; Z).

    >>> reasoning_entropy([[-2.0, -2.0]], [0], [2])
    1.0
    """
    values = row_values(matrix, own_N, length_N, normalization=normalization, mixture=mixture)
    return float(-values.marginal_N.mean())


def mi_upper_bound(matrix: LogLikelihoodMatrix, *, mixture: Mixture = "uniform") -> float:
    """H(X) = -sum pi log pi, nats; log P for the uniform mixture. Bounds the sequence value of the information.

    >>> round(mi_upper_bound(LogLikelihoodMatrix(logp_NP=[[-1.0, -2.0]], length_N=[1], own_N=[0])), 4)
    0.6931
    """
    weight_P = mixture_weights(matrix, mixture)
    return float(-(weight_P * np.log(weight_P)).sum())


def mi_saturation(matrix: LogLikelihoodMatrix, *, mixture: Mixture = "uniform") -> float:
    """I(X; Z) per trace over its bound; near 1 the P prompts cannot show more, so add prompts before reading changes.

    >>> m = LogLikelihoodMatrix(logp_NP=[[-1.0, -900.0]], length_N=[1], own_N=[0])
    >>> round(mi_saturation(m), 6)
    1.0
    """
    estimate = mutual_information(matrix, normalization="sequence", mixture=mixture)
    return estimate / mi_upper_bound(matrix, mixture=mixture)


def mi_zscore(
    matrix: LogLikelihoodMatrix | Any,
    own_N: Any = None,
    length_N: Any = None,
    *,
    scale: Scale = "gap",
    normalization: Normalization = "token",
    mixture: Mixture = "uniform",
    eps: float = ZSCORE_EPS,
) -> float:
    """Mutual information in units of a spread over traces: `mean g / (std + eps)`, population std.

    scale: "gap" divides by the std of g, "marginal" by that of M (the RAGEN-2 paper's and code's choice).
    nan where the spread is zero but the mean is not: there is no scale. Falling is bad news.

    >>> mi_zscore([[-2.0, -2.0], [-5.0, -5.0]], [0, 1], [1, 1])
    0.0
    """
    if scale not in get_args(Scale):
        raise MetricError(f"scale is {scale!r}; it is one of {', '.join(get_args(Scale))}.")
    values = row_values(matrix, own_N, length_N, normalization=normalization, mixture=mixture)
    spread = float((values.gap_N if scale == "gap" else values.marginal_N).std())
    return z_score(float(values.gap_N.mean()), spread, eps=eps)


def z_score(mean: float, spread: float, *, eps: float = ZSCORE_EPS) -> float:
    """`mean / (spread + eps)`; nan where the spread is zero and the mean is not (eps alone would say 500)."""
    if spread <= SPREAD_FLOOR:
        return 0.0 if abs(mean) <= SPREAD_FLOOR else math.nan
    return mean / (spread + eps)


_FAMILY = "Input dependence: information"
_NEEDS = "traces of at least 2 prompts, scored crosswise by the policy"
_PAPER = "RAGEN-2, arXiv 2604.06268, Table 1"


def _pair(name: str, seq: str, title: str, bad: Any, description: str, source: str, unit: str = "") -> list[MetricInfo]:
    """A metric and its per-trace twin."""
    fields: dict[str, Any] = {"bad": bad, "source": source, "family": _FAMILY, "needs": _NEEDS}
    twins = ((name, title, "nats/token", "per token"), (seq, f"{title} (per trace)", "nats/trace", "per trace"))
    return [
        MetricInfo(name=key, title=label, unit=unit or nats, description=description.replace("{per}", per), **fields)
        for key, label, nats, per in twins
    ]


def _zscores(name: str, title: str, spread: str, source: str) -> list[MetricInfo]:
    description = f"Mean gap {{per}} over ({spread} + 1e-3)."
    return _pair(name, f"{name}_seq", title, "down", description, source, unit="ratio")


register(
    *_pair("mi_estimate", "mi_seq_estimate", "I(X; Z)", "down",
           "Mean over traces of log p(Z|X) - log p(Z), {per}: what the reasoning says about its prompt. Below 0: "
           "chance in a few traces, or traces that the scored policy did not sample for these prompts.", _PAPER),
    MetricInfo(name="mi_upper_bound", title="Bound of I(X; Z)", unit="nats/trace", bad="none", bounds=(0, None),
               description="Entropy of the prompt mixture, log P: bounds the information per trace.",
               source=_PAPER, family=_FAMILY, needs=_NEEDS),
    MetricInfo(name="mi_saturation", title="Saturation of I(X; Z)", unit="fraction", bad="none", bounds=(None, 1),
               description="Information per trace over its bound; near 1 there are too few prompts to see more.",
               source="collapsediag", family=_FAMILY, needs=_NEEDS),
    *_pair("conditional_entropy_est", "conditional_entropy_seq_est", "H(Z|X)", "down",
           "-mean log p(Z|X) {per}: diversity of the reasoning for one prompt.", _PAPER),
    *_pair("reasoning_entropy_est", "reasoning_entropy_seq_est", "H(Z)", "down",
           "-mean log p(Z) {per} under the mixture of prompts; H(Z|X) + I(X; Z).", _PAPER),
    MetricInfo(name="matched_log_prob_mean", title="log p(Z|X)", unit="nats/token", bad="none", bounds=(None, 0),
               description="Mean log-likelihood per token under the own prompt.",
               source=_PAPER, family=_FAMILY, needs=_NEEDS),
    MetricInfo(name="marginal_log_prob_mean", title="log p(Z)", unit="nats/token", bad="none", bounds=(None, 0),
               description="Mean log-likelihood per token under the mixture of prompts.",
               source=_PAPER, family=_FAMILY, needs=_NEEDS),
    *_pair("gap_std", "gap_std_seq", "Std of the gap", "none",
           "Population std over traces of log p(Z|X) - log p(Z), {per}.", "collapsediag"),
    *_pair("gap_std_ema", "gap_std_ema_seq", "Std of the gap, moving average", "none",
           "Exponential moving average (decay 0.9) of gap_std, {per}.", "collapsediag"),
    *_pair("marginal_std", "marginal_std_seq", "Std of log p(Z)", "none",
           "Population std over traces of log p(Z), {per}.", _PAPER),
    *_pair("marginal_std_ema", "marginal_std_ema_seq", "Std of log p(Z), moving average", "none",
           "Exponential moving average (decay 0.9) of marginal_std, {per}.", _PAPER),
    *_zscores("mi_zscore_ema", "I(X; Z), z-score", "moving average of gap_std", "collapsediag"),
    *_zscores("mi_zscore", "I(X; Z), z-score of the batch", "gap_std", "collapsediag"),
    *_zscores("mi_zscore_marginal_ema", "I(X; Z), z-score on log p(Z)", "moving average of marginal_std", _PAPER),
    *_zscores("mi_zscore_marginal", "I(X; Z), z-score on log p(Z) of the batch", "marginal_std", _PAPER),
)  # fmt: skip
