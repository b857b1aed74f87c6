"""Scoring kept to a share of the wall time: by spacing first, by smaller scorings where one is very dear."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collapsediag as cd
from collapsediag.errors import ScoringError, SettingsError
from collapsediag.run_folder import read_records
from collapsediag.testing import planted
from collapsediag.time_budget import MAX_SPACING, TimeBudget

KEY = "collapse_first_turn_sample/"
PLANTED = planted("healthy", n_contexts=8, group_size=4, length=3)


class Clock:
    """Stands in for the module `time` in the monitor; only what is asked for passes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    time = perf_counter


class SlowScorer:
    """The planted policy, at `seconds` a cell."""

    def __init__(self, sleep: Any, seconds: float, fails: bool = False) -> None:
        self.sleep, self.seconds, self.fails = sleep, seconds, fails

    def score(self, pairs: cd.ScoringPairs) -> cd.LogLikelihoodMatrix:
        self.sleep(self.seconds * pairs.n_traces * pairs.n_contexts)
        if self.fails:
            raise ScoringError("on purpose")
        return PLANTED.scorer().score(pairs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("collapsediag.monitor.time", made)
    monkeypatch.setattr("collapsediag.step_draft.time", made)
    return made


def run(clock: Clock, steps: int, seconds_per_cell: float, monitor: cd.Monitor | None = None, **options: Any) -> Any:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    if monitor is None:
        scorer = SlowScorer(sleep, seconds_per_cell, options.pop("fails", False))
        monitor = cd.Monitor(scorer, **{"every": 1, "reasoning": "completion", **options})
    begin = (monitor.last_step or 0) + 1
    records = []
    for step in range(begin, begin + steps):
        records.append(monitor.observe(step, PLANTED.batch))
        clock.now += 1.0  # the trainer's own work
    return monitor, records


def test_scored_steps_come_as_often_as_the_share_allows_and_never_more(clock: Clock) -> None:
    # 8 contexts x 32 traces at 1/2560 s are 0.1 s a scoring: at 2% of a second a step, every fifth step.
    _, records = run(clock, 150, 0.1 / 256, time_budget=0.02)
    spent, shares = 0.0, []
    for record in records:
        if record.matrices:
            spent += 0.1
            elapsed = record.time - 1000.0  # type: ignore[operator]
            np.testing.assert_allclose(record.values["collapse/scoring_time_share"], spent / elapsed, rtol=1e-9)
            shares.append(spent / elapsed)
    assert shares[0] == pytest.approx(1.0)  # the reference costs what it costs
    assert max(shares[1:]) <= 0.02
    assert shares[-1] > 0.017
    assert not any("time_budget" in note for record in records for note in record.notes)
    assert all(record.values[KEY + "n_contexts"] == 8 for record in records if record.matrices)


def test_a_step_that_is_put_off_says_why(clock: Clock) -> None:
    _, records = run(clock, 3, 0.1 / 256, time_budget=0.02)
    assert records[1].not_measured["scoring"] == (
        "time_budget=0.02: scoring has taken 9.1% of 1.1 s, and the next would take about 0.1 s; put off"
    )


def test_the_cadence_is_the_closest_that_scored_steps_come(clock: Clock) -> None:
    _, records = run(clock, 100, 1e-9, time_budget=0.02, every=7)
    assert [record.step for record in records if record.matrices] == [1, *range(7, 100, 7)]


def test_where_one_scoring_is_very_dear_each_is_made_smaller(clock: Clock) -> None:
    # A whole scoring takes 1.28 s: at 2% that is every 64th step. Ten steps apart, 0.2 s (40 cells) are affordable.
    _, records = run(clock, 150, 0.005, time_budget=0.02)
    scored = [record for record in records if record.matrices]
    shares = [record.values["collapse/scoring_time_share"] for record in scored]
    assert max(shares[1:]) <= 0.02
    gaps = np.diff([record.step for record in scored])
    assert 60 < gaps[0] < 90  # the first one, which was whole, is paid back
    assert gaps[1:].max() <= MAX_SPACING + 2
    for record in scored[1:]:
        matrix = record.matrices["first_turn"]
        assert matrix.n_traces * matrix.n_contexts <= 41
        assert record.values[KEY + "retrieval_chance_level"] == pytest.approx(1 / matrix.n_contexts)
        assert record.values[KEY + "mi_upper_bound"] == pytest.approx(np.log(matrix.n_contexts))
        assert record.dropped["first_turn/subsampled"] == 32 - matrix.n_traces
        assert "cells (traces x contexts) a draw were scored" in record.notes[0]
    assert scored[0].matrices["first_turn"].n_contexts == 8
    assert scored[1].matrices["first_turn"].n_contexts == 6


def test_a_resumed_run_keeps_to_the_share_over_its_whole_length(clock: Clock) -> None:
    whole, records = run(clock, 100, 0.1 / 256, time_budget=0.02)
    first, begun = run(clock, 50, 0.1 / 256, time_budget=0.02)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = cd.Monitor(first.scorer, every=1, reasoning="completion", time_budget=0.02)
    resumed.load_state_dict(state)
    clock.now += 100_000.0  # the night between the two
    _, rest = run(clock, 50, 0.0, resumed)
    scored = [[record.step for record in part if record.matrices] for part in (records, [*begun, *rest])]
    assert abs(len(scored[0]) - len(scored[1])) <= 1  # the break lost one step's wall time
    assert whole.state_dict()["time_budget"].keys() == state["time_budget"].keys()


def test_time_that_a_failure_took_is_counted(clock: Clock) -> None:
    monitor, records = run(clock, 60, 0.1 / 256, time_budget=0.02, fails=True)
    failed = [record.step for record in records if record.status == "failed"]
    assert failed[0] == 1
    assert failed[1] >= 5
    assert monitor.state_dict()["time_budget"]["spent_s"] == pytest.approx(0.1 * len(failed))


def test_asked_for_steps_are_scored_and_counted(clock: Clock) -> None:
    monitor, _ = run(clock, 1, 0.1 / 256, time_budget=0.02)
    record = monitor.observe(2, PLANTED.batch, score=True)
    assert record.matrices
    assert monitor.state_dict()["time_budget"]["spent_s"] == pytest.approx(0.2)


@pytest.mark.parametrize("share", [np.float32(0.02), np.float64(0.02), Fraction(1, 50), np.array(0.02)], ids=repr)
def test_a_share_of_any_make(clock: Clock, share: Any) -> None:
    monitor, records = run(clock, 3, 0.1 / 256, time_budget=share)
    assert records[1].not_measured["scoring"].startswith("time_budget=0.02: scoring has taken 9.1% of 1.1 s")
    json.dumps(monitor.state_dict())


@pytest.mark.parametrize("share", [0, 1, 4, -0.1, float("nan"), "2%", None, True, np.bool_(True), np.float32(2)])
def test_what_is_no_share(share: Any) -> None:
    with pytest.raises(SettingsError, match=r"between 0 and 1.*BudgetScorer\(scorer, k=4\)"):
        TimeBudget(share, every=1)


def test_on_a_real_clock_with_a_slow_scorer() -> None:
    """Nothing injected: the scorer sleeps, the trainer sleeps, and the seconds are those of the machine."""
    monitor = cd.Monitor(SlowScorer(time.sleep, 0.05 / 256), every=1, reasoning="completion", time_budget=0.1)
    began = time.perf_counter()
    spent, let_through = 0.0, []
    for step in range(10_000):
        elapsed = time.perf_counter() - began
        if elapsed > 3.0:
            break
        record = monitor.observe(step, PLANTED.batch)
        if record.matrices:
            let_through.append((spent, elapsed))
            spent += record.values["timing_s/collapse_score"]
        time.sleep(0.005)
    assert step > 2 * len(let_through) >= 4
    # What was spent when each was let through; how long it then takes on a busy machine is not the monitor's to say.
    for before, elapsed in let_through[1:]:
        assert before <= 0.1 * (elapsed + 0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_training_run_with_a_slow_scorer(tmp_path: Path) -> None:
    """TRL's GRPO on a tiny model; scoring is made some times dearer than a step, and gets 5% of the wall time."""
    from collapsediag.integrations.trl_callback import CollapseCallback
    from collapsediag.scoring.hf import HFScorer

    from . import trl_tiny

    def slow(score: Any) -> Any:
        return lambda *args, **named: (time.sleep(0.05), score(*args, **named))[1]

    callback = CollapseCallback(
        every=1, reasoning="completion", sinks=[cd.JsonlSink(tmp_path / "run")], time_budget=0.05
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("score", "score_with_tokens"):
            patch.setattr(HFScorer, name, slow(getattr(HFScorer, name)))
        trl_tiny.trainer("grpo", tmp_path, [callback], max_steps=400).train()
    keep = read_records(tmp_path / "run")
    assert len(keep) == 400
    scored = [r for r in keep if "collapse/scoring_time_share" in r.values]
    put_off = [r.not_measured["scoring"] for r in keep if "scoring" in r.not_measured]
    assert len(scored) >= 3
    assert len(put_off) == len(keep) - len(scored)
    seconds = np.array([r.values["timing_s/collapse_score"] for r in scored])
    shares = np.array([r.values["collapse/scoring_time_share"] for r in scored])
    # What was spent before each: how long it then takes on a busy machine is not the monitor's to say.
    before = shares * (1 - seconds / np.cumsum(seconds))
    assert before[1:].max() <= 0.05
    assert shares[1:].max() <= 0.06  # one may have taken longer than the one it was reckoned by
    assert sum(KEY + "retrieval_chance_level" in r.values for r in keep) == len(scored)
