"""One batch of rollouts looked at before training: what would go wrong, while it is still cheap to fix.

    report = preflight(batch)
    for check in report.checks:
        print(check.status, check.name, check.reading, check.action)

Nothing here can prove that training will work. It finds what is known to spoil it: groups that mix prompts, samples
that share a seed, outputs cut off or unreadable, rewards without signal, prompts paired with the wrong outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from collapsediag.errors import RolloutError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.answers import Extractor
from collapsediag.metrics.from_rollouts import rollout_report
from collapsediag.preflight.data import DATA_CHECKS, retrieval
from collapsediag.preflight.signal import SIGNAL_CHECKS
from collapsediag.preflight.types import Check, Facts, Status
from collapsediag.rollouts import RolloutBatch

__all__ = ["Check", "PreflightReport", "Status", "preflight"]

FailOn = Literal["info", "warning", "critical"]
# From harmless to grave. A skipped check is no verdict.
SEVERITY: tuple[Status, ...] = ("ok", "info", "warning", "critical")


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The verdicts on one batch.

    checks: all of them, in the order they should be read: what spoils the others comes first.
    values: the numbers behind them. not_measured: what is missing, with the reason.
    notes: what a reader of the numbers must know.
    """

    step: int
    n_rollouts: int
    n_groups: int
    checks: tuple[Check, ...]
    values: Mapping[str, float] = field(default_factory=dict)
    not_measured: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """The gravest status of the checks that ran; "skipped" where none did."""
        ran = [check.status for check in self.checks if check.status != "skipped"]
        return max(ran, key=SEVERITY.index) if ran else "skipped"

    @property
    def n_ran(self) -> int:
        """Checks that gave a verdict."""
        return sum(check.status != "skipped" for check in self.checks)

    @property
    def n_skipped(self) -> int:
        """Checks that lacked something."""
        return len(self.checks) - self.n_ran

    def reaches(self, severity: FailOn) -> bool:
        """A check is at or above this severity.

        Raises SettingsError for a severity that does not exist.
        """
        if severity not in SEVERITY[1:]:
            raise SettingsError(f"severity {severity!r} does not exist; choose from {', '.join(SEVERITY[1:])}.")
        return any(
            check.status != "skipped" and SEVERITY.index(check.status) >= SEVERITY.index(severity)
            for check in self.checks
        )

    @property
    def headline(self) -> str:
        """One line: what was found, how many checks ran, how many were skipped and for want of what."""
        grave = [check for check in self.checks if check.status in ("critical", "warning")]
        grave.sort(key=lambda check: -SEVERITY.index(check.status))
        counts = f"{self.n_ran} checks ran, {self.n_skipped} skipped"
        if self.n_skipped:
            counts += f" ({', '.join(check.name for check in self.checks if check.status == 'skipped')})"
        noted = ", ".join(check.name for check in self.checks if check.status == "info")
        quiet = "no warning" + (f"; worth knowing: {noted}" if noted else "")
        found = "; ".join(f"{check.status}: {check.name}" for check in grave)
        return f"{found or quiet}. {counts}."


def preflight(
    batch: RolloutBatch,
    *,
    matrix: LogLikelihoodMatrix | None = None,
    unscored: str | None = None,
    format: Any = None,
    answer: Extractor = "auto",
    success_threshold: float | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> PreflightReport:
    """Check one batch of rollouts. Nothing is changed, nothing is printed.

    matrix: its outputs scored under the untrained policy. Retrieval at chance then means that prompts and outputs do
        not belong together, for nothing has been trained that could have collapsed.
    unscored: why there is no matrix although there is a policy, for the check that lacks it.
    format, answer, success_threshold, tokenizer, seed: as in `rollout_metrics`.
    Raises RolloutError for an empty batch, MetricError for a reward that is no number.

    >>> batch = RolloutBatch.from_lists(
    ...     step=0, prompts=["a", "a", "b", "b"], completions=["1", "2", "3", "4"], rewards=[1.0, 0.0, 0.0, 1.0])
    >>> report = preflight(batch)
    >>> report.status, report.reaches("warning")
    ('info', False)
    """
    if not len(batch):
        raise RolloutError(f"the batch{f' of {batch.source}' if batch.source else ''} has no rollout to check.")
    measured = rollout_report(
        batch, format=format, answer=answer, success_threshold=success_threshold, tokenizer=tokenizer, seed=seed
    )
    facts = Facts(
        batch=batch,
        values=measured.values,
        reasons=measured.not_measured,
        matrix=matrix,
        unscored=unscored,
        declared=format is not None,
    )
    return PreflightReport(
        step=batch.step,
        n_rollouts=len(batch),
        n_groups=len(facts.groups()),
        checks=tuple(check(facts) for check in (*DATA_CHECKS, *SIGNAL_CHECKS, retrieval)),
        values=measured.values,
        not_measured=measured.not_measured,
        notes=(*_notes(batch), *measured.notes),
    )


def _notes(batch: RolloutBatch) -> tuple[str, ...]:
    notes = [f"the source left out {n} rows: {reason.replace('_', ' ')}" for reason, n in batch.dropped.items() if n]
    if batch.approximate_ids:
        notes.append("token ids were made by re-tokenising text: log-likelihoods are near, not equal, to the trainer's")
    return tuple(notes)
