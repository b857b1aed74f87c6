"""What the checks of `preflight` are made of: a verdict, and the facts of a batch that verdicts rest on.

Thresholds are judgement, not theory, and stand by name beside the checks that use them. What is theory (chance levels,
intervals) is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.rollouts import RolloutBatch

Status = Literal["ok", "info", "warning", "critical", "skipped"]
# How many rows a check names as examples.
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Check:
    """One verdict.

    name: what was checked. status: "ok", "info", "warning", "critical", or "skipped".
    value, interval: the number it rests on, with its 95% interval, where there is one.
    reading: what it means, in words. action: what to do about it, "" where nothing is.
    rows: some rows of the batch that show it.
    """

    name: str
    status: Status
    reading: str
    value: float | None = None
    interval: tuple[float, float] | None = None
    action: str = ""
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the checks read.

    values, reasons: of `rollout_report`. matrix: of the policy before training, None where there is none.
    declared: a format was declared. unscored: why there is no matrix although there is a policy.
    """

    batch: RolloutBatch
    values: Mapping[str, float]
    reasons: Mapping[str, str] = field(default_factory=dict)
    matrix: LogLikelihoodMatrix | None = None
    declared: bool = False
    unscored: str | None = None

    def interval(self, name: str) -> tuple[float, float] | None:
        """The 95% interval of a value, where it has one."""
        low, high = self.values.get(f"{name}/ci_low"), self.values.get(f"{name}/ci_high")
        return None if low is None or high is None else (low, high)

    def skipped(self, check: str, *names: str) -> Check:
        """The check as skipped, with the reason why one of these values (or its family) is missing."""
        for name in names:
            for key in (name, name.split("/")[0]):
                if key in self.reasons:
                    return Check(name=check, status="skipped", reading=f"{self.reasons[key]}.")
        return Check(name=check, status="skipped", reading="nothing in the batch to judge it by.")

    def groups(self) -> dict[Hashable, list[int]]:
        """Rows of each prompt; environments that number their own prompts do not share groups."""
        found: dict[Hashable, list[int]] = {}
        for row, rollout in enumerate(self.batch):
            found.setdefault((rollout.environment, rollout.group), []).append(row)
        return found


def percent(share: float) -> str:
    """A share in words that never rounds to 0% or 100% what is not.

    >>> percent(0.125), percent(0.9999), percent(1.0)
    ('12%', 'more than 99%', '100%')
    """
    if 0 < share < 0.005:
        return "less than 1%"
    if 0.995 < share < 1:
        return "more than 99%"
    return f"{share:.0%}"


def rows_of(facts: Facts, wanted: Callable[[int], bool]) -> tuple[int, ...]:
    """The first rows for which that holds."""
    return tuple(row for row in range(len(facts.batch)) if wanted(row))[:SHOWN]
