"""Finished runs, what became of them by their behaviour, and what was said of them while they ran.

Legend: S scored steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import collapsediag as cd
from benchmarks.validity.behaviour import CHANCE, FloatArray, read_behaviour
from benchmarks.validity.runs import study_runs
from benchmarks.validity.training import ANSWERS_FILE
from collapsediag.demo import TrainingSettings
from collapsediag.record import Record
from collapsediag.run_folder import read_records

# A behaviour is lost below half of its start, for good and for this many measurements; kept while it never lies below
# four fifths for as many in a row. What is neither is called neither.
LOST, KEPT, LASTING = 0.5, 0.8, 3
# Below this share of different reasonings over all prompts one trace is written for everything.
FEW_DISTINCT = 0.5
DEPENDENCE_CHECKS = ("template_collapse", "low_entropy_collapse")
KINDS = ("healthy", "template collapse", "low-entropy collapse", "format loss", "answer lost", "in between")


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    steps, behaviour: what its policy did on the evaluation prompts at each scored step, see `behaviour.behaviour`.
    records: what the library recorded, with the behaviour added as `behaviour/NAME`.
    """

    name: str
    family: str
    settings: TrainingSettings
    folder: Path
    steps: tuple[int, ...]
    behaviour: dict[str, FloatArray]
    records: tuple[Record, ...]

    def share(self, name: str) -> FloatArray:
        """A behaviour as a share of its start, above what chance gives, [S]."""
        above = self.behaviour[name] - CHANCE.get(name, 0.0)
        shares: FloatArray = above / above[0]
        return shares

    def lost_at(self, name: str) -> int | None:
        """The step from which a behaviour lies below half of its start for good; None where it was not lost."""
        low_S = self.share(name) < LOST
        n_last = len(low_S) if low_S.all() else int(np.argmin(low_S[::-1]))
        return self.steps[len(low_S) - n_last] if n_last >= LASTING else None

    def keeps(self, name: str) -> bool:
        """Whether a behaviour never fell below four fifths of its start for three measurements in a row."""
        low_S = self.share(name) < KEPT
        return not any(low_S[i : i + LASTING].all() for i in range(len(low_S) - LASTING + 1))

    @property
    def kind(self) -> str:
        """What became of the run, by its behaviour alone: one of `KINDS`."""
        if self.lost_at("valid") is not None:
            return "format loss"
        if self.lost_at("reading") is not None:
            few = np.mean(self.behaviour["distinct"][-LASTING:]) < FEW_DISTINCT
            return "low-entropy collapse" if few else "template collapse"
        if self.lost_at("success") is not None:
            return "answer lost"
        return "healthy" if all(self.keeps(name) for name in ("success", "reading", "valid")) else "in between"

    @cached_property
    def said(self) -> tuple[frozenset[str], ...]:
        """The alarms that were up at each scored step, judged from the records up to that step alone, [S]."""
        return alarms(self.records, self.steps)

    @property
    def dated(self) -> int | None:
        """The step that the first alarm of a dependence check dates itself from, as it was said when it came up."""
        known = self.alarm_step(DEPENDENCE_CHECKS)
        if known is None:
            return None
        verdict = cd.judge([record for record in self.records if record.step <= known])
        return min(f.since_step for f in verdict.alarms if f.check in DEPENDENCE_CHECKS and f.since_step is not None)

    def alarm_step(self, checks: Collection[str]) -> int | None:
        """The scored step at which one of these checks first was an alarm, as it was known then."""
        return next((step for step, up in zip(self.steps, self.said, strict=True) if up & set(checks)), None)


def alarms(
    records: Sequence[Record], steps: Sequence[int], settings: cd.FindingSettings | None = None
) -> tuple[frozenset[str], ...]:
    """Names of the checks at warning or worse at each of `steps`, from the records up to it."""
    found = []
    for step in steps:
        verdict = cd.judge([record for record in records if record.step <= step], settings=settings)
        found.append(frozenset(finding.check for finding in verdict.alarms))
    return tuple(found)


def read_outcomes(out: Path) -> list[Outcome]:
    """The finished runs of a study, in the order of the study."""
    found = []
    for run in study_runs():
        folder = out / run.name
        if not (folder / ANSWERS_FILE).exists():
            continue
        steps, behaviour = read_behaviour(folder)
        extra = {step: {f"behaviour/{n}": float(v[i]) for n, v in behaviour.items()} for i, step in enumerate(steps)}
        records = tuple(
            dataclasses.replace(record, values={**record.values, **extra.get(record.step, {})})
            for record in read_records(folder)
        )
        found.append(Outcome(run.name, run.family, run.settings, folder, tuple(steps), behaviour, records))
    return found


def halves(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Every other run of each family: thresholds are set on the first half and checked on the second."""
    sides: tuple[list[Outcome], list[Outcome]] = ([], [])
    for family in dict.fromkeys(one.family for one in outcomes):
        for i, one in enumerate(o for o in outcomes if o.family == family):
            sides[i % 2].append(one)
    return sides
