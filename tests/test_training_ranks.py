"""A monitor of a job of one process: the columns of a budget are drawn by the monitor's seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collapsediag.monitor import Monitor
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
from collapsediag.scoring.function import FunctionScorer
from collapsediag.training.ranks import JobMonitor

from .keep import Keep


def scored_cells(seed: int) -> NDArray[np.bool_]:
    """[N, P] cells that one step of 8 prompts scores with a budget of 2 others."""
    rollouts = tuple(
        Rollout(turns=(Turn(context_ids=np.array([1, 10 + p]), output_ids=np.array([30 + k, 40 + p, 50])),), group=p)
        for p in range(8)
        for k in range(2)
    )
    keep = Keep()
    monitor = Monitor(seed=seed, every=1, reasoning="completion", sinks=[keep])
    scorer = FunctionScorer(lambda pairs: [-float(sum(trace)) for _, trace in pairs])
    JobMonitor(monitor, scorer, budget=2).observe(0, RolloutBatch(step=0, rollouts=rollouts))
    (matrix,) = keep.records[0].matrices.values()
    scored: NDArray[np.bool_] = np.isfinite(matrix.logp_NP)
    return scored


def test_the_seed_of_the_monitor_moves_the_draw_of_a_budget() -> None:
    first = scored_cells(0)
    assert (first.sum(axis=1) == 3).all()
    np.testing.assert_array_equal(first, scored_cells(0))
    assert (first != scored_cells(1)).any()
