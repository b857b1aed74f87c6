"""Trackio: numbers into the run that is open."""

from __future__ import annotations

from typing import Any

from collapsediag._optional import require
from collapsediag.main_process import MainProcess
from collapsediag.record import Record
from collapsediag.tracker_values import tracker_values


class TrackioSink:
    """Writes the numbers of each record to a Trackio run.

    run: the run to write to; where not given, the one open at the time of writing, and nothing is written where there
        is none.

    The run is never finished. Raises MissingExtraError without trackio.
    """

    def __init__(self, run: Any = None) -> None:
        self._context = require("trackio.context_vars", extra="trackio", feature="the Trackio sink")
        self._given = run
        self._process = MainProcess()

    def write(self, record: Record) -> None:
        """Send the numbers of one record at its step; Trackio takes steps in any order."""
        if not self._process.is_here():
            return
        run = self._given if self._given is not None else self._context.current_run.get()
        if run is not None:
            run.log(tracker_values(record), step=record.step)

    def close(self) -> None:
        """Nothing to close: the run belongs to whoever opened it."""
