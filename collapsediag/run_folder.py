"""The run folder: what a run leaves on disk, readable at any moment, whatever killed it.

    RUN/
      run.json                    schema version and provenance
      metrics.jsonl               one record a line; the source of truth
      matrices/STEP-NAMESPACE.npz
      traces/STEP.jsonl           a bounded sample of traces
      writer.json                 the process that has the run open; gone once it has closed it

A line in metrics.jsonl is written last, so every record that can be read has its matrix and traces beside it (of as
many scored steps as are kept). Everything else is written to a temporary name and renamed. No pickle anywhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from collapsediag.arrays import whole_number
from collapsediag.errors import RunFolderError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.record import SCHEMA_VERSION, Provenance, Record, is_trace_line
from collapsediag.retention import step_to_forget
from collapsediag.run_writer import WRITER_FILE, Writer, writer_json, writer_of
from collapsediag.whole_files import clear_leftovers, ending, replacing

logger = logging.getLogger("collapsediag")

METRICS_FILE = "metrics.jsonl"
# No record comes near these; what does is no run of ours, and is not taken into memory whole.
MAX_LINE_BYTES = 16 * 2**20
MAX_TRACES_BYTES = 256 * 2**20
NO_RECORD = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
RUN_FILE = "run.json"
# Run folders that a message names, of those in a folder that is none.
MAX_NAMED = 8


def _json_line(value: dict[str, Any]) -> bytes:
    # ASCII: a lone surrogate in model text survives as an escape instead of failing the write.
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _append(stream: IO[bytes], line: bytes) -> None:
    """Write a line whole or not at all: what a full disk cut off is taken back."""
    start = os.fstat(stream.fileno()).st_size
    done = 0
    try:
        while done < len(line):
            done += stream.write(line[done:])
    except OSError:
        with contextlib.suppress(OSError):
            if os.fstat(stream.fileno()).st_size == start + done:  # nobody else has written since
                os.ftruncate(stream.fileno(), start)
        raise


class RunStore:
    """A run folder, open for writing.

    path: the folder; made if it is not there. A folder that already holds records is refused unless resume=True,
        because mixing two runs in one curve cannot be undone.
    provenance: written to run.json on the first record (kept as it is on resume).
    keep: of how many scored steps matrices and traces stay: the first, the last, and others spread evenly between;
        the numbers of all steps stay. None: of all.

    Constructing touches nothing on disk; the first `append` does. Raises RunFolderError where the folder has no name,
    cannot be written, or holds another run, and SettingsError for another `keep` or `provenance`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        provenance: Provenance | None = None,
        resume: bool = False,
        keep: int | None = None,
    ) -> None:
        if not (provenance is None or isinstance(provenance, Provenance)):
            raise SettingsError(
                f"provenance is of type {type(provenance).__name__}; make it: Provenance.collect(model=..., dtype=...)."
            )
        if keep is not None and (whole_number(keep) or 0) < 2:
            raise SettingsError(
                f"keep={keep!r:.80}: a whole number of scored steps is needed, 2 or more, for the first and the last "
                "always stay; None keeps all."
            )
        self.path = _named(path)
        self._keep = keep
        self._provenance = provenance
        self._resume = resume
        self._stream: IO[bytes] | None = None

    def refuse_another_run(self) -> None:
        """Raise RunFolderError where the folder holds records and resume=True was not said; nothing is made."""
        if not self._resume and _holds_bytes(self.path / METRICS_FILE):
            raise RunFolderError(
                f"{self.path} already holds records of a run. Choose another folder, or resume that run "
                "(resume=True, on the command line --resume)."
            )

    def append(self, record: Record) -> None:
        """Write one record; when this returns, the record survives a kill of the process."""
        line = _json_line(record.to_json())
        try:
            stream = self._stream_still_there() or self._open()
            for namespace, matrix in record.matrices.items():
                matrix.save(self.path / "matrices" / matrix_name(record.step, namespace))
            if record.traces:
                content = b"".join(_json_line(trace.to_json()) for trace in record.traces)
                _replace(self.path / "traces" / f"{record.step:09d}.jsonl", content)
            _append(stream, line)
        except RunFolderError:
            raise
        except OSError as error:
            raise RunFolderError(
                f"{self.path}: step {record.step} could not be written ({error.strerror or error}). Earlier records "
                "are intact; free space or fix permissions and resume."
            ) from error
        if self._keep is not None and (record.matrices or record.traces):
            self._forget(self._keep)

    def close(self) -> None:
        """Flush to the disk itself and close. Closing twice is fine."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None
            if writer_of(self.path) == Writer.here():
                (self.path / WRITER_FILE).unlink(missing_ok=True)

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget(self, keep: int) -> None:
        files: dict[int, list[Path]] = {}
        for file in (*self.path.glob("matrices/*.npz"), *self.path.glob("traces/*.jsonl")):
            step = re.match(r"-?\d+", file.name)
            if step:
                files.setdefault(int(step[0]), []).append(file)
        while len(files) > keep:
            for file in files.pop(step_to_forget(sorted(files))):
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:  # the record itself is safe, and that is what counts
                    logger.warning("%s could not be deleted (%s)", file, error.strerror or error)

    def _stream_still_there(self) -> IO[bytes] | None:
        if self._stream is not None and not (self.path / METRICS_FILE).exists():
            logger.warning("%s was deleted while the run went on; it is made anew, without its past", self.path)
            self._stream.close()
            self._stream = None
        return self._stream

    def _open(self) -> IO[bytes]:
        metrics = self.path / METRICS_FILE
        self.refuse_another_run()
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; a run folder is needed.")
        for folder in (self.path, self.path / "matrices", self.path / "traces"):
            folder.mkdir(parents=True, exist_ok=True)
            clear_leftovers(folder)
        if not (self.path / RUN_FILE).exists():
            provenance = self._provenance or Provenance.collect()
            content = json.dumps(provenance.to_json(), indent=2).encode()
            _replace(self.path / RUN_FILE, content + b"\n")
        _replace(self.path / WRITER_FILE, writer_json(Writer.here()))
        # Unbuffered: what could not be written must not come out with a later record.
        stream = open(metrics, "ab", buffering=0)  # noqa: SIM115  stays open for the life of the run
        self._stream = stream
        if stream.tell() and not _ends_with_newline(metrics):
            stream.write(b"\n")  # seals the torn line of a killed run; nothing of the user's is deleted
        self._resume = True
        return stream


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise RunFolderError where no run could be written to `path`; nothing is made or changed.

    For those who have an hour of work to do before the first record is there to be written.
    """
    folder = _named(path)
    try:
        metrics = folder / METRICS_FILE
        there = next(p for p in (metrics, folder, *folder.absolute().parents) if os.path.lexists(p))
        if there == metrics:
            is_fit, wanted = metrics.is_file(), os.W_OK
        else:
            is_fit, wanted = there.is_dir(), os.W_OK | os.X_OK
        if not is_fit:
            raise RunFolderError(f"{there} is {_kind(there)}, so {folder} cannot be a run folder. Choose another.")
        if not os.access(there, wanted):
            raise RunFolderError(f"{there} cannot be written to. Choose another run folder, or change its permissions.")
        # No name can be looked up that is too long for the file system, or holds a NUL.
        metrics.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except RunFolderError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFolderError(f"{folder} cannot be a run folder ({reason}). Choose another.") from error


