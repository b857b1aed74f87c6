"""Which curves belong on one chart, as data; trackers that take a layout are given this one.

Legend: a chart in the "matrix" scope is drawn once per draw of turns, one in the "rollouts" scope once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from collapsediag.metrics.registry import find
from collapsediag.tracker_values import tracker_name
from collapsediag.turn_cuts import DRAWS


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that are read together, all in one unit.

    title: without the unit, which the registry knows. names: registry names.
    has_band: one name, drawn with its 95% interval.
    """

    title: str
    names: tuple[str, ...]
    has_band: bool = False

    def heading(self) -> str:
        """Title, and the unit where it says more than the title."""
        info = find(self.names[0])
        says_nothing = info is not None and info.unit in ("ratio", "count", self.title.lower())
        return self.title if info is None or says_nothing else f"{self.title} ({info.unit})"


@dataclass(frozen=True, kw_only=True)
class Category:
    """A heading with its charts, whose names are tracker names."""

    title: str
    charts: tuple[Chart, ...]


# Drawn as series, not as constants: P changes from step to step, and chance and log P with it.
MATRIX_CHARTS = (
    Chart(title="Retrieval accuracy and chance", names=("retrieval_accuracy", "retrieval_chance_level")),
    Chart(title="Retrieval accuracy, 95% interval", names=("retrieval_accuracy",), has_band=True),
    Chart(title="I(X; Z) and its bound log P", names=("mi_seq_estimate", "mi_upper_bound")),
    Chart(title="Entropies: I(X; Z) is the gap", names=("reasoning_entropy_est", "conditional_entropy_est")),
    Chart(title="z-score of I(X; Z)", names=("mi_zscore_ema",)),
)
BUDGET_CHART = Chart(
    title="Retrieval among K+1 and chance", names=("retrieval_accuracy_subset", "retrieval_subset_chance_level")
)
ROLLOUT_CATEGORIES = (
    Category(
        title="Rewards",
        charts=(
            Chart(title="Reward", names=("reward/mean",)),
            Chart(title="Reward std within prompts", names=("reward/within_group_std",)),
            Chart(
                title="Prompts whose rewards are all equal",
                names=("reward/all_equal_fraction", "reward/expected_all_equal_fraction"),
            ),
            Chart(title="Spread of reward variance", names=("reward/variance_spread",)),
        ),
    ),
    Category(
        title="Format, length, diversity",
        charts=(
            Chart(
                title="In the declared format, cut off", names=("format/valid_fraction", "length/truncated_fraction")
            ),
            Chart(title="Completion length: p10, median, p90", names=("length/p10", "length/p50", "length/p90")),
            Chart(title="Distinct answers per prompt", names=("diversity/distinct_answers_per_group",)),
            Chart(title="Identical completions within a prompt", names=("diversity/identical_completion_fraction",)),
            Chart(title="Tool calls per rollout", names=("tools/calls_per_rollout",)),
            Chart(title="Token entropy", names=("entropy/token_mean",)),
        ),
    ),
    Category(
        title="Cost of these diagnostics",
        charts=(Chart(title="Wall time", names=("timing_s/collapse_step", "timing_s/collapse_score")),),
    ),
)


def layout(names: Iterable[str]) -> list[Category]:
    """Categories for a run that logs `names` (tracker names): only charts that have something to show.

    >>> [c.title for c in layout(["collapse/reward/mean", "collapse_turn_sample/mi_zscore_ema"])]
    ['Input dependence, all turns', 'Rewards']
    """
    known = set(names)
    categories = [
        _present(f"Input dependence, {words}", (*MATRIX_CHARTS, BUDGET_CHART), f"collapse_{namespace}_sample/", known)
        for namespace, words in DRAWS.items()
    ]
    categories += [_present(category.title, category.charts, "", known) for category in ROLLOUT_CATEGORIES]
    return [category for category in categories if category.charts]


def _present(title: str, charts: tuple[Chart, ...], prefix: str, known: set[str]) -> Category:
    renamed = (
        Chart(
            title=chart.title,
            names=tuple(name for name in (tracker_name(prefix + n) for n in chart.names) if name in known),
            has_band=chart.has_band,
        )
        for chart in charts
    )
    kept = (chart for chart in renamed if chart.names and (not chart.has_band or f"{chart.names[0]}/ci_low" in known))
    return Category(title=title, charts=tuple(kept))
