"""What is worth a message to a person: a state that changed, said once, not a number that is still bad."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from collapsediag.plain_text import number, printable
from collapsediag.record import Record
from collapsediag.turn_cuts import DRAWS

# A measure must be bad this often in a row before it is said, and good this often before it may be said again: near its
# border a noisy value would otherwise send a message at every step.
RETRIEVAL_RAISE_AFTER = 2
CLEAR_AFTER = 3
# A record that failed is a fact, not a noisy value.
FAILURE_RAISE_AFTER = 1

_RETRIEVAL = (
    ("retrieval_accuracy", "retrieval_chance_level"),
    ("retrieval_accuracy_subset", "retrieval_subset_chance_level"),
)


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One message. level: "WARN" where something went bad, "INFO" where it is good again."""

    title: str
    text: str
    level: Literal["INFO", "WARN"]


@dataclass
class _Switch:
    """A state that changes only after several observations in a row agree."""

    raise_after: int
    is_raised: bool = False
    streak: int = 0

    def changed(self, is_bad: bool) -> bool:
        self.streak = self.streak + 1 if is_bad != self.is_raised else 0
        if self.streak < (CLEAR_AFTER if self.is_raised else self.raise_after):
            return False
        self.is_raised, self.streak = is_bad, 0
        return True


@dataclass
class AlertStates:
    """Turns records into alerts, one per change of state.

    Two states are watched: whether the diagnostics fail, and per draw of turns whether the 95% interval of retrieval
    accuracy reaches chance. Steps that were not scored say nothing about the second.

    >>> states = AlertStates()
    >>> failed = Record(step=3, values={}, status="failed", reason="out of memory")
    >>> [alert.title for alert in states.update(failed)], states.update(failed)
    (['Collapse diagnostics fail'], [])
    """

    _switches: dict[str, _Switch] = field(default_factory=dict)

    def update(self, record: Record) -> list[Alert]:
        """The alerts that `record` gives rise to, mostly none."""
        return [*self._failure(record), *self._retrieval(record)]

    def _failure(self, record: Record) -> Iterator[Alert]:
        failed = record.status == "failed"
        if not self._changed("failure", failed, FAILURE_RAISE_AFTER):
            return
        if failed:
            reason = printable(record.reason or "no reason given")
            text = f"Step {record.step}: {reason}. Training goes on; this step has no values."
            yield Alert(title="Collapse diagnostics fail", text=text, level="WARN")
        else:
            text = f"Step {record.step}: {CLEAR_AFTER} steps in a row were measured."
            yield Alert(title="Collapse diagnostics work again", text=text, level="INFO")

    def _retrieval(self, record: Record) -> Iterator[Alert]:
        for namespace, words in DRAWS.items():
            for name, chance_name in _RETRIEVAL:
                prefix = f"collapse_{namespace}_sample/"
                keys = (prefix + name, f"{prefix}{name}/ci_low", f"{prefix}{name}/ci_high", prefix + chance_name)
                if not all(key in record.values for key in keys):
                    continue
                accuracy, low, high, chance = (record.values[key] for key in keys)
                if self._changed(f"{namespace}/{name}", low <= chance, RETRIEVAL_RAISE_AFTER):
                    measured = f"{number(accuracy)} [{number(low)}, {number(high)}], chance {number(chance)}"
                    yield _retrieval_alert(record.step, words, measured, at_chance=low <= chance)

    def _changed(self, state: str, is_bad: bool, raise_after: int) -> bool:
        return self._switches.setdefault(state, _Switch(raise_after)).changed(is_bad)


def _retrieval_alert(step: int, words: str, measured: str, *, at_chance: bool) -> Alert:
    said = f"Step {step} ({words}): retrieval accuracy {measured}."
    if at_chance:
        text = (
            f"{said} The reasoning may no longer depend on the prompt. Read traces of different prompts side by side."
        )
        return Alert(title="Reasoning retrieved at chance", text=text, level="WARN")
    return Alert(title="Reasoning retrieved above chance again", text=said, level="INFO")
