"""All answers of the study in one place, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import collapsediag as cd
from benchmarks.validity import answers, estimators
from benchmarks.validity.answers import PREFIX, Alarmed
from benchmarks.validity.outcomes import DEPENDENCE_CHECKS, Outcome, halves, read_outcomes
from collapsediag.findings.across_runs import Correlation

# A finding's threshold, the values tried for it, and what it should find: checks, kinds of runs, behaviour lost.
THRESHOLDS = {
    "dependence_low": ((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), DEPENDENCE_CHECKS, answers.COLLAPSED, "reading"),
    "format_low": ((0.5, 0.6, 0.7, 0.8, 0.9), ("format_loss",), ("format loss",), "valid"),
    "token_entropy_low": ((0.3, 0.5, 0.7, 0.8, 0.9), ("entropy_collapse",), answers.COLLAPSED, "reading"),
}
# Numbers that may alarm on their own, by falling.
BARE = (
    f"{PREFIX}mi_zscore_ema",
    f"{PREFIX}mi_zscore_marginal_ema",
    f"{PREFIX}mi_seq_estimate",
    f"{PREFIX}retrieval_above_chance",
    f"{PREFIX}conditional_entropy_est",
    "entropy/token_mean",
    "reward/mean",
    "reward/within_group_std",
)
RATIOS = tuple(round(0.1 * i, 1) for i in range(1, 10))
SIZES = ((16, 4), (16, 2), (16, 1), (8, 4), (8, 2), (8, 1), (4, 4), (4, 2), (4, 1))


@dataclass(frozen=True, kw_only=True)
class Half:
    """How an alarm does on the half that a threshold was set on, and on the other."""

    first: Alarmed
    second: Alarmed


@dataclass(frozen=True, kw_only=True)
class Study:
    """outcomes: finished runs. The rest answers one question each; see `benchmarks.validity.page`."""

    outcomes: list[Outcome]
    correlations: dict[str, dict[tuple[str, str], Correlation]]
    findings: Alarmed
    any_alarm: Alarmed
    entropy_alarm: Alarmed
    to_success: Alarmed
    thresholds: dict[str, dict[float, Half]]
    bare: dict[str, tuple[float, Half]]
    sizes: dict[tuple[int, int], Alarmed]
    biases: list[estimators.Bias]
    coverages: list[estimators.Coverage]
    stationary: list[estimators.Stationary]


def analyse(out: Path) -> Study:
    """Everything that the page says, from the finished runs in a folder."""
    outcomes = read_outcomes(out)
    grid = [one for one in outcomes if one.family == "grid"]
    return Study(
        outcomes=outcomes,
        correlations={name: answers.correlations(grid, f"behaviour/{name}") for name in ("success", "reading")},
        findings=answers.alarmed(outcomes, answers.by_checks(DEPENDENCE_CHECKS)),
        any_alarm=answers.alarmed(outcomes, answers.by_checks()),
        entropy_alarm=answers.alarmed(outcomes, answers.by_checks(("entropy_collapse",))),
        to_success=answers.alarmed(outcomes, answers.by_checks(DEPENDENCE_CHECKS), lost="success"),
        thresholds={name: _scan(outcomes, name) for name in THRESHOLDS},
        bare={name: _bare(outcomes, name) for name in BARE},
        sizes={
            size: answers.alarmed(outcomes, lambda one, size=size: answers.fewer_traces(one, *size))  # type: ignore[misc]
            for size in SIZES
        },
        biases=estimators.biases(),
        coverages=estimators.coverages(),
        stationary=estimators.stationary(),
    )


def _scan(outcomes: Sequence[Outcome], name: str) -> dict[float, Half]:
    candidates, checks, kinds, lost = THRESHOLDS[name]
    found = {}
    for value in candidates:
        up = answers.by_settings(cd.FindingSettings(**{name: value}), checks)  # type: ignore[arg-type]
        first, second = (answers.alarmed(side, up, kinds=kinds, lost=lost) for side in halves(outcomes))
        found[value] = Half(first=first, second=second)
    return found


def _bare(outcomes: Sequence[Outcome], name: str) -> tuple[float, Half]:
    first, second = halves(outcomes)
    low, on_first = answers.best_ratio(first, name, RATIOS)
    return low, Half(first=on_first, second=answers.alarmed(second, answers.by_ratio(name, low)))
