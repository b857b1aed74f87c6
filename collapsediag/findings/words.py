"""Findings and verdicts in plain words, for a terminal, a log line, a notification."""

from __future__ import annotations

import textwrap

from collapsediag.findings.finding import RANK, Finding, Verdict
from collapsediag.plain_text import number, printable

WIDTH = 100
DIGITS = 3
_SIGNAL = ("reward_variance_cliff", "all_equal_groups", "pass_at_k_narrowing")
# Which findings a look-alike could be the true cause of. Beside any other it is news of its own.
EXPLAINS = {
    "chance_from_the_start": ("template_collapse", "low_entropy_collapse"),
    "identical_completions": ("low_entropy_collapse", "compressed_reasoning", "entropy_collapse", *_SIGNAL),
    "truncation": ("format_loss", "tool_use_collapse", "environment_collapse", *_SIGNAL),
    "groups_out_of_order": ("template_collapse", "low_entropy_collapse", *_SIGNAL),
}


def measured(value: float, interval: tuple[float, float] | None = None) -> str:
    """A number to three digits, with its interval.

    >>> measured(0.15, (0.11, 0.2)), measured(0.12345)
    ('0.15 [0.11, 0.2]', '0.123')
    """
    said = [number(v, DIGITS) for v in (value, *(interval or ()))]
    return said[0] + (f" [{said[1]}, {said[2]}]" if interval else "")


def counted(n: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "check"), counted(2, "check")
    ('1 check', '2 checks')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def sentence(finding: Finding) -> str:
    """One finding as a paragraph: what, since when, the numbers, what they mean. Safe to print."""
    if finding.status == "skipped":
        return f"{finding.check}: skipped, {finding.missing}."
    opening = finding.title.upper() if finding.is_alarm and not finding.is_lookalike else finding.title
    if finding.since_step is not None:
        opening += f" since step {finding.since_step}"
        if finding.n_steps is not None and not finding.n_clear:
            opening += f" ({counted(finding.n_steps, 'measured step')} in a row)"
    # A title or a number may name an environment, and data chose that name.
    return printable(" ".join(part for part in (f"{opening}.", finding.evidence, meaning(finding)) if part))


def meaning(finding: Finding) -> str:
    """What the numbers mean; of a state that no longer shows and is not over yet, just that."""
    if finding.n_clear:
        return f"Not seen in the last {counted(finding.n_clear, 'measured step')}, too few to call it over."
    return finding.meaning


def headline(verdict: Verdict) -> str:
    """The verdict as a paragraph, safe to print: how many checks ran and what was missing for the others, always."""
    parts = []
    shown = lead(verdict)
    if shown is not None:
        others = [f for f in verdict.alarms if f is not shown]
        first = [f for f in others if shown.check in EXPLAINS.get(f.check, ())]
        also = sorted((f for f in others if f not in first), key=lambda f: f.is_lookalike)
        if first:
            parts.append(f"Rule out first: {'; '.join(_lowered(f.title) for f in first)}.")
        parts.append(sentence(shown))
        if also:
            parts.append(f"Also: {'; '.join(_lowered(f.title) for f in also)}.")
        if verdict.not_known and not verdict.n_scored:
            parts.append(f"Not known: {verdict.not_known}.")
    else:
        parts.append(f"{calm(verdict)}.")
        if verdict.not_known and not _is_blank(verdict):
            parts.append("Nothing else showed in what was checked.")
    parts.append(counts(verdict))
    if shown is not None:
        reading = f"Read traces {', '.join(map(str, shown.traces))} side by side." if len(shown.traces) > 1 else ""
        parts.extend(part for part in (reading, shown.next) if part)
    return printable(" ".join(parts))


def lead(verdict: Verdict) -> Finding | None:
    """The finding that a verdict is about: the gravest that is no look-alike, else the first of those."""
    alarms = verdict.alarms
    return next((f for f in alarms if not f.is_lookalike), alarms[0] if alarms else None)


def calm(verdict: Verdict) -> str:
    """What there is to say where nothing was found."""
    if _is_blank(verdict):
        return "Nothing could be checked" + (f": {verdict.not_known}" if verdict.not_known else "")
    if verdict.not_known:
        return f"Not known: {verdict.not_known}"
    unseen = (
        "" if verdict.n_scored else "; no step was scored, so whether reasoning depends on its prompt was not looked at"
    )
    return f"No sign of collapse in what was checked{unseen}"


def _is_blank(verdict: Verdict) -> bool:
    return len(verdict.skipped) == len(verdict.findings)


def counts(verdict: Verdict) -> str:
    """How many checks ran, how many did not and for want of what."""
    ran, skipped = len(verdict.findings) - len(verdict.skipped), verdict.skipped
    text = f"{counted(ran, 'check')} ran"
    if skipped:
        missing = dict.fromkeys(finding.missing for finding in skipped)
        text += f", {len(skipped)} skipped ({', '.join(missing)})"
    if verdict.n_failed:
        text += f"; {counted(verdict.n_failed, 'step')} could not be measured"
    return text + "."


def _lowered(title: str) -> str:
    """A title inside a sentence; an abbreviation keeps its capitals."""
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def verdict_lines(verdict: Verdict, *, width: int = WIDTH, every: bool = False) -> list[str]:
    """The verdict as lines of a terminal: the headline, then one paragraph for each finding worth reading.

    every: also list the checks that found nothing and those that were skipped.
    """
    lines = textwrap.wrap(headline(verdict), width)
    if verdict.regime is not None:
        lines.append(f"Regime at the last scored step ({verdict.last_scored_step}): {verdict.regime}.")
    told = lead(verdict)
    order = sorted(verdict.findings, key=lambda f: (not f.is_lookalike, -RANK[f.status]))
    for finding in order:
        if not every and (finding.status in ("ok", "skipped") or finding is told):
            continue
        said = sentence(finding)
        if finding.status == "ok":
            said = f"{finding.title}. {finding.evidence}".rstrip()
        if finding.next and finding.status not in ("ok", "skipped"):
            said += f" {finding.next}"
        mark = f"{finding.status:>8}  "
        lines += textwrap.wrap(said, width, initial_indent=mark, subsequent_indent=" " * len(mark))
    return lines
