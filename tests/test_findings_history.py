"""Histories of scalars: one concept under many names, and what is said of real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import collapsediag as cd
from collapsediag.errors import ReaderError
from collapsediag.findings.history import ALIASES
from collapsediag.metrics.registry import find

HISTORIES = Path(__file__).parent / "data" / "histories"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HISTORIES / name).read_text().splitlines()]


def e5b(*steps: int) -> list[dict[str, Any]]:
    return [json.loads((HISTORIES / f"eval_e5b_collapse_step{step}.json").read_text()) for step in steps]


def test_reward_hacking_with_falling_entropy_is_at_least_a_warning() -> None:
    records = cd.from_history(lines("tinker_llama3b_hacked_metrics.jsonl"))
    assert records[-1].values["reward/mean"] > 2.9 * records[0].values["reward/mean"]  # and that excuses nothing
    finding = cd.judge(records)["entropy_collapse"]
    # Baseline (2.867 + 3.009 + 2.788 + 2.747 + 2.855) / 5 = 2.853; half of it, 1.427, is passed at step 30 (1.361).
    assert (finding.status, finding.since_step, finding.n_steps) == ("warning", 30, 5)
    assert finding.baseline == pytest.approx(2.8533, abs=1e-3)
    assert finding.metric == "entropy/sampled_mean"


def test_a_flat_run_is_silent_and_its_resumed_steps_count_once() -> None:
    rows = lines("tinker_llama1b_hard_metrics.jsonl")
    records = cd.from_history(rows)
    assert (len(rows), len(records)) == (50, 45)
    assert records[0].values["entropy/sampled_mean"] == rows[5]["policy/entropy"]  # steps 0 to 4 were run twice
    assert cd.judge(records).status == "ok"


def test_an_agent_that_gives_up_its_tools_is_found_where_it_does() -> None:
    verdict = cd.judge(cd.from_history(e5b(100, 150, 200, 250, 300)))
    finding = verdict["tool_use_collapse"]
    assert (finding.status, finding.since_step, finding.n_steps) == ("critical", 200, 3)
    assert (finding.value, finding.baseline) == (0.0, pytest.approx(2.15))
    # Two steps are not yet a finding.
    assert not cd.judge(cd.from_history(e5b(100, 150, 200, 250)))["tool_use_collapse"].is_alarm


def test_a_trl_history_with_old_names_is_read() -> None:
    state = json.loads((HISTORIES / "trl_old_names_trainer_state.json").read_text())
    records = cd.from_history(state["log_history"])
    assert [record.step for record in records] == list(range(5, 55, 5))
    assert records[0].values == {
        "length/mean": state["log_history"][0]["completion_length"],
        "reward/mean": state["log_history"][0]["reward"],
        "reward/r1_correctness/mean": state["log_history"][0]["rewards/r1_correctness"],
        "reward/r2_format/mean": 0.0,
    }  # reward_std is not the same number in all releases
    assert cd.judge(records).alarms == ()


def test_every_alias_is_a_number_of_ours() -> None:
    assert [name for name in ALIASES.values() if find(name) is None] == []


@pytest.mark.parametrize(
    "row",
    [
        {"frac_reward_zero_std": 0.75},
        {"by_group/frac_all_good": 0.5, "by_group/frac_all_bad": 0.25},
        {"solved_all": 0.5, "solved_none": 0.25},
        {"baseline_reward/pct_1": 0.5, "baseline_reward/pct_0": 0.25},
        {"rejection_sample/solve_all": 0.5, "rejection_sample/solve_none": 0.25},
        {"dynamic_filtering_pass_rate": 0.25},
        {"degenerate_frac": 0.75},
        {"train/frac_reward_zero_std": 0.75},
        {"reward/all_equal_fraction": 0.75},
    ],
)
def test_all_equal_groups_under_their_many_names(row: dict[str, float]) -> None:
    (record,) = cd.from_history([{"step": 3, **row}])
    assert record.values["reward/all_equal_fraction"] == 0.75


def test_a_share_above_one_is_a_unit_error_and_named() -> None:
    (record,) = cd.from_history([{"step": 0, "frac_reward_zero_std": 12.0, "reward": 3.0}])
    assert record.values == {"reward/mean": 3.0}
    assert "logged as 12" in record.not_measured["reward/all_equal_fraction"]


def test_rows_of_one_step_are_merged_and_the_last_value_holds() -> None:
    rows = [
        {"step": 1, "entropy": 1.0},
        {"step": 1, "reward": 0.5},
        {"step": 0, "entropy": 2.0},
        {"step": 1, "entropy": 3.0},
    ]
    records = cd.from_history(rows)
    assert [(r.step, dict(r.values)) for r in records] == [
        (0, {"entropy/token_mean": 2.0}),
        (1, {"entropy/token_mean": 3.0, "reward/mean": 0.5}),
    ]


@pytest.mark.parametrize(
    "history",
    [
        {5: {"entropy": 1.0}, 10: {"entropy": 0.5}},
        {"5": {"entropy": 1.0}, "10": {"entropy": 0.5}},
        [{5: {"entropy": 1.0}}, {10: {"entropy": 0.5}}],
        [{"global_step": 5, "entropy": 1.0}, {"global_step": 10.0, "entropy": 0.5}],
        [{"training/global_step": 5, "actor/entropy": 1.0}, {"training/global_step": 10, "actor/entropy": 0.5}],
    ],
)
def test_the_shapes_that_histories_have(history: Any) -> None:
    records = cd.from_history(history)
    assert [(r.step, dict(r.values)) for r in records] == [
        (5, {"entropy/token_mean": 1.0}),
        (10, {"entropy/token_mean": 0.5}),
    ]


def test_texts_nans_booleans_and_unknown_names_are_left_out() -> None:
    row = {"step": 0, "entropy": math.nan, "reward": "high", "kl": 0.1, "accuracy": True, "loss": None, "em": 0.25}
    (record,) = cd.from_history([row])
    assert record.values == {"pass@1": 0.25}


def test_own_aliases_win() -> None:
    (record,) = cd.from_history(
        [{"step": 0, "my/h": 1.5, "entropy": 9.0}], aliases={"my/h": "entropy/token_mean", "entropy": "kl"}
    )
    assert record.values == {"entropy/token_mean": 1.5, "kl": 9.0}


@pytest.mark.parametrize("rows", [[{"entropy": 1.0}], [{"step": None, "entropy": 1.0}], [{"step": 1.5}], [{}]])
def test_a_row_without_a_step_is_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ReaderError, match="history row 0 names no step"):
        cd.from_history(rows)


def test_a_row_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ReaderError, match="history row 1 is list"):
        cd.from_history([{"step": 0}, [1, 2]])  # type: ignore[list-item]
