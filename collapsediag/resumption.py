"""What a monitor goes on from: the state it saved, or what its records tell, for jobs that keep no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from collapsediag.arrays import whole_number
from collapsediag.errors import SettingsError
from collapsediag.record import step_number
from collapsediag.statistics import EmaStd

STATE_VERSION = 1
AFRESH = "Start the monitor afresh: only the moving averages begin anew."
Reasoning = Literal["auto", "think", "completion"]
# How the note begins that says what a trace was decided to be.
REASONING_NOTE = "reasoning="


@dataclass(frozen=True, kw_only=True)
class MonitorState:
    """What a monitor saves of itself; see Monitor for the fields."""

    ema: dict[str, EmaStd]
    reasoning: Reasoning
    last_step: int | None
    failures: int
    failures_in_a_row: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the version of their layout."""
        averages = {namespace: ema.state_dict() for namespace, ema in self.ema.items()}
        return {"version": STATE_VERSION, **vars(self), "ema": averages}

    @classmethod
    def from_json(cls, state: Any) -> MonitorState:
        """What `to_json` gave. Raises SettingsError naming the key that is not as it was saved, and what was found."""
        version = state.get("version") if isinstance(state, Mapping) else state
        if version != STATE_VERSION:
            raise SettingsError(
                f"monitor state of version {version!r:.80} cannot be loaded; this release reads version "
                f"{STATE_VERSION}. {AFRESH}"
            )
        return cls(
            ema=_averages(state),
            reasoning=_entry(
                state, "reasoning", lambda name: name if name in ("auto", "think", "completion") else None
            ),
            # Before the first step there is none; a state that does not say is damaged.
            last_step=None if state.get("last_step", 0) is None else _entry(state, "last_step", step_number),
            failures=_entry(state, "failures", _count),
            failures_in_a_row=_entry(state, "failures_in_a_row", _count),
        )


def _entry(state: Mapping[str, Any], key: str, read: Callable[[Any], Any]) -> Any:
    """An entry as `read` gives it; SettingsError where it is not there, or `read` gives None."""
    if key not in state:
        raise SettingsError(f"the monitor state is damaged: it has no {key!r}. {AFRESH}")
    value = read(state[key])
    if value is None:
        found = f"{state[key]!r:.80} ({type(state[key]).__name__})"
        raise SettingsError(f"the monitor state is damaged: {key!r} is {found}. {AFRESH}")
    return value


def _count(value: Any) -> int | None:
    number = whole_number(value)
    return number if number is not None and number >= 0 else None


def _averages(state: Mapping[str, Any]) -> dict[str, EmaStd]:
    saved = _entry(state, "ema", lambda value: value if isinstance(value, Mapping) else None)
    averages = {}
    for namespace, entry in saved.items():
        averages[namespace] = EmaStd()
        try:
            averages[namespace].load_state_dict(entry)
        except SettingsError as error:
            raise SettingsError(
                f"the monitor state is damaged: 'ema' of {namespace!r:.80}: {error} {AFRESH}"
            ) from error
    return averages


def reasoning_of(notes: Iterable[str]) -> Reasoning:
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
