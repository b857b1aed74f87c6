"""The judgement of a run as the page tells it, and its path over the regime map.

Legend: S scored steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from collapsediag.findings import judge, regimes
from collapsediag.findings.finding import Finding, Verdict
from collapsediag.findings.regime import dependences
from collapsediag.findings.series import baseline_length
from collapsediag.findings.settings import FindingSettings
from collapsediag.findings.words import counts, measured
from collapsediag.record import Record, TraceSample

_SPOKEN_OF = ("persistence", "dependence_low", "conditional_entropy_low")
_OF_TRACE = ("namespace", "row", "own", "best", "group", "length")


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
    lead = _lead(verdict)
    return {
        "status": verdict.status,
        "title": _title(verdict, lead),
        "lead": None if lead is None else lead.check,
        "counts": counts(verdict),
        "regime": verdict.regime,
        "last_step": verdict.last_step,
        "last_scored_step": verdict.last_scored_step,
        "n_scored": verdict.n_scored,
        "traces_step": last_traces[0] if last_traces else None,
        "findings": [_finding(finding) for finding in _grave_first(verdict)],
        "settings": {name: getattr(settings, name) for name in _SPOKEN_OF},
    }


def regime_map(records: Sequence[Record], draw: str) -> dict[str, Any]:
    """The path of one draw over the map: points [step, H(Z|X), I(X; Z), regime], and where the regions end.

    The borders are those the regimes are judged by, at the baseline that the last scored step is compared with; null
    while there is none. MI is also low where retrieval is at chance, which no border shows.
    """
    settings = FindingSettings()
    points = [p for p in dependences(_measured(records), draw) if p.entropy is not None and p.mi is not None]
    names = {step.step: step.name for step in regimes(_measured(records), namespace=draw, settings=settings)}
    base = points[: baseline_length(len(points) - 1, settings)] if points else []
    borders = None
    if base:
        borders = {
            "entropy": settings.conditional_entropy_low * sum(p.entropy or 0.0 for p in base) / len(base),
            "mi": settings.dependence_low * sum(p.mi or 0.0 for p in base) / len(base),
        }
    path = [[p.step, round(p.entropy or 0.0, 4), round(p.mi or 0.0, 4), names.get(p.step)] for p in points]
    return {"points": path, "borders": borders}


def _measured(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.status == "ok"]


def _with_traces(
    records: Sequence[Record], last_traces: tuple[int, Sequence[Mapping[str, Any]]] | None
) -> list[Record]:
    if last_traces is None:
        return list(records)
    step, lines = last_traces
    kept = tuple(
        TraceSample(
            **{name: line[name] for name in _OF_TRACE},
            logp_P=tuple(float("nan") if v is None else v for v in line["logp_P"]),
        )
        for line in lines
    )
    return [dataclasses.replace(record, traces=kept) if record.step == step else record for record in records]


def _lead(verdict: Verdict) -> Finding | None:
    """The gravest alarm that is no look-alike, else the first of those."""
    alarms = verdict.alarms
    return next((f for f in alarms if not f.is_lookalike), alarms[0] if alarms else None)


def _title(verdict: Verdict, lead: Finding | None) -> str:
    if lead is not None:
        return lead.title if lead.since_step is None else f"{lead.title} since step {lead.since_step}"
    if all(finding.status == "skipped" for finding in verdict.findings):
        return "Nothing could be checked"
    return "No sign of collapse in what was checked"


def _grave_first(verdict: Verdict) -> list[Finding]:
    alarms = verdict.alarms
    rank = ("info", "ok", "skipped")
    calm = [f for f in verdict.findings if not f.is_alarm]
    return [*alarms, *sorted(calm, key=lambda f: rank.index(f.status))]


def _finding(finding: Finding) -> dict[str, Any]:
    fields = ("check", "status", "title", "metric", "since_step", "n_steps", "evidence", "meaning", "next", "missing")
    value = None if finding.value is None else measured(finding.value, finding.interval)
    return {
        **{name: getattr(finding, name) for name in fields},
        "value": value,
        "traces": list(finding.traces),
        "is_lookalike": finding.is_lookalike,
    }
