"""Checks of what the reasoning owes to its prompt: the two collapses, compression, and the limit of P."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from collapsediag.findings.facts import Facts, Wording, of_episodes, skipped, too_few
from collapsediag.findings.finding import RANK, Finding, Status
from collapsediag.findings.regime import Dependence, RegimeName, RegimeStep, dependences
from collapsediag.findings.series import high_episodes
from collapsediag.findings.words import counted, measured
from collapsediag.metrics.rewards import SPREAD_HELPED, SPREAD_HIGH, SPREAD_HURT, SPREAD_LOW
from collapsediag.record import Record
from collapsediag.turn_cuts import DRAWS

NO_MATRIX = "no scored matrix"
# Characters of an error message that a headline has room for.
REASON_WIDTH = 240

_TEMPLATE = Wording(
    check="template_collapse",
    title="Template collapse",
    ok="The reasoning depends on the prompt",
    what="scored retrieval",
    missing=NO_MATRIX,
    meaning="The reasoning no longer says which prompt produced it.",
    next="Then look at the spread of reward variance, and at the signal of the prompts that are left.",
)
_NEVER_DEPENDED = "The reasoning says at no scored step which prompt produced it, so nothing shows that it ever did."
_LOW_ENTROPY = Wording(
    check="low_entropy_collapse",
    title="Low-entropy collapse",
    ok="No collapse to a few traces",
    what="scored retrieval",
    missing=NO_MATRIX,
    meaning="The policy writes nearly the same trace whatever the prompt.",
    next="Go back to a checkpoint before this step; then more entropy bonus or KL, or a lower learning rate.",
)
_COMPRESSED = Wording(
    check="compressed_reasoning",
    title="Compressed reasoning",
    ok="H(Z|X) holds",
    what="scored retrieval",
    missing=NO_MATRIX,
    meaning="Traces of one prompt are more alike than at the start, and still say which prompt they are of.",
    next="Watch pass@k at large k: exploration is what shrinks.",
)


def template_collapse(facts: Facts) -> Finding:
    """MI low, H(Z|X) not."""
    return _worst(facts, _TEMPLATE, "template collapse", _grave_at_chance)


def low_entropy_collapse(facts: Facts) -> Finding:
    """MI low, H(Z|X) low."""
    return _worst(facts, _LOW_ENTROPY, "low-entropy collapse", lambda _, __: "critical")


def compressed_reasoning(facts: Facts) -> Finding:
    """H(Z|X) low, MI not: information, no alarm."""
    return _worst(facts, _COMPRESSED, "compressed reasoning", lambda _, __: "info")


def _grave_at_chance(facts: Facts, steps: list[RegimeStep]) -> Status:
    # Never seen above chance in this run, it is a state and no collapse yet; `chance_from_the_start` has the alarm.
    return "critical" if steps[-1].at_chance and not _always_at_chance(steps) else "warning"


def _always_at_chance(steps: Sequence[RegimeStep]) -> bool:
    return all(step.at_chance for step in steps)


def _worst(
    facts: Facts, words: Wording, name: RegimeName, status: Callable[[Facts, list[RegimeStep]], Status]
) -> Finding:
    """Of all draws of turns the gravest finding, and of equal ones the earliest."""
    if not facts.regimes:
        return skipped(words.check, words.title, words.missing)
    found = [_finding(facts, words, name, draw, status(facts, steps)) for draw, steps in facts.regimes.items()]
    return max(found, key=lambda f: (RANK[f.status], -(f.since_step or 0)))


def _finding(facts: Facts, words: Wording, name: RegimeName, draw: str, status: Status) -> Finding:
    steps, settings = facts.regimes[draw], facts.settings
    if len(steps) < settings.persistence:
        return skipped(words.check, words.title, too_few(settings.persistence, "scored"))
    points, last = dependences(facts.records, draw), steps[-1]
    start = points[: max(1, min(settings.n_baseline, len(points) - settings.persistence))]
    title, said = _title(words, steps, name, status)
    where = "" if draw == "first_turn" else f" ({DRAWS[draw]})"
    holds = last.name == name
    return Finding(
        check=words.check,
        status=said,
        title=title + where,
        metric=f"collapse_{draw}_sample/{points[-1].name}",
        value=points[-1].accuracy,
        interval=points[-1].interval,
        baseline=_mean([p.accuracy for p in start]),
        since_step=last.since_step if holds else None,
        n_steps=sum(step.step >= (last.since_step or 0) for step in steps) if holds else None,
        n_clear=last.n_clear if holds else 0,
        traces=facts.traces(draw) if holds and said != "info" else (),
        evidence=_evidence(points[-1], start),
        meaning=_meaning(words, steps) if holds else "",
        next=_next(facts, words) if holds else "",
    )


def _meaning(words: Wording, steps: Sequence[RegimeStep]) -> str:
    return _NEVER_DEPENDED if words is _TEMPLATE and _always_at_chance(steps) else words.meaning


def _title(words: Wording, steps: list[RegimeStep], name: RegimeName, status: Status) -> tuple[str, Status]:
    last, earlier = steps[-1], [step for step in steps if step.name == name]
    if last.name == name:
        return words.title, status
    if not earlier or status == "info":
        return words.ok, "ok"
    # The last steps of a state are those that ended it, and showed it no more.
    shown = [step for step in earlier if not step.n_clear] or earlier
    return f"{words.title} from step {shown[-1].since_step} to {shown[-1].step}, then {last.name}", "info"


def _evidence(point: Dependence, start: Sequence[Dependence]) -> str:
    text = (
        f"Retrieval accuracy {measured(point.accuracy, point.interval)}, chance {measured(point.chance)}, "
        f"at the start {measured(_mean([p.accuracy for p in start]))}"
    )
    entropies = [p.entropy for p in start if p.entropy is not None]
    if point.entropy is not None and entropies:
        text += f"; H(Z|X) {measured(point.entropy)} nats/token, at the start {measured(_mean(entropies))}"
    return f"{text}."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _next(facts: Facts, words: Wording) -> str:
    spread = facts.last("reward/variance_spread")
    if words is _TEMPLATE and spread is not None:
        word = "high" if spread >= SPREAD_HIGH else ("low" if spread <= SPREAD_LOW else "middling")
        return (
            f"Then look at the spread of reward variance between prompts: {measured(spread)}, {word} (training on "
            f"those whose rewards vary most helped at about {SPREAD_HELPED}, and hurt at {SPREAD_HURT})."
        )
    return words.next


def not_known(records: Sequence[Record], n_scored: int, needed: int) -> str:
    """Why nothing can be said of dependence though scoring was tried, in words; "" where it can, or nobody tried.

    records: those of failed steps as well, in the order of their steps.
    """
    if n_scored >= needed:
        return ""
    tried = [reason for record in records for reason in _not_scored(record)]
    # The first names the cause. The last may only say what came of it: that scoring was switched off.
    told = dict.fromkeys(textwrap.shorten(reason, REASON_WIDTH).rstrip(".") for reason in (*tried[:1], *tried[-1:]))
    why = f" ({'; '.join(told)})" if tried else ""
    if n_scored:
        return f"only {counted(n_scored, 'step')} scored, and a collapse of the reasoning is named after {needed}{why}"
    return f"no step could be scored{why}" if tried else ""


def _not_scored(record: Record) -> list[str]:
    if record.status == "failed":
        return [] if record.reason is None else [record.reason]
    names = ("scoring", *(f"collapse_{draw}_sample" for draw in DRAWS))
    return [record.not_measured[name] for name in names if name in record.not_measured]


def mi_saturation(facts: Facts) -> Finding:
    """The information per trace is at its bound log P: more prompts are needed before a change can be seen."""
    words = Wording(
        check="mi_saturation",
        title="MI at its bound",
        ok="MI below its bound",
        what="MI over its bound log P",
        missing=NO_MATRIX,
        meaning="P is too small to see a loss of information before it is large.",
        next="Score more distinct prompts a step before reading anything into a flat curve.",
    )
    found = []
    for draw in facts.regimes:
        series = facts.series(f"collapse_{draw}_sample/mi_saturation")
        if len(series) >= facts.settings.persistence:
            found.append(
                of_episodes(words, high_episodes(series, facts.settings.saturation_high, facts.settings), "info")
            )
    if found:
        return max(found, key=lambda f: RANK[f.status])
    if not facts.regimes:
        return skipped(words.check, words.title, NO_MATRIX)
    return skipped(words.check, words.title, too_few(facts.settings.persistence, "scored"))