def _named(path: str | os.PathLike[str]) -> Path:
    if not str(path).strip():
        raise RunFolderError("the run folder has no name; give one, for example runs/a.")
    return Path(path)


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a file" if path.is_file() else "neither a file nor a folder"


def _holds_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (OSError, ValueError):  # not there, or out of reach: whoever opens it is told
        return False


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def matrix_name(step: int, namespace: str) -> str:
    """File name of a step's matrix.

    >>> matrix_name(120, "first_turn")
    '000000120-first_turn.npz'
    """
    return f"{step:09d}-{namespace}.npz"


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of run.json. Raises RunFolderError where it is missing, damaged, or of a newer schema."""
    file = Path(path) / RUN_FILE
    try:
        content = json.loads(ending(file).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise no_run_folder(path, RUN_FILE) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{file}: cannot be read ({error}).") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise RunFolderError(f"{file}: no schema_version; this is not a run folder of collapsediag.")
    if version > SCHEMA_VERSION:
        raise RunFolderError(
            f"{file}: schema version {version}, but this release reads up to {SCHEMA_VERSION}. Upgrade collapsediag."
        )
    return dict(content)


def run_folders_in(path: str | os.PathLike[str]) -> list[str]:
    """Paths of the run folders right inside a folder."""
    return sorted(str(file.parent) for file in Path(path).glob(f"*/{METRICS_FILE}"))


def no_run_folder(path: str | os.PathLike[str], missing: str) -> RunFolderError:
    """The error for a path without this file: what it is instead, and the run folders in it."""
    if not os.path.lexists(path):
        return RunFolderError(f"{path} is not a run folder: it does not exist.")
    if not os.path.isdir(path):
        cure = f" Its folder may be one: {Path(path).parent}." if Path(path).name in (METRICS_FILE, RUN_FILE) else ""
        return RunFolderError(f"{path} is not a run folder: it is {_kind(Path(path))}.{cure}")
    inside = run_folders_in(path)
    more = f", and {len(inside) - MAX_NAMED} more" if len(inside) > MAX_NAMED else ""
    cure = f" Run folders in it: {', '.join(inside[:MAX_NAMED])}{more}." if inside else ""
    return RunFolderError(f"{path} is not a run folder: it has no {missing}.{cure}")


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """All records in the order of their steps; of a step written twice (a resumed run) the last one holds.

    A line that is not JSON (the torn end of a killed run) is skipped with one warning that counts them.
    """
    latest: dict[int, Record] = {}
    for record in iter_records(path):
        latest[record.step] = record
    return [latest[step] for step in sorted(latest)]


def record_of(line: bytes) -> Record:
    """The record of a line of metrics.jsonl. Raises one of NO_RECORD for what is none."""
    if len(line) >= MAX_LINE_BYTES:
        raise ValueError("a line that long is no record")
    return Record.from_json(json.loads(line))


def iter_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Records as they stand in metrics.jsonl, repeated steps included."""
    file = Path(path) / METRICS_FILE
    torn = 0
    try:
        with open(ending(file), "rb") as stream:
            for line in iter(partial(stream.readline, MAX_LINE_BYTES), b""):
                if not line.strip():
                    continue
                try:
                    yield record_of(line)
                except NO_RECORD:
                    torn += 1
    except (FileNotFoundError, NotADirectoryError):
        raise no_run_folder(path, METRICS_FILE) from None
    except OSError as error:
        raise RunFolderError(f"{file}: cannot be read ({error.strerror or error}).") from error
    if torn:
        logger.warning("%s: skipped %d unreadable line(s), the torn end of a killed run", file, torn)


def read_matrix(path: str | os.PathLike[str], step: int, namespace: str) -> LogLikelihoodMatrix:
    """The matrix of a scored step. Raises RunFolderError where that step has none."""
    file = Path(path) / "matrices" / matrix_name(step, namespace)
    if not file.exists():
        raise RunFolderError(f"{path}: no matrix of step {step} ({namespace}); the step was not scored.")
    return LogLikelihoodMatrix.load(file)


def read_traces(path: str | os.PathLike[str], step: int) -> list[dict[str, Any]]:
    """The sampled traces of a step, [] where none were kept."""
    file = Path(path) / "traces" / f"{step:09d}.jsonl"
    if not file.exists():
        return []
    try:
        if ending(file).stat().st_size > MAX_TRACES_BYTES:
            raise ValueError(f"it is larger than {MAX_TRACES_BYTES >> 20} MB")
        lines = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines() if line]
        for number, line in enumerate(lines, 1):
            if not is_trace_line(line):
                raise ValueError(f"line {number} is no trace")
        return lines
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise RunFolderError(f"{file}: cannot be read ({error}). Metrics and matrices are in other files.") from error
