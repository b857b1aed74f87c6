"""Budget mode: each trace under its own context and K others, with an error that is known.

The own column is exact. The K others stand for all P-1: metrics weigh each with (P-1)/K, which makes the mixture over
contexts right on average, and leaves its logarithm a small error (docs/scoring.md has the table).

Legend: N traces (rows), P contexts (columns), U distinct (trace, own context) units.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.cells import BoolArray, FloatArray, IntArray, distinct_traces, matrix_of, tokens_digest
from collapsediag.scoring.protocol import CellScorer, TokenScorer
from collapsediag.statistics import generator

logger = logging.getLogger("collapsediag")

# Nats per token. Float32 against float32 stays below 1e-5; more than this is another policy, dtype or temperature.
OWN_LOGP_TOLERANCE = 1e-2
OWN_ROWS_CHECKED = 4


def choose_columns(
    own_N: Any, n_contexts: int, k: int, *, seed: int = 0, step: int = 0, unit_N: Any = None
) -> BoolArray:
    """[N, P] which cells to score: the own column of each row and K others, drawn without replacement.

    own_N: [N] own column of each row. n_contexts: P. k: others per row; P-1 or more means all.
    seed, step: the same two give the same choice.
    unit_N: [N] rows with the same number are the same unit (equal trace, equal own context) and get the same columns,
        so that they are still computed once. Without it each row is a unit.

    Each row's K columns are a uniform draw from all sets of K of the P-1 others. Across rows the draws are balanced:
    contexts stand in a random circle, the first trace of each context takes the K contexts that follow its own, its
    second trace the K after those, and so on, with a new circle once all P-1 have been handed out. So each context
    gets equally many traces (work that is batched by context comes out even), the traces of one prompt cover different
    contexts, and an easy context cannot by chance count twice for some and never for others.

    Raises SettingsError for k < 1.

    >>> scored_NP = choose_columns([0, 1, 2, 3], n_contexts=4, k=1, seed=3)
    >>> scored_NP.sum(axis=0).tolist(), scored_NP.sum(axis=1).tolist()
    ([2, 2, 2, 2], [2, 2, 2, 2])
    """
    if k < 1:
        raise SettingsError(f"k is {k}; each trace needs at least 1 other context to be compared with.")
    own_N = np.asarray(own_N, dtype=np.int64)
    if k >= n_contexts - 1:
        return np.ones((own_N.size, n_contexts), dtype=np.bool_)
    layer_N = _layers(own_N, np.arange(own_N.size) if unit_N is None else np.asarray(unit_N, dtype=np.int64))
    layers_per_circle = (n_contexts - 1) // k
    n_circles = int(layer_N.max(initial=0)) // layers_per_circle + 1
    rng = generator(seed, step)
    circle_BP = rng.permuted(np.tile(np.arange(n_contexts), (n_circles, 1)), axis=1)
    return columns_of_circles(own_N, layer_N, circle_BP, k)


def columns_of_circles(own_N: IntArray, layer_N: IntArray, circle_BP: IntArray, k: int) -> BoolArray:
    """[N, P] the choice that given circles lead to: the part of `choose_columns` that is not random.

    layer_N: [N] which trace of its own context a row is. circle_BP: [B, P] permutations of the contexts.
    """
    n_contexts = circle_BP.shape[1]
    layers_per_circle = (n_contexts - 1) // k
    circle_N, turn_N = layer_N // layers_per_circle, layer_N % layers_per_circle
    place_BP = np.argsort(circle_BP, axis=1)
    place_N = place_BP[circle_N, own_N]
    place_NK = (place_N[:, None] + turn_N[:, None] * k + np.arange(1, k + 1)) % n_contexts
    scored_NP = np.zeros((own_N.size, n_contexts), dtype=np.bool_)
    rows_N = np.arange(own_N.size)
    scored_NP[rows_N[:, None], circle_BP[circle_N[:, None], place_NK]] = True
    scored_NP[rows_N, own_N] = True
    return scored_NP


def _layers(own_N: IntArray, unit_N: IntArray) -> IntArray:
    """[N] rank of each row's unit among the units of its own context, in order of first appearance."""
    seen: dict[int, dict[int, int]] = {}
    ranks = [
        seen.setdefault(own, {}).setdefault(unit, len(seen[own]))
        for own, unit in zip(own_N.tolist(), unit_N.tolist(), strict=True)
    ]
    return np.array(ranks, dtype=np.int64)


