"""When the policy is scored."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from collapsediag.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When the policy is scored: at the first step seen, and at every step divisible by `every`.

    A function of the step number alone, so that a resumed run scores the same steps as one that never stopped.

    >>> [step for step in range(12) if Cadence(every=5).is_due(step)]
    [0, 5, 10]
    """

    every: int = 10

    def __post_init__(self) -> None:
        try:
            is_count = operator.index(self.every) >= 1
        except TypeError:
            is_count = False
        if not is_count:
            raise SettingsError(f"every={self.every!r}: the cadence is a whole number of steps, 1 or more.")

    def is_due(self, step: int, last_step: int | None = None) -> bool:
        """Whether `step` is a scored step.

        last_step: the step observed before this one. Trainers that generate for several steps at once are not seen at
        every step; a due step in between is then made up for at the next that is seen.

        >>> Cadence(every=5).is_due(8, last_step=4), Cadence(every=5).is_due(8, last_step=6)
        (True, False)
        """
        if last_step is None or last_step >= step:
            return step % self.every == 0
        return step // self.every > last_step // self.every
