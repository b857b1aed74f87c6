"""Checks of what looks like collapse and is not: bugs of the set-up, limits of the sampler, and success."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from collapsediag.findings.facts import Facts, Wording, risen, skipped
from collapsediag.findings.finding import RANK, Finding, Status
from collapsediag.findings.regime import dependences
from collapsediag.findings.words import counted, measured
from collapsediag.turn_cuts import DRAWS

# The note of a record whose groups hold several prompts; see `pairs`.
SPLIT_GROUPS = re.compile(r"^(\d+) of (\d+) groups have more than one distinct context")


_CHANCE = Wording(
    check="chance_from_the_start",
    title="Retrieval never above chance",
    ok="Retrieval was above chance at the start",
    what="retrieval accuracy",
    missing="no scored matrix",
    meaning="Prompts and completions may be paired wrongly, the scored model be another than the policy that wrote the "
    "rollouts, traces be too few or too short to tell, or the policy never have looked at its prompt.",
    next="Read a prompt with its completion; score with the weights that sampled, and with more prompts and traces.",
    is_lookalike=True,
)


def chance_from_the_start(facts: Facts) -> Finding:
    """Retrieval at chance from the first scored step on: wrongly paired, or scored with another model, most likely."""
    found = [_chance_from_the_start(facts, draw) for draw in facts.regimes]
    if not found:
        return skipped(_CHANCE.check, _CHANCE.title, _CHANCE.missing, is_lookalike=True)
    return max(found, key=lambda finding: RANK[finding.status])


def _chance_from_the_start(facts: Facts, draw: str) -> Finding:
    steps, point = facts.regimes[draw], dependences(facts.records, draw)[-1]
    leading = next((i for i, step in enumerate(steps) if not step.at_chance), len(steps))
    still, long = leading == len(steps), leading >= facts.settings.persistence
    status: Status = ("critical" if long else "warning") if still else ("info" if long else "ok")
    where = "" if draw == "first_turn" else f" ({DRAWS[draw]})"
    early = f"; at chance in the first {counted(leading, 'scored step')}" if status == "info" else ""
    title = {"ok": _CHANCE.ok, "info": "Retrieval was at chance at first"}.get(status, _CHANCE.title)
    return Finding(
        check=_CHANCE.check,
        status=status,
        title=title + where,
        metric=f"collapse_{draw}_sample/{point.name}",
        value=point.accuracy,
        interval=point.interval,
        since_step=steps[0].step if still else None,
        n_steps=leading if still else None,
        traces=facts.traces(draw) if still else (),
        evidence=f"Retrieval accuracy {measured(point.accuracy, point.interval)}, chance {measured(point.chance)}"
        f"{early}.",
        meaning=_CHANCE.meaning if still else "",
        next=_CHANCE.next if still else "",
        is_lookalike=True,
    )


def identical_completions(facts: Facts) -> Finding:
    """Byte-identical completions within groups: a shared seed, where entropy says that they should differ."""
    words = Wording(
        check="identical_completions",
        title="Completions of one prompt are byte-identical",
        ok="Completions of one prompt differ",
        what="share of completions equal to another of their prompt",
        missing="no outputs to compare",
        meaning="Look for a seed shared by the samples of a prompt, temperature 0, or a cache: groups hold copies.",
        next="Sample one prompt twice by hand.",
        is_lookalike=True,
    )
    settings = facts.settings
    length = facts.series("length/mean", "length_words/mean")
    if len(length) and length.last < settings.identical_min_length:
        return skipped(words.check, words.title, "completions so short that equal ones are expected", is_lookalike=True)
    finding = risen(facts, words, "diversity/identical_completion_fraction", settings.identical_high, "warning")
    if finding.is_alarm and facts.entropy_is_low:
        meaning = "Entropy is low as well: the policy itself says always the same."
        return dataclasses.replace(finding, status="info", meaning=meaning, next="")
    return finding


def truncation(facts: Facts) -> Finding:
    """Many turns are cut off."""
    words = Wording(
        check="truncation",
        title="Turns are cut off",
        ok="Few turns are cut off",
        what="share of turns cut off",
        missing="no finish reasons",
        meaning="What was cut off has no answer: reward, format and length speak of the limit, not of the policy.",
        next="Raise the limit of output tokens, or look for a policy that does not end.",
        is_lookalike=True,
    )
    return risen(facts, words, "length/truncated_fraction", facts.settings.truncated_high, "warning")


def groups_out_of_order(facts: Facts) -> Finding:
    """Groups that hold several prompts, or one rollout: assembled in another order than they were sampled in."""
    check, title = "groups_out_of_order", "Groups are not what was sampled"
    counts = [
        (record.step, *found)
        for record in facts.records
        if (found := _ungrouped(record.values, record.notes)) is not None
    ]
    if not counts:
        return skipped(check, title, "no groups", is_lookalike=True)
    recent = counts[-facts.settings.persistence :]
    step, share, why = counts[-1]
    if min(share for _, share, _ in recent) < facts.settings.ungrouped_high:
        return Finding(check=check, status="ok", title="Groups hold one prompt each", value=share, is_lookalike=True)
    return Finding(
        check=check,
        status="warning",
        title=title,
        value=share,
        evidence=f"Step {step}: {why}.",
        meaning="Everything that compares the rollouts of a prompt compares rollouts of different prompts, or nothing.",
        next="Check how groups are numbered: sampled rollouts may have been sorted or gathered before.",
        is_lookalike=True,
    )


def _ungrouped(known: Mapping[str, float], notes: tuple[str, ...]) -> tuple[float, str] | None:
    """Share of groups that cannot be right, and why; None where nothing is known of groups."""
    found = [(0.0, "every group holds one prompt")] if known.get("n_groups") else []
    single, groups = known.get("n_single_groups", 0.0), known.get("n_groups", 0.0)
    if groups and single:
        found.append((single / groups, f"{single:.0f} of {groups:.0f} groups hold one rollout"))
    for note in notes:
        if match := SPLIT_GROUPS.match(note):
            found.append((int(match[1]) / int(match[2]), f"{match[1]} of {match[2]} groups hold more than one prompt"))
    return max(found, default=None)


def healthy_saturation(facts: Facts) -> Finding:
    """Most prompts are solved by every rollout: signal goes because the task is learnt."""
    words = Wording(
        check="healthy_saturation",
        title="Most prompts are solved by every rollout",
        ok="Prompts are left to learn from",
        what="share of prompts solved by every rollout",
        missing="no success labels",
        meaning="Reward variance falls and groups turn equal for that reason.",
        next="Mix in harder prompts.",
        is_lookalike=True,
    )
    finding = risen(facts, words, "reward/all_success_fraction", facts.settings.saturated_high, "info")
    if finding.status == "info" and facts.mi_is_low:
        meaning = "The reasoning does not depend on the prompt: a template that pays is no success."
        return dataclasses.replace(finding, meaning=meaning, next="Read rollouts that were rewarded.")
    return finding