class BudgetScorer:
    """Scores each trace under its own context and K others; the rest of the matrix stays unscored.

    inner: the scorer that does the work; it must be able to score single cells (HFScorer, FunctionScorer, the server
        scorers).
    k: other contexts per trace. The cost falls to about (K+1)/P of the whole matrix.
    seed: of the draw. The draw also depends on the step where `score` is told one, and otherwise on the pairs
        themselves: the same batch gets the same columns on every rank and after every restart.

    Equal traces of one context get the same columns, so that they still cost one computation.

    >>> from collapsediag.scoring.function import FunctionScorer
    >>> BudgetScorer(FunctionScorer(len), k=4)
    BudgetScorer(FunctionScorer(len, batch_tokens=16384), k=4)
    """

    def __init__(self, inner: CellScorer, k: int, *, seed: int = 0) -> None:
        if not isinstance(inner, CellScorer):
            raise SettingsError(f"{type(inner).__name__} cannot score single cells (it has no score_cells).")
        if k < 1:
            raise SettingsError(f"k is {k}; each trace needs at least 1 other context to be compared with.")
        self.inner = inner
        self.k = k
        self.seed = seed

    def __repr__(self) -> str:
        return f"BudgetScorer({self.inner!r}, k={self.k})"

    def columns(self, pairs: ScoringPairs, *, step: int | None = None) -> BoolArray:
        """[N, P] which cells `score` will ask for."""
        trace_N = distinct_traces(pairs)
        return choose_columns(
            pairs.own_N,
            pairs.n_contexts,
            self.k,
            seed=self.seed,
            step=int(tokens_digest(pairs)[:15], 16) if step is None else step,
            unit_N=trace_N,  # ranked within each own context, so the trace's number alone names the unit
        )

    def score(
        self, pairs: ScoringPairs, *, step: int | None = None, own_logp_N: FloatArray | None = None
    ) -> LogLikelihoodMatrix:
        """The matrix with `scored_NP` marking what was scored.

        step: of the trainer; part of the seed.
        own_logp_N: [N] log-likelihoods of the traces under their own contexts where the trainer already has them
            (`trainer_own_logp`), NaN where not. A few are scored all the same: where they differ by more than
            OWN_LOGP_TOLERANCE a token, the trainer's are dropped with a warning, because two engines' noise between
            own and other columns would look like information.
        """
        scored_NP = self.columns(pairs, step=step)
        if own_logp_N is None:
            return matrix_of(pairs, self.inner.score_cells(pairs, scored_NP), scored_NP)
        return matrix_of(pairs, self._with_own(pairs, scored_NP, own_logp_N), scored_NP)

    def score_with_tokens(
        self, pairs: ScoringPairs, rows: Sequence[int], scored_NP: BoolArray | None = None
    ) -> tuple[LogLikelihoodMatrix, list[FloatArray] | None]:
        """`score` with the tokens of `rows`, None where `inner` has none; see TokenScorer."""
        if not isinstance(self.inner, TokenScorer):
            return self.score(pairs), None
        return self.inner.score_with_tokens(pairs, rows, self.columns(pairs) if scored_NP is None else scored_NP)

    def _with_own(self, pairs: ScoringPairs, scored_NP: BoolArray, own_logp_N: FloatArray) -> FloatArray:
        given_N = np.asarray(own_logp_N, dtype=np.float64)
        if given_N.shape != (pairs.n_traces,):
            raise ScoringError(f"own_logp_N has shape {given_N.shape} but there are {pairs.n_traces} traces.")
        rows_N, own_N = np.arange(pairs.n_traces), np.asarray(pairs.own_N)
        length_N = np.array([len(trace) for trace in pairs.traces])
        known_N = np.isfinite(given_N)
        checked = [int(i) for i in np.argsort(-length_N, kind="stable") if known_N[i]][:OWN_ROWS_CHECKED]
        ask_NP = scored_NP.copy()
        ask_NP[rows_N[known_N], own_N[known_N]] = False
        ask_NP[checked, own_N[checked]] = True
        logp_NP = np.array(self.inner.score_cells(pairs, ask_NP))
        scored = logp_NP[checked, own_N[checked]]
        off = np.abs(scored - given_N[checked]) / np.maximum(length_N[checked], 1)
        # NaN counts as a difference: a model that gives NaN is a finding, and the trainer's value would hide it.
        if not (off <= OWN_LOGP_TOLERANCE).all():
            logger.warning(
                "the trainer's log-probabilities are %.2g nats per token away from the scorer's (at most %.2g expected "
                "of the same policy, dtype and temperature); the own column is scored instead",
                float(np.max(off)),
                OWN_LOGP_TOLERANCE,
            )
            rest_NP = np.zeros_like(ask_NP)
            rest_NP[rows_N, own_N] = ~ask_NP[rows_N, own_N]
            return np.where(rest_NP, self.inner.score_cells(pairs, rest_NP), logp_NP)
        fill_N = known_N.copy()
        fill_N[checked] = False
        logp_NP[rows_N[fill_N], own_N[fill_N]] = given_N[fill_N]
        return logp_NP


