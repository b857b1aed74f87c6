"""What the checks read, and the forms that most of their answers take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collapsediag.findings.finding import Finding, Status
from collapsediag.findings.regime import RegimeStep, regimes
from collapsediag.findings.series import Episodes, Series, high_episodes, low_episodes, series_of
from collapsediag.findings.settings import FindingSettings
from collapsediag.findings.words import measured
from collapsediag.record import Record
from collapsediag.turn_cuts import DRAWS

# How many traces a finding names.
SHOWN = 3


@dataclass(frozen=True)
class Facts:
    """A run as the checks see it: records that did not fail, in the order of their steps, one a step."""

    records: tuple[Record, ...]
    settings: FindingSettings

    def series(self, *names: str) -> Series:
        """The first of these numbers that the run holds."""
        return series_of(self.records, *names)

    def last(self, name: str) -> float | None:
        """A number as last measured."""
        found = self.series(name)
        return found.last if len(found) else None

    @cached_property
    def regimes(self) -> dict[str, list[RegimeStep]]:
        """Regimes of each draw of turns that was scored."""
        found = {draw: regimes(self.records, namespace=draw, settings=self.settings) for draw in DRAWS}
        return {draw: steps for draw, steps in found.items() if steps}

    @property
    def mi_is_low(self) -> bool:
        """Whether the reasoning of any draw has stopped to depend on the prompt."""
        return any(steps[-1].mi_is_low for steps in self.regimes.values())

    @property
    def entropy_is_low(self) -> bool:
        """Whether H(Z|X) of any draw, or the token entropy, is low."""
        tokens = self.series("entropy/token_mean", "entropy/sampled_mean")
        low = low_episodes(tokens, self.settings.token_entropy_low, self.settings).holds
        return low or any(steps[-1].entropy_is_low for steps in self.regimes.values())

    @cached_property
    def is_saturated(self) -> bool:
        """Whether the task is solved while the reasoning still depends on the prompt.

        Success alone is no excuse: a policy that has found a template that pays solves every prompt, too.
        """
        levels = {"reward/all_success_fraction": self.settings.saturated_high, "pass@1": self.settings.solved_high}
        return not self.mi_is_low and any(self._stays_above(name, level) for name, level in levels.items())

    def _stays_above(self, name: str, level: float) -> bool:
        series = self.series(name)
        recent = series.values[max(0, len(series) - self.settings.persistence) :]
        return bool(recent) and min(recent) >= level

    def traces(self, namespace: str) -> tuple[int, ...]:
        """Rows of the last scored step to read side by side: of different prompts, not retrieved as their own."""
        for record in reversed(self.records):
            rows = [(t.row, t.own, t.logp_P) for t in record.traces if t.namespace == namespace]
            matrix = record.matrices.get(namespace)
            if not rows and matrix is not None:
                own = matrix.own_N.tolist()
                rows = [(row, own[row], tuple(matrix.logp_NP[row].tolist())) for row in range(matrix.n_traces)]
            if rows:
                return _unlike_prompts(rows)
        return ()


def _unlike_prompts(rows: Sequence[tuple[int, int, tuple[float, ...]]]) -> tuple[int, ...]:
    chosen: dict[int, int] = {}
    for row, own, logp_P in rows:
        others = np.delete(np.asarray(logp_P, dtype=np.float64), own)
        # A tie counts as not retrieved: at total collapse every row is one.
        if own not in chosen and others.size and not logp_P[own] > np.nanmax(others):
            chosen[own] = row
    return tuple(sorted(chosen.values())[:SHOWN])


def skipped(check: str, title: str, missing: str, *, is_lookalike: bool = False) -> Finding:
    """The finding of a check that could not run."""
    return Finding(check=check, status="skipped", title=title, missing=missing, is_lookalike=is_lookalike)


def too_few(needed: int, how: str = "measured") -> str:
    """Words for a series that is too short."""
    return f"fewer than {needed} {how} steps"


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The words of a check.

    check, title: its name, and what was found. ok: the title while nothing was. what: the number, in words.
    missing: what is not there where the number is absent.
    """

    check: str
    title: str
    ok: str
    what: str
    missing: str
    meaning: str
    next: str
    is_lookalike: bool = False


def fallen(
    facts: Facts, words: Wording, names: Sequence[str], low: float, critical: float, *, floor: float = 0.0
) -> Finding:
    """The finding of a number that must not fall below a share of its baseline."""
    series, settings = facts.series(*names), facts.settings
    if not len(series):
        return skipped(words.check, words.title, words.missing, is_lookalike=words.is_lookalike)
    if len(series) < settings.n_needed:
        missing = too_few(settings.n_needed)
        return skipped(words.check, words.title, missing, is_lookalike=words.is_lookalike)
    episodes = low_episodes(series, low, settings, floor=floor)
    if episodes.baseline is None or episodes.baseline <= floor:
        missing = f"{words.what} {measured(episodes.baseline or 0.0)} at the start"
        return skipped(words.check, words.title, missing, is_lookalike=words.is_lookalike)
    grave = episodes.ratio is not None and episodes.ratio < critical
    return of_episodes(words, episodes, "critical" if grave else "warning")


def risen(
    facts: Facts, words: Wording, name: str, level: float, status: Status, *, above: Sequence[float] | None = None
) -> Finding:
    """The finding of a number that must not stay at or above a level; seen from the first measured step on."""
    series = facts.series(name)
    if not len(series):
        return skipped(words.check, words.title, words.missing, is_lookalike=words.is_lookalike)
    settings = facts.settings
    # What a bug or a limit does, it does from the first step: a run of one step is judged by that step.
    if len(series) < settings.persistence:
        settings = dataclasses.replace(settings, persistence=len(series))
    return of_episodes(words, high_episodes(series, level, settings, above=above), status)


def of_episodes(words: Wording, episodes: Episodes, status: Status) -> Finding:
    """The finding that a state gives: `status` while it holds, info once it is over, ok where it never was."""
    series, earlier = episodes.series, episodes.earlier
    title, said = words.title, status
    if not episodes.holds:
        title, said = words.ok, "ok"
        if earlier is not None:
            title, said = f"{words.title} from step {earlier[0]} to {earlier[1]}, over since", "info"
    start = f", at the start {measured(episodes.baseline)}" if episodes.baseline is not None else ""
    interval = series.intervals[-1]
    return Finding(
        check=words.check,
        status=said,
        title=title,
        metric=series.name,
        value=series.last,
        interval=interval,
        baseline=episodes.baseline,
        since_step=episodes.since_step,
        n_steps=episodes.n_steps,
        n_clear=episodes.n_clear,
        evidence=f"{words.what[:1].upper()}{words.what[1:]} {measured(series.last, interval)}{start}.",
        meaning=words.meaning if episodes.holds else "",
        next=words.next if episodes.holds else "",
        is_lookalike=words.is_lookalike,
    )
