"""Warnings of a monitor that are worth one line a run: every record says them again."""

from __future__ import annotations

import logging

from collapsediag.metrics.from_rollouts import RolloutReport
from collapsediag.pairs import DropReason, PairSettings, ScoringPairs
from collapsediag.plain_text import printable

logger = logging.getLogger("collapsediag")

# Left out because not needed, which is no defect of the data.
CHOSEN_AWAY = (DropReason.SUBSAMPLED, DropReason.NOT_DRAWN)


class SaidOnce:
    """Remembers what has been told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def _is_new(self, *topics: str) -> bool:
        new = set(topics) - self._told
        self._told |= new
        return bool(new)

    def doubt(self, text: str) -> None:
        """Warn that a step was given without a usable number."""
        if self._is_new("step"):
            logger.warning("%s. Said once, every record notes it.", printable(text))

    def unmeasured(self, step: int, report: RolloutReport) -> None:
        """Warn of families of rollout metrics that refused what the batch holds, and of rewards that overflowed."""
        for note in report.overflowed:
            if self._is_new("overflow"):
                logger.warning("step %d: %s. Said once, every record notes it.", step, printable(note))
        for family, reason in report.refused.items():
            if self._is_new(f"family {family}"):
                logger.warning(
                    "step %d: %s is not measured: %s Said once, every record says it.", step, family, printable(reason)
                )

    def dropped(self, step: int, pairs: ScoringPairs, settings: PairSettings) -> None:
        """Warn of traces that were left out, where a reason is new."""
        left_out = {r.value: n for r, n in pairs.dropped.items() if n and r not in CHOSEN_AWAY}
        if not self._is_new(*left_out):
            return
        listed = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in left_out.items())
        total = pairs.n_traces + sum(pairs.dropped.values())
        cap = f", limited by {settings.caps}" if pairs.dropped.get(DropReason.SUBSAMPLED) else ""
        logger.warning(
            "step %d: %d of %d traces cannot be scored (%s); %d were%s%s. Said once, every record counts them.",
            *(step, sum(left_out.values()), total, listed, pairs.n_traces, cap, pairs.cure),
        )
