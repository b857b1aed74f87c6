"""MLflow: numbers into the run that is active, under names MLflow accepts."""

from __future__ import annotations

import re
from typing import Any

from collapsediag._optional import require
from collapsediag.main_process import MainProcess
from collapsediag.record import Record
from collapsediag.tracker_values import tracker_values

_NOT_ALLOWED = re.compile(r"[^/\w.\- :]")
# In a store of files a metric is a file: `x` and `x/ci_low` would need x to be a folder too.
_INTERVAL = re.compile(r"/(ci_low|ci_high)$")


class MlflowSink:
    """Writes the numbers of each record to an MLflow run.

    run_id: the run to write to; where not given, the one active in the writing thread, and nothing is written where
        there is none (MLflow itself would start one).

    Writing is asynchronous, because a SQLite store takes tens of milliseconds a step: what fails is raised at the next
    record, or at `close`, which waits. The run is never ended. Raises MissingExtraError without mlflow.
    """

    in_caller_thread = True  # MLflow's active run is that of the thread

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow = require("mlflow", extra="mlflow", feature="the MLflow sink")
        self._run_id = run_id
        self._process = MainProcess()
        self._sent: Any = None

    def write(self, record: Record) -> None:
        """Send the numbers of one record."""
        if not self._process.is_here():
            return
        run = self._mlflow.active_run() if self._run_id is None else None
        run_id = run.info.run_id if run is not None else self._run_id
        if run_id is None:
            return
        values = {mlflow_name(name): value for name, value in tracker_values(record).items()}
        sent = self._mlflow.log_metrics(values, step=record.step, run_id=run_id, synchronous=False)
        self._settle(then=sent)

    def close(self) -> None:
        """Wait until everything is written."""
        if not self._process.is_forked():
            self._settle()

    def _settle(self, then: Any = None) -> None:
        before, self._sent = self._sent, then
        if before is not None:
            before.wait()


def mlflow_name(name: str) -> str:
    """A metric name without what MLflow rejects.

    >>> mlflow_name("collapse_turn_sample/retrieval_accuracy@4/ci_low"), mlflow_name("/a//H(Z|X)")
    ('collapse_turn_sample/retrieval_accuracy_at_4_ci_low', 'a/H_Z_X_')
    """
    plain = re.sub(r"/+", "/", _INTERVAL.sub(r"_\1", name).replace("@", "_at_"))
    return _NOT_ALLOWED.sub("_", plain).strip("/")
