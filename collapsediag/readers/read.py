"""The one door: saved files of any known source in, one RolloutBatch per step out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from collapsediag.errors import ReaderError, SettingsError
from collapsediag.readers._options import MAX_STEP_BYTES, ReadOptions, RepeatedSteps
from collapsediag.readers._read import Paths, as_list_of_paths, find_files, has_suffix
from collapsediag.readers._steps import read_batches
from collapsediag.readers.detect import METRIC_LOG, SOURCES, Detection, detect_file
from collapsediag.readers.tokenization import tokenize_batch
from collapsediag.rollouts import RolloutBatch

logger = logging.getLogger("collapsediag")


def read_rollouts(
    paths: Paths,
    *,
    source: str | None = None,
    key_map: Mapping[str, str] | None = None,
    skip_bad_lines: bool = False,
    tokenizer: Any = None,
    max_groups: int | None = None,
    max_rollouts: int | None = None,
    max_step_bytes: int = MAX_STEP_BYTES,
    seed: int = 0,
    repeated_steps: RepeatedSteps = "auto",
    wrap_questions: bool = True,
    reward_weights: Mapping[str, float] | None = None,
    check_groups: bool = True,
    plain_prompts: bool = False,
    answer_prefix: str = "",
) -> Iterator[RolloutBatch]:
    """The batches of saved rollouts, steps ascending; one step is in memory at a time.

    paths: files, folders (read with their subfolders) or patterns; gzip is unpacked.
    source: a name of SOURCES; None: detected, and the reason is logged and kept in the batches' notes.
    tokenizer: a transformers tokenizer (or anything with its calls); gives token ids to turns that have none.
    plain_prompts, answer_prefix: how the tokenizer is used, see tokenize_batch.
    The others: see ReadOptions.

    Raises SettingsError at once for settings that do not fit; ReaderError, naming file, line and key, for files that
    cannot be read, when the first batch is asked for.
    """
    options = ReadOptions(
        key_map=dict(key_map or {}),
        skip_bad_lines=skip_bad_lines,
        max_groups=max_groups,
        max_rollouts=max_rollouts,
        max_step_bytes=max_step_bytes,
        seed=seed,
        repeated_steps=repeated_steps,
        wrap_questions=wrap_questions,
        reward_weights=reward_weights,
        check_groups=check_groups,
    )
    if source is not None and source not in SOURCES:
        raise SettingsError(f"source {source!r} is not known; known are {', '.join(sorted(SOURCES))}.")
    return _read(paths, source, options, tokenizer, {"plain_prompts": plain_prompts, "answer_prefix": answer_prefix})


def _read(
    paths: Paths, source: str | None, options: ReadOptions, tokenizer: Any, how: Mapping[str, Any]
) -> Iterator[RolloutBatch]:
    notes: list[str] = []
    if source is None:
        files, found, notes = _detect(paths, options)
        source = found.source
        logger.info("read as %s: %s", source, found.reason)
    else:
        files = find_files(paths, SOURCES[source].suffixes)
    made = SOURCES[source](options, many_files=len(files) > 1)
    for batch in read_batches(files, made, options):
        batch = with_notes(batch, notes)
        yield batch if tokenizer is None else tokenize_batch(batch, tokenizer, **how)


def with_notes(batch: RolloutBatch, notes: list[str]) -> RolloutBatch:
    """The batch with notes put before its own."""
    return replace(batch, notes=(*notes, *batch.notes)) if notes else batch


def _detect(paths: Paths, options: ReadOptions) -> tuple[list[Path], Detection, list[str]]:
    """(the files that hold rollouts, their one source, notes)."""
    files = _candidates(paths)
    detections = {file: detect_file(file, options.key_map) for file in files}
    logs = [file for file, found in detections.items() if found.source == METRIC_LOG]
    kept = [file for file in files if file not in logs]
    if not kept:
        raise ReaderError(f"{logs[0]} is {detections[logs[0]].reason}.")
    first = detections[kept[0]]
    for file in kept:
        if detections[file].source != first.source:
            raise ReaderError(
                f"the files are of two sources: {kept[0]} is {first.reason}; {file} is {detections[file].reason}. "
                "Read them one kind at a time, or name the source (--source)."
            )
    notes = [f"read as {first.source} ({first.reason})"]
    if logs:
        notes.append(f"left out {len(logs)} metric logs, such as {logs[0].name}")
    return kept, first, notes


def _candidates(paths: Paths) -> list[Path]:
    """Files to look into. Single JSON documents in a folder count only where there is nothing else: trainers leave
    their settings in such files beside the rollouts."""
    suffixes = dict.fromkeys(s for source in SOURCES.values() for s in source.suffixes)
    lines = [s for s in suffixes if s != ".json"]
    files: dict[Path, None] = {}
    for path in as_list_of_paths(paths):
        if not os.path.isdir(path):  # of a name that is too long, pathlib raises
            files.update(dict.fromkeys(find_files(path, ())))
            continue
        inside = find_files(path, (*lines, ".json"))
        better = [file for file in inside if has_suffix(file, lines)]
        files.update(dict.fromkeys(better or inside))
    return list(files)
