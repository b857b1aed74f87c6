"""Numbers that wait for the trainer's next log line."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

from collapsediag.chart_layout import BUDGET_CHART, MATRIX_CHARTS, ROLLOUT_CATEGORIES
from collapsediag.errors import SettingsError
from collapsediag.pairs import NAMESPACES
from collapsediag.record import Record
from collapsediag.tracker_values import tracker_name

# Counts of the whole run: their mean over a window is nobody's number.
LAST_VALUE_HOLDS = ("collapse/failures",)

# What a log line has room for: it is printed at every logging step. The sinks get everything.
MATRIX_NAMES = frozenset(name for chart in (*MATRIX_CHARTS, BUDGET_CHART) for name in chart.names) | {"n_traces"}
OTHER_NAMES = frozenset(
    name for category in ROLLOUT_CATEGORIES for chart in category.charts for name in chart.names
) | {"collapse/failures", "collapse/own_logp_difference", "timing_s/collapse_step"}

Logged = Literal["charts", "all", "none"]


def is_charted(name: str) -> bool:
    """Whether a metric is on one of the charts (chart_layout), of the whole batch; the others are detail.

    >>> is_charted("collapse_first_turn_sample/mi_seq_estimate"), is_charted("reward/modal_share")
    (True, False)
    """
    prefixes = tuple(f"collapse_{namespace}_sample/" for namespace in NAMESPACES)
    if name.startswith(prefixes):
        return name.split("/", 1)[1] in MATRIX_NAMES
    return name in OTHER_NAMES


class LogWindow:
    """The mean of each number over the records since the last log line, as trainers average their own.

    logged: "charts": what is on a chart; "all": everything; "none": nothing.

    >>> window, line = LogWindow(), {"loss": 0.5}
    >>> window.add(Record(step=0, values={"reward/mean": 1.0}))
    >>> window.add(Record(step=1, values={"reward/mean": 2.0}))
    >>> window.merge_into(line)
    >>> line
    {'loss': 0.5, 'collapse/reward/mean': 1.5}
    """

    def __init__(self, logged: Logged = "charts") -> None:
        if logged not in ("charts", "all", "none"):
            raise SettingsError(f"logged={logged!r}: choose 'charts', 'all' or 'none'.")
        self._logged = logged
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, record: Record) -> None:
        """Take the numbers of one record; all of them are finite."""
        for metric, value in record.values.items():
            if self._logged == "none" or (self._logged == "charts" and not is_charted(metric)):
                continue
            name = tracker_name(metric)
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
