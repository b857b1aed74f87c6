"""What one step has collected before it becomes a record."""

from __future__ import annotations

import math
import reprlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from collapsediag.errors import CollapsediagError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.plain_text import error_text
from collapsediag.record import MAX_STEP, Record, TraceSample, step_number
from collapsediag.rollouts import RolloutBatch
from collapsediag.statistics import EmaStd

UNDEFINED = "not defined on this matrix: no spread between traces to measure against, or too few groups for an interval"


def settled_step(given: Any, batch: Any, last_step: int | None) -> tuple[int, str | None]:
    """The number that a step is recorded under, and what was wrong with the one given, None where nothing was.

    A step that is no whole number must not cost what was measured in it: its batch knows a number too. Where that one
    has been recorded already the next is taken, for of a step that is recorded twice only the last record holds.

    >>> settled_step(4.0, None, None)
    (4, None)
    >>> settled_step("4", None, 7)[0]
    8
    """
    number = step_number(given)
    if number is not None:
        return number, None
    number = step_number(batch.step) if isinstance(batch, RolloutBatch) else None
    origin = "the step of its batch"
    if number is None or (last_step is not None and number <= last_step):
        number, origin = 0 if last_step is None else min(last_step + 1, MAX_STEP), "the next one"
    return number, (
        f"the step given was {_shown(given)} ({type(given).__name__}), which is no whole number up to 2**53; it "
        f"is recorded as step {number}, {origin}. Give the trainer's step number: monitor.observe(step, batch)"
    )


def _shown(given: Any) -> str:
    try:
        return reprlib.repr(given)
    except ValueError:  # an integer of thousands of digits
        return "a number"


@dataclass
class StepDraft:
    """What one step has collected so far; see Record for the fields of the same name.

    doubts: what was wrong with the step before it was measured; part of the notes.
    """

    step: int
    doubts: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    matrices: dict[str, LogLikelihoodMatrix] = field(default_factory=dict)
    traces: list[TraceSample] = field(default_factory=list)
    # Moving averages as they are after this step; a step that fails half-way must not have moved them.
    ema: dict[str, EmaStd] = field(default_factory=dict)
    n_cells: int = 0

    @property
    def scored(self) -> bool:
        """Whether the policy was scored."""
        return self.n_cells > 0

    def take(self, prefix: str, values: Mapping[str, float]) -> None:
        """Take in what a matrix gave; what it does not define is not measured."""
        for name, value in values.items():
            if math.isfinite(value):
                self.values[f"{prefix}/{name}"] = value
            else:
                self.not_measured[f"{prefix}/{name}"] = UNDEFINED

    def record(self) -> Record:
        """The record of a step that went well."""
        return Record(
            step=self.step,
            values=self.values,
            not_measured=self.not_measured,
            dropped=dict(self.dropped),
            notes=(*self.doubts, *self.notes),
            time=time.time(),
            matrices=self.matrices,
            traces=tuple(self.traces),
        )

    def failed(self, error: Exception, n_failures: int) -> Record:
        """The record of a step that failed: the reason, and no value that could look healthy."""
        kind = "" if isinstance(error, CollapsediagError) else f"{type(error).__name__}: "
        return Record(
            step=self.step,
            values={"collapse/failures": float(n_failures)},
            status="failed",
            reason=kind + error_text(error),
            notes=self.doubts,
            time=time.time(),
        )
