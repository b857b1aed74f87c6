"""The records of a run that is still being written, read once each."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO

from collapsediag.errors import RunFolderError
from collapsediag.record import Record
from collapsediag.run_folder import MAX_LINE_BYTES, METRICS_FILE, NO_RECORD, record_of
from collapsediag.whole_files import ending

logger = logging.getLogger("collapsediag")

# What stood before the place to read on from; as much as no other run has by chance, its lines being timed.
REMEMBERED_BYTES = 1024


class RecordTail:
    """Follows `metrics.jsonl` of a run folder from the byte up to which it was read.

    A line that is not complete yet is left for later, a torn one skipped. Of a step written twice the last one holds.
    Where the file ends earlier than before or holds something else (the run was started afresh), all is read anew; a
    copy of the same run that replaces it, as rsync does, is read on.

    run: the run folder; neither it nor the file need be there yet.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.path = Path(run) / METRICS_FILE
        self._forget()

    @property
    def records(self) -> list[Record]:
        """In the order of their steps."""
        return [self._latest[step] for step in sorted(self._latest)]

    def poll(self) -> bool:
        """Read what was added; whether there was anything new. Raises RunFolderError where the file cannot be read."""
        try:
            with open(ending(self.path), "rb") as stream:
                is_new = not self._goes_on(stream)
                if is_new:
                    self._forget()
                stream.seek(self._offset)
                return self._read(stream) or is_new
        except FileNotFoundError:
            was_there = bool(self._latest)
            self._forget()
            return was_there
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be read ({error.strerror or error}).") from error

    def _forget(self) -> None:
        self._offset, self._end = 0, b""
        self._latest: dict[int, Record] = {}
        # The record that was written last, which need not have the highest step.
        self.last: Record | None = None
        self.n_records = self.n_torn = 0

    def _goes_on(self, stream: IO[bytes]) -> bool:
        stream.seek(self._offset - len(self._end))
        return stream.read(len(self._end)) == self._end

    def _read(self, stream: IO[bytes]) -> bool:
        before = self._offset
        while line := stream.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                break
            self._offset += len(line)
            self._end = (self._end + line)[-REMEMBERED_BYTES:]
            if line.strip():
                self._take(line)
        return self._offset > before

    def _take(self, line: bytes) -> None:
        try:
            record = record_of(line)
        except NO_RECORD:
            self.n_torn += 1
            return
        self._latest[record.step] = self.last = record
        self.n_records += 1
