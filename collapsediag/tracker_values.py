"""A record as experiment trackers take it: names that collide with no trainer's, and traces as plain, inert cells."""

from __future__ import annotations

import math

from collapsediag.plain_text import number, printable
from collapsediag.record import Record, TraceSample

PREFIX = "collapse/"
_OURS = ("collapse/", "collapse_", "timing_s/collapse_")

# One table for every tracker that shows tables; each column has one type for the whole run.
TRACE_COLUMNS = (
    "step",
    "trace",
    "group",
    "own_prompt",
    "best_prompt",
    "retrieved",
    "own_logp",
    "best_logp",
    "tokens",
    "reward",
    "environment",
    "context",
    "reasoning",
    "best_context",
)
Cell = str | float | int | bool | None


def tracker_name(name: str) -> str:
    """A metric's name in a tracker that others write to as well.

    Rollout metrics have names that trainers use too (`reward/mean`); without a prefix the later of the two would
    replace the other in a shared row.

    >>> tracker_name("reward/mean"), tracker_name("collapse_turn_sample/mi_estimate"), tracker_name("collapse/failures")
    ('collapse/reward/mean', 'collapse_turn_sample/mi_estimate', 'collapse/failures')
    """
    return name if name.startswith(_OURS) else PREFIX + name


def tracker_values(record: Record) -> dict[str, float]:
    """The numbers of a record under their tracker names; all finite."""
    return {tracker_name(name): value for name, value in record.values.items()}


def namespaces_with_traces(record: Record) -> list[str]:
    """The draws of turns this record holds traces of, in order."""
    return list(dict.fromkeys(trace.namespace for trace in record.traces))


def trace_rows(record: Record, namespace: str) -> list[list[Cell]]:
    """The traces of one draw as cells of TRACE_COLUMNS; text is made safe to show, a non-finite score is None."""
    return [_cells(record.step, trace) for trace in record.traces if trace.namespace == namespace]


def _cells(step: int, trace: TraceSample) -> list[Cell]:
    return [
        step,
        trace.row,
        safe_text(trace.group),
        trace.own,
        trace.best,
        trace.own == trace.best and not _n_tied(trace),
        _finite(trace.logp_P[trace.own]),
        _finite(trace.logp_P[trace.best]),
        trace.length,
        None if trace.reward is None else _finite(trace.reward),
        safe_text(trace.environment),
        safe_text(trace.context),
        safe_text(trace.trace),
        safe_text(trace.context_best),
    ]


def traces_as_text(record: Record, namespace: str, *, max_characters: int = 2000) -> str:
    """The traces of one draw for reading, as plain text that is safe to show; what is long is cut and says so."""
    chosen = [trace for trace in record.traces if trace.namespace == namespace]
    return "\n\n".join(_as_text(trace, max_characters) for trace in chosen)


def _as_text(trace: TraceSample, limit: int) -> str:
    verdict = "retrieved" if trace.own == trace.best else f"retrieved as prompt {trace.best}"
    if tied := _n_tied(trace):
        verdict = f"not told apart from {tied} other prompts"
    reward = "" if trace.reward is None else f", reward {number(trace.reward)}"
    scores = f"log p {trace.logp_P[trace.own]:.2f} nats"
    if trace.own != trace.best:
        scores += f" under its own prompt, {trace.logp_P[trace.best]:.2f} under that one"
    lines = [
        f"=== trace {trace.row} of prompt {trace.own} (group {safe_text(trace.group)}): {verdict}; {scores}; "
        f"{trace.length} tokens{reward}"
    ]
    parts = (("prompt", trace.context), ("reasoning", trace.trace), (f"prompt {trace.best}", trace.context_best))
    lines += [f"--- {heading}\n{_cut(safe_text(text) or '', limit)}" for heading, text in parts if text is not None]
    return "\n".join(lines)


def _n_tied(trace: TraceSample) -> int:
    """Other prompts under which a trace scores exactly what it scores under its own, where that is the best."""
    return trace.logp_P.count(trace.logp_P[trace.own]) - 1 if trace.own == trace.best else 0


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters]"


def safe_text(text: str | None) -> str | None:
    """Text of a model or a data set for a tracker's page: what cannot be seen or encoded becomes a visible escape.

    >>> safe_text("a\\tb\\x00\\ud800")
    'a\\tb\\\\x00\\\\ud800'
    """
    if text is None:
        return None
    return "\t".join(printable(part) for part in text.split("\t"))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
