"""RAGEN's own definitions and key names, so that a RAGEN dashboard keeps its meaning.

What differs from the paper's: a token value is the mixture of token-averaged likelihoods, contexts weigh by how many
groups share them, repeated prompts are separate columns in `@k`, chance comes from class sizes, z-scores divide by the
std of the marginal, and the bound is log of the number of prompts with repeats.

Legend: N traces, P distinct contexts. Source: mll-lab-nu/RAGEN at commit 20daedc.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.retrieval import top_k_scores

FloatArray = NDArray[np.float64]

_KEYS = (
    "mi_estimate",
    "mi_upper_bound",
    "matched_log_prob_mean",
    "marginal_log_prob_mean",
    "mi_seq_estimate",
    "retrieval_accuracy",
    "retrieval_chance_level",
    "retrieval_above_chance",
    "conditional_entropy_est",
    "reasoning_entropy_est",
    "conditional_entropy_seq_est",
    "reasoning_entropy_seq_est",
    "marginal_std",
    "marginal_std_seq",
    "mi_zscore",
    "mi_zscore_seq",
    "marginal_std_ema",
    "marginal_std_ema_seq",
    "mi_zscore_ema",
    "mi_zscore_ema_seq",
)
_STEMS_AT_K = ("retrieval_accuracy@", "retrieval_chance_level@", "retrieval_above_chance@")


def ragen_keys(values: Mapping[str, float]) -> dict[str, float]:
    """Those of `values` that RAGEN logs under the same name.

    >>> ragen_keys({"mi_estimate": 0.5, "gap_std": 0.1, "retrieval_accuracy@2": 1.0})
    {'mi_estimate': 0.5, 'retrieval_accuracy@2': 1.0}
    """
    return {name: value for name, value in values.items() if name in _KEYS or name.startswith(_STEMS_AT_K)}


def ragen_n_prompts(rows: LogLikelihoodMatrix) -> int:
    """Number of prompts with repeats, which RAGEN counts as columns."""
    return int(rows.multiplicity_P.sum())


def ragen_upper_bound(rows: LogLikelihoodMatrix) -> float:
    """log of the number of prompts, repeats included. No bound on what can be told apart once prompts repeat."""
    return math.log(ragen_n_prompts(rows))


def ragen_own_scores(rows: LogLikelihoodMatrix, k: int = 1, *, tie_tolerance: float = 0.0) -> FloatArray:
    """[N] as `retrieval.own_scores`, with repeated prompts taking a place each and any of them counting as own.

    Ties count by their expected value; RAGEN's code gives them to the first column.
    """
    scores_NP = top_k_scores(rows.logp_NP, k, tie_tolerance=tie_tolerance, weight_P=rows.multiplicity_P)
    own: FloatArray = scores_NP[np.arange(rows.n_traces), rows.own_N]
    return own


def ragen_chance_level(rows: LogLikelihoodMatrix, k: int = 1) -> float:
    """`min(1, k * mean over traces of w[own] / sum w)`: RAGEN's class-size formula.

    Exact for k = 1 only; for k > 1 it overstates the chance of a prompt that repeats.
    """
    share_P = rows.multiplicity_P / rows.multiplicity_P.sum()
    return min(1.0, k * float(share_P[rows.own_N].mean()))
