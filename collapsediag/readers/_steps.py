"""Files into batches, one per step, in the order of steps, never holding more than one step.

Every file is read twice: once from end to end, to find out which step lies where and that every row can be read (a
broken line shows now, not after an hour of scoring), and once to make the batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapsediag.errors import ReaderError, RolloutError
from collapsediag.readers._collect import StepCollector
from collapsediag.readers._files import open_rows
from collapsediag.readers._options import ReadOptions
from collapsediag.readers._rows import BadLines, Row, RowFile
from collapsediag.readers._source import Parsed, Source, step_from_name
from collapsediag.rollouts import RolloutBatch

# A file that changes its step more often than this is not sorted by step at all.
MAX_RUNS = 100_000


@dataclass(slots=True)
class Run:
    """Rows of one step that stand together in one file: [start, stop) in the file's offsets."""

    step: int
    start: int
    number: int
    stop: int | None = None
    rollouts: int = 0
    attempt: int = 0


@dataclass(slots=True)
class IndexedFile:
    """One file and where its steps lie. stated: the rows or the name say the step; else all of it is step 0."""

    rows: RowFile
    runs: list[Run]
    stated: bool


@dataclass(slots=True)
class Plan:
    """Which runs make up each step, and what was set aside."""

    runs: dict[int, list[tuple[RowFile, Run]]]
    superseded: dict[int, int]
    notes: list[str]


def read_batches(files: Sequence[Path], source: Source, options: ReadOptions) -> Iterator[RolloutBatch]:
    """The batches of `files` under one source, steps ascending."""
    files, notes = source.prepare(files)
    indexed = [_index(open_rows(path), source, options) for path in files]
    plan = _plan([file for file in indexed if file.runs], options)
    if not plan.runs:
        raise ReaderError(f"no rollouts in {', '.join(str(path) for path in files[:3])}: every row was left out.")
    plan.notes[:0] = notes
    for step in sorted(plan.runs):
        yield _read_step(step, plan, source, options)


def _parse(source: Source, row: Row, bad: BadLines) -> Parsed | None:
    try:
        try:
            return source.parse(row)
        except RolloutError as error:
            raise row.error(str(error)) from error
    except ReaderError as error:
        bad.meet(error)
        return None


def _step_of(parsed: Parsed, path: str) -> int:
    return parsed.step if parsed.step is not None else (step_from_name(path) or 0)


def _index(rows: RowFile, source: Source, options: ReadOptions) -> IndexedFile:
    bad = BadLines(options.skip_bad_lines)
    named = step_from_name(rows.path)
    runs: list[Run] = []
    stated: str | None = None  # where the first row stood that stated its step
    silent: str | None = None
    for row in rows.scan(bad):
        parsed = _parse(source, row, bad)
        if parsed is None:
            continue
        if parsed.step is None:
            silent = silent or row.where
        else:
            stated = stated or row.where
        if stated and silent:
            bad.meet(
                row.error(f"some rows state a step ({stated}) and some do not ({silent}). State it in all or none.")
            )
            continue
        step = _step_of(parsed, rows.path)
        if not runs or runs[-1].step != step:
            _begin_run(runs, step, row)
            source.begin_step()
        runs[-1].rollouts += len(parsed.rollouts)
    if not runs and bad.first is not None:
        raise ReaderError(f"{rows.path}: not one of its {bad.total} rows can be read. The first complaint: {bad.first}")
    return IndexedFile(rows, runs, bool(stated) or named is not None)


def _begin_run(runs: list[Run], step: int, row: Row) -> None:
    if len(runs) >= MAX_RUNS:
        raise row.error(f"the step has changed {MAX_RUNS} times by now. Sort the file by step first.")
    if not runs:
        runs.append(Run(step, 0, 1))  # from the top, so that bad lines before the first row are counted with it
        return
    runs[-1].stop = row.offset
    attempt = runs[-1].attempt + (step < runs[-1].step)
    runs.append(Run(step, row.offset, row.number, attempt=attempt))


def _plan(files: Sequence[IndexedFile], options: ReadOptions) -> Plan:
    plan = Plan({}, {}, [])
    if files and not any(file.stated for file in files):
        plan.notes.append("no step is stated: all rows are read as step 0")
    home: dict[int, str] = {}
    for file in files:
        kept = _last_attempts(file, plan, options)
        for step in dict.fromkeys(run.step for run in kept):
            _meet_other_file(step, file, home, plan, options)
        for run in kept:
            plan.runs.setdefault(run.step, []).append((file.rows, run))
    return plan


def _last_attempts(file: IndexedFile, plan: Plan, options: ReadOptions) -> list[Run]:
    """The runs that count in one file: where it goes back to an earlier step, the last attempt at each step wins."""
    if options.repeated_steps == "merge":
        return file.runs
    last: dict[int, int] = {}
    for run in file.runs:
        last[run.step] = max(run.attempt, last.get(run.step, 0))
    kept = [run for run in file.runs if run.attempt == last[run.step]]
    gone = [run for run in file.runs if run.attempt != last[run.step]]
    lost, total = sum(run.rollouts for run in gone), sum(run.rollouts for run in file.runs)
    if options.repeated_steps == "auto" and 2 * lost >= total > 0 and gone:
        raise ReaderError(
            f"{file.rows.path}: steps come back {file.runs[-1].attempt} times (step {gone[0].step} first stands at "
            f"{gone[0].number}), and reading each step's last attempt alone would drop {lost} of {total} rollouts. Say "
            "what it is: repeated_steps='last' for a run that was resumed, 'merge' for shards of the same steps "
            "(--repeated-steps)."
        )
    for run in gone:
        plan.superseded[run.step] = plan.superseded.get(run.step, 0) + run.rollouts
    return kept


def _meet_other_file(step: int, file: IndexedFile, home: dict[int, str], plan: Plan, options: ReadOptions) -> None:
    earlier = home.setdefault(step, file.rows.path)
    if earlier == file.rows.path or not file.stated or options.repeated_steps == "merge":
        return
    if options.repeated_steps == "auto":
        raise ReaderError(
            f"step {step} is in two files, {earlier} and {file.rows.path}. Say what they are: repeated_steps='last' "
            "if the later file is a resumed run, 'merge' if they are shards of one step (--repeated-steps); or read "
            "two runs one at a time."
        )
    gone = plan.runs.pop(step)
    plan.superseded[step] = plan.superseded.get(step, 0) + sum(run.rollouts for _, run in gone)


def _read_step(step: int, plan: Plan, source: Source, options: ReadOptions) -> RolloutBatch:
    bad = BadLines(options.skip_bad_lines)
    collector = StepCollector(options, step, source.title)
    source.begin_step()
    for rows, run in plan.runs[step]:
        for row in rows.scan(bad, start=run.start, number=run.number, stop=run.stop):
            parsed = _parse(source, row, bad)
            # A file that is still being written may have grown by rows of later steps since it was indexed.
            if parsed is not None and _step_of(parsed, row.path) == step:
                try:
                    collector.add(parsed, row)
                except ReaderError as error:
                    bad.meet(error)
    extra = {"bad_line": bad.take()} if bad.total else {}
    notes = list(plan.notes)
    if plan.superseded.get(step):
        extra["superseded_step"] = plan.superseded[step]
        notes.append(f"step {step} was written more than once (a resumed run): its last attempt is read")
    return collector.finish(extra, notes)
