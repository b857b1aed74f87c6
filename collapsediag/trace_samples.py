"""Choose which traces of a scored step are kept for reading, and write them out as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from collapsediag.matrix import IntArray, LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.record import TraceSample
from collapsediag.rollouts import RolloutBatch
from collapsediag.statistics import generator


def sample_traces(
    batch: RolloutBatch,
    pairs: ScoringPairs,
    matrix: LogLikelihoodMatrix,
    tokenizer: Any,
    limit: int,
    seed: int,
) -> list[TraceSample]:
    """At most `limit` traces, drawn without replacement and seeded by (seed, step); all of them where there are fewer.

    The draw does not look at the scores: a sample of the worst would make every run look collapsed.
    """
    rng = generator(seed, batch.step)
    n = pairs.n_traces
    rows = np.arange(n) if n <= limit else np.sort(rng.choice(n, size=limit, replace=False))
    return [_sample(batch, pairs, matrix, tokenizer, int(row)) for row in rows]


def _sample(
    batch: RolloutBatch, pairs: ScoringPairs, matrix: LogLikelihoodMatrix, tokenizer: Any, row: int
) -> TraceSample:
    rollout = batch.rollouts[int(pairs.rollout_N[row])]
    own = int(pairs.own_N[row])
    scores = np.where(np.isfinite(matrix.logp_NP[row]), matrix.logp_NP[row], -np.inf)
    # Own wins a tie: a trace that scores the same everywhere was not retrieved as another one.
    best = own if scores[own] >= scores.max() else int(scores.argmax())
    return TraceSample(
        namespace=pairs.namespace,
        row=row,
        own=own,
        best=best,
        group=str(rollout.group),
        length=int(matrix.length_N[row]),
        logp_P=tuple(float(v) for v in matrix.logp_NP[row]),
        context=_text(tokenizer, pairs.contexts[own]),
        context_best=None if best == own else _text(tokenizer, pairs.contexts[best]),
        trace=_text(tokenizer, pairs.traces[row]),
        reward=rollout.reward,
        environment=rollout.environment,
    )


def _text(tokenizer: Any, ids: IntArray) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode(ids.tolist()))
