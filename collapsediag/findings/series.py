"""One number over a run: its own baseline, and the states it enters and leaves.

Legend: S measured steps of one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collapsediag.findings.settings import FindingSettings
from collapsediag.record import Record


@dataclass(frozen=True)
class Series:
    """The steps at which a number was measured, its values there, and their intervals where there are any."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    intervals: tuple[tuple[float, float] | None, ...]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The value measured last."""
        return self.values[-1]


def series_of(records: Sequence[Record], *names: str) -> Series:
    """The first of `names` that the records hold, at the steps where they hold it; empty where none does.

    >>> from collapsediag.record import Record
    >>> series_of([Record(step=s, values={"b": s / 10}) for s in (1, 2)], "a", "b").values
    (0.1, 0.2)
    """
    for name in names:
        held = [record for record in records if name in record.values]
        if held:
            return Series(
                name=name,
                steps=tuple(record.step for record in held),
                values=tuple(record.values[name] for record in held),
                intervals=tuple(interval_of(record, name) for record in held),
            )
    return Series(name=names[0], steps=(), values=(), intervals=())


def interval_of(record: Record, name: str) -> tuple[float, float] | None:
    """The 95% interval of a value, where it has one."""
    low, high = record.values.get(f"{name}/ci_low"), record.values.get(f"{name}/ci_high")
    return None if low is None or high is None else (low, high)


def baseline_length(index: int, settings: FindingSettings) -> int:
    """How many first steps are the baseline of step `index`; 0 while there are too few.

    Depends on the past alone, so that what was said of a step is never unsaid by later ones.

    >>> [baseline_length(i, FindingSettings()) for i in range(10)]
    [0, 0, 2, 2, 2, 3, 4, 5, 5, 5]
    """
    if index < settings.min_baseline:
        return 0
    return max(settings.min_baseline, min(settings.n_baseline, index - settings.persistence + 1))


def baselines(values: Sequence[float], settings: FindingSettings) -> list[float | None]:
    """Baseline of each step: the mean of its first steps, None while there are too few."""
    lengths = [baseline_length(i, settings) for i in range(len(values))]
    return [sum(values[:n]) / n if n else None for n in lengths]


def sustained(bad_S: Sequence[bool], clear_S: Sequence[bool], persistence: int) -> list[int | None]:
    """For each step, the index since which a state holds, or None where it does not.

    The state is entered after `persistence` bad steps in a row and dates from the first of them; it is left after
    `persistence` clear steps in a row. A step that is neither keeps what there was and starts every count anew.

    >>> bad = [False, True, False, True, True, True, False, True, False, False, False]
    >>> sustained(bad, [not b for b in bad], 3)
    [None, None, None, None, None, 3, 3, 3, 3, 3, None]
    """
    since: int | None = None
    streak = 0
    found: list[int | None] = []
    for index, (bad, clear) in enumerate(zip(bad_S, clear_S, strict=True)):
        streak = streak + 1 if (bad if since is None else clear) else 0
        if streak >= persistence:
            since = index - streak + 1 if since is None else None
            streak = 0
        found.append(since)
    return found


def clear_at_the_end(since_S: Sequence[int | None], clear_S: Sequence[bool]) -> int:
    """How many of the last steps are clear while the state still holds: too few of them yet to leave it.

    >>> clear_at_the_end([None, 1, 1, 1], [True, False, True, True])
    2
    """
    n = 0
    while n < len(since_S) and since_S[-1 - n] is not None and clear_S[-1 - n]:
        n += 1
    return n


@dataclass(frozen=True)
class Episodes:
    """A state over a run: which steps show it, which are clear of it, and since when it holds at each of them."""

    series: Series
    bad_S: tuple[bool, ...]
    clear_S: tuple[bool, ...]
    since_S: tuple[int | None, ...]
    baseline_S: tuple[float | None, ...]

    @classmethod
    def of(
        cls,
        series: Series,
        bad_S: Sequence[bool],
        clear_S: Sequence[bool],
        baseline_S: Sequence[float | None],
        persistence: int,
    ) -> Episodes:
        """The state that `sustained` makes of bad and clear steps."""
        since_S = sustained(bad_S, clear_S, persistence)
        return cls(series, tuple(bad_S), tuple(clear_S), tuple(since_S), tuple(baseline_S))

    @property
    def holds(self) -> bool:
        """Whether the state holds at the last measured step."""
        return bool(self.since_S) and self.since_S[-1] is not None

    @property
    def since_step(self) -> int | None:
        """The step since which it holds now."""
        since = self.since_S[-1] if self.since_S else None
        return None if since is None else self.series.steps[since]

    @property
    def n_steps(self) -> int | None:
        """Measured steps since then."""
        since = self.since_S[-1] if self.since_S else None
        return None if since is None else len(self.series) - since

    @property
    def n_clear(self) -> int:
        """Steps at the end that are clear of it, while it still holds."""
        return clear_at_the_end(self.since_S, self.clear_S)

    @property
    def earlier(self) -> tuple[int, int] | None:
        """First and last step that show the latest episode that is over, None where there was none or one holds now.

        It is left after `persistence` clear steps, which are none of it.
        """
        if self.holds:
            return None
        for index in range(len(self.since_S) - 1, -1, -1):
            since = self.since_S[index]
            if since is not None and self.bad_S[index]:
                return self.series.steps[since], self.series.steps[index]
        return None

    @property
    def baseline(self) -> float | None:
        """The baseline that the last measured step is compared with."""
        return self.baseline_S[-1] if self.baseline_S else None

    @property
    def ratio(self) -> float | None:
        """Last value over its baseline."""
        base = self.baseline
        return None if base is None or base <= 0 else self.series.last / base


def low_episodes(series: Series, low: float, settings: FindingSettings, *, floor: float = 0.0) -> Episodes:
    """Where the series lies below `low` times its baseline, for good.

    floor: a baseline that is not above it gives no ratio.
    A step whose 95% interval still reaches the baseline is not low: too little was measured to say so.
    """
    base_S = baselines(series.values, settings)
    bad_S, clear_S = [], []
    for value, interval, base in zip(series.values, series.intervals, base_S, strict=True):
        judged = base is not None and base > floor
        ratio = value / base if base is not None and judged else 1.0
        unsure = interval is not None and base is not None and interval[1] >= base
        bad_S.append(judged and ratio < low and not unsure)
        clear_S.append(judged and ratio > settings.left_above(low))
    return Episodes.of(series, bad_S, clear_S, base_S, settings.persistence)


def high_episodes(
    series: Series, level: float, settings: FindingSettings, *, above: Sequence[float] | None = None
) -> Episodes:
    """Where the series lies at or above an absolute level, for good.

    above: [S] a reference that the lower end of the interval (the value, where it has none) must exceed as well.
    """
    reference_S = above if above is not None else [float("-inf")] * len(series)
    bad_S, clear_S = [], []
    for value, interval, reference in zip(series.values, series.intervals, reference_S, strict=True):
        sure = (interval[0] if interval is not None else value) > reference
        bad_S.append(value >= level and sure)
        clear_S.append(value < level / settings.release or not sure)
    base_S = baselines(series.values, settings)
    return Episodes.of(series, bad_S, clear_S, base_S, settings.persistence)
