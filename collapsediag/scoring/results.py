"""Where scores are collected until a matrix is complete.

Legend: N traces and P contexts as asked for; U and C the distinct ones; T tokens of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.cells import matrix_of
from collapsediag.scoring.plan import Group, Unique
from collapsediag.scoring.prefix import BatchScores

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """A matrix and the tokens behind it.

    own_logp: for each of the N traces, [T] log-prob of each token under its own context, nats.
    own_entropy: for each trace, [T] exact entropy of the policy before each token, under its own context, nats; None
        where not asked for.
    logp: for each trace, [P, T] log-prob of each token under every context; None where not asked for.
    """

    matrix: LogLikelihoodMatrix
    own_logp: tuple[FloatArray, ...]
    own_entropy: tuple[FloatArray, ...] | None = None
    logp: tuple[FloatArray, ...] | None = None


class Progress:
    """Counts tokens and tells a callback, never going back."""

    def __init__(self, callback: Callable[[int, int], None] | None):
        self.callback, self.done, self.total = callback, 0, 0

    def plan(self, remaining: int) -> None:
        """So many tokens are still to come."""
        self.total = self.done + int(remaining)

    def add(self, tokens: int) -> None:
        """So many tokens ran."""
        self.done = min(self.done + int(tokens), self.total)
        if self.callback is not None:
            self.callback(self.done, self.total)

    def finish(self) -> None:
        """All is done, also what nobody counted."""
        if self.done < self.total:
            self.add(self.total - self.done)


class Results:
    """Sums of all wanted cells, and tokens where they are wanted."""

    def __init__(
        self,
        pairs: ScoringPairs,
        unique: Unique,
        *,
        own_tokens: bool = False,
        entropies: bool = False,
        every_context: bool | Sequence[int] = False,
    ):
        """every_context: rows whose tokens are kept under all contexts, not their own alone; True for all rows."""
        self.pairs, self.unique = pairs, unique
        self.own_tokens, self.entropies, self.every_context = own_tokens, entropies, every_context is True
        self._whole_U = np.full(len(unique.traces), self.every_context)
        if not isinstance(every_context, bool):
            kept = unique.trace_of_N[np.asarray(every_context, dtype=np.int64)]
            self._whole_U[kept[kept >= 0]] = True
        self.wants_tokens = own_tokens or entropies or bool(self._whole_U.any())
        shape = unique.wanted_UC.shape
        self.sum_UC = np.full(shape, np.nan)
        self.done_UC = np.zeros(shape, dtype=np.bool_)
        self._logp: dict[tuple[int, int], FloatArray] = {}
        self._entropy: dict[tuple[int, int], FloatArray] = {}
        self._own = np.zeros(shape, dtype=np.bool_)
        filled = np.flatnonzero(unique.trace_of_N >= 0)
        if filled.size:
            self._own[unique.trace_of_N[filled], unique.context_of_P[np.asarray(pairs.own_N)[filled]]] = True

    @property
    def open_UC(self) -> BoolArray:
        """Wanted cells that are not there yet."""
        return np.asarray(self.unique.wanted_UC & ~self.done_UC)

    @property
    def entropy_UC(self) -> BoolArray | None:
        """Cells whose entropies are wanted; None where none are."""
        return self._own if self.entropies else None

    def add_batch(self, group: Group, scores: BatchScores, *, apart: bool = False) -> None:
        """Take over one batch of the fast path.

        A NaN stays open where it may be a neighbour's: 0 times NaN is NaN, so that one trace whose activations overflow
        reaches all that run beside it, masked or not. Not where the context gives NaN by itself, nor `apart`.
        """
        columns = group.context_G[list(scores.context_B)]
        self.sum_UC[np.ix_(group.trace_G, columns)] = scores.logp_BG.T
        if scores.tokens is not None:
            cuts = np.cumsum([self.unique.traces[u].size for u in group.trace_G])[:-1]
            for column, (logp, entropy) in zip(columns.tolist(), scores.tokens, strict=True):
                entropies = [None] * group.trace_G.size if entropy is None else np.split(entropy, cuts)
                parts = zip(group.trace_G.tolist(), np.split(logp, cuts), entropies, strict=True)
                for trace, logp_T, entropy_T in parts:
                    self._keep((trace, column), logp_T, entropy_T)
        mine_BG = ~np.isnan(scores.logp_BG) | scores.context_nan_B[:, None] | apart
        self.done_UC[np.ix_(group.trace_G, columns)] = mine_BG.T

    def add_cell(self, cell: tuple[int, int], logp_T: FloatArray, entropy_T: FloatArray | None) -> None:
        """Take over one cell of the plain path."""
        self.sum_UC[cell] = logp_T.sum()
        if self.wants_tokens:
            self._keep(cell, logp_T, entropy_T)
        self.done_UC[cell] = True

    def _keep(self, cell: tuple[int, int], logp_T: FloatArray, entropy_T: FloatArray | None) -> None:
        if self._whole_U[cell[0]] or (self.own_tokens and self._own[cell]):
            self._logp[cell] = logp_T.copy()
        if self.entropies and self._own[cell] and entropy_T is not None:
            self._entropy[cell] = entropy_T.copy()

    def logp_NP(self) -> FloatArray:
        """[N, P] sums; 0 for empty traces."""
        full = np.zeros((self.pairs.n_traces, self.pairs.n_contexts))
        filled = self.unique.trace_of_N >= 0
        full[filled] = self.sum_UC[np.ix_(self.unique.trace_of_N[filled], self.unique.context_of_P)]
        return full

    def matrix(self, scored_NP: BoolArray | None = None) -> LogLikelihoodMatrix:
        """The matrix of the pairs; `scored_NP` where only these cells were wanted."""
        return matrix_of(self.pairs, self.logp_NP(), scored_NP)

    def token_scores(self) -> TokenScores:
        """The matrix with its tokens."""
        empty = np.zeros(0)
        own = np.asarray(self.pairs.own_N).tolist()
        rows = list(enumerate(self.unique.trace_of_N.tolist()))
        column = self.unique.context_of_P.tolist()

        def of(values: dict[tuple[int, int], FloatArray]) -> tuple[FloatArray, ...]:
            return tuple(values[u, column[own[n]]] if u >= 0 else empty for n, u in rows)

        return TokenScores(
            matrix=self.matrix(),
            own_logp=of(self._logp),
            own_entropy=of(self._entropy) if self.entropies else None,
            logp=tuple(self.tokens_of(range(len(rows)))) if self.every_context else None,
        )

    def tokens_of(self, rows: Iterable[int], scored_NP: BoolArray | None = None) -> list[FloatArray]:
        """For each row [P, T] log-probs of its tokens; NaN under contexts that it was not scored under."""
        tokens = {row: self._tokens_PT(int(self.unique.trace_of_N[row])) for row in rows}
        if scored_NP is None:
            return list(tokens.values())
        # An equal trace in another row may have been scored under more contexts.
        return [np.where(scored_NP[row][:, None], logp_PT, np.nan) for row, logp_PT in tokens.items()]

    def _tokens_PT(self, u: int) -> FloatArray:
        columns = self.unique.context_of_P.tolist()
        if u < 0:
            return np.zeros((len(columns), 0))
        not_scored = np.full(self.unique.traces[u].size, np.nan)
        return np.stack([self._logp.get((u, c), not_scored) for c in columns])
