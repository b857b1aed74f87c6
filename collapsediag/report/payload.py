"""What the page shows, as JSON values: a run's series, and one scored step at a time.

`series_payload(run)` has these keys; every list named after a step has the length of `steps`.

    name            the run's name in the page
    about           model, dtype, created (seconds since 1970): those that run.json knows
    steps           all recorded steps, in order
    columns         {metric name: [number or null]}; null where it was not measured at that step
    info            {metric name: {title, unit, bad, description, bounds, needs}}, from the registry
    not_measured    {metric, family or draw: [[reason, first step, last step, number of steps]]}
    reasons         {metric name: why no step has it, in words}, for everything a chart asks for
    failed          [[step, reason]] of the steps whose diagnostics failed
    notes           what a reader must know, in words
    draws           {draw of turns: its words}, those that were scored, the judged one first
    environments    names under env/
    charts          the charts, see `charts.py`
    verdict         the judgement in words, see `judgement.py`
    regimes         {draw: {points: [[step, H(Z|X), I(X; Z), regime or null, at chance]], mi_range: nats,
                    borders: {entropy, mi, is_chance} or null}}, see `judgement.py`
    scored_steps    steps of which `scored_payload` has something to show
    live            only where a job is followed: {"state": "running" or "stopped", "words": what to tell the reader}

`scored_payload(run, step)`:

    step
    draws           {draw: the matrix, or {"missing": reason}}
                    range: log P, nats; the colours end at -range and +range at every step, whatever is in the matrix
                    pmi: base64(zlib(uint8)), row after row as drawn, of log p(Z_i|X_j) - log p(Z_i):
                         0 not scored, 1 to 255 for -range to range, 128 for zero; clipped
                    n_rows, n_columns; rows: the matrix row that each drawn row is; own: its column
                    n_traces, n_left_out: traces in the matrix, and those of them that are empty or not finite
    contexts        texts of contexts, each once
    traces          [{draw, row, own, best, tied, group, length, reward, environment, own_pmi, best_pmi,
                      context, context_best: index into contexts or null, trace: text or null, cut: characters left out,
                      tokens, pmi: texts and nats of its tokens, or null and why: pmi_reason}]

A page that follows a job asks its server for `series.json` (one `series_payload`) and `scored/STEP.json`.
All of it is plain JSON without NaN, and pure ASCII once dumped, so lone surrogates of a broken decoder survive.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import CollapsediagError, RunFolderError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.matrix_image import pointwise_mi_NP
from collapsediag.metrics.registry import canonical_name, find
from collapsediag.record import END_OF_TIME, Record
from collapsediag.report.charts import chart_names, charts_json
from collapsediag.report.judgement import regime_map, verdict_payload
from collapsediag.run_folder import matrix_name, read_matrix, read_records, read_run, read_traces
from collapsediag.turn_cuts import DRAWS

logger = logging.getLogger("collapsediag")

MAX_ROWS = 1024
# A text that is longer loses its middle: the beginning says what it is about, the end what came of it.
MAX_CHARACTERS = 20_000
MAX_TOKENS = 4_000
_STEP_FILE = re.compile(r"([0-9]+)(-\w+\.npz|\.jsonl)")
_ENVIRONMENT = re.compile(r"^env/([^/]+)/")


def series_payload(
    run: str | os.PathLike[str], *, name: str | None = None, records: Sequence[Record] | None = None
) -> dict[str, Any]:
    """A run's numbers over its steps, judged; the keys are in the module's docstring.

    name: what the page calls the run; the folder's name where not given.
    records: those of the run, in order, where they have been read already.
    Raises RunFolderError where `run` is no run folder, or has no record yet.
    """
    records = read_records(run) if records is None else records
    if not records:
        raise RunFolderError(f"{run}: no step has been recorded yet; there is nothing to show.")
    about = _about(run)
    columns = _columns(records)
    draws = _draws(columns)
    not_measured = _not_measured(records)
    steps_scored = scored_steps(run, records)
    return {
        "name": name if name is not None else Path(run).absolute().name,
        "about": about,
        "steps": [record.step for record in records],
        "columns": columns,
        "info": _info(columns),
        "not_measured": not_measured,
        "reasons": _reasons(chart_names(draws), columns, not_measured),
        "failed": [[record.step, record.reason or "no reason given"] for record in records if record.status != "ok"],
        "notes": list(dict.fromkeys(note for record in records for note in record.notes)),
        "draws": {draw: DRAWS[draw] for draw in draws},
        "environments": list(dict.fromkeys(m[1] for column in columns if (m := _ENVIRONMENT.match(column)))),
        "charts": charts_json(columns),
        "verdict": verdict_payload(records, _last_traces(run, steps_scored)),
        "regimes": {draw: regime_map(records, draw) for draw in draws},
        "scored_steps": steps_scored,
    }


def scored_steps(run: str | os.PathLike[str], records: Sequence[Record]) -> list[int]:
    """Recorded steps that have a matrix or traces on disk."""
    names = [file.name for folder in ("matrices", "traces") for file in (Path(run) / folder).glob("*")]
    held = {int(m[1]) for m in map(_STEP_FILE.fullmatch, names) if m}
    return [record.step for record in records if record.step in held]


def scored_payload(run: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """One scored step: its matrices and its sampled traces; the keys are in the module's docstring.

    A matrix that cannot be read or drawn is {"missing": reason}; a page is not lost for one damaged file.
    """
    lines = _traces_or_none(run, step)
    matrices: dict[str, LogLikelihoodMatrix | str] = {}
    for draw in DRAWS:
        if (Path(run) / "matrices" / matrix_name(step, draw)).exists():
            matrices[draw] = _matrix_or_reason(run, step, draw)
    for line in lines:
        matrices.setdefault(str(line["namespace"]), "its matrix is not in the run folder")
    contexts: dict[str, int] = {}
    draws, traces = {}, []
    for draw, matrix in matrices.items():
        sampled = [line for line in lines if line["namespace"] == draw]
        pmi_NP, drawn = _pointwise(matrix)
        draws[draw] = {"missing": matrix if isinstance(matrix, str) else drawn}
        if not isinstance(matrix, str) and not isinstance(drawn, str):
            draws[draw] = _drawn_matrix(matrix, pmi_NP, drawn, {int(line["row"]) for line in sampled})
        usable = {} if isinstance(drawn, str) else {int(row): i for i, row in enumerate(drawn)}
        for line in sampled:
            index = usable.get(int(line["row"]))
            traces.append(_trace(line, None if index is None else pmi_NP[index], contexts))
    return {"step": step, "draws": draws, "contexts": list(contexts), "traces": traces}


def _about(run: str | os.PathLike[str]) -> dict[str, Any]:
    held = read_run(run)
    about: dict[str, Any] = {name: str(held[name]) for name in ("model", "dtype") if held.get(name)}
    created = held.get("created")
    if isinstance(created, (int, float)) and 0 < created < END_OF_TIME:
        about["created"] = created
    return about


def _columns(records: Sequence[Record]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for record in records for name in record.values)
    columns: dict[str, list[float | None]] = {name: [None] * len(records) for name in names}
    for index, record in enumerate(records):
        for name, value in record.values.items():
            columns[name][index] = _rounded(value)
    return columns


def _rounded(value: float) -> float:
    """Six significant digits: more than any chart or reader resolves, in half the bytes."""
    return float(f"{value:.6g}")


def _draws(columns: Iterable[str]) -> list[str]:
    found = [draw for draw in DRAWS if any(name.startswith(f"collapse_{draw}_sample/") for name in columns)]
    return found or [next(iter(DRAWS))]


def _info(columns: Iterable[str]) -> dict[str, Any]:
    found = {name: find(name) for name in columns}
    fields = ("title", "unit", "bad", "description", "bounds", "needs")
    return {name: {field: getattr(info, field) for field in fields} for name, info in found.items() if info is not None}


def _not_measured(records: Sequence[Record]) -> dict[str, list[list[Any]]]:
    """[reason, first step, last step, number of steps] of each name, in the order in which they came up."""
    spans: dict[str, dict[str, list[Any]]] = {}
    for record in records:
        for name, reason in record.not_measured.items():
            span = spans.setdefault(name, {}).setdefault(reason, [reason, record.step, record.step, 0])
            span[2], span[3] = record.step, span[3] + 1
    return {name: list(reasons.values()) for name, reasons in spans.items()}


def _reasons(
    names: Iterable[str], columns: Mapping[str, Any], not_measured: Mapping[str, list[list[Any]]]
) -> dict[str, str]:
    return {name: _reason(name, not_measured) for name in names if name not in columns}


def _reason(name: str, not_measured: Mapping[str, list[list[Any]]]) -> str:
    """Why no step has a number: as recorded for it, its family or its draw; else what it needs."""
    plain = canonical_name(name)
    for key in (name, plain, plain.split("@")[0], plain.split("/")[0], name.split("/")[0], "scoring", "rollouts"):
        if not_measured.get(key):
            return str(not_measured[key][-1][0])
    info = find(name)
    if info is not None and info.needs:
        return f"it needs {info.needs}"
    if name.startswith("collapse_"):
        return "no step of this run was scored"
    return "this run did not record it"


def _last_traces(run: str | os.PathLike[str], steps: Sequence[int]) -> tuple[int, list[dict[str, Any]]] | None:
    for step in reversed(steps):
        try:
            lines = read_traces(run, step)
        except CollapsediagError:
            continue
        if lines:
            return step, lines
    return None


def _traces_or_none(run: str | os.PathLike[str], step: int) -> list[dict[str, Any]]:
    try:
        return read_traces(run, step)
    except CollapsediagError as error:
        logger.warning("%s", error)
        return []


def _matrix_or_reason(run: str | os.PathLike[str], step: int, draw: str) -> LogLikelihoodMatrix | str:
    try:
        return read_matrix(run, step, draw)
    except CollapsediagError as error:
        return str(error)


def _pointwise(matrix: LogLikelihoodMatrix | str) -> tuple[NDArray[np.float64], NDArray[np.int64] | str]:
    """Pointwise MI of the usable rows and which rows those are, or why there is none."""
    if isinstance(matrix, str):
        return np.zeros((0, 0)), matrix
    try:
        return pointwise_mi_NP(matrix), np.flatnonzero(matrix.usable_N)
    except CollapsediagError as error:
        return np.zeros((0, 0)), str(error)


def _drawn_matrix(
    matrix: LogLikelihoodMatrix, pmi_NP: NDArray[np.float64], usable: NDArray[np.int64], kept: set[int]
) -> dict[str, Any]:
    """The matrix as bytes, its rows ordered by their own context; of too many rows evenly spaced ones and `kept`."""
    own_N = matrix.own_N[usable]
    order = np.argsort(own_N, kind="stable")
    if order.size > MAX_ROWS:
        is_kept = np.isin(usable[order], list(kept))
        spaced = np.linspace(0, order.size - 1, max(0, MAX_ROWS - int(is_kept.sum()))).round().astype(np.int64)
        is_kept[spaced] = True
        order = order[is_kept]
    limit = float(np.log(matrix.n_contexts))
    return {
        "range": _rounded(limit),
        "pmi": _packed(pmi_NP[order], limit),
        "n_rows": int(order.size),
        "n_columns": matrix.n_contexts,
        "rows": usable[order].tolist(),
        "own": own_N[order].tolist(),
        "n_traces": matrix.n_traces,
        "n_left_out": matrix.n_traces - int(usable.size),
    }


def _packed(pmi_NP: NDArray[np.float64], limit: float) -> str:
    levels_NP = 128 + np.round(np.clip(pmi_NP / limit, -1.0, 1.0) * 127)
    bytes_NP = np.where(np.isnan(pmi_NP), 0, levels_NP).astype(np.uint8)
    return base64.b64encode(zlib.compress(bytes_NP.tobytes(), 6)).decode("ascii")


def _trace(line: Mapping[str, Any], pmi_P: NDArray[np.float64] | None, contexts: dict[str, int]) -> dict[str, Any]:
    own, best = int(line["own"]), int(line["best"])
    scores = line["logp_P"]
    text, cut = _cut(line.get("trace"))
    tokens, pmi = line.get("tokens"), line.get("pmi")
    return {
        "draw": line["namespace"],
        "row": int(line["row"]),
        "own": own,
        "best": best,
        "tied": scores.count(scores[own]) - 1 if own == best else 0,
        "group": str(line.get("group")),
        "length": line.get("length"),
        "reward": line.get("reward"),
        "environment": line.get("environment"),
        "own_pmi": _number(pmi_P, own),
        "best_pmi": _number(pmi_P, best),
        "context": _context(line.get("context"), contexts),
        "context_best": _context(line.get("context_best"), contexts),
        "trace": text,
        "cut": cut,
        "tokens": list(tokens[:MAX_TOKENS]) if tokens and pmi else None,
        "pmi": [None if v is None else round(v, 3) for v in pmi[:MAX_TOKENS]] if tokens and pmi else None,
        "pmi_reason": line.get("pmi_reason") or "this run did not keep their scores",
    }


def _number(pmi_P: NDArray[np.float64] | None, column: int) -> float | None:
    if pmi_P is None or column >= pmi_P.size or not np.isfinite(pmi_P[column]):
        return None
    return round(float(pmi_P[column]), 4)


def _context(text: str | None, contexts: dict[str, int]) -> int | None:
    if text is None:
        return None
    shown, cut = _cut(text)
    note = f"\n[{cut} characters left out of the middle]" if cut else ""
    return contexts.setdefault(f"{shown}{note}", len(contexts))


def _cut(text: str | None) -> tuple[str | None, int]:
    if text is None or len(text) <= MAX_CHARACTERS:
        return text, 0
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}", len(text) - 2 * half
