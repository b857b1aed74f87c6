from __future__ import annotations

import pytest

from collapsediag.alert_states import CLEAR_AFTER, AlertStates
from collapsediag.record import Record


def scored(step: int, low: float, *, namespace: str = "first_turn", name: str = "retrieval_accuracy") -> Record:
    prefix = f"collapse_{namespace}_sample/"
    chance = {"retrieval_accuracy": "retrieval_chance_level"}.get(name, "retrieval_subset_chance_level")
    values = {name: low + 0.1, f"{name}/ci_low": low, f"{name}/ci_high": low + 0.2, chance: 0.25}
    return Record(step=step, values={prefix + key: value for key, value in values.items()})


def said(records: list[Record]) -> list[tuple[int, str, str]]:
    states = AlertStates()
    return [(r.step, a.title, a.level) for r in records for a in states.update(r)]


AT = "Reasoning retrieved at chance"
ABOVE = "Reasoning retrieved above chance again"


@pytest.mark.parametrize("name", ["retrieval_accuracy", "retrieval_accuracy_subset"])
def test_chance_is_said_after_two_scored_steps_and_once(name: str) -> None:
    lows = [0.9, 0.5, 0.2, 0.2, 0.2, 0.1]
    unscored = Record(step=99, values={"reward/mean": 1.0})
    records = [r for step, low in enumerate(lows) for r in (scored(step, low, name=name), unscored)]
    assert said(records) == [(3, AT, "WARN")]


def test_an_interval_that_touches_chance_reaches_it() -> None:
    assert said([scored(step, 0.25) for step in range(2)]) == [(1, AT, "WARN")]
    assert said([scored(step, 0.2501) for step in range(9)]) == []


def test_a_value_that_flickers_around_the_border_sends_nothing_more() -> None:
    flicker = [scored(step, 0.2 if step % 2 else 0.3) for step in range(20)]
    assert said(flicker) == []
    assert said([scored(-2, 0.1), scored(-1, 0.1), *flicker]) == [(-1, AT, "WARN")]


def test_recovery_is_said_and_the_next_collapse_again() -> None:
    lows = [0.1] * 2 + [0.9] * CLEAR_AFTER + [0.1] * 2
    assert said([scored(step, low) for step, low in enumerate(lows)]) == [
        (1, AT, "WARN"),
        (4, ABOVE, "INFO"),
        (6, AT, "WARN"),
    ]


def test_draws_of_turns_are_watched_apart() -> None:
    records = [scored(0, 0.1, namespace="turn"), scored(1, 0.1, namespace="trajectory")]
    assert said(records) == []
    assert len(said([*records, *records])) == 2


def test_failures_are_said_at_once_and_once() -> None:
    failed = Record(step=1, values={}, status="failed", reason="CUDA \x1b[31m out of memory")
    fine = Record(step=2, values={})
    assert said([fine, failed, failed, fine, failed, fine, fine, fine, failed]) == [
        (1, "Collapse diagnostics fail", "WARN"),
        (2, "Collapse diagnostics work again", "INFO"),
        (1, "Collapse diagnostics fail", "WARN"),
    ]
    (alert,) = AlertStates().update(failed)
    assert "CUDA \\x1b[31m out of memory" in alert.text


def test_the_text_carries_the_numbers() -> None:
    states = AlertStates()
    states.update(scored(1, 0.2))
    (alert,) = states.update(scored(2, 0.2))
    assert alert.text.startswith("Step 2 (first turn): retrieval accuracy 0.3 [0.2, 0.4], chance 0.25.")
