"""docs/validity.md, written from the answers. Sentences that weigh the numbers stand in `verdict`."""

from __future__ import annotations

import os
import platform
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.validity import plots
from benchmarks.validity.answers import DIAGNOSTICS, PREFIX, Alarmed
from benchmarks.validity.behaviour import CHANCE
from benchmarks.validity.estimators import INTERVALS, NORMALIZATIONS, STATIONARY_THRESHOLDS
from benchmarks.validity.outcomes import DEPENDENCE_CHECKS, KEPT, KINDS, LASTING, LOST, Outcome
from benchmarks.validity.runs import FACTORS, N_GRID, N_SEEDS, SCORED_EVERY, SIGNALS, STEPS
from benchmarks.validity.study import BARE, RATIOS, SIZES, THRESHOLDS, Study
from benchmarks.validity.training import N_EVALUATION
from benchmarks.validity.verdict import verdict
from collapsediag.findings.across_runs import Correlation
from collapsediag.findings.settings import FindingSettings

PLOTS = "validity"
# Two scored steps of baseline, then three in a row.
FIRST_ALARM = 4 * SCORED_EVERY
READ_WHEN = (
    (
        "whether reasoning depends on the prompt at all",
        "`retrieval_accuracy`, its interval and p-value: 1/P at chance, whatever the policy",
    ),
    (
        "how much it says, in nats",
        "`mi_seq_estimate` while `mi_saturation` stays below 0.95; else score more prompts first",
    ),
    ("how much it says per token", "`mi_estimate`: the same over the length, so it falls when traces get longer"),
    ("how sure a trace is of its prompt, over one run", "`mi_zscore_ema`, unless MI is at its bound"),
    (
        "a curve beside RAGEN's own",
        '`naming="ragen"`; its mixture of token-averaged likelihoods is no mutual information: it may exceed I(X; Z)',
    ),
)


def write(study: Study, page: Path) -> None:
    """The page, and its plots in a folder beside it."""
    folder = page.parent / PLOTS
    plots.spearman(folder / "spearman.svg", study.correlations, DIAGNOSTICS)
    plots.courses(folder / "courses.svg", study.outcomes)
    plots.leads(folder / "leads.svg", study.outcomes)
    plots.biases(folder / "biases.svg", study.biases)
    sections = (_head, _runs, _silent, _across, _lead, _thresholds, _bare, _sizes, _biases, _coverage)
    page.write_text("\n\n".join(section(study) for section in sections) + "\n", encoding="utf-8")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def prose(text: str) -> str:
    """A paragraph, wrapped."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _name(diagnostic: str) -> str:
    return f"`{diagnostic.removeprefix(PREFIX)}`"


def _head(study: Study) -> str:
    made = prose(
        f"""Written by `python -m benchmarks.validity --out runs/validity --workers 2`; from finished runs again by
        `--analyse runs/validity` (plots: `pip install matplotlib`). {len(study.outcomes)} training runs on
        {platform.machine()}, {os.cpu_count()} CPU cores, one thread a run; seeds 0 to {N_SEEDS - 1}.
        The whole took 34 minutes on two cores that had other work as well, 26 minutes of CPU time."""
    )
    return f"# Do the numbers tell the truth?\n\n{made}\n\n{verdict(study)}"


def _runs(study: Study) -> str:
    families = list(dict.fromkeys(one.family for one in study.outcomes))
    counts = Counter((one.family, one.kind) for one in study.outcomes)
    rows: list[tuple[object, ...]] = [(kind, *(counts[family, kind] or "" for family in families)) for kind in KINDS]
    rows.append(("all", *(sum(counts[family, kind] for kind in KINDS) for family in families)))
    factors = "; ".join(f"`{name}` {', '.join(map(str, levels))}" for name, levels in FACTORS.items())
    signals = ", ".join(" with noise ".join(map(str, signal.values())) for signal in SIGNALS)
    task = prose(
        f"""A policy of 100,000 parameters is warmed up to read three colours off its prompt, name them in its
        reasoning, and name the door of the first one; then it is trained by a group-relative policy gradient, 16
        prompts a step. Nothing is scripted. `healthy` and `template` are the demo's scenarios, one run a seed,
        {STEPS["healthy"]} and {STEPS["template"]} steps. `grid` is {N_GRID} runs of {STEPS["grid"]} steps that deal out
        the reward ({signals}) and the settings ({factors}; `filter_rho` is filtering of the batch by reward variance).
        `squeezed` is hardly any signal and a penalty on entropy, {STEPS["squeezed"]} steps.
        Every {SCORED_EVERY}rd step is scored, with the monitor's default of 64 traces and 16 prompts."""
    )
    truth = prose(
        f"""What became of a run is read off its words, never off a likelihood: at each scored step the policy answers
        {N_EVALUATION} prompts that no update is made from. *Success* is the right door (chance {CHANCE["success"]}),
        *reading* the share of the prompt's colours that the reasoning names, less the share of another prompt's
        colours, *valid* the whole format. A behaviour is lost when it lies below {LOST} of its start from some step to
        the end, for {LASTING} measurements at least. Healthy runs are those that never leave {KEPT} of the start for
        {LASTING} measurements in a row, in any of the three. *Answer lost* is success lost while the reasoning still
        reads."""
    )
    return f"""## The runs

{task}

{truth}

{table(("what became of it", *families), rows)}

![Courses of the two scenarios]({PLOTS}/courses.svg)"""


