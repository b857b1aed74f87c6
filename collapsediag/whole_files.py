"""Files that are there whole or not at all, and files that end."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Whoever is still at work on a file writes to it more often than this.
STALE_S = 60
_LEFTOVER = re.compile(r"\.collapsediag-[0-9a-f]{16}\.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end; where writing fails, `path` stays and nothing is left.

    A device or a pipe is written to: what takes its place would be no /dev/null any more.
    """
    if _may_not_end(path):
        yield path
        return
    # Of no name that a user's file has, nor that another process writes to at the same time.
    temporary = path.with_name(f".collapsediag-{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear_leftovers(folder: Path) -> None:
    """Delete what `replacing` left in the folder where a process was killed while it wrote."""
    for file in folder.glob(".collapsediag-*.tmp"):
        with contextlib.suppress(OSError):  # another process cleared it first, or may delete where we may not
            if _LEFTOVER.fullmatch(file.name) and time.time() - file.stat().st_mtime > STALE_S:
                file.unlink()


def ending(path: Path) -> Path:
    """`path`, which is about to be read whole. Raises OSError for a device or a pipe: it may go on without end."""
    if _may_not_end(path):
        raise OSError(errno.EINVAL, "it is a device or a pipe; save what comes out of it as a file")
    return path


def _may_not_end(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
