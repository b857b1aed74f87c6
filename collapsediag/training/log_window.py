"""Numbers that wait for the trainer's next log line."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from collapsediag.record import Record
from collapsediag.tracker_values import tracker_values

# Counts of the whole run: their mean over a window is nobody's number.
LAST_VALUE_HOLDS = ("collapse/failures",)


class LogWindow:
    """The mean of each number over the records since the last log line, as trainers average their own.

    >>> window, line = LogWindow(), {"loss": 0.5}
    >>> window.add(Record(step=0, values={"reward/mean": 1.0}))
    >>> window.add(Record(step=1, values={"reward/mean": 2.0}))
    >>> window.merge_into(line)
    >>> line
    {'loss': 0.5, 'collapse/reward/mean': 1.5}
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, record: Record) -> None:
        """Take the numbers of one record; all of them are finite."""
        for name, value in tracker_values(record).items():
            if name in LAST_VALUE_HOLDS:
                self._sums[name], self._counts[name] = value, 1
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1

    def merge_into(self, logs: MutableMapping[str, Any], prefix: str = "") -> None:
        """Add the means to a trainer's log line and begin anew. A key that is there already is left alone."""
        for name, total in self._sums.items():
            logs.setdefault(prefix + name, total / self._counts[name])
        self._sums.clear()
        self._counts.clear()

    def state_dict(self) -> dict[str, Any]:
        """What has not been logged yet, as plain JSON values."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
