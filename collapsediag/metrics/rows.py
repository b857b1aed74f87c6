"""Which rows of a matrix the numbers are made of, and the door for plain arrays.

Legend: N traces (rows), P distinct contexts (columns).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import MetricError
from collapsediag.matrix import LogLikelihoodMatrix

FloatArray = NDArray[np.float64]


def usable_rows(matrix: LogLikelihoodMatrix | Any, own_N: Any = None, length_N: Any = None) -> LogLikelihoodMatrix:
    """The non-empty, finite rows, which every matrix metric reads; all columns stay.

    matrix: a LogLikelihoodMatrix, or summed log-likelihoods [N, P] in nats with `own_N` [N] (and `length_N` [N] where
        a value is per token; without it every trace counts as one token long).

    Raises MetricError with the reason where no matrix metric is defined: fewer than 2 distinct contexts, or no
    usable row.

    >>> usable_rows([[-1.0, -2.0], [-3.0, float("nan")]], [0, 1]).n_traces
    1
    """
    whole = _as_matrix(matrix, own_N, length_N)
    if whole.n_traces == 0:
        raise MetricError("the matrix has no rows: no trace was scored.")
    if whole.n_contexts < 2:
        raise MetricError(
            f"matrix metrics compare contexts and need at least 2 distinct ones, found {whole.n_contexts} "
            f"({whole.n_traces} traces). Score traces of more prompts together."
        )
    usable_N = whole.usable_N
    if usable_N.all():
        return whole
    if not usable_N.any():
        raise MetricError(f"no usable row among {whole.n_traces}: {_why_none(whole)}.")
    return whole.rows(usable_N)


def _as_matrix(matrix: Any, own_N: Any, length_N: Any) -> LogLikelihoodMatrix:
    if isinstance(matrix, LogLikelihoodMatrix):
        if own_N is not None or length_N is not None:
            raise MetricError(
                "a LogLikelihoodMatrix already holds own_N and length_N; pass them with plain arrays only."
            )
        return matrix
    if own_N is None:
        raise MetricError(
            "plain log-likelihoods need own_N, the column of each trace's own context, as second argument."
        )
    if length_N is None:
        length_N = np.ones(len(matrix), dtype=np.int64)
    return LogLikelihoodMatrix(logp_NP=matrix, length_N=length_N, own_N=own_N)


def _why_none(matrix: LogLikelihoodMatrix) -> str:
    n_empty = int((matrix.length_N == 0).sum())
    nonfinite_N = matrix.nonfinite_N
    reason = f"{n_empty} empty traces, {int(nonfinite_N.sum())} with a non-finite log-likelihood"
    if nonfinite_N.any():
        bad_NP = ~np.isfinite(matrix.logp_NP[nonfinite_N]) & matrix.scored_NP[nonfinite_N]
        always = np.flatnonzero(bad_NP.all(axis=0))
        if 0 < always.size < matrix.n_contexts:
            reason += f" (column {int(always[0])} is non-finite in every one of them: that context could not be scored)"
    return reason
