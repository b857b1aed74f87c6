"""Where records go: files first, then whatever else the user looks at."""

from __future__ import annotations

import contextvars
import inspect
import io
import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from collapsediag.errors import SettingsError, TrackerError
from collapsediag.main_process import MainProcess, is_main_process, is_worker
from collapsediag.plain_text import error_text, printable
from collapsediag.record import Provenance, Record
from collapsediag.run_folder import RunStore

logger = logging.getLogger("collapsediag")

# A sink that failed this often in a row is left alone for the rest of the run.
MAX_SINK_FAILURES = 3
# A sink that does not come back within this is left behind. Above the 90 s that W&B tries to reach its server.
WRITE_LIMIT_S = 120.0
# Closing may upload what is left.
CLOSE_LIMIT_S = 600.0


@runtime_checkable
class Sink(Protocol):
    """Anything that takes records. `close` may be called more than once.

    Each call is made in a thread of its own, so that it can be given up. A sink that must be called in the training
    thread (a SQLite connection, a logger that looks for the run of its thread) says `in_caller_thread = True`, and is
    then waited for however long it takes.
    """

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish; nothing is written afterwards."""
        ...


class JsonlSink:
    """Writes a run folder: metrics.jsonl, matrices, traces, run.json.

    path: the run folder. resume: go on in a folder that already holds records.
    provenance: where the numbers come from, for run.json.
    keep: of how many scored steps matrices and traces stay, spread over the run; None: of all. Numbers always stay.

    Raises RunFolderError at once, before anything is trained, where the folder holds records of another run or has no
    name, and SettingsError for another `keep` or `provenance`. Nothing is made on disk before the first record.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        provenance: Provenance | None = None,
        keep: int | None = None,
    ) -> None:
        self._store = RunStore(path, provenance=provenance, resume=resume, keep=keep)
        # A worker that imports its parent's script makes this sink again, while the parent's run is in the folder.
        if is_main_process() and not is_worker():
            self._store.refuse_another_run()

    def write(self, record: Record) -> None:
        """Append the record; it survives a kill once this returns."""
        self._store.append(record)

    def close(self) -> None:
        """Close the files."""
        self._store.close()


class FanOut:
    """Several sinks as one. A sink that raises is reported once and dropped after three failures in a row; one that
    hangs is dropped at once. One that is given twice is written to once.

    Only the main process of a job writes (rank 0, and no forked child), so that a run is written once.

    strict: raise at once instead (the command line's choice: a user who asked for a file must not go without).
    write_limit_s, close_limit_s: how long a sink may take before it is left behind.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        *,
        strict: bool = False,
        write_limit_s: float = WRITE_LIMIT_S,
        close_limit_s: float = CLOSE_LIMIT_S,
    ) -> None:
        self._sinks = list({id(sink): sink for sink in sinks}.values())
        self._write_limit_s, self._close_limit_s = write_limit_s, close_limit_s
        self._failures: dict[int, int] = {}
        self._has_closed_sinks = False
        self._strict = strict
        self._process = MainProcess()
        for sink in self._sinks:
            _check(sink)

    def write(self, record: Record) -> None:
        """Give the record to every sink that still works. After `close` none is left, which is said once."""
        if not self._process.is_here():
            return
        if self._has_closed_sinks:
            self._has_closed_sinks = False
            logger.warning("the sinks have been closed: step %d and those after it are not written", record.step)
        for sink in list(self._sinks):
            try:
                self._call(sink, partial(sink.write, record), self._write_limit_s)
            except _HungError as error:
                self._drop(sink)
                logger.warning("%s; it is switched off, training and the others go on", error)
            except Exception as error:
                if self._strict:
                    raise
                self._count_failure(sink, error)
            else:
                self._failures.pop(id(sink), None)

    def close(self) -> None:
        """Close every sink, also those that come after one that fails to."""
        sinks, self._sinks = self._sinks, []
        self._has_closed_sinks |= bool(sinks)
        failed: list[Exception] = []
        # A forked child shares its parent's files and lacks its threads: closing there would hang or write twice.
        for sink in sinks if not self._process.is_forked() else ():
            try:
                self._call(sink, sink.close, self._close_limit_s)
            except Exception as error:
                failed.append(error)
                said = printable(error_text(error))
                logger.warning("sink %s failed to close: %s: %s", type(sink).__name__, type(error).__name__, said)
        if self._strict and failed:
            raise failed[0]

    def _call(self, sink: Sink, body: Callable[[], None], limit_s: float) -> None:
        if self._strict:
            body()
        elif getattr(sink, "in_caller_thread", False):
            try:
                body()
            except SystemExit as error:  # training is not its to end
                raise TrackerError("it raised SystemExit") from error
        elif not _came_back(body, limit_s):
            raise _HungError(f"sink {type(sink).__name__} did not come back within {limit_s:g} s")

    def _count_failure(self, sink: Sink, error: Exception) -> None:
        count = self._failures[id(sink)] = self._failures.get(id(sink), 0) + 1
        name = type(sink).__name__
        if count == 1:
            logger.warning("sink %s failed: %s: %s", name, type(error).__name__, printable(error_text(error)))
        if count >= MAX_SINK_FAILURES:
            self._drop(sink)
            logger.warning("sink %s failed %d times in a row and is switched off; the others go on", name, count)

    def _drop(self, sink: Sink) -> None:
        # By identity: sinks may be equal to one another.
        self._sinks = [other for other in self._sinks if other is not sink]


def _check(sink: Any) -> None:
    name, write = type(sink).__name__, getattr(sink, "write", None)
    # An open file has both methods, and takes text.
    if not (callable(write) and callable(getattr(sink, "close", None))) or isinstance(sink, io.IOBase):
        raise TypeError(f"{name} is not a sink: it needs write(record) and close(). Pass e.g. JsonlSink('runs/a').")
    if inspect.iscoroutinefunction(write):
        raise SettingsError(
            f"{name}.write is a coroutine function, and records are written from synchronous code. Schedule it on your "
            "event loop in a write that is none."
        )


class _HungError(TrackerError):
    """A sink was left behind in its thread."""


def _came_back(body: Callable[[], None], limit_s: float) -> bool:
    """Run `body` in a thread, raise what it raises; whether it ended within the limit."""
    raised: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            context.run(body)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="collapsediag-sink", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        error = raised[0]
        if isinstance(error, Exception):
            raise error
        # What would end the process (SystemExit) ended the sink's thread; training is not its to end.
        raise TrackerError(f"it raised {type(error).__name__}") from error
    return not thread.is_alive()