def _silent(study: Study) -> str:
    rows = []
    for family, finds in (("healthy", ()), ("template", DEPENDENCE_CHECKS)):
        runs = [one for one in study.outcomes if one.family == family]
        found = sum(bool(one.said[-1] & set(finds)) for one in runs)
        silent = sum(not any(one.said) for one in runs)
        calm = sum(not one.said[-1] for one in runs)
        known = [step for one in runs if (step := one.alarm_step(DEPENDENCE_CHECKS)) is not None]
        when = f"{np.median(known):.0f} ({min(known)} to {max(known)})" if known else ""
        rows.append((family, len(runs), calm, silent, found if finds else "", when))
    others = Counter(check for one in study.outcomes if one.family == "healthy" for check in set().union(*one.said))
    said = ", ".join(f"`{check}` in {n}" for check, n in others.most_common()) or "none"
    heads = ("scenario", "runs", "silent at the end", "silent at every step", "collapse found", "known at step")
    return f"""## Healthy is silent, collapse is found

{table(heads, rows)}

Silent is no finding of warning or worse from any check. Alarms that came up on the way in healthy runs: {said}."""


def _across(study: Study) -> str:
    rows = []
    for name in DIAGNOSTICS:
        cells = [_rho(study.correlations[b].get((name, s))) for b in ("success", "reading") for s in ("mean", "last")]
        rows.append((_name(name), *cells))
    n = sum(one.family == "grid" for one in study.outcomes)
    heads = ("", "success: mean", "success: last", "reading: mean", "reading: last")
    return f"""## Which number goes with success across runs

Spearman's rho of each number's mean over a run, and of its last value, with the mean of the last five measurements of
the behaviour, over the {n} runs of the grid, with 95% intervals. Runs that lose their format are scored for as long as
there is reasoning to score. The RAGEN-2 paper reports +0.39 for the MI z-score and -0.11 to -0.14 for entropy.

{table(heads, rows)}

![Rank correlations]({PLOTS}/spearman.svg)"""


def _rho(row: Correlation | None) -> str:
    return "" if row is None else f"{row.rho:+.2f} [{row.low:+.2f}, {row.high:+.2f}]"


def _spread(leads: Sequence[int]) -> str:
    if not leads:
        return "none"
    low, middle, high = np.quantile(leads, [0.25, 0.5, 0.75])
    return f"{middle:+.0f} ({low:+.0f} to {high:+.0f})"


def _row(name: str, found: Alarmed) -> tuple[object, ...]:
    return (name, found.detected, found.false_runs, f"{found.false_per_thousand:.1f}", _spread(found.leads))


def _dated(outcomes: Sequence[Outcome]) -> list[int]:
    """Steps from the date of the finding, which is given afterwards, to the loss of reading."""
    found = []
    for one in outcomes:
        lost = one.lost_at("reading")
        if one.dated is not None and lost is not None:
            found.append(lost - one.dated)
    return found


def _lead(study: Study) -> str:
    heads = ("alarm", "collapsed runs found", "healthy runs alarmed", "per 1,000 scored steps", "lead, steps")
    rows = [
        _row("template or low-entropy collapse", study.findings),
        _row("`entropy_collapse`", study.entropy_alarm),
        _row("any check", study.any_alarm),
    ]
    before = sum(lost <= FIRST_ALARM for one in study.outcomes if (lost := one.lost_at("reading")) is not None)
    delay = prose(
        f"""To the loss of success, the lead of the dependence alarm is {_spread(study.to_success.leads)}. An alarm is
        known two scored steps after the one that it dates itself from, because three in a row are asked for; from that
        date on, the lead is {_spread(_dated(study.outcomes))}. With two scored steps of baseline none can be known
        before step {FIRST_ALARM}: {before} runs had lost their reading by then."""
    )
    return f"""## Lead and false alarms

Over all runs. Collapsed are those whose reading was lost while the format held. The lead is counted from the step at
which the alarm was first *known* to the step at which reading was lost: median and quartiles, negative where the alarm
came after. Per 1,000 scored steps counts the scored steps of healthy runs at which the alarm was up.

{table(heads, rows)}

{delay}

![Alarm against loss]({PLOTS}/leads.svg)"""


