"""Which source a file is of, and why: decided by the keys of its first rows, said in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from collapsediag.errors import ReaderError
from collapsediag.readers import _read
from collapsediag.readers._files import ParquetRows, open_rows
from collapsediag.readers._rows import BadLines, Row, RowFile
from collapsediag.readers.atropos import AtroposSource
from collapsediag.readers.generic import GenericSource
from collapsediag.readers.nemo_gym import NemoGymSource
from collapsediag.readers.nested import LIST_KEYS, NestedSource
from collapsediag.readers.parallel import ParallelSource
from collapsediag.readers.tinker import TinkerSource
from collapsediag.readers.trl import TrlSource
from collapsediag.readers.verifiers import VerifiersSource
from collapsediag.readers.verl import VerlSource

SOURCES = {
    source.name: source
    for source in (
        GenericSource,
        VerlSource,
        TrlSource,
        ParallelSource,
        NestedSource,
        AtroposSource,
        NemoGymSource,
        VerifiersSource,
        TinkerSource,
    )
}
METRIC_LOG = "metric_log"
# Keys of the lines that a run folder of this library holds, in metrics.jsonl and in traces/.
RECORD_KEYS = {"step", "status", "values"}
TRACE_KEYS = {"namespace", "row", "own", "best", "logp_P"}

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Detection:
    """The source of a file, and the reason in words."""

    source: str
    reason: str


def detect_source(path: str | Path) -> Detection:
    """Say which source a file (or the first file of a folder that holds rollouts) is of.

    Raises ReaderError where nothing fits, with the keys found and how to name them.
    """
    suffixes = sorted({suffix for source in SOURCES.values() for suffix in source.suffixes})
    complaint: ReaderError | None = None
    for file in _read.find_files(path, suffixes):
        found = detect_file(file)
        if found.source != METRIC_LOG:
            return found
        complaint = ReaderError(f"{file}: {found.reason}")
    assert complaint is not None
    raise complaint


def detect_file(path: Path, key_map: Mapping[str, str] | None = None) -> Detection:
    """The same for one file; a log of metrics is said to be one and raises nothing."""
    rows = open_rows(path)
    row = _first_row(rows)
    if isinstance(rows, ParquetRows):
        if {"prompt", "completion"} <= set(row.data) or key_map:
            return Detection("trl", f"TRL completions: parquet with {_keys(row.data, 'step', 'prompt', 'completion')}")
        raise row.missing(
            "prompt", "Of parquet files only TRL's completions are known; else name keys: --map OURS=THEIRS."
        )
    for source, test in _TESTS:
        reason = test(row.data)
        if reason:
            return Detection(source, reason)
    if key_map:
        return Detection("jsonl", f"rollout JSONL: the key map names {', '.join(sorted(key_map))}")
    _refuse_run_folder(path, row.data)
    raise row.error(
        f"no known source of rollouts has these keys: {row.keys_found()}. Name what holds prompt and completion "
        "(--map prompt=THEIRS --map completion=THEIRS), or the source (--source); docs/formats.md shows what is read."
    )


def _refuse_run_folder(path: Path, data: Data) -> None:
    """What was measured is easily taken for what it was measured on."""
    for run, keys in ((path.parent, RECORD_KEYS), (path.parent.parent, TRACE_KEYS)):
        if keys <= set(data):
            raise ReaderError(
                f"{path} belongs to a run folder, which holds what was measured, not rollouts: `collapsediag report "
                f"{run}` reads it. What is read here is saved rollouts, prompts and completions; docs/formats.md shows "
                "which."
            )


def _first_row(rows: RowFile) -> Row:
    bad = BadLines(skip=True)
    for row in islice(rows.scan(bad), 1):
        return row
    raise bad.first or ReaderError(f"{rows.path} holds no row.")


def _keys(data: Data, *names: str) -> str:
    there = [name for name in names if name in data]
    return ("keys " if len(there) > 1 else "key ") + ", ".join(there)


def _is_list(data: Data, *names: str, of: type | tuple[type, ...] = object) -> str | None:
    """The first of the names under which a list of such values stands."""
    for name in names:
        value = data.get(name)
        if isinstance(value, list) and (not value or isinstance(value[0], of)):
            return name
    return None


def _nemo_gym(data: Data) -> str | None:
    if "responses_create_params" in data and "response" in data:
        return f"NeMo-Gym rollouts: {_keys(data, 'responses_create_params', 'response', '_ng_task_index')}"
    return None


def _atropos(data: Data) -> str | None:
    if _is_list(data, "tokens", of=list) and _is_list(data, "masks", of=list) and _is_list(data, "scores"):
        return f"Atropos dump: lists of trajectories under {_keys(data, 'tokens', 'masks', 'scores', 'messages')}"
    return None


def _tinker(data: Data) -> str | None:
    if isinstance(data.get("rollouts"), list) and ("env_type" in data or "env_config" in data):
        return f"tinker chat log: {_keys(data, 'rollouts', 'metrics', 'env_type', 'env_config')}"
    return None


def _verl(data: Data) -> str | None:
    if not (isinstance(data.get("input"), str) and isinstance(data.get("output"), str)):
        return None
    if not {"score", "step", "gts", "uid"} & set(data):
        return None
    version = "V1" if "uid" in data else "V0"
    return f"{version} veRL dump: {_keys(data, 'input', 'output', 'score', 'step', 'gts', 'uid')}"


def _verifiers(data: Data) -> str | None:
    marks = {"example_id", "stop_condition", "is_completed", "generation_ms"} & set(data)
    if {"prompt", "completion"} <= set(data) and marks:
        return f"verifiers results: {_keys(data, 'prompt', 'completion', *sorted(marks))}"
    return None


def _parallel(data: Data) -> str | None:
    texts = _is_list(data, *ParallelSource.aliases["completion"], of=str)
    scores = _is_list(data, *ParallelSource.aliases["reward"], of=(bool, int, float, type(None)))
    if texts and scores:
        return f"parallel lists: {len(data[texts])} texts under {texts!r} beside the scores under {scores!r}"
    return None


def _nested(data: Data) -> str | None:
    name = _is_list(data, *LIST_KEYS, of=dict)
    if name and not any("role" in item for item in data[name][:1]):
        return f"nested dump: a list of samples (objects) under {name!r}"
    return None


def _metric_log(data: Data) -> str | None:
    if set(data) == {"step", "data"} and isinstance(data["data"], Mapping):
        return "a metric log of veRL's file logger (keys step, data), not rollouts"
    numbers = [key for key, value in data.items() if isinstance(value, (int, float))]
    if "log_history" in data:
        return "a Hugging Face trainer_state (key log_history), not rollouts"
    if len(numbers) == len(data) > 1 or (len(numbers) > 5 and any("/" in key for key in numbers)):
        return f"a log of metrics ({len(numbers)} numbers: {', '.join(numbers[:4])}, ...), not rollouts"
    return None


def _generic(data: Data) -> str | None:
    names = [n for part in ("completion", "completion_ids", "turns", "messages") for n in GenericSource.aliases[part]]
    there = [name for name in (*names, "token_ids") if name in data]
    if there:
        prompts = [n for part in ("prompt", "question", "prompt_ids") for n in GenericSource.aliases[part] if n in data]
        return f"rollout JSONL: {_keys(data, *prompts, *there)}"
    return None


_TESTS: tuple[tuple[str, Callable[[Data], str | None]], ...] = (
    ("nemo_gym", _nemo_gym),
    ("atropos", _atropos),
    ("tinker", _tinker),
    ("verl", _verl),
    ("verifiers", _verifiers),
    ("parallel", _parallel),
    ("nested", _nested),
    (METRIC_LOG, _metric_log),
    ("jsonl", _generic),
)
