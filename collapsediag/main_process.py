"""Which process of a job speaks: the main one, and never a fork of it."""

from __future__ import annotations

import multiprocessing
import os
import sys


def is_main_process() -> bool:
    """Whether this is rank 0 of its job: by torch.distributed where it runs, else by the variable RANK, else yes.

    Nothing is imported for it: where torch is not loaded, no process group can exist.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "").strip() in ("", "0")


def is_worker() -> bool:
    """Whether `multiprocessing` started this process, also while it still imports the script of its parent.

    >>> is_worker()
    False
    """
    # A fork server, the default on Linux from Python 3.14 on, is a MainProcess too, but renames the script it imports.
    script = getattr(sys.modules.get("__mp_main__"), "__name__", None)
    return script == "__mp_main__" or multiprocessing.current_process().name != "MainProcess"


class MainProcess:
    """Remembers the process it was made in.

    A forked child inherits live loggers and open files. If it used them, two processes would write one run.

    >>> MainProcess().is_forked()
    False
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_forked(self) -> bool:
        """Whether this is a child of the process that made the object."""
        return os.getpid() != self._pid

    def is_here(self) -> bool:
        """Whether this process is to write. Asked each time: a process group may begin after construction."""
        return not self.is_forked() and is_main_process()