def _thresholds(study: Study) -> str:
    rows = []
    for setting in THRESHOLDS:
        for value, half in study.thresholds[setting].items():
            mark = " (set)" if value == getattr(FindingSettings(), setting) else ""
            both = [cell for side in (half.first, half.second) for cell in (side.detected, side.false_runs)]
            rows.append((f"`{setting}` {value}{mark}", *both, _spread(half.second.leads)))
    heads = ("threshold", "found, 1st half", "false, 1st half", "found, 2nd half", "false, 2nd half", "lead, 2nd half")
    noise = [
        (
            f"{one.accuracy:.2f}, {one.mi:.2f}",
            f"{one.n_contexts} x {one.group_size}",
            f"{one.at_chance:.0%}",
            *(f"{k} of {one.n_runs}" for k in one.false_runs.values()),
        )
        for one in study.stationary
    ]
    noise_heads = (
        "retrieval, MI", "prompts x traces", "steps at chance", *(f"at {low}" for low in STATIONARY_THRESHOLDS),
    )  # fmt: skip
    still = prose(
        """In these runs MI sits at its bound log P while they are healthy, so they cannot say what noise does below it.
        Policies that do not change at all can: runs of 20 scored steps, other prompts at each, and how many of the runs
        were ever said to have lost their dependence, at each `dependence_low`."""
    )
    return f"""## Thresholds, set on one half and checked on the other

Every other run of each family is in the first half. Found is of the runs that the check is about, false of the healthy
ones.

{table(heads, rows)}

{still}

{table(noise_heads, noise)}

Where dependence is plain, no threshold mistakes noise for a loss, because the interval must have left the start. Where
too few traces are scored to see it, its absence is all that can be said, whatever the threshold: more prompts help."""


def _bare(study: Study) -> str:
    rows = []
    for name in BARE:
        ratio, half = study.bare[name]
        rows.append((_name(name), ratio, half.first.detected, *_row("", half.second)[1:]))
    heads = (
        "falls below", "of its start", "found, 1st half", "found, 2nd half", "false, 2nd half", "per 1,000", "lead",
    )  # fmt: skip
    how = prose(
        f"""The barest alarm: one number, below a share of its first five values for three scored steps in a row. The
        share is that of {RATIOS[0]}, ..., {RATIOS[-1]} which in the first half alarms in the fewest healthy runs, among
        those finds most collapses, and among those finds them first; the other half checks it."""
    )
    return f"""## Each number on its own: gap or marginal, MI or entropy

{how}

{table(heads, rows)}"""


def _sizes(study: Study) -> str:
    rows = [_row(f"{p} x {g}", study.sizes[p, g]) for p, g in SIZES]
    heads = ("prompts x traces", "collapsed runs found", "healthy runs alarmed", "per 1,000 scored steps", "lead")
    return f"""## How few traces still see it

The saved matrices cut down to their first prompts and the first traces of each, and judged anew. Runs with four
rollouts a prompt hold four traces at most.

{table(heads, rows)}"""


def _biases(study: Study) -> str:
    rows = []
    for one in study.biases:
        cells = [f"{one.mean[name]:.2f} ± {one.std[name]:.2f}" for name in NORMALIZATIONS]
        rows.append((one.length, one.n_contexts, one.group_size, f"{one.truth:.2f}", *cells))
    heads = ("tokens T", "prompts P", "traces G", "truth", "sequence", "token x T", "token mixture x T")
    return f"""## Estimates against truth, and which number to read when

Policies small enough to be summed over, with 256 prompts; each step scores P of them, G traces each. Mean and standard
deviation of 200 such steps, in nats per trace, beside I(X; Z) over all 256 prompts.

{table(heads, rows)}

![MI against P]({PLOTS}/biases.svg)

Dotted: log P, which no estimate of sequences can pass. More traces narrow the spread; only more prompts lessen the
bias.

{table(("to know", "read"), READ_WHEN)}"""


def _coverage(study: Study) -> str:
    rows = [
        (one.n_contexts, one.group_size, *(f"{one.share[name]:.1%}" for name in INTERVALS)) for one in study.coverages
    ]
    off = {
        name: [f"{c.n_contexts} x {c.group_size}" for c in study.coverages if not 0.93 <= c.share[name] <= 0.97]
        for name in INTERVALS
    }
    outside = "; ".join(f"{_name(name)} at {', '.join(cells)}" for name, cells in off.items() if cells) or "none"
    n = study.coverages[0].n
    return f"""## What 95% intervals cover

{n} steps of such a policy for each P and G, each with other prompts, as in training; a share of {n} is good to about
{1.96 * np.sqrt(0.95 * 0.05 / n):.1%}. The truth is the mean over all of them, which for MI is what P prompts can show.

{table(("prompts P", "traces G", *(_name(name) for name in INTERVALS)), rows)}

A bootstrap over four groups cannot reach 95%: its percentiles cover 76 to 89% of the same steps. From 4 to 7 prompts
Student's t over the resampled spread is used instead; from 8 on, percentiles widened for few groups. With 2 or 3
prompts t would span everything, so the interval is the range of the groups, and covers less than it says; with one
there is none. Near a bound (MI at log P, retrieval at 1) the quantity is skewed, and 85 to 95% are covered.

Outside 93 to 97% lie {outside}."""
