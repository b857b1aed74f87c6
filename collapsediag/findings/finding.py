"""What a judgement is made of: findings, and the verdict that holds them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from collapsediag.errors import SettingsError

Status = Literal["ok", "info", "warning", "critical", "skipped"]
# From harmless to grave; a skipped check says nothing.
RANK: dict[str, int] = {"skipped": 0, "ok": 1, "info": 2, "warning": 3, "critical": 4}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's answer about a run.

    check: name of the check. status: "ok", "info", "warning", "critical", or "skipped".
    title: what was found, in words, once it is found.
    metric, value, interval: the number it rests on, as last measured, with its 95% interval.
    baseline: what the same number was at the start of the run.
    since_step: first step of the unbroken series that shows it. n_steps: measured steps from there on.
    n_clear: of these, how many at the end no longer show it; a state is over only after `persistence` of them.
    traces: rows of the last scored step to read side by side.
    evidence: the numbers in words. meaning: what they mean. next: what to look at.
    missing: of a skipped check, what was not there.
    is_lookalike: a bug or a harmless state that looks like collapse; to be ruled out first.
    """

    check: str
    status: Status
    title: str
    metric: str | None = None
    value: float | None = None
    interval: tuple[float, float] | None = None
    baseline: float | None = None
    since_step: int | None = None
    n_steps: int | None = None
    n_clear: int = 0
    traces: tuple[int, ...] = ()
    evidence: str = ""
    meaning: str = ""
    next: str = ""
    missing: str = ""
    is_lookalike: bool = False

    @property
    def is_alarm(self) -> bool:
        """Warning or worse."""
        return RANK[self.status] >= RANK["warning"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all checks say about a run.

    findings: look-alikes first, then the others; every check has exactly one.
    n_steps: records judged. n_scored: those with a scored matrix. n_failed: records of steps that failed.
    last_step, last_scored_step: where the run and its scoring end.
    regime: the regime at the last scored step, None where none can be named.
    not_known: why scoring, though tried, does not say whether the reasoning depends on the prompt; "" where it does.
    """

    findings: tuple[Finding, ...]
    n_steps: int
    n_scored: int
    n_failed: int = 0
    last_step: int | None = None
    last_scored_step: int | None = None
    regime: str | None = None
    not_known: str = ""

    def __getitem__(self, check: str) -> Finding:
        """The finding of one check; KeyError with the names of all checks."""
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(f"no check {check!r}; there are {', '.join(f.check for f in self.findings)}")

    @property
    def status(self) -> Status:
        """The gravest status; "skipped" where no check could run."""
        return max((f.status for f in self.findings), key=lambda s: RANK[s], default="skipped")

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Findings of warning or worse: look-alikes first, then the gravest."""
        found = [f for f in self.findings if f.is_alarm]
        return tuple(sorted(found, key=lambda f: (not f.is_lookalike, -RANK[f.status])))

    @property
    def skipped(self) -> tuple[Finding, ...]:
        """Checks that could not run."""
        return tuple(f for f in self.findings if f.status == "skipped")

    def reaches(self, level: str) -> bool:
        """Whether any finding is as grave as `level` or graver."""
        if level not in ("info", "warning", "critical"):
            raise SettingsError(f"level is {level!r}; it is 'info', 'warning' or 'critical'.")
        return RANK[self.status] >= RANK[level]

    @property
    def headline(self) -> str:
        """The verdict in a paragraph; see `words.headline`."""
        from collapsediag.findings.words import headline

        return headline(self)

    def __str__(self) -> str:
        """The verdict as the lines of a terminal."""
        from collapsediag.findings.words import verdict_lines

        return "\n".join(verdict_lines(self))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "status": self.status, "headline": self.headline}
