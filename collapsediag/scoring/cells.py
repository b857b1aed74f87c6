"""Which (context, trace) pairs have to be computed, once each, and how they are batched.

Integers only. The scorers that ask somebody else for log-probabilities (a trainer's function, an inference server)
share this; equal traces are asked for once, empty traces never, and a budget leaves cells out.

Legend: N traces (rows), P contexts (columns), U distinct traces, C distinct cells to compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import ScoringError
from collapsediag.matrix import POSITIVE_LOGP_TOLERANCE, LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def distinct_traces(pairs: ScoringPairs) -> IntArray:
    """[N] number of each trace's token sequence, in order of first appearance: equal traces share a number.

    >>> from collapsediag.scoring.cells import distinct_traces
    >>> vectors = [np.array(t) for t in ([5, 6], [7], [5, 6])]
    >>> blank = dict(own_N=[0] * 3, group_N=[0] * 3, rollout_N=[0] * 3, turn_N=[0] * 3, multiplicity_P=[1])
    >>> distinct_traces(ScoringPairs(contexts=(np.array([1]),), traces=tuple(vectors), **blank)).tolist()
    [0, 1, 0]
    """
    seen: dict[bytes, int] = {}
    # The dtype is fixed before the bytes are compared: int32 [1, 0] and int64 [1] have the same bytes.
    keys = (np.asarray(trace, dtype=np.int64).tobytes() for trace in pairs.traces)
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def tokens_digest(pairs: ScoringPairs, mask_NP: Any = None) -> str:
    """A name for these contexts, traces and own columns (and a mask): equal in every process and after every restart.

    Two sets of pairs have the same name only if all their tokens are the same, in the same order.
    """
    state = hashlib.blake2b(digest_size=16)
    for sequences in (pairs.contexts, pairs.traces, (pairs.own_N,)):
        state.update(len(sequences).to_bytes(8, "little"))
        for ids in sequences:
            values = np.asarray(ids, dtype="<i8")
            state.update(len(values).to_bytes(8, "little") + values.tobytes())
    if mask_NP is not None:
        state.update(np.ascontiguousarray(mask_NP, dtype=np.bool_).tobytes())
    return state.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """The cells to compute.

    context_C, row_C: column of each cell, and the first row whose trace it holds.
    length_C: tokens of context and trace together.
    index_NP: [N, P] cell number of each matrix entry, -1 where it is not asked for, -2 where the trace is empty.
    """

    context_C: IntArray
    row_C: IntArray
    length_C: IntArray
    index_NP: IntArray

    def __len__(self) -> int:
        return int(self.context_C.size)

    def matrix(self, logp_C: FloatArray) -> FloatArray:
        """[N, P] log-likelihoods: each cell at every place it belongs to, 0 for empty traces, NaN where not asked."""
        # The two extra entries are what the indices -2 and -1 point at.
        return np.concatenate([logp_C, [0.0, np.nan]])[self.index_NP]


def distinct_cells(pairs: ScoringPairs, scored_NP: Any = None) -> Cells:
    """The cells of `scored_NP` (all, where None) with equal traces merged, ordered by context.

    Raises ScoringError where `scored_NP` does not fit the pairs.
    """
    n, p = pairs.n_traces, pairs.n_contexts
    wanted_NP = np.ones((n, p), dtype=np.bool_) if scored_NP is None else np.asarray(scored_NP)
    if wanted_NP.shape != (n, p) or wanted_NP.dtype != np.bool_:
        raise ScoringError(
            f"scored_NP must be booleans of shape ({n}, {p}), one per trace and context, found shape "
            f"{wanted_NP.shape} of {wanted_NP.dtype}."
        )
    trace_N = distinct_traces(pairs)
    length_N = np.array([len(trace) for trace in pairs.traces], dtype=np.int64)
    length_P = np.array([len(context) for context in pairs.contexts], dtype=np.int64)
    rows, columns = np.nonzero(wanted_NP & (length_N > 0)[:, None])
    # One key per cell, context first: what shares a context stays together, for servers that cache prefixes.
    _, first, inverse = np.unique(columns * max(n, 1) + trace_N[rows], return_index=True, return_inverse=True)
    index_NP = np.where(wanted_NP & (length_N == 0)[:, None], -2, -1)
    index_NP[rows, columns] = inverse
    return Cells(
        context_C=columns[first],
        row_C=rows[first],
        length_C=length_P[columns[first]] + length_N[rows[first]],
        index_NP=index_NP,
    )


def batches(length_C: IntArray, budget: int) -> Iterator[IntArray]:
    """Cell numbers in batches, longest first, so that a padded batch (cells x longest) stays under `budget` tokens.

    A cell longer than the budget is a batch by itself. Longest first: if memory does not suffice, it shows at once.

    >>> [b.tolist() for b in batches(np.array([3, 9, 4, 4]), budget=8)]
    [[1], [2, 3], [0]]
    """
    order = np.argsort(-length_C, kind="stable")
    start = 0
    while start < order.size:
        size = max(1, budget // max(1, int(length_C[order[start]])))
        yield order[start : start + size]
        start += size


def check_logp(value: float, pairs: ScoringPairs, row: int, column: int, who: str) -> None:
    """Raise ScoringError for a log-likelihood that cannot be one. NaN and -inf pass: the matrix counts such rows."""
    if value > POSITIVE_LOGP_TOLERANCE:
        raise ScoringError(
            f"{who} gave {value:.6g} for trace {row} ({len(pairs.traces[row])} tokens) under context {column}: a "
            "log-likelihood cannot be positive. Was a probability, a loss (sign flipped) or a log-ratio returned?"
        )


def matrix_of(pairs: ScoringPairs, logp_NP: FloatArray, scored_NP: BoolArray | None = None) -> LogLikelihoodMatrix:
    """The matrix of `pairs` with these log-likelihoods: labels and lengths are taken from the pairs."""
    return LogLikelihoodMatrix(
        logp_NP=logp_NP,
        length_N=np.array([len(trace) for trace in pairs.traces], dtype=np.int64),
        own_N=np.asarray(pairs.own_N, dtype=np.int64),
        group_N=np.asarray(pairs.group_N, dtype=np.int64),
        multiplicity_P=np.asarray(pairs.multiplicity_P, dtype=np.int64),
        scored_NP=np.ones(logp_NP.shape, dtype=np.bool_) if scored_NP is None else scored_NP,
    )