def trainer_own_logp(pairs: ScoringPairs, batch: RolloutBatch) -> FloatArray:
    """[N] log-likelihood of each trace under its own context, out of the trainer's per-token log-probs; NaN where not.

    The trace must be found by its ids: own context = turn's context plus the output up to the trace. Only for
    log-probs of the policy that is scored, from an engine of the same precision.

    Raises SettingsError for a batch sampled at another temperature than 1: its log-probs may be those of the scaled
    distribution, and nothing in them says so.
    """
    if batch.temperature != 1.0:
        raise SettingsError(
            f"the batch was sampled at temperature {batch.temperature}; whether its log-probs are of the scaled or the "
            "raw distribution is not known. Score the own column instead (own_logp_N=None)."
        )
    found_N = np.full(pairs.n_traces, np.nan)
    for row, trace in enumerate(pairs.traces):
        turn = batch.rollouts[int(pairs.rollout_N[row])].turns[int(pairs.turn_N[row])]
        if turn.logprobs is None or turn.context_ids is None or turn.output_ids is None:
            continue
        context = pairs.contexts[int(pairs.own_N[row])]
        whole = np.concatenate([turn.context_ids, turn.output_ids])
        stop = len(context) + len(trace)
        start = len(context) - len(turn.context_ids)
        if start >= 0 and stop <= len(whole) and np.array_equal(whole[:stop], np.concatenate([context, trace])):
            found_N[row] = float(turn.logprobs[start : start + len(trace)].sum())
    return found_N


def own_logp_difference(
    pairs: ScoringPairs, batch: RolloutBatch, matrix: LogLikelihoodMatrix, temperature: float = 1.0
) -> float | None:
    """Largest distance, nats/token, between the scores under own contexts and the trainer's own log-probs.

    temperature: that of the scorer. None where the batch has no log-probs, or was sampled at another temperature.
    """
    if batch.temperature not in (1.0, temperature):
        return None
    given_N = trainer_own_logp(pairs, dataclasses.replace(batch, temperature=1.0))
    own_N = matrix.logp_NP[np.arange(matrix.n_traces), matrix.own_N]
    off_N = np.abs(own_N - given_N) / np.maximum(matrix.length_N, 1)
    return float(np.nanmax(off_N)) if np.isfinite(off_N).any() else None
