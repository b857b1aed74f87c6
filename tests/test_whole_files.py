"""Files that are there whole or not at all, and that cost nobody else's file."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from collapsediag.cli.report import write_file
from collapsediag.whole_files import STALE_S, clear_leftovers, replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_users_file_beside_the_output_stays(tmp_path: Path) -> None:
    beside = ("a.html.tmp", "a.html~", ".a.html.tmp", ".a.html.swp", ".collapsediag-notes.tmp", ".collapsediag.tmp")
    for name in beside:
        (tmp_path / name).write_text("mine")
        os.utime(tmp_path / name, (0, 0))
    write_file(tmp_path / "a.html", b"page")
    assert names(tmp_path) == sorted(["a.html", *beside])
    assert {(tmp_path / name).read_text() for name in beside} == {"mine"}
    assert (tmp_path / "a.html").read_bytes() == b"page"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def write(error: type[BaseException]) -> None:
        with replacing(tmp_path / "a") as part:
            part.write_text("half")
            raise error

    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error):
            write(error)
    assert (names(tmp_path), (tmp_path / "a").read_text()) == (["a"], "old")


def test_two_writers_of_one_file_never_mix(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second, longer")
        first.write_text("1")
    assert (names(tmp_path), (tmp_path / "a").read_text()) == (["a"], "1")
    threads = [threading.Thread(target=write_file, args=(tmp_path / "b", bytes([n]) * 10**5)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = (tmp_path / "b").read_bytes()
    assert content == content[:1] * 10**5
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.skipif(os.name != "posix", reason="a mask of the process is of POSIX")
def test_the_files_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


KILLED = """
import os, signal, sys
from pathlib import Path
from collapsediag.whole_files import replacing

with replacing(Path(sys.argv[1])) as part:
    part.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that nothing can catch")
def test_what_a_killed_process_left_is_cleared_once_it_is_old(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a")], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "a").read_text() == "old"
    (left,) = (path for path in tmp_path.iterdir() if path.name != "a")
    clear_leftovers(tmp_path)
    assert left.exists()  # somebody may be writing it
    written = left.stat().st_mtime
    os.utime(left, (written, written - STALE_S))
    write_file(tmp_path / "b", b"")
    assert names(tmp_path) == ["a", "b"]
