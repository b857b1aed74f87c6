"""Checks of what training has to learn from: reward variance, all-equal groups, pass@k, single environments."""

from __future__ import annotations

import dataclasses
import math
import re
from urllib.parse import unquote

from collapsediag.findings.facts import Facts, Wording, fallen, of_episodes, risen, skipped, too_few
from collapsediag.findings.finding import Finding
from collapsediag.findings.series import Episodes, Series, baselines, low_episodes
from collapsediag.findings.words import measured

MIN_LARGE_K = 4
# What is followed in each environment, and what it is called.
ENVIRONMENT_NAMES = {
    "pass@1": "pass@1",
    "reward/mean": "mean reward",
    "tools/calls_per_rollout": "tool calls per rollout",
    "format/valid_fraction": "share of turns in the declared format",
    "entropy/token_mean": "token entropy",
    "entropy/sampled_mean": "token entropy",
}
_ENVIRONMENT = re.compile(r"^env/([^/]+)/")
_SATURATED = "Most rollouts solve their prompt: little signal is left because there is little left to learn from."


def reward_variance_cliff(facts: Facts) -> Finding:
    """The reward's std within prompts, which a group-relative gradient lives on, has broken down."""
    finding = fallen(
        facts,
        Wording(
            check="reward_variance_cliff",
            title="Reward-variance cliff",
            ok="Rewards differ within prompts as at the start",
            what="reward std within prompts",
            missing="no rewards within prompts",
            meaning="Rollouts of one prompt are all rewarded alike: regularisers steer the update, not the task.",
            next="Look at reward/all_fail_fraction and all_success_fraction: prompts that are too hard or too easy.",
        ),
        ("reward/within_group_std",),
        facts.settings.spread_low,
        facts.settings.spread_critical,
    )
    return _unless_saturated(facts, finding)


def all_equal_groups(facts: Facts) -> Finding:
    """Too many prompts whose rollouts are all rewarded alike, against what chance gives at this group size."""
    settings = facts.settings
    words = Wording(
        check="all_equal_groups",
        title="Most groups have equal rewards",
        ok="Enough groups have unequal rewards",
        what="share of groups with equal rewards",
        missing="no rewards within prompts",
        meaning="These prompts give no group-relative gradient.",
        next="Mix in prompts of other difficulty, or draw larger groups.",
    )
    series = facts.series("reward/all_equal_fraction")
    by_step = {r.step: r.values.get("reward/expected_all_equal_fraction", -1.0) for r in facts.records}
    expected_S = [by_step[step] for step in series.steps]
    if len(series) and min(expected_S[-settings.persistence :]) >= settings.all_equal_by_chance:
        said = f"Share of groups with equal rewards {measured(series.last, series.intervals[-1])}"
        return Finding(
            check=words.check, status="info", title="Groups are too small", metric=series.name, value=series.last,
            interval=series.intervals[-1], evidence=f"{said}, by chance alone {measured(expected_S[-1])}.",
            meaning="At this group size and success rate equal rewards are the rule, whatever the policy does.",
            next="Draw larger groups.",
        )  # fmt: skip
    grave = len(series) > 0 and series.last >= settings.all_equal_critical
    # Prompts of unequal difficulty exceed the share by chance, too; below that share nothing is wrong with the policy.
    finding = risen(
        facts, words, series.name, settings.all_equal_high, "critical" if grave else "warning", above=expected_S
    )
    if finding.status == "skipped":
        return finding
    chance = (
        f"by chance alone {measured(expected_S[-1])}"
        if expected_S[-1] >= 0
        else "by chance not known (no success labels)"
    )
    return _unless_saturated(facts, dataclasses.replace(finding, evidence=f"{finding.evidence[:-1]}; {chance}."))


def _unless_saturated(facts: Facts, finding: Finding) -> Finding:
    if not (finding.is_alarm and facts.is_saturated):
        return finding
    return dataclasses.replace(finding, status="info", meaning=_SATURATED, next="Mix in harder prompts.")


