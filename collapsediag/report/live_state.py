"""Is a followed run still being written? In words, for the page.

A sentence stays the same while there is nothing new to say, so that a page that asks again is not sent all of it again.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Literal, TypedDict

from collapsediag.record import Record
from collapsediag.run_writer import Writer

# A run is silent after this many of its usual gaps between records, and not before a minute.
SILENT_GAPS = 10
SILENT_SECONDS = 60.0
RECENT = 20
_AGES = (
    (86_400, "day", (30, 14, 7, 4, 2, 1)),
    (3_600, "hour", (12, 6, 4, 2, 1)),
    (60, "minute", (30, 20, 10, 5, 2, 1)),
)


class LiveState(TypedDict):
    """What the page says about the job."""

    state: Literal["running", "stopped"]
    words: str


def live_state(records: Sequence[Record], last: Record, written: float, writer: Writer | None, now: float) -> LiveState:
    """What to say of a run whose last record came at `written`, a wall clock time as `now` is.

    records: in the order of their steps. last: the one that was written last. writer: who has the run open.
    """
    age = now - written
    when = f"step {last.step} at {time.strftime('%H:%M:%S', time.localtime(written))}"
    is_alive = None if writer is None else writer.is_alive
    if writer is None:
        return {"state": "stopped", "words": f"Nobody has this run open. It was last written at {when}{_ago(age)}."}
    if is_alive is False:
        words = f"The run stopped without closing: its process {writer.pid} is gone. Last record: {when}{_ago(age)}."
        return {"state": "stopped", "words": f"{words} Everything up to there is here."}
    if age < _silent_after(records):
        return {"state": "running", "words": f"Following the run. Last record: {when}."}
    process = f"process {writer.pid} on {writer.host}"
    known = f"its {process} is still there" if is_alive else f"whether its {process} runs cannot be seen from here"
    return {"state": "stopped", "words": f"No record for {_coarse(age)}, and {known}. Last record: {when}."}


def _silent_after(records: Sequence[Record]) -> float:
    times = [record.time for record in records[-RECENT:] if record.time is not None]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > earlier]
    return max(SILENT_SECONDS, SILENT_GAPS * statistics.median(gaps)) if gaps else SILENT_SECONDS


def _ago(age: float) -> str:
    return f", {_coarse(age)} ago" if age >= SILENT_SECONDS else ""


def _coarse(seconds: float) -> str:
    """An age in one of few words.

    >>> _coarse(59), _coarse(150), _coarse(4 * 86_400)
    ('less than a minute', 'more than 2 minutes', 'more than 4 days')
    """
    for size, unit, steps in _AGES:
        for count in steps:
            if seconds >= count * size:
                return f"more than {count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"
