"""From paths to files to batches: what every `from_<source>` does."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collapsediag.errors import ReaderError
from collapsediag.readers._options import make_options
from collapsediag.readers._source import Source
from collapsediag.readers._steps import read_batches
from collapsediag.rollouts import RolloutBatch

Paths = str | Path | Sequence[str | Path]


def read_source(source: type[Source], paths: Paths, options: Mapping[str, Any]) -> Iterator[RolloutBatch]:
    """The batches of files that are known to be of one source. Settings and paths are checked now, files on reading."""
    made = make_options(options)
    files = find_files(paths, source.suffixes)
    return read_batches(files, source(made, many_files=len(files) > 1), made)


def find_files(paths: Paths, suffixes: Sequence[str]) -> list[Path]:
    """The files that `paths` name: files as they are; the files of a folder and its subfolders by suffix; patterns.

    In the order given; inside a folder in the order of the numbers in their names (2.jsonl before 10.jsonl).
    """
    found: dict[Path, None] = {}
    for path in as_list_of_paths(paths):
        try:
            found.update(dict.fromkeys(_expand(Path(path), suffixes)))
        except OSError as error:
            raise ReaderError(f"{path} cannot be read: {error.strerror or error}.") from error
    return list(found)


def as_list_of_paths(paths: Paths) -> list[str | Path]:
    """What was named, at least one."""
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given:
        raise ReaderError("no files were named; give files or folders of saved rollouts.")
    if "" in given:
        raise ReaderError("a path is empty, which would be the folder that you are in; say . if you mean that one.")
    return given


def _expand(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and has_suffix(file, suffixes)]
        if not files:
            there = sorted({file.suffix or file.name for file in path.rglob("*") if file.is_file()})
            raise ReaderError(
                f"{path} is a folder without rollout files (wanted: {', '.join(suffixes)}, also .gz; found: "
                f"{', '.join(there[:8]) or 'nothing'})."
            )
        return sorted(files, key=lambda file: natural_order(file.relative_to(path)))
    if path.exists():
        return [path]
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    files = [match for match in matches if match.is_file()]
    if not matches:
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):
            path.stat()  # says why a path is out of reach; from Python 3.14 on, is_dir and exists do not
    if not files:
        what = "a link that leads nowhere" if path.is_symlink() else "a pattern that folders match, and no file"
        raise ReaderError(f"{path} is {what}." if matches else f"{path} does not exist.")
    return sorted(files, key=natural_order)


def has_suffix(path: Path, suffixes: Sequence[str]) -> bool:
    """Whether the name ends with one of the suffixes, gzip's aside."""
    return path.name.lower().removesuffix(".gz").endswith(tuple(suffixes))


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """A sort key that puts 2.jsonl before 10.jsonl.

    >>> sorted([Path("10.jsonl"), Path("2.jsonl")], key=natural_order)[0].name
    '2.jsonl'
    """
    parts = re.split(r"([0-9]+)", str(path))
    return [(0, int(part), "") if place % 2 else (1, 0, part) for place, part in enumerate(parts)]
