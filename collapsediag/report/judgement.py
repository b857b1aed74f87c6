"""The judgement of a run as the page tells it, and its path over the regime map.

Legend: S scored steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from collapsediag.findings import judge, regimes
from collapsediag.findings.finding import RANK, Finding, Verdict
from collapsediag.findings.regime import dependences
from collapsediag.findings.series import baseline_length
from collapsediag.findings.settings import FindingSettings
from collapsediag.findings.words import calm, counts, lead, meaning, measured
from collapsediag.plain_text import printable
from collapsediag.record import Record, TraceSample

# Of log P: MI that is noise around 0 looks like that, and not like a path through the regions.
LEAST_MI_RANGE = 0.1
_SPOKEN_OF = ("persistence", "dependence_low", "conditional_entropy_low")


def verdict_payload(
    records: Sequence[Record], last_traces: tuple[int, Sequence[Mapping[str, Any]]] | None
) -> dict[str, Any]:
    """The verdict in words.

    last_traces: the last step with sampled traces and its lines, from which a finding names what to read.

    status: gravest of all checks. title: what was found. lead: the finding it is about, or null.
    counts: how many checks ran, and what the others wanted. findings: every check, the gravest first.
    settings: those thresholds that the page speaks of.
    """
    settings = FindingSettings()
    verdict = judge(_with_traces(records, last_traces), settings=settings)
    told = lead(verdict)
    return {
        "status": verdict.status,
        "title": _title(verdict, told),
        "lead": None if told is None else told.check,
        "counts": counts(verdict),
        "regime": verdict.regime,
        "last_step": verdict.last_step,
        "last_scored_step": verdict.last_scored_step,
        "n_scored": verdict.n_scored,
        "traces_step": last_traces[0] if last_traces else None,
        "findings": [_finding(finding) for finding in _alarms_first(verdict)],
        "settings": {name: getattr(settings, name) for name in _SPOKEN_OF},
    }


def regime_map(records: Sequence[Record], draw: str) -> dict[str, Any]:
    """The path of one draw over the map: points [step, H(Z|X), I(X; Z), regime, at chance], where the regions end, and
    the least range of the axis of MI.

    The borders are those the regimes are judged by, at the baseline that the last scored step is compared with; null
    while there is none. MI is also low where retrieval is at chance, which no border shows; a baseline at chance has
    no MI to take a share of, and the border is the most that a step at chance shows.
    """
    settings = FindingSettings()
    records = [record for record in records if record.status == "ok"]
    scored = dependences(records, draw)
    points = [(p.step, p.entropy, p.mi) for p in scored if p.entropy is not None and p.mi is not None]
    known = {step.step: step for step in regimes(records, namespace=draw, settings=settings)}
    base = points[: baseline_length(len(points) - 1, settings)] if points else []
    borders: dict[str, Any] | None = None
    if base:
        borders = {
            "entropy": settings.conditional_entropy_low * sum(entropy for _, entropy, _ in base) / len(base),
            "mi": settings.dependence_low * sum(mi for _, _, mi in base) / len(base),
            "is_chance": all(known[step].at_chance for step, _, _ in base),
        }
        if borders["is_chance"]:
            borders["mi"] = max(borders["mi"], *(mi for step, _, mi in points if known[step].at_chance))
    path = [
        [step, round(entropy, 4), round(mi, 4), known[step].name, known[step].at_chance] for step, entropy, mi in points
    ]
    bounds = [p.bound for p in scored if p.bound is not None]
    return {"points": path, "borders": borders, "mi_range": LEAST_MI_RANGE * max(bounds, default=0.0)}


def _with_traces(
    records: Sequence[Record], last_traces: tuple[int, Sequence[Mapping[str, Any]]] | None
) -> list[Record]:
    if last_traces is None:
        return list(records)
    step, lines = last_traces
    kept = tuple(
        TraceSample(
            namespace=line["namespace"],
            row=line["row"],
            own=line["own"],
            best=line["best"],
            # Of no matter to a judgement, and not in every file that can be read.
            group=str(line.get("group")),
            length=line.get("length") or 0,
            logp_P=tuple(float("nan") if v is None else v for v in line["logp_P"]),
        )
        for line in lines
    )
    return [dataclasses.replace(record, traces=kept) if record.step == step else record for record in records]


def _title(verdict: Verdict, told: Finding | None) -> str:
    if told is None:
        return calm(verdict)
    return printable(told.title if told.since_step is None else f"{told.title} since step {told.since_step}")


def _alarms_first(verdict: Verdict) -> list[Finding]:
    quiet = [f for f in verdict.findings if not f.is_alarm]
    return [*verdict.alarms, *sorted(quiet, key=lambda f: -RANK[f.status])]


def _finding(finding: Finding) -> dict[str, Any]:
    fields = ("check", "status", "since_step", "n_steps", "n_clear")
    # Words may name an environment, and data chose that name.
    words = ("title", "evidence", "next", "missing")
    value = None if finding.value is None else measured(finding.value, finding.interval)
    return {
        **{name: getattr(finding, name) for name in fields},
        **{name: printable(getattr(finding, name)) for name in words},
        "meaning": printable(meaning(finding)),
        "metric": None if finding.metric is None else printable(finding.metric),
        "value": value,
        "traces": list(finding.traces),
        "is_lookalike": finding.is_lookalike,
    }
