"""Which diagnostics go with success across runs: rank correlations of every number with a chosen outcome.

Legend: R runs.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from collapsediag.errors import MetricError
from collapsediag.metrics.registry import canonical_name, find
from collapsediag.record import Record
from collapsediag.statistics import FloatArray, spearman

Summary = Literal["mean", "last", "minimum", "slope"]
SUMMARIES: tuple[Summary, ...] = ("mean", "last", "minimum", "slope")
# The outcome of a run is the mean of this many last measured steps: a single step is noise.
N_OUTCOME_STEPS = 5
# Below this a rank correlation must be nearly perfect before its interval leaves zero out.
FEW_RUNS = 8
# Two runs have no order to speak of.
FEWEST_RANKED = 3
# More names than this are no help in a message.
MAX_NAMED = 8
# Where no outcome is chosen: the first of these that all runs hold.
DEFAULT_OUTCOMES = ("pass@1", "reward/mean")
_NO_DIAGNOSTIC = re.compile(r"/ci_(low|high)$|^timing_s/|^collapse/failures$")
_NO_FAMILY = ("bookkeeping", "counts", "Input dependence: counts")


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Spearman's rho of one summary of one diagnostic with the outcome, over n runs, with its 95% interval."""

    metric: str
    summary: Summary
    rho: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Diagnostics across runs.

    outcome: name of the outcome. outcomes: its value for each run. correlations: strongest first.
    left_out: diagnostics without a correlation, with the reason. runs_left_out: runs without the outcome.
    """

    outcome: str
    outcomes: Mapping[str, float]
    correlations: tuple[Correlation, ...]
    left_out: Mapping[str, str]
    runs_left_out: tuple[str, ...] = ()

    @property
    def n_runs(self) -> int:
        """Runs that have an outcome."""
        return len(self.outcomes)

    @property
    def warning(self) -> str:
        """What a reader must know before believing a row; "" where nothing."""
        parts = []
        if self.n_runs < FEW_RUNS:
            parts.append(
                f"{self.n_runs} runs are too few: below {FEW_RUNS} only a nearly perfect order can be told from chance."
            )
        found = sum(c.excludes_zero for c in self.correlations)
        if self.correlations:
            parts.append(
                f"{len(self.correlations)} correlations were computed and {found} intervals leave zero out; about "
                f"{0.05 * len(self.correlations):.0f} would by chance."
            )
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "n_runs": self.n_runs, "warning": self.warning}


def compare_runs(runs: Mapping[str, Sequence[Record]], *, outcome: str | None = None) -> Comparison:
    """Spearman's rank correlation of every diagnostic with the outcome across runs.

    runs: records by name of the run. outcome: name of a number that the records hold; pass@1, else the mean reward,
        where none is given. Its value for a run is the mean of its last 5 measured steps.

    Each diagnostic is summarised by its mean, its last value, its minimum, and its slope (least squares, per step).
    Runs differ in what they hold, so n is given with each row. Correlation is no cause: runs that differ in length or
    task differ in everything. Raises MetricError where fewer than 2 runs have the outcome.

    >>> runs = {
    ...     f"run{i}": [Record(step=s, values={"reward/mean": i + s / 10, "length/mean": 50.0 - i}) for s in range(3)]
    ...     for i in range(4)
    ... }
    >>> best = compare_runs(runs, outcome="reward/mean").correlations[0]
    >>> best.metric, best.summary, best.rho, best.n
    ('length/mean', 'mean', -1.0, 4)
    """
    held = {run: _series(records) for run, records in runs.items()}
    name = outcome if outcome is not None else _default_outcome(held)
    outcomes = {run: _mean(s[name][1][-N_OUTCOME_STEPS:]) for run, s in held.items() if name in s}
    if len(outcomes) < 2:
        known = {key for series in held.values() for key in series if not _NO_DIAGNOSTIC.search(key)}
        raise MetricError(
            f"{len(outcomes)} of {len(runs)} runs hold {name!r}; a comparison needs 2, and {FEW_RUNS} to say "
            f"something. {_names_held(name, known)}"
        )
    found: list[Correlation] = []
    left_out: dict[str, str] = {}
    for metric in dict.fromkeys(key for run in outcomes for key in held[run] if _is_diagnostic(key) and key != name):
        for summary in SUMMARIES:
            pairs = [
                (value, outcomes[run])
                for run in outcomes
                if metric in held[run] and (value := summarise(*held[run][metric], summary)) is not None
            ]
            correlation = _correlation(metric, summary, pairs)
            if isinstance(correlation, str):
                left_out[f"{metric} ({summary})"] = correlation
            else:
                found.append(correlation)
    # By the end of the interval that is nearest to zero: three runs in order are not stronger than thirty nearly so.
    found.sort(key=lambda c: (-max(c.low, -c.high), -abs(c.rho)))
    return Comparison(
        outcome=name,
        outcomes=outcomes,
        correlations=tuple(found),
        left_out=left_out,
        runs_left_out=tuple(run for run in runs if run not in outcomes),
    )


def _names_held(name: str, known: set[str]) -> str:
    if len(known) <= MAX_NAMED:
        return f"The runs hold: {', '.join(sorted(known)) or 'no numbers'}."
    close = difflib.get_close_matches(name, sorted(known - {name}), n=MAX_NAMED)
    nearest = f"Nearest to it: {', '.join(close)}." if close else "None of their names is near to it."
    return f'{nearest} All {len(known)} names are in the "values" of a line of RUN/metrics.jsonl.'


def summarise(steps: Sequence[int], values: Sequence[float], summary: Summary) -> float | None:
    """One number for a series; None for a slope through fewer than 2 steps, or steeper than a float can say.

    >>> [summarise([0, 10, 20], [3.0, 2.0, 1.0], summary) for summary in SUMMARIES]
    [2.0, 1.0, 1.0, -0.1]
    """
    if summary == "mean":
        return _mean(values)
    if summary == "last":
        return float(values[-1])
    if summary == "minimum":
        return float(np.min(values))
    if len(steps) < 2:
        return None
    centred = np.asarray(steps, dtype=np.float64) - np.mean(steps)
    small, exponent = _scaled(values)
    try:
        return math.ldexp(centred @ small / (centred @ centred), exponent)
    except OverflowError:
        return None


def _mean(values: Sequence[float]) -> float:
    small, exponent = _scaled(values)
    # No mean is outside of its values, but its last digit may be: the largest float of all would overflow.
    return math.ldexp(np.clip(small.mean(), small.min(), small.max()), exponent)


def _scaled(values: Sequence[float]) -> tuple[FloatArray, int]:
    """The values over a power of two, so that no sum of them overflows, and its exponent; digits stay as they are."""
    _, exponents = np.frexp(values)
    exponent = int(exponents.max())
    return np.ldexp(values, -exponent), exponent


def _series(records: Sequence[Record]) -> dict[str, tuple[list[int], list[float]]]:
    latest = {record.step: record for record in records if record.status == "ok"}
    series: dict[str, tuple[list[int], list[float]]] = {}
    for step in sorted(latest):
        for name, value in latest[step].values.items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return series


def _default_outcome(held: Mapping[str, Mapping[str, Any]]) -> str:
    for name in DEFAULT_OUTCOMES:
        if all(name in series for series in held.values()):
            return name
    return DEFAULT_OUTCOMES[-1]


def _is_diagnostic(name: str) -> bool:
    if _NO_DIAGNOSTIC.search(name) or canonical_name(name).startswith("n_") or "/n_" in canonical_name(name):
        return False
    info = find(name)
    return info is None or info.family not in _NO_FAMILY


def _correlation(metric: str, summary: Summary, pairs: Sequence[tuple[float, float]]) -> Correlation | str:
    if len(pairs) < FEWEST_RANKED:
        return f"only {len(pairs)} runs hold it"
    x, y = zip(*pairs, strict=True)
    try:
        result = spearman(x, y)
    except MetricError as error:
        return str(error)
    return Correlation(metric=metric, summary=summary, rho=result.rho, low=result.low, high=result.high, n=result.n)
