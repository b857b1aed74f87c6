"""Score with any trainer's own log-prob function. Needs numpy only: torch is whatever the function brings along."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collapsediag.arrays import to_numpy
from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.cells import (
    BoolArray,
    FloatArray,
    IntArray,
    batches,
    check_logp,
    distinct_cells,
    matrix_of,
)

LogProbFunction = Callable[[list[tuple[list[int], list[int]]]], Any]

DEFAULT_BATCH_TOKENS = 16_384


class FunctionScorer:
    """Scores through a function that a trainer already has.

    fn: takes a list of B pairs `(context_ids, trace_ids)`, both plain lists of token ids, and returns the
        log-probability of each trace's tokens given its context and the trace so far, in nats: either B sums (list,
        array or tensor [B]), or per token (B sequences as long as the traces, or one right-padded [B, longest] array
        with zero or NaN in the padding). The context's own tokens are not counted.
    batch_tokens: a batch of B pairs padded to its longest pair has at most this many tokens; a longer pair goes alone.

    Equal (context, trace) pairs are asked for once. Batches come longest first. Gradients, eval mode and autocast are
    the function's own business: it should score as the trainer does.

    NaN and -inf are kept: the metrics leave such rows out and count them. A positive log-probability, a wrong count,
    or an exception in the function raise ScoringError.

    >>> ids, zero = [np.array([3, 4]), np.array([5])], np.zeros(2, dtype=np.int64)
    >>> pairs = ScoringPairs(contexts=tuple(ids), traces=tuple(ids), own_N=np.array([0, 1]), group_N=np.array([0, 1]),
    ...                      multiplicity_P=np.array([1, 1]), rollout_N=zero, turn_N=zero)
    >>> scorer = FunctionScorer(lambda batch: [-0.5 * len(trace) for context, trace in batch])
    >>> scorer.score(pairs).logp_NP.tolist()
    [[-1.0, -1.0], [-0.5, -0.5]]
    """

    def __init__(self, fn: LogProbFunction, *, batch_tokens: int = DEFAULT_BATCH_TOKENS) -> None:
        if not callable(fn):
            raise SettingsError(f"fn must be a function of a list of (context_ids, trace_ids), found {fn!r}.")
        if batch_tokens < 1:
            raise SettingsError(f"batch_tokens is {batch_tokens}; at least 1 is needed.")
        self.fn = fn
        self.batch_tokens = batch_tokens

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"FunctionScorer({name}, batch_tokens={self.batch_tokens})"

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """Score every trace of `pairs` under every context. Raises ScoringError where the function misbehaves."""
        return matrix_of(pairs, self._logp_NP(pairs, None))

    def score_cells(self, pairs: ScoringPairs, scored_NP: BoolArray) -> FloatArray:
        """Log-likelihoods [N, P] of the cells marked in `scored_NP`, NaN elsewhere."""
        return self._logp_NP(pairs, scored_NP)

    def _logp_NP(self, pairs: ScoringPairs, scored_NP: BoolArray | None) -> FloatArray:
        cells = distinct_cells(pairs, scored_NP)
        logp_C = np.full(len(cells), np.nan)
        for batch in batches(cells.length_C, self.batch_tokens):
            rows, columns = cells.row_C[batch], cells.context_C[batch]
            logp_C[batch] = self._call(pairs, rows, columns)
            for row, column, value in zip(rows.tolist(), columns.tolist(), logp_C[batch].tolist(), strict=True):
                check_logp(value, pairs, row, column, repr(self))
        return cells.matrix(logp_C)

    def _call(self, pairs: ScoringPairs, rows: IntArray, columns: IntArray) -> FloatArray:
        # Lists, not arrays: `context + trace` must join them, and nobody can write into the batch's own ids.
        batch = [(pairs.contexts[j].tolist(), pairs.traces[i].tolist()) for i, j in zip(rows, columns, strict=True)]
        lengths = [len(trace) for _, trace in batch]
        try:
            returned = self.fn(batch)
        except Exception as error:
            longest = max(len(context) + len(trace) for context, trace in batch)
            raise ScoringError(
                f"{self!r} failed on a batch of {len(batch)} pairs (longest {longest} tokens): "
                f"{type(error).__name__}: {error}"
            ) from error
        return sums_of(returned, lengths, repr(self))


def sums_of(returned: Any, lengths: Sequence[int], who: str) -> FloatArray:
    """[B] sums from what a log-prob function returned: sums already, one sequence per trace, or a padded array.

    lengths: tokens of each of the B traces. `who` starts the message. Raises ScoringError where the shapes do not fit.

    >>> sums_of([[-1.0, -2.0], [-4.0]], [2, 1], "fn").tolist()
    [-3.0, -4.0]
    >>> sums_of(np.array([[-1.0, -2.0], [-4.0, 0.0]]), [2, 1], "fn").tolist()
    [-3.0, -4.0]
    """
    count = len(lengths)
    expected = (
        f"expected {count} sums, {count} sequences as long as the traces ({_short(lengths)}), or one right-padded "
        f"[{count}, {max(lengths)}] array"
    )
    if returned is None or not hasattr(returned, "__len__"):
        raise ScoringError(f"{who} returned {type(returned).__name__}; {expected}.")
    if len(returned) != count:
        raise ScoringError(f"{who} returned {len(returned)} entries for {count} pairs; {expected}.")
    if hasattr(returned, "shape"):
        array = _numbers(returned, who, expected)
        if array.ndim == 1:
            return array
        if array.shape == (count, max(lengths)):
            return _sums_of_padded(array, lengths, who)
        raise ScoringError(f"{who} returned an array of shape {array.shape}; {expected}.")
    rows = [_numbers(row, who, expected) for row in returned]
    if all(row.ndim == 0 for row in rows):
        return np.array(rows, dtype=np.float64)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.shape != (length,):
            raise ScoringError(
                f"{who} returned shape {row.shape} for pair {number} of its batch, whose trace has {length} tokens; "
                f"{expected}. The context's tokens must not be counted, the trace's first token must."
            )
    return np.array([math.fsum(row.tolist()) if np.isfinite(row).all() else row.sum() for row in rows])


def _sums_of_padded(array: FloatArray, lengths: Sequence[int], who: str) -> FloatArray:
    """Right padding is believed only where it is empty: left-padded rows summed from the left are silently wrong."""
    inside = np.arange(array.shape[1])[None, :] < np.asarray(lengths)[:, None]
    outside = np.nan_to_num(np.where(inside, 0.0, array), nan=0.0)
    if outside.any():
        row, column = (int(v) for v in np.argwhere(outside)[0])
        raise ScoringError(
            f"{who} returned a padded array with {array[row, column]:.6g} at [{row}, {column}], but that trace has "
            f"{lengths[row]} tokens. Right-pad with zeros or NaN, or return one sequence per trace."
        )
    sums: FloatArray = np.where(inside, array, 0.0).sum(axis=1)
    return sums


def _numbers(values: Any, who: str, expected: str) -> FloatArray:
    try:
        array = to_numpy(values)
    except (TypeError, ValueError) as error:
        raise ScoringError(f"{who} returned something that is not an array ({error}); {expected}.") from error
    if array.dtype.kind not in "fiu":
        raise ScoringError(f"{who} returned {type(values).__name__} of {array.dtype}; {expected}.")
    return array.astype(np.float64)


def _short(lengths: Sequence[int]) -> str:
    shown = ", ".join(str(length) for length in lengths[:6])
    return shown + ", ..." if len(lengths) > 6 else shown
