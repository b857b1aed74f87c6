"""Weights & Biases: joins the run the trainer has opened, and costs neither side a row.

A trainer may log with or without explicit steps, and the library cannot know which. It therefore never passes `step=`:
its row rides on the row that is open, under an x-axis of its own (`collapse/step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from collapsediag._optional import require
from collapsediag.alert_states import AlertStates
from collapsediag.errors import SettingsError
from collapsediag.main_process import MainProcess
from collapsediag.matrix_image import matrix_caption, matrix_rgb
from collapsediag.record import Record
from collapsediag.tracker_values import TRACE_COLUMNS, namespaces_with_traces, trace_rows, tracker_values

STEP = "collapse/step"
MAX_TITLE = 63


class WandbSink:
    """Writes records into a W&B run.

    run: the run to write to; where not given, the one open in this process (`wandb.run`) at the time of writing, and
        nothing is written where there is none.
    mode: "join" writes into that run. "own_run" opens a second one beside it, for trainers that log a step after the
        next step's rollouts were measured, or that number their rows by something slower than the monitor's steps.
    traces: also send a table of traces per scored step. Off unless asked for: text leaves the machine.
    matrix: also send the matrix as an image.
    alerts: send W&B alerts when a state changes; see AlertStates.
    init: arguments of wandb.init for mode="own_run".

    A run it did not open is never finished. Raises MissingExtraError without wandb, or without Pillow where
    matrix=True.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        mode: Literal["join", "own_run"] = "join",
        traces: bool = False,
        matrix: bool = True,
        alerts: bool = True,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in ("join", "own_run"):
            raise SettingsError(f"mode={mode!r}: choose 'join' (the trainer's run) or 'own_run'.")
        if init is not None and mode == "join":
            raise SettingsError("init= is for mode='own_run'; in mode 'join' the trainer opens the run.")
        self._wandb = require("wandb", extra="wandb", feature="the W&B sink")
        if matrix:
            require("PIL.Image", extra="wandb", feature="the matrix image of the W&B sink (matrix=False does without)")
        self._process = MainProcess()
        self._given: Any = run
        self._own: Any = None
        self._mode, self._init = mode, dict(init or {})
        self._traces, self._matrix = traces, matrix
        self._states = AlertStates() if alerts else None
        self._said: dict[str, str] = {}
        self._run_id: str | None = None
        self._defined: set[str] = set()
        # Our last row that nobody has closed yet: (W&B's step, the record's step).
        self._open_row: tuple[int, int] | None = None

    def write(self, record: Record) -> None:
        """Send one record; without a run, or on another process, nothing happens."""
        run = self._run()
        if run is None:
            return
        row = {**tracker_values(record), **self._media(record), STEP: record.step}
        self._define(run, row)
        if self._own is not None:
            run.log(row, commit=True)
        else:
            self._ride(run, row, record.step)
        for alert in self._states.update(record) if self._states is not None else ():
            self.alert(alert.title, alert.text, level=alert.level)

    def alert(self, title: str, text: str, *, level: Literal["INFO", "WARN", "ERROR"] = "WARN") -> None:
        """Send an alert, unless it says what the last one of that title said: W&B itself would send both."""
        run = self._run()
        if run is None or self._said.get(title) == text:
            return
        self._said[title] = text
        run.alert(title=title[:MAX_TITLE], text=text, level=level)

    def close(self) -> None:
        """Finish the run if it was opened here; the trainer's stays open, and its finish sends the last row."""
        own, self._own = self._own, None
        self._open_row = None
        if own is not None and not self._process.is_forked():
            own.finish()

    def _run(self) -> Any:
        # Looked up late: a trainer often opens W&B after the sinks are made, and only on its main process. A forked
        # child inherits a run that still works, so the process is asked first.
        if not self._process.is_here():
            return None
        joined = self._given if self._given is not None else self._wandb.run
        if self._mode == "join":
            return joined
        if self._own is None:
            self._own = self._wandb.init(**self._init_arguments(joined))
        return self._own

    def _init_arguments(self, beside: Any) -> dict[str, Any]:
        arguments = {
            "job_type": "collapsediag",
            "reinit": "create_new",  # wandb.run stays the trainer's
            "settings": self._wandb.Settings(console="off"),  # the trainer's run captures the terminal already
        }
        if beside is not None:
            arguments |= {"project": beside.project, "entity": beside.entity, "group": beside.group or beside.id}
            arguments["name"] = f"{beside.name or beside.id}-collapsediag"
        return {**arguments, **self._init}

    def _define(self, run: Any, names: Iterable[str]) -> None:
        if self._run_id != run.id:
            self._run_id, self._defined, self._open_row = run.id, set(), None
        for name in names:
            if name in self._defined:
                continue
            # By exact name and before the first row: where patterns overlap (trainers define "*"), W&B picks one at
            # random.
            if name == STEP:
                run.define_metric(STEP, hidden=True)
            else:
                run.define_metric(name.replace("*", "_"), step_metric=STEP)
            self._defined.add(name)

    def _ride(self, run: Any, row: Mapping[str, Any], step: int) -> None:
        at = run.step
        if self._open_row is not None and self._open_row[0] == at and self._open_row[1] != step:
            # Nobody has closed our last row; a second uncommitted one would overwrite it.
            run.log({}, commit=True)
            at = run.step
        run.log(dict(row), commit=False)
        self._open_row = (at, step)

    def _media(self, record: Record) -> dict[str, Any]:
        media: dict[str, Any] = {}
        if self._matrix:
            for namespace, matrix in record.matrices.items():
                pixels = require("PIL.Image", extra="wandb", feature="the matrix image").fromarray(matrix_rgb(matrix))
                image = self._wandb.Image(pixels, caption=matrix_caption(matrix, record.step))
                media[f"collapse_{namespace}_sample/matrix"] = image
        if self._traces:
            for namespace in namespaces_with_traces(record):
                # A fresh table each time: an immutable one that is logged again is ignored, a mutable one is sent whole
                # again and again.
                table = self._wandb.Table(columns=list(TRACE_COLUMNS), data=trace_rows(record, namespace))
                media[f"collapse_{namespace}_sample/traces"] = table
        return media
