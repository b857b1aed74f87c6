"""Files that are there whole or not at all, and files that end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end; where writing fails, `path` stays and nothing is left.

    A device or a pipe is written to: what takes its place would be no /dev/null any more.
    """
    if _may_not_end(path):
        yield path
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def ending(path: Path) -> Path:
    """`path`, which is about to be read whole. Raises OSError for a device or a pipe: it may go on without end."""
    if _may_not_end(path):
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    return path


def _may_not_end(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
