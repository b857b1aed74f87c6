"""How often and how much to score when scoring may take only a share of the wall time.

Spacing comes first: a due step is put off until the time already spent and the time it would take fit into the share.
Only where one scoring is so dear that it would come less than once in MAX_SPACING due steps is each made smaller.

A cell is one trace under one context, the unit in which the cost of a scoring is reckoned.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any

from collapsediag.arrays import plain
from collapsediag.errors import SettingsError

# A scoring is made smaller where, whole, it could be afforded only once in so many due steps.
MAX_SPACING = 10
# Below four traces under four contexts nothing can be told from noise: then scorings come less often instead.
MIN_CELLS = 16
# What a scoring may take beyond what the last one took for as much, before the share is overdrawn.
MARGIN = 1.5
# What a resumed run needs of the account.
SAVED = ("wall_s", "spent_s", "_n_steps", "_seconds_per_cell", "_whole_cells")


class TimeBudget:
    """Keeps measured scoring time below a share of the wall time, from the second scoring on.

    The first observed step is scored whatever it costs: it is the reference of every later one, and shows the cost.
    Time in which the process did not run is not counted. All times in seconds; `now` is any clock that never goes
    back.

    share: of the wall time, for example 0.02. every: the cadence, the closest that scorings come.

    >>> budget = TimeBudget(0.1, every=1)
    >>> budget.begin_step(0.0); budget.charge(1.0, n_cells=64); budget.begin_step(5.0)
    >>> budget.refusal()
    'time_budget=0.1: scoring has taken 20.0% of 5 s, and the next would take about 1 s; put off'
    >>> for now in range(6, 30): budget.begin_step(float(now))
    >>> budget.refusal() is None
    True
    """

    def __init__(self, share: float, every: int) -> None:
        number: Any = plain(share)
        if not isinstance(number, numbers.Real) or not 0 < float(number) < 1:
            raise SettingsError(
                f"time_budget={share!r}: scoring's share of the wall time, between 0 and 1, for example 0.02. To score "
                "each trace under a few other contexts only, give the scorer a budget: BudgetScorer(scorer, k=4)."
            )
        self.share = float(number)
        self.every = every
        self.wall_s = 0.0
        self.spent_s = 0.0
        self._n_steps = 0
        self._seconds_per_cell = 0.0
        self._whole_cells = 0
        self._seen_at: float | None = None

    def begin_step(self, now: float) -> None:
        """A step is observed."""
        self.look(now)
        self._n_steps += 1

    def look(self, now: float) -> None:
        """Let the wall time go on to `now`."""
        if self._seen_at is not None:
            self.wall_s += now - self._seen_at
        self._seen_at = now

    def charge(self, seconds: float, n_cells: int) -> None:
        """A scoring took so long; n_cells: how many cells it scored, 0 where it failed."""
        self.spent_s += seconds
        if n_cells:
            self._seconds_per_cell = seconds / n_cells
            self._whole_cells = max(self._whole_cells, n_cells)

    @property
    def max_cells(self) -> int | None:
        """How many cells the next scoring may have; None where it may be whole."""
        if not self._seconds_per_cell or not self.wall_s:
            return None
        affordable_s = self.share * MAX_SPACING * self.every * (self.wall_s / self._n_steps)
        cells = max(MIN_CELLS, int(affordable_s / self._seconds_per_cell))
        return cells if cells < self._whole_cells else None

    def refusal(self) -> str | None:
        """Why a scoring does not fit now, in words; None where it does."""
        cells = self.max_cells
        next_s = self._seconds_per_cell * (self._whole_cells if cells is None else cells)
        if self.spent_s + MARGIN * next_s <= self.share * self.wall_s:
            return None
        return (
            f"time_budget={self.share:g}: scoring has taken {self.spent_share:.1%} of {self.wall_s:.3g} s, and the "
            f"next would take about {next_s:.2g} s; put off"
        )

    @property
    def spent_share(self) -> float:
        """Scoring's share of the wall time so far."""
        return self.spent_s / self.wall_s if self.wall_s else 0.0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to keep to the share over its whole length."""
        return {name.lstrip("_"): getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Raises SettingsError, and takes nothing over, where that is damaged."""
        found: dict[str, Any] = {n: state.get(n.lstrip("_")) if isinstance(state, Mapping) else None for n in SAVED}
        for name, value in found.items():
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 <= value < sys.float_info.max:
                raise SettingsError(
                    f"the saved time budget is damaged: {name.lstrip('_')!r} is {value!r:.80}, and must be a number, 0 "
                    "or more. Leave it out to begin its account anew."
                )
        vars(self).update(found)
