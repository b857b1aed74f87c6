"""Which numbers share a chart of the page, and what each chart's title says is bad, as data.

`{draw}` in a name stands for the prefix of a draw of turns, `pass@*` for every k that the run has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

DRAW = "{draw}"
_PASS = re.compile(r"^pass@(\d+)$")
# More lines than this in one chart are a tangle: the smallest and largest k tell the story.
MAX_PASS_LINES = 4

Style = Literal["main", "second", "third", "fourth", "reference"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve. label: at its end. style: colour and dash. low, high: names of a band around it."""

    name: str
    label: str
    style: Style = "main"
    low: str | None = None
    high: str | None = None


@dataclass(frozen=True, kw_only=True)
class PageChart:
    """One chart of the page.

    title: the number, and after the colon what is bad. note: how to read it.
    reach: values the axis always shows. gap: names of two lines between which the area is shaded.
    n_overlaid: of several runs in one page, how many of the lines are drawn of each run.
    is_wide: takes the width of two.
    """

    key: str
    section: Literal["dependence", "signal", "behaviour"]
    title: str
    note: str
    unit: str
    lines: tuple[Line, ...]
    reach: tuple[float, ...] = (0.0,)
    gap: tuple[str, str] | None = None
    n_overlaid: int = 1
    is_wide: bool = False


def _with_interval(name: str, label: str, style: Style = "main") -> Line:
    return Line(name=name, label=label, style=style, low=f"{name}/ci_low", high=f"{name}/ci_high")


CHARTS = (
    PageChart(
        key="retrieval",
        section="dependence",
        title="Retrieval of the own prompt: bad when its band reaches chance",
        note="Share of traces whose own prompt makes them likelier than any other prompt does. Band: 95% interval.",
        unit="fraction",
        lines=(
            _with_interval("{draw}retrieval_accuracy", "retrieval"),
            Line(name="{draw}retrieval_chance_level", label="chance", style="reference"),
        ),
        reach=(0.0, 1.0),
    ),
    PageChart(
        key="subset",
        section="dependence",
        title="Retrieval among K+1 prompts: bad when its band reaches chance",
        note="Scored on a budget: the own prompt against K others. Band: 95% interval.",
        unit="fraction",
        lines=(
            _with_interval("{draw}retrieval_accuracy_subset", "retrieval"),
            Line(name="{draw}retrieval_subset_chance_level", label="chance", style="reference"),
        ),
        reach=(0.0, 1.0),
    ),
    PageChart(
        key="mi",
        section="dependence",
        title="Mutual information I(X; Z): bad when it falls to 0",
        note="What a trace says about its prompt. It cannot exceed log P: read its height against that bound.",
        unit="nats/trace",
        lines=(
            _with_interval("{draw}mi_seq_estimate", "I(X; Z)"),
            Line(name="{draw}mi_upper_bound", label="log P", style="reference"),
        ),
    ),
    PageChart(
        key="zscore",
        section="dependence",
        title="z-score of I(X; Z): bad when it falls to 0",
        note="I(X; Z) over the moving average of the gap's standard deviation: comparable between runs.",
        unit="ratio",
        lines=(Line(name="{draw}mi_zscore_ema", label="z"),),
    ),
    PageChart(
        key="entropies",
        section="dependence",
        title="Entropy of the reasoning: bad when the gap closes, worst when both lines fall",
        note="H(Z) less H(Z|X) is I(X; Z) per token, the shaded gap: one axis holds all three.",
        unit="nats/token",
        lines=(
            _with_interval("{draw}reasoning_entropy_est", "H(Z)", "third"),
            _with_interval("{draw}conditional_entropy_est", "H(Z|X)"),
        ),
        gap=("{draw}reasoning_entropy_est", "{draw}conditional_entropy_est"),
        n_overlaid=2,
        is_wide=True,
    ),
    PageChart(
        key="reward",
        section="signal",
        title="Reward: a rise alone proves nothing",
        note="A template that pays is rewarded as well.",
        unit="reward",
        lines=(_with_interval("reward/mean", "mean"),),
    ),
    PageChart(
        key="reward_std",
        section="signal",
        title="Reward spread within prompts: bad when it falls to 0",
        note="Mean standard deviation among the rollouts of a prompt: all that a group-relative gradient has.",
        unit="reward",
        lines=(
            _with_interval("reward/within_group_std", "within"),
            Line(name="reward/between_group_std", label="between", style="reference"),
        ),
    ),
    PageChart(
        key="all_equal",
        section="signal",
        title="Prompts without signal: bad when their share nears 1",
        note="Rewards of all rollouts equal: solved by all, solved by none. Dashed: what chance alone gives.",
        unit="fraction",
        lines=(
            _with_interval("reward/all_equal_fraction", "all equal"),
            Line(name="reward/all_fail_fraction", label="none solve", style="second"),
            Line(name="reward/all_success_fraction", label="all solve", style="third"),
            Line(name="reward/expected_all_equal_fraction", label="by chance", style="reference"),
        ),
        reach=(0.0, 1.0),
    ),
    PageChart(
        key="variance_spread",
        section="signal",
        title="Spread of reward variance: bad when it falls",
        note="Std over mean of the prompts' reward variances. At 1.2 filtering prompts by it helped, at 0.33 it hurt.",
        unit="ratio",
        lines=(_with_interval("reward/variance_spread", "spread"),),
    ),
    PageChart(
        key="pass",
        section="signal",
        is_wide=True,
        title="pass@k: bad when pass@1 rises and a large k falls",
        note="Chance that at least one of k rollouts solves the prompt.",
        unit="fraction",
        lines=(Line(name="pass@*", label="pass@*"),),
        reach=(0.0, 1.0),
    ),
    PageChart(
        key="answers",
        section="behaviour",
        title="Distinct answers per prompt: bad when it nears 1",
        note="How many different final answers the rollouts of a prompt give. Few are right where it is solved.",
        unit="count",
        lines=(_with_interval("diversity/distinct_answers_per_group", "answers"),),
    ),
    PageChart(
        key="identical",
        section="behaviour",
        title="Identical completions: bad when they multiply",
        note="Share of completions equal to another one: of their own prompt, of any prompt.",
        unit="fraction",
        lines=(
            _with_interval("diversity/identical_completion_fraction", "own prompt"),
            Line(name="diversity/identical_completion_fraction_across_groups", label="any prompt", style="second"),
        ),
        reach=(0.0, 0.1),
    ),
    PageChart(
        key="token_entropy",
        section="behaviour",
        is_wide=True,
        title="Token entropy: bad when it falls to 0",
        note="Of the next-token distribution. The top 20% of tokens, where the text forks, lie above their line.",
        unit="nats/token",
        lines=(
            Line(name="entropy/token_mean", label="mean"),
            Line(name="entropy/token_p80", label="top 20%", style="second"),
            Line(name="entropy/sampled_mean", label="sampled", style="reference"),
        ),
    ),
    PageChart(
        key="format",
        section="behaviour",
        title="Outputs in the declared format: bad when they fall",
        note="Can stay at 1 throughout a collapse.",
        unit="fraction",
        lines=(_with_interval("format/valid_fraction", "valid"),),
        reach=(0.0, 1.0),
    ),
    PageChart(
        key="length",
        section="behaviour",
        title="Completion length: bad when it shrinks to a stub",
        note="Mean; band from the 10th to the 90th percentile.",
        unit="tokens",
        lines=(Line(name="length/mean", label="mean", low="length/p10", high="length/p90"),),
    ),
    PageChart(
        key="truncated",
        section="behaviour",
        title="Turns cut off: bad when they rise",
        note="What is cut off looks like loss of format and of reward.",
        unit="fraction",
        lines=(_with_interval("length/truncated_fraction", "cut off"),),
        reach=(0.0, 0.1),
    ),
    PageChart(
        key="tool_calls",
        section="behaviour",
        title="Tool calls per rollout: bad when they fall to 0",
        note="Mean number of calls, failed ones included.",
        unit="count",
        lines=(_with_interval("tools/calls_per_rollout", "calls"),),
    ),
    PageChart(
        key="tool_errors",
        section="behaviour",
        title="Tool calls that fail: bad when they rise",
        note="Failed, malformed, and repeated calls as shares of all calls.",
        unit="fraction",
        lines=(
            _with_interval("tools/error_rate", "failed"),
            Line(name="tools/malformed_rate", label="malformed", style="second"),
            Line(name="tools/duplicate_call_fraction", label="repeated", style="fourth"),
        ),
        reach=(0.0, 0.1),
    ),
)
# Drawn only where the run has it: whole matrices have no subset.
_OPTIONAL = ("subset",)


