"""Which of four regimes a run is in, step by step, relative to its own start and to chance.

    |                | MI high            | MI low              |
    | H(Z|X) high    | diverse reasoning  | template collapse   |
    | H(Z|X) low     | compressed reasoning | low-entropy collapse |

Legend: S scored steps, P distinct contexts of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from collapsediag.findings.series import baseline_length, clear_at_the_end, interval_of, sustained
from collapsediag.findings.settings import FindingSettings
from collapsediag.record import Record

RegimeName = Literal["diverse reasoning", "template collapse", "compressed reasoning", "low-entropy collapse"]

# At total collapse every row is one tie: accuracy, its interval and chance are the same 1/P, up to a rounding each.
CHANCE_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """How much the reasoning of one scored step depends on its prompt.

    name: of the retrieval number: that of a whole matrix, or of one scored on a budget.
    accuracy, chance, interval: of retrieval. p_value: of the permutation test, None where it could not be significant.
    mi, bound: nats per trace; None in a record without them. entropy: H(Z|X), nats per token.
    """

    step: int
    name: str
    accuracy: float
    chance: float
    interval: tuple[float, float] | None
    p_value: float | None
    mi: float | None
    bound: float | None
    saturation: float | None
    entropy: float | None
    entropy_interval: tuple[float, float] | None

    @property
    def above_chance(self) -> float:
        """Retrieval above chance, as a share of what is possible at this P: 0 at chance, 1 when perfect."""
        return (self.accuracy - self.chance) / (1 - self.chance)

    def may_reach(self, base: Sequence[Dependence]) -> bool:
        """Whether the interval of retrieval still holds the mean of these steps, as a share of what is possible."""
        if self.interval is None or not base:
            return False
        return (self.interval[1] - self.chance) / (1 - self.chance) >= sum(p.above_chance for p in base) / len(base)

    def is_at_chance(self, alpha: float) -> bool:
        """Whether retrieval cannot be told from chance."""
        low = self.interval[0] if self.interval is not None else self.accuracy
        if min(low, self.accuracy) <= self.chance + CHANCE_SLACK:
            return True
        return self.p_value is not None and self.p_value > alpha


def dependences(records: Sequence[Record], namespace: str) -> list[Dependence]:
    """The scored steps of one draw of turns."""
    found = (_dependence(record, f"collapse_{namespace}_sample/") for record in records)
    return [one for one in found if one is not None]


def _dependence(record: Record, prefix: str) -> Dependence | None:
    values = record.values
    for accuracy, chance in (
        ("retrieval_accuracy", "retrieval_chance_level"),
        ("retrieval_accuracy_subset", "retrieval_subset_chance_level"),
    ):
        if prefix + accuracy in values and values.get(prefix + chance, 1.0) < 1.0:
            break
    else:
        return None
    n_contexts = values.get(prefix + "n_contexts", 1 / values[prefix + chance])
    p_value = values.get(prefix + "retrieval_p_value")
    return Dependence(
        step=record.step,
        name=accuracy,
        accuracy=values[prefix + accuracy],
        chance=values[prefix + chance],
        interval=interval_of(record, prefix + accuracy),
        # 1/P! is the smallest p-value there is: with 2 or 3 contexts none can be significant.
        p_value=None if n_contexts < 4 else p_value,
        mi=values.get(prefix + "mi_seq_estimate"),
        bound=values.get(prefix + "mi_upper_bound"),
        saturation=values.get(prefix + "mi_saturation"),
        entropy=values.get(prefix + "conditional_entropy_est"),
        entropy_interval=interval_of(record, prefix + "conditional_entropy_est"),
    )


@dataclass(frozen=True, kw_only=True)
class RegimeStep:
    """The regime as it was known at one scored step.

    name: None while fewer than `persistence` steps were scored. since_step: the first step of the series that shows it;
        a regime is named only some steps later.
    n_clear: steps up to this one that no longer show it: too few yet to leave it.
    at_chance: retrieval cannot be told from chance at this very step.
    retrieval_ratio, mi_ratio, entropy_ratio: to the baseline, in what is comparable; None where there is none.
    """

    step: int
    name: RegimeName | None
    since_step: int | None
    n_clear: int
    at_chance: bool
    mi_is_low: bool
    entropy_is_low: bool
    retrieval_ratio: float | None
    mi_ratio: float | None
    entropy_ratio: float | None


def regimes(
    records: Sequence[Record], *, namespace: str = "first_turn", settings: FindingSettings | None = None
) -> list[RegimeStep]:
    """The regime at each scored step.

    What is said of a step depends on it and the steps before it alone, so a longer run never changes it.

    MI is low where retrieval is at chance, or where MI and retrieval above chance are both below `dependence_low` times
    the baseline and the interval of retrieval no longer reaches its own. P may change between steps: retrieval above
    chance is compared as a share of what is possible at each P, and MI after cutting both sides at the smallest bound
    log P among them, because no more could have been seen.

    >>> from collapsediag.metrics.from_matrix import matrix_metrics
    >>> from collapsediag.testing import planted
    >>> steps = ["healthy"] * 5 + ["template"] * 3
    >>> records = [
    ...     Record(step=s, values={
    ...         f"collapse_first_turn_sample/{k}": v
    ...         for k, v in matrix_metrics(planted(r, seed=s).matrix, n_resamples=100).items()})
    ...     for s, r in enumerate(steps)
    ... ]
    >>> [(r.name, r.since_step) for r in regimes(records)][-2:]
    [('diverse reasoning', 0), ('template collapse', 5)]
    """
    chosen = settings or FindingSettings()
    points = dependences(records, namespace)
    compared = [_comparison(points, i, chosen) for i in range(len(points))]
    mi_clear_S, entropy_clear_S = [c.mi_is_clear for c in compared], [c.entropy_is_clear for c in compared]
    mi_S = sustained([c.mi_is_low for c in compared], mi_clear_S, chosen.persistence)
    entropy_S = sustained([c.entropy_is_low for c in compared], entropy_clear_S, chosen.persistence)
    found: list[RegimeStep] = []
    for i, (point, one) in enumerate(zip(points, compared, strict=True)):
        name = _name(mi_S[i], entropy_S[i]) if i >= chosen.persistence - 1 else None
        before = found[-1] if found else None
        state_S, clear_S = (mi_S, mi_clear_S) if mi_S[i] is not None else (entropy_S, entropy_clear_S)
        since = before.since_step if before and before.name == name else _start(points, mi_S, entropy_S, i, before)
        found.append(
            RegimeStep(
                step=point.step,
                name=name,
                since_step=None if name is None else since,
                n_clear=clear_at_the_end(state_S[: i + 1], clear_S[: i + 1]),
                at_chance=one.at_chance,
                mi_is_low=mi_S[i] is not None,
                entropy_is_low=entropy_S[i] is not None,
                retrieval_ratio=one.retrieval,
                mi_ratio=one.mi,
                entropy_ratio=one.entropy,
            )
        )
    return found


def _name(mi_since: int | None, entropy_since: int | None) -> RegimeName:
    if mi_since is None:
        return "diverse reasoning" if entropy_since is None else "compressed reasoning"
    return "template collapse" if entropy_since is None else "low-entropy collapse"


def _start(
    points: Sequence[Dependence],
    mi_S: Sequence[int | None],
    entropy_S: Sequence[int | None],
    index: int,
    before: RegimeStep | None,
) -> int:
    """The step from which a new name dates: where the state began that was entered, or here if one was left."""
    if before is None or before.name is None:
        return points[0].step
    for since_S in (mi_S, entropy_S):
        since = since_S[index]
        # Both states entered at once began at once: each after the same number of steps in a row.
        if since is not None and since_S[index - 1] is None:
            return points[since].step
    return points[index].step


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """One scored step against its baseline."""

    at_chance: bool
    retrieval: float | None
    mi: float | None
    entropy: float | None
    mi_is_low: bool
    mi_is_clear: bool
    entropy_is_low: bool
    entropy_is_clear: bool


def _comparison(points: Sequence[Dependence], index: int, settings: FindingSettings) -> _Comparison:
    point, base = points[index], points[: baseline_length(index, settings)]
    retrieval = _ratio(point.above_chance, [p.above_chance for p in base])
    mi = _mi_ratio(point, base)
    known = [p.entropy for p in base if p.entropy is not None]
    entropy = _ratio(point.entropy, known)
    at_chance = point.is_at_chance(settings.alpha)
    interval = point.entropy_interval
    unsure = interval is not None and bool(known) and interval[1] >= sum(known) / len(known)
    dependence_low = _both_below(retrieval, mi, settings.dependence_low) and not point.may_reach(base)
    low = settings.conditional_entropy_low
    return _Comparison(
        at_chance=at_chance,
        retrieval=retrieval,
        mi=mi,
        entropy=entropy,
        mi_is_low=at_chance or dependence_low,
        mi_is_clear=not at_chance and not _both_below(retrieval, mi, settings.left_above(settings.dependence_low)),
        entropy_is_low=entropy is not None and entropy < low and not unsure,
        entropy_is_clear=entropy is not None and entropy > settings.left_above(low),
    )


def _both_below(retrieval: float | None, mi: float | None, low: float) -> bool:
    # Both, because each alone falls for other reasons: retrieval with near-equal prompts, MI with shorter traces.
    ratios = [ratio for ratio in (retrieval, mi) if ratio is not None]
    return bool(ratios) and all(ratio < low for ratio in ratios)


def _ratio(value: float | None, base: Sequence[float]) -> float | None:
    mean = sum(base) / len(base) if base else 0.0
    return value / mean if value is not None and mean > 0 else None


def _mi_ratio(point: Dependence, base: Sequence[Dependence]) -> float | None:
    """MI over its baseline, both cut at the smallest bound: with fewer prompts no more than that can be seen."""
    bounds = [p.bound for p in (point, *base)]
    values = [p.mi for p in (point, *base)]
    if None in bounds or None in values:
        return None
    bound = min(b for b in bounds if b is not None)
    cut = [min(v, bound) for v in values if v is not None]
    return _ratio(cut[0], cut[1:])
