"""The plots of docs/validity.md. matplotlib is needed here alone: pip install matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.validity.answers import PREFIX
from benchmarks.validity.estimators import NORMALIZATIONS, Bias
from benchmarks.validity.outcomes import DEPENDENCE_CHECKS, KINDS, Outcome
from collapsediag.findings.across_runs import Correlation
from collapsediag.findings.series import series_of

COLOURS = {
    "healthy": "#2a7f62",
    "template collapse": "#c0392b",
    "low-entropy collapse": "#7d3c98",
    "format loss": "#b9770e",
    "answer lost": "#2e6da4",
    "in between": "#888888",
}


def _figure(columns: int, width: float = 9.0, height: float = 3.2) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    # The same numbers must give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "collapsediag"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")
    return pyplot, figure, axes


def _save(pyplot: Any, figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def spearman(file: Path, found: Mapping[str, Mapping[tuple[str, str], Correlation]], names: Sequence[str]) -> None:
    """Rank correlations of run means with the ends of behaviours, with their intervals."""
    pyplot, figure, axes = _figure(len(found), height=4.2)
    for axis, (title, rows) in zip(axes, found.items(), strict=True):
        for y, name in enumerate(reversed(names)):
            row = rows.get((name, "mean"))
            if row is not None:
                axis.plot([row.low, row.high], [y, y], color="#555555", lw=1.2)
                axis.plot(row.rho, y, "o", color="#c0392b" if row.excludes_zero else "#999999")
        axis.axvline(0, color="black", lw=0.6)
        axis.set(xlim=(-1, 1), title=title, xlabel="Spearman's rho, 95% interval")
        axis.set_yticks(range(len(names)), [name.removeprefix(PREFIX) for name in reversed(names)])
    for axis in axes[1:]:
        axis.set_yticklabels([])
    _save(pyplot, figure, file)


def courses(file: Path, outcomes: Sequence[Outcome]) -> None:
    """What behaviour, retrieval, entropy and reward did in the runs of each scenario: median and range."""
    names = {
        "answers right": "behaviour/success",
        "reasoning reads the prompt": "behaviour/reading",
        "retrieval accuracy": f"{PREFIX}retrieval_accuracy",
        "H(Z|X), nats per token": f"{PREFIX}conditional_entropy_est",
        "reward": "reward/mean",
    }
    pyplot, figure, axes = _figure(len(names), width=12.0, height=2.8)
    for family, kind in (("healthy", "healthy"), ("template", "template collapse")):
        runs = [one for one in outcomes if one.family == family]
        for axis, name in zip(axes, names.values(), strict=True):
            held = [series_of(one.records, name) for one in runs]
            by_step: dict[int, list[float]] = {}
            for series in held:
                for step, value in zip(series.steps, series.values, strict=True):
                    by_step.setdefault(step, []).append(value)
            steps = sorted(by_step)
            low, middle, high = np.array([np.quantile(by_step[s], [0, 0.5, 1]) for s in steps]).T
            axis.fill_between(steps, low, high, color=COLOURS[kind], alpha=0.15, lw=0)
            axis.plot(steps, middle, color=COLOURS[kind], label=f"{family} ({len(runs)})")
    for axis, title in zip(axes, names, strict=True):
        axis.set(xlabel="step", ylim=(0, None))
        axis.set_title(title, fontsize=9)
    axes[0].legend(fontsize=7)
    _save(pyplot, figure, file)


def leads(file: Path, outcomes: Sequence[Outcome]) -> None:
    """The step of the alarm against the steps at which reading and success were lost."""
    pyplot, figure, axes = _figure(2, width=8.0, height=3.6)
    for axis, lost in zip(axes, ("reading", "success"), strict=True):
        for kind in KINDS:
            steps = [
                (alarm, loss)
                for one in outcomes
                if one.kind == kind
                and (alarm := one.alarm_step(DEPENDENCE_CHECKS)) is not None
                and (loss := one.lost_at(lost)) is not None
            ]
            if steps:
                jitter = np.random.default_rng(0).uniform(-0.6, 0.6, (len(steps), 2))
                axis.plot(*(np.array(steps) + jitter).T, "o", ms=4, alpha=0.7, color=COLOURS[kind], label=kind)
        axis.axline((0, 0), slope=1, color="black", lw=0.6)
        axis.set(xlabel="step of the alarm", ylabel=f"step at which {lost} was lost", xlim=(0, 60), ylim=(0, 60))
        axis.set_title("above the line the alarm came first", fontsize=9)
    axes[0].legend(fontsize=7)
    _save(pyplot, figure, file)


def biases(file: Path, found: Sequence[Bias]) -> None:
    """Estimates of MI over the truth, against P, for each length and normalisation."""
    lengths = sorted({one.length for one in found})
    pyplot, figure, axes = _figure(len(lengths), height=2.8)
    marks = {"sequence": ("o", "#2a7f62"), "token": ("x", "#2e6da4"), "token_mixture": ("s", "#c0392b")}
    for axis, length in zip(axes, lengths, strict=True):
        rows = [one for one in found if one.length == length and one.group_size == 8]
        for shift, name in enumerate(NORMALIZATIONS):
            mark, colour = marks[name]
            x = [one.n_contexts * 1.06**shift for one in rows]
            y, e = [one.mean[name] for one in rows], [one.std[name] for one in rows]
            axis.errorbar(x, y, yerr=e, fmt=mark, color=colour, label=name, capsize=2, mfc="none")
        axis.axhline(rows[0].truth, color="black", lw=0.8)
        axis.plot([4, 64], np.log([4, 64]), ":", color="#888888")
        axis.set(xscale="log", title=f"{length} tokens", xlabel="prompts P", ylim=(0, None))
        axis.set_xticks([4, 16, 64], ["4", "16", "64"])
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("nats per trace")
    axes[0].legend(fontsize=7)
    _save(pyplot, figure, file)
