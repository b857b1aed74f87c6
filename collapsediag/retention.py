"""Which scored steps keep their matrix and traces in a run that has more of them than are to be kept."""

from __future__ import annotations

from collections.abc import Sequence


def step_to_forget(steps: Sequence[int]) -> int:
    """The step whose going leaves the smallest gap; never the first or the last. steps: ascending, three or more.

    Applied again and again, what is kept stays spread over the whole run: the reference at its start, the end, and
    between them about even gaps.

    >>> step_to_forget([0, 10, 20, 40])
    10
    """
    gaps = [after - before for before, after in zip(steps, steps[2:], strict=False)]
    return steps[1 + min(range(len(gaps)), key=gaps.__getitem__)]
