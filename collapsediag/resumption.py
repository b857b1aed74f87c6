"""What a record tells about the state of the monitor that wrote it, for jobs that keep no checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from collapsediag.statistics import EmaStd

# How the note begins that says what a trace was decided to be.
REASONING_NOTE = "reasoning="


def reasoning_of(notes: Iterable[str]) -> Literal["auto", "think", "completion"]:
    """What a trace was decided to be, by the notes of a record; "auto" where nothing was decided in it."""
    for note in notes:
        if note.startswith(f"{REASONING_NOTE}think:"):
            return "think"
        if note.startswith(f"{REASONING_NOTE}completion:"):
            return "completion"
    return "auto"


def averages_of(values: Mapping[str, float], prefix: str) -> EmaStd | None:
    """The moving averages as they stood after a recorded step, None where it was not scored."""
    averages = {
        f"{kind}_std{seq}": values[f"{prefix}{kind}_std_ema{seq}"]
        for kind in ("gap", "marginal")
        for seq in ("", "_seq")
        if f"{prefix}{kind}_std_ema{seq}" in values
    }
    if not averages:
        return None
    ema = EmaStd()
    ema.load_state_dict({"decay": ema.decay, "values": averages})
    return ema
