"""The questions of the study, each answered by numbers from finished runs.

Legend: R runs, S scored steps, P prompts, G traces of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import collapsediag as cd
from benchmarks.validity.outcomes import DEPENDENCE_CHECKS, Outcome, alarms
from collapsediag.findings.across_runs import Correlation, compare_runs
from collapsediag.findings.series import low_episodes, series_of
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.from_matrix import matrix_metrics
from collapsediag.record import Record
from collapsediag.run_folder import read_matrix
from collapsediag.statistics import EmaStd, wilson_interval

PREFIX = "collapse_first_turn_sample/"
COLLAPSED = ("template collapse", "low-entropy collapse")
# What is compared across runs, in the order of the table.
DIAGNOSTICS = (
    f"{PREFIX}mi_zscore_ema",
    f"{PREFIX}mi_zscore",
    f"{PREFIX}mi_zscore_marginal_ema",
    f"{PREFIX}mi_zscore_marginal",
    f"{PREFIX}mi_estimate",
    f"{PREFIX}mi_seq_estimate",
    f"{PREFIX}retrieval_above_chance",
    f"{PREFIX}conditional_entropy_est",
    f"{PREFIX}reasoning_entropy_est",
    "entropy/token_mean",
    "reward/mean",
    "reward/within_group_std",
    "format/valid_fraction",
    "length/mean",
)


def correlations(outcomes: Sequence[Outcome], outcome: str) -> dict[tuple[str, str], Correlation]:
    """Spearman of each diagnostic's mean and last value with the end of a behaviour, by (diagnostic, summary)."""
    compared = compare_runs({one.name: one.records for one in outcomes}, outcome=outcome)
    return {(c.metric, c.summary): c for c in compared.correlations if c.metric in DIAGNOSTICS}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """k of n, with its Wilson interval."""

    k: int
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """95%."""
        return wilson_interval(self.k, self.n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.k} of {self.n} [{low:.2f}, {high:.2f}]" if self.n else "none to count"


@dataclass(frozen=True, kw_only=True)
class Alarmed:
    """How an alarm does on runs.

    detected: collapsed runs in which it was up. false_runs: healthy runs in which it ever was.
    false_steps: of their scored steps, those at which it was up.
    leads: steps from the alarm to the loss, of each detected run; negative where it came after.
    """

    detected: Rate
    false_runs: Rate
    false_steps: Rate
    leads: tuple[int, ...]

    @property
    def false_per_thousand(self) -> float:
        """False alarms per 1,000 scored steps of healthy runs."""
        return 1000 * self.false_steps.k / max(1, self.false_steps.n)


def alarmed(
    outcomes: Sequence[Outcome],
    up: Callable[[Outcome], Sequence[bool]],
    *,
    kinds: Collection[str] = COLLAPSED,
    lost: str = "reading",
) -> Alarmed:
    """An alarm against behaviour; `up` says at which scored steps of a run it is up, [S].

    kinds: the runs that it should find. lost: the behaviour whose loss it should precede.
    """
    collapsed = [(one, list(up(one))) for one in outcomes if one.kind in kinds]
    healthy = [list(up(one)) for one in outcomes if one.kind == "healthy"]
    leads = []
    for one, up_S in collapsed:
        lost_at = one.lost_at(lost)
        if any(up_S) and lost_at is not None:
            leads.append(lost_at - one.steps[up_S.index(True)])
    return Alarmed(
        detected=Rate(k=sum(any(up_S) for _, up_S in collapsed), n=len(collapsed)),
        false_runs=Rate(k=sum(map(any, healthy)), n=len(healthy)),
        false_steps=Rate(k=sum(map(sum, healthy)), n=sum(map(len, healthy))),
        leads=tuple(leads),
    )


def by_checks(checks: Collection[str] | None = None) -> Callable[[Outcome], Sequence[bool]]:
    """The alarm of these checks, of any check where none are given."""
    return lambda one: [bool(said if checks is None else said & set(checks)) for said in one.said]


def by_settings(settings: cd.FindingSettings, checks: Collection[str]) -> Callable[[Outcome], Sequence[bool]]:
    """The alarm of these checks under other thresholds."""
    return lambda one: [bool(said & set(checks)) for said in alarms(one.records, one.steps, settings)]


def by_ratio(name: str, low: float) -> Callable[[Outcome], Sequence[bool]]:
    """A bare alarm: one number below `low` times its baseline for three scored steps in a row."""

    def up(one: Outcome) -> list[bool]:
        held = [record for record in one.records if record.step in one.steps]
        bare = [dataclasses.replace(r, values={name: r.values[name]} if name in r.values else {}) for r in held]
        series = series_of(bare, name)
        since = dict(zip(series.steps, low_episodes(series, low, cd.FindingSettings()).since_S, strict=True))
        return [since.get(step) is not None for step in one.steps]

    return up


def best_ratio(outcomes: Sequence[Outcome], name: str, candidates: Sequence[float]) -> tuple[float, Alarmed]:
    """The ratio that alarms in the fewest healthy runs, of these detects most, of these earliest, and is the lowest."""
    tried = [(low, alarmed(outcomes, by_ratio(name, low))) for low in candidates]

    def order(one: tuple[float, Alarmed]) -> tuple[float, ...]:
        low, found = one
        return (found.false_runs.k, -found.detected.k, -float(np.median(found.leads or [0])), low)

    return min(tried, key=order)


def fewer_traces(one: Outcome, n_contexts: int, group_size: int) -> list[bool]:
    """The dependence alarm at each scored step, had only so many prompts and traces of each been scored, [S]."""
    ema, records = EmaStd(), []
    for record in one.records:
        if record.step not in one.steps:
            continue
        values: Mapping[str, float] = {}
        if PREFIX + "retrieval_accuracy" in record.values:
            matrix = part_of(read_matrix(one.folder, record.step, "first_turn"), n_contexts, group_size)
            if matrix is not None:
                found = matrix_metrics(matrix, ema=ema, n_resamples=200, seed=one.settings.seed)
                values = {PREFIX + name: value for name, value in found.items() if np.isfinite(value)}
        records.append(Record(step=record.step, values=values))
    return [bool(said & set(DEPENDENCE_CHECKS)) for said in alarms(records, one.steps)]


def part_of(matrix: LogLikelihoodMatrix, n_contexts: int, group_size: int) -> LogLikelihoodMatrix | None:
    """The first traces of the first contexts that have any; None where fewer than two have."""
    held = list(dict.fromkeys(matrix.own_N[matrix.length_N > 0].tolist()))[:n_contexts]
    if len(held) < 2:
        return None
    rows = np.concatenate([np.flatnonzero((matrix.own_N == j) & (matrix.length_N > 0))[:group_size] for j in held])
    number = {column: i for i, column in enumerate(held)}
    return LogLikelihoodMatrix(
        logp_NP=matrix.logp_NP[np.ix_(rows, held)],
        length_N=matrix.length_N[rows],
        own_N=np.array([number[int(column)] for column in matrix.own_N[rows]]),
    )