def pass_at_k_narrowing(facts: Facts) -> Finding:
    """pass@1 rises while pass@k at large k falls: the policy sharpens on what it could do, and loses the rest."""
    settings = facts.settings
    words = Wording(
        check="pass_at_k_narrowing",
        title="pass@k narrows",
        ok="pass@k at large k holds",
        what="pass@k",
        missing="no success labels",
        meaning="The policy gets surer of what it could already do, and loses solutions that it had.",
        next="Look at entropy and distinct answers; evaluate pass@k at large k on held-out prompts.",
    )
    labelled = [record for record in facts.records if "pass@1" in record.values]
    if not labelled:
        return skipped(words.check, words.title, words.missing)
    shared = set.intersection(*({name for name in r.values if re.fullmatch(r"pass@\d+", name)} for r in labelled))
    k = max(int(name[5:]) for name in shared)
    if k < MIN_LARGE_K:
        return skipped(words.check, words.title, f"no pass@k with k of {MIN_LARGE_K} or more")
    one, large = facts.series("pass@1"), facts.series(f"pass@{k}")
    if len(large) < settings.n_needed:
        return skipped(words.check, words.title, too_few(settings.n_needed))
    finding = of_episodes(dataclasses.replace(words, what=f"pass@{k}"), _narrowing(facts, one, large), "warning")
    start = baselines(one.values, settings)[-1] or 0.0
    gain = f"pass@1 {measured(one.last, one.intervals[-1])}, at the start {measured(start)}"
    return dataclasses.replace(finding, evidence=f"{finding.evidence[:-1]}; {gain}.")


def _narrowing(facts: Facts, one: Series, large: Series) -> Episodes:
    settings = facts.settings
    base_S, base_one_S = baselines(large.values, settings), baselines(one.values, settings)
    bad_S, clear_S = [], []
    for value, interval, base, first, base_one in zip(
        large.values, large.intervals, base_S, one.values, base_one_S, strict=True
    ):
        loss = (base or 0.0) - value if base is not None else 0.0
        gain = first - base_one if base_one is not None else 0.0
        sure = base is not None and (interval is None or interval[1] < base)
        bad_S.append(sure and loss >= settings.narrowing_loss and gain >= settings.narrowing_gain)
        clear_S.append(loss < settings.narrowing_loss / settings.release or gain <= 0)
    return Episodes.of(large, bad_S, clear_S, base_S, settings.persistence)


def environment_collapse(facts: Facts) -> Finding:
    """One environment breaks down while the mean over all environments hides it."""
    check, title = "environment_collapse", "One environment collapses"
    names = sorted({m[1] for record in facts.records for key in record.values if (m := _ENVIRONMENT.match(key))})
    if not names:
        return skipped(check, title, "a single environment")
    collapsed: list[tuple[str, str, Episodes, Series]] = []
    n_judged = 0
    for environment in names:
        for name, what in ENVIRONMENT_NAMES.items():
            own, pooled = _with_interval(facts, f"env/{environment}/", name), facts.series(name)
            if len(own) < facts.settings.n_needed:
                continue
            n_judged += 1
            low = low_episodes(own, facts.settings.environment_low, facts.settings)
            if low.holds and not low_episodes(pooled, facts.settings.environment_low, facts.settings).holds:
                collapsed.append((unquote(environment), what, low, pooled))
    if not n_judged:
        return skipped(check, title, too_few(facts.settings.n_needed))
    if not collapsed:
        return Finding(check=check, status="ok", title=f"All {len(names)} environments hold")
    environment, what, low, pooled = collapsed[0]
    mean = f" over all environments {measured(pooled.last)}" if len(pooled) else ""
    return Finding(
        check=check,
        status="warning",
        title=f"Environment {environment} collapses" + ("" if not mean else " under a stable mean"),
        metric=low.series.name,
        value=low.series.last,
        interval=low.series.intervals[-1],
        baseline=low.baseline,
        since_step=low.since_step,
        n_steps=low.n_steps,
        n_clear=low.n_clear,
        evidence=f"Its {what} {measured(low.series.last, low.series.intervals[-1])}, at the start "
        f"{measured(low.baseline or 0.0)}{';' if mean else ''}{mean}.",
        meaning="The other environments make up for it in the mean."
        + (
            f" Also: {', '.join(dict.fromkeys(f'{e} ({w})' for e, w, _, _ in collapsed[1:]))}." if collapsed[1:] else ""
        ),
        next="Read its rollouts, and look at its share of the batch.",
    )


def _with_interval(facts: Facts, prefix: str, name: str) -> Series:
    """A series of one environment; a mean reward, which has no interval of its own, gets two standard errors."""
    series = facts.series(prefix + name)
    if name != "reward/mean":
        return series
    by_step = {record.step: record.values for record in facts.records}
    intervals = []
    for step, value in zip(series.steps, series.values, strict=True):
        std, groups = by_step[step].get(f"{prefix}reward/std"), by_step[step].get(f"{prefix}n_groups")
        # Prompts, not rollouts, are independent.
        half = 2 * std / math.sqrt(groups) if std is not None and groups else None
        intervals.append(None if half is None else (value - half, value + half))
    return dataclasses.replace(series, intervals=tuple(intervals))
