"""Reads what W&B wrote offline, without its private modules: the log file a run leaves on disk.

The file is a LevelDB log: a 7-byte header (":W&B", magic 0xBEE1, version), then 32-KiB blocks of records, each
crc32 (4 bytes), length (2), kind (1: full, 2: first, 3: middle, 4: last), data. A record is a protobuf message.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandbLogError(ValueError):
    """The file is not a W&B log, or damaged in the middle."""


@dataclass
class OfflineRun:
    """What one run holds. history: (W&B's own step, the row); metrics: exact name -> every x-axis it was given."""

    folder: Path
    history: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    metrics: dict[str, set[str]] = field(default_factory=dict)
    globs: dict[str, set[str]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def column(self, *names: str) -> list[tuple[Any, ...]]:
        """The values of `names` in every row that has them all."""
        return [tuple(row[n] for n in names) for _, row in self.history if all(n in row for n in names)]

    def tables(self) -> list[dict[str, Any]]:
        """All media tables, in the order of their names."""
        found = sorted((self.folder / "files" / "media" / "table").rglob("*.table.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def iter_raw(path: Path) -> Iterator[bytes]:
    """The records' bytes; a torn tail (a live or killed run) ends the iteration."""
    content = path.read_bytes()
    if len(content) < _HEADER or struct.unpack("<4sHB", content[:_HEADER])[:2] != (b":W&B", 0xBEE1):
        raise WandbLogError(f"{path}: no W&B header")
    at, parts = _HEADER, []
    while at < len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        if at + _HEADER > len(content):
            return
        crc, length, kind = struct.unpack_from("<IHB", content, at)
        if kind == 0 and length == 0:
            at += left  # padding to the end of the block
            continue
        data = content[at + _HEADER : at + _HEADER + length]
        if len(data) < length:
            return
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            raise WandbLogError(f"{path}: checksum at byte {at}")
        at += _HEADER + length
        parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


def read_offline(folder: Path) -> OfflineRun:
    """One run folder (wandb/offline-run-...)."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    found = OfflineRun(folder=folder)
    for raw in iter_raw(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        _take(record, found)
    return found


def _take(record: Any, found: OfflineRun) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "history":
        found.history.append((record.history.step.num, _items(record.history.item)))
    elif kind == "metric":
        metric = record.metric
        target, name = (found.globs, metric.glob_name) if metric.glob_name else (found.metrics, metric.name)
        target.setdefault(name, set()).add(metric.step_metric)
    elif kind == "run":
        run = record.run
        found.run = {"id": run.run_id, "project": run.project, "name": run.display_name, "group": run.run_group}
        found.run["job_type"] = run.job_type
        found.config.update(_items(run.config.update))
    elif kind == "config":
        found.config.update(_items(record.config.update))
    elif kind == "files":
        found.files += [file.path for file in record.files.files]
    elif kind == "alert":
        found.alerts.append((record.alert.title, record.alert.text, record.alert.level))
    elif kind == "exit":
        found.exit_code = record.exit.exit_code


def _items(items: Any) -> dict[str, Any]:
    return {".".join(i.nested_key) if i.nested_key else i.key: json.loads(i.value_json) for i in items}


def wait_closed(folder: Path, timeout: float = 60.0) -> OfflineRun:
    """The run once its file is complete: finish() returns before it is. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if any(path.stat().st_size > _HEADER for path in folder.glob("*.wandb")):
            found = read_offline(folder)
            if found.exit_code is not None:
                return found
        time.sleep(0.05)
    raise TimeoutError(f"{folder} was not closed within {timeout} s")
