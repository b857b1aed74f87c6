"""What one step has collected before it becomes a record."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.record import Record, TraceSample
from collapsediag.statistics import EmaStd


@dataclass
class StepDraft:
    """What one step has collected so far; see Record for the fields of the same name."""

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

    def record(self, step: int) -> Record:
        """The record of a step that went well."""
        return Record(
            step=step,
            values=self.values,
            not_measured=self.not_measured,
            dropped=dict(self.dropped),
            notes=tuple(self.notes),
            time=time.time(),
            matrices=self.matrices,
            traces=tuple(self.traces),
        )
