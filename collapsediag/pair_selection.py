"""Choose which rows and columns stay when not all can be scored. Arrays in, arrays out; nothing here knows rollouts.

Legend: M candidate rows (traces with their own context), P distinct contexts (columns).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def fitting_lengths(context_M: IntArray, trace_M: IntArray, column_M: IntArray, limit: int) -> tuple[int, int]:
    """The longest context and the longest trace to keep so that any kept pair, own or crossed, fits into `limit`.

    Every trace is scored under every context, so max(context) + max(trace) <= limit over what is kept. A row fits at a
    cut `a` (longest context) exactly when context <= a <= limit - trace, an interval; the answer is the point that most
    intervals cover, among those that keep two contexts where any does. O(M log M).

    context_M, trace_M: tokens of each row's own context and of its trace, [M]. column_M: number of its context, [M].
    Returns (a, limit - a); (0, limit) where nothing fits.

    >>> fitting_lengths(np.array([5, 5, 90]), np.array([10, 60, 10]), np.array([0, 1, 2]), 100)
    (5, 95)
    """
    last_M = limit - trace_M
    fits_M = context_M <= last_M
    if not fits_M.any():
        return 0, limit
    cuts = np.unique(context_M[fits_M])
    rows = _covering(context_M[fits_M], last_M[fits_M], cuts)
    # A column stays as long as one of its rows does: one interval a column, up to its shortest trace.
    _, column = np.unique(column_M[fits_M], return_inverse=True)
    first_P = np.zeros(int(column.max()) + 1, dtype=np.int64)
    first_P[column] = context_M[fits_M]
    last_P = np.full(first_P.size, -1, dtype=np.int64)
    np.maximum.at(last_P, column, last_M[fits_M])
    columns = np.minimum(_covering(first_P, last_P, cuts), 2)
    best = int(np.lexsort((-cuts, rows, columns))[-1])  # most columns up to two, then most rows, then the lowest cut
    return int(cuts[best]), int(limit - cuts[best])


def _covering(first: IntArray, last: IntArray, points: IntArray) -> IntArray:
    """How many of the intervals [first, last] hold each point."""
    begun = np.searchsorted(np.sort(first), points, side="right")
    ended = np.searchsorted(np.sort(last), points, side="left")
    return np.asarray(begun - ended, dtype=np.int64)


class Selection(NamedTuple):
    """rows: indices into the candidates, ascending. columns: the context numbers that stay, ascending.

    A column may have no row of its own left: it then serves the others as an alternative context.
    """

    rows: IntArray
    columns: IntArray


def select_rows(
    stratum_M: IntArray,
    column_M: IntArray,
    *,
    max_columns: int | None,
    max_rows: int | None,
    max_cells: int | None,
    rng: np.random.Generator,
) -> Selection:
    """A seeded choice of rows and columns within the limits, spread over the strata as evenly as possible.

    Strata come in random order, and so do the rows of each; the first row of every stratum goes before the second of
    any. Columns are taken in that order. Where cells (rows x columns) are limited, rows are given up before columns,
    down to one row a column: fewer rows only add noise, fewer columns measure another quantity, bounded by log P. Two
    columns are kept whenever there are two and the limits allow it: with one, nothing can be told apart.

    stratum_M: which stratum (prompt group) each row belongs to, [M]. column_M: number of its context, [M].
    """
    if not stratum_M.size:
        return Selection(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    order = _round_robin(stratum_M, rng)
    _, first_seen = np.unique(column_M[order], return_index=True)
    columns = column_M[order][np.sort(first_seen)][: _column_limit(first_seen.size, max_columns, max_rows, max_cells)]
    n_rows = order.size if max_rows is None else max_rows
    if max_cells is not None:
        n_rows = max(1, min(n_rows, max_cells // columns.size))
    order = order[np.isin(column_M[order], columns)]
    # The first row of each column goes first, so that no column is without a trace of its own if it can be helped.
    later = np.ones(order.size, dtype=np.bool_)
    later[np.unique(column_M[order], return_index=True)[1]] = False
    chosen = order[np.argsort(later, kind="stable")][:n_rows]
    return Selection(np.sort(chosen), np.sort(columns))


def _column_limit(n_columns: int, max_columns: int | None, max_rows: int | None, max_cells: int | None) -> int:
    limit = n_columns if max_columns is None else min(n_columns, max_columns)
    wanted = limit if max_rows is None else min(limit, max_rows)
    if max_cells is not None:
        wanted = min(wanted, math.isqrt(max_cells))
    at_least = min(2, limit, limit if max_cells is None else max_cells)
    return max(wanted, at_least)


def _round_robin(stratum_M: IntArray, rng: np.random.Generator) -> IntArray:
    """Rows in the order of choice: the first of every stratum, then the second of every stratum, and so on."""
    _, stratum = np.unique(stratum_M, return_inverse=True)
    rank_of_stratum = rng.permutation(int(stratum.max()) + 1)
    shuffled = rng.permutation(stratum.size)
    by_stratum = shuffled[np.argsort(stratum[shuffled], kind="stable")]
    counts = np.bincount(stratum)
    turn = np.arange(stratum.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return by_stratum[np.lexsort((rank_of_stratum[stratum[by_stratum]], turn))]
