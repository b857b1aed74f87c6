"""One monitor for all ranks of a job: rank 0 measures, every rank scores its share, all get the numbers.

While rank 0 observes, the others serve it: they wait for a piece of scoring or for the end. So whatever goes wrong on
rank 0, it ends in the same message as success, and whatever goes wrong on another rank is told to rank 0 by the scorer
(see DistributedScorer) or with the rollouts. Nobody leaves early, nobody waits for a rank that has left.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from collapsediag.errors import ScoringError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.monitor import Monitor
from collapsediag.pairs import ScoringPairs
from collapsediag.record import Record
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.budget import BudgetScorer
from collapsediag.scoring.cells import BoolArray, FloatArray, matrix_of

logger = logging.getLogger("collapsediag")

DEFAULT_TIMEOUT_S = 1800.0


class JobMonitor:
    """Gives a Monitor the rollouts of all ranks and the help of all ranks in scoring.

    monitor: one on each rank, with equal settings. Only rank 0's measures and writes; the others' keep its state.
    scorer: scores single cells (HFScorer, FunctionScorer); one on each rank. None: nothing is scored.
    budget: other contexts per trace, see BudgetScorer; None scores the whole matrix.
    timeout_s: how long ranks wait for one that died, and so the longest that rank 0 may measure.

    Without torch.distributed, or with one rank, it is just the monitor.
    """

    def __init__(
        self,
        monitor: Monitor,
        scorer: Any = None,
        *,
        budget: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.monitor = monitor
        self.scorer = scorer
        self._budget = budget
        self._timeout_s = timeout_s
        self._group: Any = None
        self._shared: Any = None
        self._connected = False

    def observe(
        self,
        step: int,
        part: RolloutBatch | Exception,
        *,
        order: Sequence[int] | None = None,
        score: bool | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Record:
        """Measure one step; every rank calls this with its own rollouts and gets the record of all.

        part: this rank's rollouts, or why there are none: the step is then recorded as failed.
        order: place of each rollout in the whole batch; rank after rank where not given.
        score: overrides the cadence. around: entered while scoring, e.g. the trainer's autocast.
        The record of the other ranks comes without matrices and traces.
        """
        self._connect()
        if self._group is None:
            with around():
                return self._measure(step, part, score)
        import torch.distributed as dist

        reason = f"{type(part).__name__}: {part}" if isinstance(part, Exception) else None
        mine = (reason, None if isinstance(part, Exception) else part, None if order is None else list(order))
        rank = dist.get_rank(self._group)
        parts: list[Any] | None = [None] * dist.get_world_size(self._group) if rank == 0 else None
        dist.gather_object(mine, parts, dst=0, group=self._group)
        with around():
            if parts is None:
                return self._serve(step)
            return self._lead(step, parts, score)

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _lead(self, step: int, parts: list[Any], score: bool | None) -> Record:
        record: Record | None = None
        try:
            record = self._measure(step, _whole(parts), score)
            return record
        finally:
            told = None if record is None else dataclasses.replace(record, matrices={}, traces=())
            self._tell(("done", told, self.monitor.state_dict()))

    def _measure(self, step: int, batch: RolloutBatch | Exception, score: bool | None) -> Record:
        if isinstance(batch, Exception):
            return self.monitor.record_failure(step, batch)
        return self.monitor.observe(step, batch, score=score)

    def _tell(self, message: tuple[Any, ...]) -> None:
        import torch.distributed as dist

        dist.broadcast_object_list([message], src=0, group=self._group)

    # -- the others --------------------------------------------------------------------------------------------------

    def _serve(self, step: int) -> Record:
        import torch.distributed as dist

        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0, group=self._group)
            what, *content = box[0]
            if what == "done":
                record, state = content
                self.monitor.load_state_dict(state)
                if record is None:
                    raise ScoringError(f"step {step}: rank 0 raised while it measured; its message says why.")
                found: Record = record
                return found
            try:
                self._shared.score_cells(*content)
            except Exception as error:
                # Rank 0 has been told, and decides what becomes of it.
                logger.debug("step %d: scoring failed on this rank: %s", step, error)

    # -- wiring ------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """At the first step: only then is it known whether, and with whom, this process works."""
        if self._connected:
            return
        self._connected = True
        scorer = self.scorer
        if _world_size() > 1:
            import torch.distributed as dist

            from collapsediag.scoring.distributed import DistributedScorer

            # Of its own: nothing here may come between the trainer's collectives, or wait behind them.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
            if scorer is not None:
                self._shared = DistributedScorer(scorer, group=self._group)
                scorer = ScoringByAllRanks(self)
        if scorer is not None:
            if self._budget is not None:
                scorer = BudgetScorer(scorer, self._budget, seed=self.monitor.seed)
            self.monitor.scorer = scorer

    def share(self, pairs: ScoringPairs, scored_NP: BoolArray) -> FloatArray:
        """Rank 0: score cells together with the ranks that serve."""
        self._tell(("score", pairs, scored_NP))
        cells: FloatArray = self._shared.score_cells(pairs, scored_NP)
        return cells


class ScoringByAllRanks:
    """Rank 0's scorer: calls the others in first. Log-probs of single tokens stay where they were computed."""

    def __init__(self, job: JobMonitor) -> None:
        self._job = job

    @property
    def temperature(self) -> float:
        """Of the scored distribution."""
        return float(getattr(self._job.scorer, "temperature", 1.0))

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """The whole matrix."""
        import numpy as np

        everything_NP = np.ones((pairs.n_traces, pairs.n_contexts), dtype=np.bool_)
        return matrix_of(pairs, self.score_cells(pairs, everything_NP))

    def score_cells(self, pairs: ScoringPairs, scored_NP: BoolArray) -> FloatArray:
        """[N, P] the cells asked for."""
        return self._job.share(pairs, scored_NP)


def close_all(monitors: Sequence[Monitor]) -> None:
    """Close the sinks of every monitor."""
    for monitor in monitors:
        monitor.close()


def _whole(parts: list[Any]) -> RolloutBatch | Exception:
    """All ranks' rollouts in order, or the first failure."""
    failed = [(rank, reason) for rank, (reason, _, _) in enumerate(parts) if reason is not None]
    if failed:
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        return ScoringError(f"rank {failed[0][0]} of {len(parts)} has no rollouts{more}: {failed[0][1]}")
    batches: list[RolloutBatch] = [batch for _, batch, _ in parts]
    rollouts = [rollout for batch in batches for rollout in batch]
    if all(order is not None for _, _, order in parts):
        places = [place for _, _, order in parts for place in order]
        rollouts = [rollouts[i] for i in sorted(range(len(places)), key=places.__getitem__)]
    dropped: dict[str, int] = {}
    for batch in batches:
        for why, count in batch.dropped.items():
            dropped[why] = dropped.get(why, 0) + count
    return dataclasses.replace(
        batches[0],
        rollouts=tuple(rollouts),
        dropped=dropped,
        notes=tuple(dict.fromkeys(note for batch in batches for note in batch.notes)),
    )


def _world_size() -> int:
    import sys

    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())