def charts_json(columns: Iterable[str]) -> list[dict[str, Any]]:
    """The charts as plain JSON, the lines of pass@k written out for the run's own k.

    >>> pass_at_k = [chart for chart in charts_json(["pass@1", "pass@8"]) if chart["key"] == "pass"]
    >>> [line["name"] for line in pass_at_k[0]["lines"]]
    ['pass@1', 'pass@8']
    """
    known = list(columns)
    shown = [chart for chart in CHARTS if chart.key not in _OPTIONAL or _holds(chart, known)]
    return [{**asdict(chart), "lines": [asdict(line) for line in _lines(chart, known)]} for chart in shown]


def chart_names(draws: Iterable[str]) -> list[str]:
    """Every number that a chart draws as a line, written out for these draws of turns."""
    names = []
    for chart in CHARTS:
        for line in chart.lines:
            if line.name.startswith(DRAW):
                names += [line.name.replace(DRAW, f"collapse_{draw}_sample/") for draw in draws]
            else:
                names.append(line.name.replace("*", "k"))
    return names


def _holds(chart: PageChart, columns: Iterable[str]) -> bool:
    endings = tuple(line.name.removeprefix(DRAW) for line in chart.lines)
    return any(column.endswith(endings) for column in columns)


def _lines(chart: PageChart, columns: Iterable[str]) -> tuple[Line, ...]:
    if chart.key != "pass":
        return chart.lines
    ks = sorted(int(match[1]) for column in columns if (match := _PASS.match(column)))
    if len(ks) > MAX_PASS_LINES:
        ks = [ks[0], ks[len(ks) // 3], ks[2 * len(ks) // 3], ks[-1]]
    styles: tuple[Style, ...] = ("main", "second", "third", "fourth")
    found = [_with_interval(f"pass@{k}", f"k = {k}", style) for k, style in zip(ks, styles, strict=False)]
    return tuple(found) or (Line(name="pass@k", label="pass@k"),)
