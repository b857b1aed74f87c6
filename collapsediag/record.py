"""One frozen record per step: the numbers, the counts behind them, and where they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from collapsediag.matrix import LogLikelihoodMatrix

SCHEMA_VERSION = 1

Status = Literal["ok", "failed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceSample:
    """One trace kept for reading: what was asked, what was written, and what it was retrieved as.

    row: its row in the matrix; own, best: columns of its own and its best-scoring context.
    context, trace: text (decoded where a tokenizer was at hand, else None) ; context_best: text of the best column.
    logp_P: its row of the matrix, nats.
    """

    namespace: str
    row: int
    own: int
    best: int
    group: str
    length: int
    logp_P: tuple[float, ...]
    context: str | None = None
    context_best: str | None = None
    trace: str | None = None
    reward: float | None = None
    environment: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """What was measured in one step.

    step: the trainer's step number.
    status: "ok", or "failed" where the diagnostics raised; a failed record has no values that could look healthy.
    values: finite numbers by metric name. A number that came out non-finite is not here but in `not_measured`.
    not_measured: what could not be measured, with the reason in words.
    dropped: rollouts, turns and traces left out, by reason.
    seconds: how long each part took ("score", "rollout_metrics").
    notes: decisions a reader must know ("reasoning=completion: no think tags were found").
    time: wall clock, seconds since 1970.
    matrices, traces: not part of the line in metrics.jsonl; the run folder keeps them beside it.
    """

    step: int
    values: Mapping[str, float]
    status: Status = "ok"
    reason: str | None = None
    not_measured: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    time: float | None = None
    matrices: Mapping[str, LogLikelihoodMatrix] = field(default_factory=dict)
    traces: tuple[TraceSample, ...] = ()

    def __post_init__(self) -> None:
        finite = {name: float(value) for name, value in self.values.items() if math.isfinite(value)}
        lost = {name: f"came out {float(v)}" for name, v in self.values.items() if name not in finite}
        object.__setattr__(self, "values", finite)
        object.__setattr__(self, "not_measured", {**lost, **self.not_measured})

    def to_json(self) -> dict[str, Any]:
        """The line of metrics.jsonl, as plain JSON values."""
        line: dict[str, Any] = {"step": self.step, "status": self.status, "values": dict(self.values)}
        if self.time is not None:
            line["time"] = self.time
        for name in ("reason", "not_measured", "dropped", "seconds", "notes"):
            value = getattr(self, name)
            if value:
                line[name] = list(value) if name == "notes" else (value if name == "reason" else dict(value))
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Record:
        """The record of one line of metrics.jsonl; keys of a newer schema are ignored."""
        known = ("step", "values", "status", "reason", "not_measured", "dropped", "seconds", "time")
        fields = {name: line[name] for name in known if name in line}
        return cls(notes=tuple(line.get("notes", ())), **fields)
