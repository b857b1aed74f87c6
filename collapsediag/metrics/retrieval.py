"""Retrieval: does a trace score highest under the prompt that produced it?

Legend: N traces (rows), P distinct contexts (columns). The arg-max of a row is the same per token and per sequence.
Every function takes a LogLikelihoodMatrix, or `logp_NP` and `own_N` as its first two arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import MetricError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.metrics.rows import usable_rows
from collapsediag.statistics import DEFAULT_DRAWS, permutation_p_value

FloatArray = NDArray[np.float64]

DEFAULT_KS = (2, 4, 8)


def top_k_scores(
    logp_NP: FloatArray, k: int = 1, *, tie_tolerance: float = 0.0, weight_P: NDArray[np.int64] | None = None
) -> FloatArray:
    """Probability, [N, P], that column j is among the k best of row i when ties are broken at random.

    With v the k-th best value of the row: columns above v are in, columns equal to v share the places that are left
    (1/t each for k = 1 and t tied columns), columns below are out. Equal means within `tie_tolerance` nats of v.
    weight_P: a column that stands for w equal columns takes w places, and is in as soon as one of them is (RAGEN keeps
    repeated prompts as separate columns); ones where not given.

    >>> top_k_scores(np.array([[-1.0, -1.0, -2.0]]), 1).tolist()
    [[0.5, 0.5, 0.0]]
    """
    n, p = logp_NP.shape
    weights = np.ones(p, dtype=np.int64) if weight_P is None else np.asarray(weight_P, dtype=np.int64)
    order_NP = np.argsort(-logp_NP, axis=1, kind="stable")
    places_NP = np.cumsum(weights[order_NP], axis=1)
    kth_N = np.argmax(places_NP >= k, axis=1)
    threshold_N1 = logp_NP[np.arange(n), order_NP[np.arange(n), kth_N]][:, None]
    above_NP = logp_NP > threshold_N1 + tie_tolerance
    tied_NP = ~above_NP & (logp_NP >= threshold_N1 - tie_tolerance)
    left_N1 = k - (above_NP * weights).sum(axis=1, keepdims=True)
    tied_places_N1 = (tied_NP * weights).sum(axis=1, keepdims=True)
    missed_NP = np.ones((n, p))
    for drawn in range(k):  # places are drawn one by one without replacement; a miss is a draw of other columns only
        remaining_N1 = np.maximum(tied_places_N1 - drawn, 1)
        others_NP = np.maximum(tied_places_N1 - weights - drawn, 0)
        missed_NP = np.where(drawn < left_N1, missed_NP * others_NP / remaining_N1, missed_NP)
    result: FloatArray = np.where(above_NP, 1.0, np.where(tied_NP, 1.0 - missed_NP, 0.0))
    return result


def own_scores(rows: LogLikelihoodMatrix, k: int = 1, *, tie_tolerance: float = 0.0) -> FloatArray:
    """[N] expected score of each trace: 1 retrieved, 0 not, in between where its own context is tied."""
    _check_complete(rows)
    _check_k(k, rows.n_contexts)
    scores_NP = top_k_scores(rows.logp_NP, k, tie_tolerance=tie_tolerance)
    own: FloatArray = scores_NP[np.arange(rows.n_traces), rows.own_N]
    return own


def retrieval_accuracy(
    matrix: LogLikelihoodMatrix | Any, own_N: Any = None, *, k: int = 1, tie_tolerance: float = 0.0
) -> float:
    """Share of traces whose own context is among the k best; for k = 1: scores highest. Chance is k/P.

    A tie for first place counts 1/(number tied), so a policy whose traces score the same under every context gets
    exactly chance, whatever the order of the columns. 0 to 1; falling is bad news.
    Raises MetricError for fewer than 2 contexts, no usable row, k outside 1..P-1, or an incomplete matrix.
    Source: RAGEN-2 (arXiv 2604.06268), with ties counted by their expected value.

    >>> retrieval_accuracy(np.array([[-1.0, -2.0], [-3.0, -3.0]]), np.array([0, 0]))
    0.75
    """
    return float(own_scores(usable_rows(matrix, own_N), k, tie_tolerance=tie_tolerance).mean())


def retrieval_chance_level(matrix: LogLikelihoodMatrix | Any, own_N: Any = None, *, k: int = 1) -> float:
    """k/P: the accuracy of traces that say nothing about their context, which are as likely to fit any column.

    Where traces are spread unevenly over the columns and all of them prefer the same one, accuracy can differ from
    this although nothing is known; `retrieval_p_value` is right there too.

    >>> retrieval_chance_level(np.zeros((2, 4)), [0, 1], k=2)
    0.5
    """
    rows = usable_rows(matrix, own_N)
    _check_k(k, rows.n_contexts)
    return k / rows.n_contexts


def retrieval_above_chance(
    matrix: LogLikelihoodMatrix | Any, own_N: Any = None, *, k: int = 1, tie_tolerance: float = 0.0
) -> float:
    """Retrieval accuracy minus its chance level; 0 means that the reasoning does not tell prompts apart.

    >>> retrieval_above_chance(np.array([[-1.0, -2.0], [-3.0, -2.0]]), np.array([0, 1]))
    0.5
    """
    accuracy = retrieval_accuracy(matrix, own_N, k=k, tie_tolerance=tie_tolerance)
    return accuracy - retrieval_chance_level(matrix, own_N, k=k)


def retrieval_p_value(
    matrix: LogLikelihoodMatrix | Any,
    own_N: Any = None,
    *,
    tie_tolerance: float = 0.0,
    seed: int = 0,
    n_draws: int = DEFAULT_DRAWS,
) -> float:
    """Probability of an accuracy this high if traces carried no information about their context.

    Permutes the assignment of groups to columns; see `statistics.permutation_p_value` for what moves together. High is
    bad news. With P = 2 or 3 it cannot fall below 1/2 or 1/6.

    >>> round(retrieval_p_value(-10.0 + np.eye(4), np.arange(4)), 4)
    0.0417
    """
    rows = usable_rows(matrix, own_N)
    _check_complete(rows)
    scores_NP = top_k_scores(rows.logp_NP, tie_tolerance=tie_tolerance)
    return permutation_p_value(scores_NP, rows.own_N, rows.group_N, seed=seed, n_draws=n_draws)


def own_subset_scores(rows: LogLikelihoodMatrix, *, tie_tolerance: float = 0.0) -> FloatArray:
    """[N] as `own_scores` for k = 1, among the scored cells of each row only."""
    logp_NP = np.where(rows.scored_NP, rows.logp_NP, -np.inf)
    own: FloatArray = top_k_scores(logp_NP, tie_tolerance=tie_tolerance)[np.arange(rows.n_traces), rows.own_N]
    return own


def retrieval_accuracy_subset(matrix: LogLikelihoodMatrix | Any, *, tie_tolerance: float = 0.0) -> float:
    """Share of traces whose own context beats the K others that were scored for it. Chance is 1/(K+1), not 1/P.

    Another quantity than `retrieval_accuracy`, and easier: never compare the two. Raises MetricError as it does.

    >>> nan = float("nan")
    >>> m = LogLikelihoodMatrix(logp_NP=[[-1, -2, nan], [nan, -2, -1]], length_N=[1, 1], own_N=[0, 1],
    ...                         scored_NP=np.array([[True, True, False], [False, True, True]]))
    >>> retrieval_accuracy_subset(m), retrieval_subset_chance_level(m)
    (0.5, 0.5)
    """
    return float(own_subset_scores(usable_rows(matrix), tie_tolerance=tie_tolerance).mean())


def retrieval_subset_chance_level(matrix: LogLikelihoodMatrix | Any) -> float:
    """Mean over traces of 1/(K+1), K the number of other contexts scored for the trace."""
    return float((1.0 / usable_rows(matrix).scored_NP.sum(axis=1)).mean())


def _check_complete(rows: LogLikelihoodMatrix) -> None:
    if not rows.is_complete:
        raise MetricError(
            "retrieval among all contexts needs every cell of the matrix, and this one was scored on a budget. "
            "retrieval_accuracy_subset compares with the scored cells, at its own chance level."
        )


def _check_k(k: int, n_contexts: int) -> None:
    if not 1 <= k < n_contexts:
        raise MetricError(f"k is {k} but there are {n_contexts} contexts: only 1 <= k < P can tell anything.")


_FAMILY = "Input dependence: retrieval"
_NEEDS = "traces of at least 2 prompts, scored crosswise by the policy"
_PAPER = "RAGEN-2, arXiv 2604.06268"


def _info(name: str, title: str, bad: Any, bounds: tuple[float, float], description: str, source: str) -> MetricInfo:
    return MetricInfo(
        name=name, title=title, unit="fraction", bad=bad, bounds=bounds, description=description, source=source,
        family=_FAMILY, needs=_NEEDS,
    )  # fmt: skip


register(
    _info("retrieval_accuracy", "Retrieval accuracy", "down", (0, 1),
          "Share of traces that are likelier under their own prompt than under any other; a tie of t counts 1/t.",
          _PAPER),
    _info("retrieval_accuracy@k", "Retrieval accuracy @k", "down", (0, 1),
          "Share of traces whose own prompt is among the k under which they are likeliest (k < P).", _PAPER),
    _info("retrieval_chance_level", "Chance level of retrieval", "none", (0, 1),
          "1/P for P distinct prompts: the accuracy of traces that say nothing about their prompt.", _PAPER),
    _info("retrieval_chance_level@k", "Chance level of retrieval @k", "none", (0, 1),
          "k/P for P distinct prompts.", _PAPER),
    _info("retrieval_above_chance", "Retrieval above chance", "down", (-1, 1),
          "Retrieval accuracy minus its chance level.", _PAPER),
    _info("retrieval_above_chance@k", "Retrieval @k above chance", "down", (-1, 1),
          "Retrieval accuracy @k minus its chance level.", _PAPER),
    _info("retrieval_p_value", "p-value of retrieval", "up", (0, 1),
          "Probability of an accuracy this high if traces carried no information about their prompt, by permuting "
          "the assignment of groups to prompts.", "permutation test, Phipson and Smyth (2010)"),
    _info("retrieval_accuracy_subset", "Retrieval accuracy among K+1", "down", (0, 1),
          "Budget mode: share of traces that are likelier under their own prompt than under the K others scored.",
          "collapsediag"),
    _info("retrieval_subset_chance_level", "Chance level among K+1", "none", (0, 1),
          "Budget mode: 1/(K+1).", "collapsediag"),
)  # fmt: skip
