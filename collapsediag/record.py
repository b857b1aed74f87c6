"""One frozen record per step: the numbers, the counts behind them, and where they came from."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from collapsediag.arrays import plain, whole_number
from collapsediag.errors import RolloutError
from collapsediag.matrix import LogLikelihoodMatrix

SCHEMA_VERSION = 1
# Seconds since 1970, in the year 5138: whatever lies beyond was not read off a clock.
END_OF_TIME = 1e11
# Steps count in whole numbers also where they become floats: in a chart, in the page's script.
MAX_STEP = 2**53

Status = Literal["ok", "failed"]


def step_number(step: Any) -> int | None:
    """A step of any make as a whole number, None for what no run has as its step.

    >>> step_number(4.0), step_number("4"), step_number(2**60)
    (4, None, None)
    """
    try:
        number = whole_number(step)
    except Exception:  # a tensor without data, and whatever else will not be looked into
        return None
    return number if number is not None and abs(number) <= MAX_STEP else None


def _json_value(value: Any) -> Any:
    """A setting as JSON has it; what it has not becomes text, for a run must not go unrecorded for a setting."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(entry) for entry in value]
    number = plain(value)
    is_json = number is None or isinstance(number, (str, int)) or (isinstance(number, float) and math.isfinite(number))
    return number if is_json else str(number)


@dataclass(frozen=True, kw_only=True, eq=False)
class Provenance:
    """Where a run's numbers came from; the content of run.json.

    created: wall clock, seconds since 1970.
    versions: library versions by package name.
    model, tokenizer: what was scored with, as the user named it; None where a trainer handed over live objects.
    device, dtype: where and how precisely it was scored; runs of different dtype are not comparable in small values.
    settings: every setting that changes a number; what is no JSON value is written as text.
    """

    created: float
    versions: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    tokenizer: str | None = None
    device: str | None = None
    dtype: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def collect(cls, **fields: Any) -> Provenance:
        """With the clock and the versions of the packages that produce numbers; nothing is imported for it."""
        versions = {"python": platform.python_version()}
        for package in ("collapsediag", "numpy", "scipy", "torch", "transformers", "trl", "verl"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return cls(created=time.time(), versions=versions, **fields)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the schema version of the run folder."""
        return {"schema_version": SCHEMA_VERSION, **{f.name: _json_value(getattr(self, f.name)) for f in fields(self)}}


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceSample:
    """One trace kept for reading: what was asked, what was written, and what it was retrieved as.

    row: its row in the matrix; own, best: columns of its own and its best-scoring context.
    context, trace: text (decoded where a tokenizer was at hand, else None) ; context_best: text of the best column.
    logp_P: its row of the matrix, nats.
    tokens: the pieces of `trace`, one a token, whose join it is; a part of a character is empty, its last part has all.
    pmi: what each token says about the trace's prompt, nats (`token_information`); with `tokens`, or neither is there.
    pmi_reason: why there is no pmi; None also in folders written before it was measured.
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
    tokens: tuple[str, ...] | None = None
    pmi: tuple[float, ...] | None = None
    pmi_reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The line of traces/STEP.jsonl; a non-finite score becomes null, because JSON has no NaN.

        `tokens`, `pmi` and `pmi_reason` are there where they are not None.
        """
        line = asdict(self)
        for name in ("tokens", "pmi", "pmi_reason"):
            if line[name] is None:
                del line[name]
        line["logp_P"] = [value if math.isfinite(value) else None for value in self.logp_P]
        if self.reward is not None and not math.isfinite(self.reward):
            line["reward"] = None
        return line


def is_trace_line(line: Any) -> bool:
    """Whether a line of traces/STEP.jsonl can be read as what `TraceSample.to_json` writes; further keys are allowed.

    >>> is_trace_line({"namespace": "turn", "row": 0, "own": 0, "best": 1, "logp_P": [-1.0, None]}), is_trace_line([])
    (True, False)
    """
    if not isinstance(line, Mapping) or not isinstance(line.get("namespace"), str):
        return False
    scores = line.get("logp_P")
    columns = [value for name in ("row", "own", "best") if type(value := line.get(name)) is int and value >= 0]
    if not isinstance(scores, list) or len(columns) < 3:
        return False
    pmi, tokens = line.get("pmi") or [], line.get("tokens") or []
    texts = [line.get(name) for name in ("context", "context_best", "trace")]
    return (
        max(columns[1:]) < len(scores)
        and all(_is_number(value) for value in (*scores, line.get("reward"), line.get("length")))
        and all(text is None or isinstance(text, str) for text in (*texts, line.get("environment")))
        and isinstance(pmi, list)
        and all(map(_is_number, pmi))
        and isinstance(tokens, list)
        and all(isinstance(token, str) for token in tokens)
    )


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """What was measured in one step.

    step: the trainer's step number, a whole number of any make; RolloutError for anything else.
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
        step = step_number(self.step)
        if step is None:
            raise RolloutError(
                f"the step of a record is {self.step!r:.80} ({type(self.step).__name__}); it must be a whole number up "
                "to 2**53: the trainer's step number."
            )
        object.__setattr__(self, "step", step)
        if self.reason is not None:
            object.__setattr__(self, "reason", str(self.reason))
        object.__setattr__(self, "notes", tuple(map(str, self.notes)))
        object.__setattr__(self, "dropped", {str(reason): plain(count) for reason, count in self.dropped.items()})
        finite = {name: float(value) for name, value in self.values.items() if math.isfinite(value)}
        lost = {name: f"came out {float(v)}" for name, v in self.values.items() if name not in finite}
        object.__setattr__(self, "values", finite)
        given = {str(name): str(reason) for name, reason in self.not_measured.items()}
        object.__setattr__(self, "not_measured", {**lost, **given})

    def without_arrays(self) -> Record:
        """The numbers alone, for those who keep many records."""
        return replace(self, matrices={}, traces=())

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
        """The record of one line of metrics.jsonl; keys of a newer schema are ignored.

        Raises ValueError, KeyError or TypeError for what is no such line.
        """
        if not isinstance(line, Mapping) or type(line["step"]) is not int:
            raise ValueError("not a record: an object with a whole-numbered step is needed")
        for name in ("values", "not_measured", "dropped", "seconds"):
            if not isinstance(line.get(name, {}), Mapping):
                raise ValueError(f"not a record: {name} is no object")
        texts = (*line.get("notes", ()), *line.get("not_measured", {}).values(), line.get("reason") or "")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("not a record: a note or a reason is no text")
        if not 0 <= (line.get("time") or 0) < END_OF_TIME:
            raise ValueError("not a record: time is not read off a clock")
        known = ("step", "values", "status", "reason", "not_measured", "dropped", "seconds", "time")
        fields = {name: line[name] for name in known if name in line}
        return cls(notes=tuple(line.get("notes", ())), **fields)
