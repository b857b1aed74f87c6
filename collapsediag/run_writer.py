"""Which process is writing a run, for those who follow it: is it still at work, or has it gone without a word?

`RUN/writer.json` is there while a process has the run open. A killed process leaves it behind, and its number tells.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from collapsediag.whole_files import ending

WRITER_FILE = "writer.json"


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A process. started: when, in the kernel's ticks since boot; None where that is not known.

    >>> Writer.here().is_alive
    True
    """

    host: str
    pid: int
    started: str | None = None

    @classmethod
    def here(cls) -> Writer:
        """This process."""
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, started=_started(pid))

    @property
    def is_alive(self) -> bool | None:
        """Whether the process still runs; None where that cannot be told from this machine."""
        if self.host != socket.gethostname() or os.name != "posix":
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            pass
        # The number may have passed on to another process, or to what is left of this one.
        return self.started is None or _started(self.pid) == self.started


def _started(pid: int) -> str | None:
    """Field 22 of Linux's /proc/PID/stat, counted after the name, which may hold anything; None for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def writer_of(run: str | os.PathLike[str]) -> Writer | None:
    """Who has the run open, or was killed while it had; None where nobody."""
    try:
        content = json.loads(ending(Path(run) / WRITER_FILE).read_text(encoding="utf-8"))
        started = content["started"]
        return Writer(
            host=str(content["host"]), pid=int(content["pid"]), started=None if started is None else str(started)
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def writer_json(writer: Writer) -> bytes:
    """The content of writer.json."""
    return json.dumps(asdict(writer)).encode("ascii") + b"\n"
