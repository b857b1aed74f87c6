"""What a monitor is given that it cannot use: steps, states, settings. Nothing is lost, and the reason says why."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collapsediag as cd
from collapsediag.errors import MetricError, PairError, RolloutError, SettingsError
from collapsediag.run_folder import read_matrix, read_records
from collapsediag.testing import planted

from .keep import Keep

KEY = "collapse_first_turn_sample/"
PLANTED = planted("healthy", n_contexts=4, group_size=3, length=3)


def batch(step: int) -> cd.RolloutBatch:
    return dataclasses.replace(PLANTED.batch, step=step)


def monitor(**options: Any) -> tuple[cd.Monitor, Keep]:
    keep = Keep()
    settings = {"every": 1, "reasoning": "completion", "sinks": [keep], **options}
    return cd.Monitor(PLANTED.scorer(), **settings), keep


@pytest.mark.fault(
    "a damaged state is loaded",
    "an error names the key and what was found; nothing of the state is taken over",
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema": None}, "'ema' is None"),
        ({"ema": {"turn": {"decay": 0.9}}}, "'ema' of 'turn': an EmaStd state has the keys"),
        ({"ema": {"turn": {"decay": 0.9, "values": {"gap_std": -1.0}}}}, "'ema' of 'turn': .* gap_std is -1.0"),
        ({"reasoning": "thinking"}, r"'reasoning' is 'thinking' \(str\)"),
        ({"last_step": "9"}, r"'last_step' is '9' \(str\)"),
        ({"failures": -1}, r"'failures' is -1 \(int\)"),
        ({"failures_in_a_row": True}, r"'failures_in_a_row' is True \(bool\)"),
        ({"context_bank": 5}, "context bank is of type int"),
        ({"context_bank": {"turn": [[1], ["a"]]}}, r"'turn' is \[\[1\], \['a'\]\], and must be lists of token ids"),
        ({"context_bank": {"turn": [[1, -1]]}}, "must be lists of token ids"),
        ({"context_bank": {"turn": None}}, "must be lists of token ids"),
        ({"time_budget": None}, "'wall_s' is None, and must be a number"),
        ({"time_budget": {"wall_s": float("nan")}}, "'wall_s' is nan"),
        ({"time_budget": {"wall_s": 10**400}}, "'wall_s' is 1000"),
        *[({key: ...}, f"it has no '{key}'") for key in ("ema", "reasoning", "last_step", "failures")],
    ],
)
def test_a_damaged_state_is_refused_whole(changes: dict[str, object], message: str) -> None:
    parts = {"context_bank": 2, "time_budget": 0.5}
    first, _ = monitor(**parts)
    for step in range(2):
        first.observe(step, batch(step))
    state = {key: value for key, value in {**first.state_dict(), **changes}.items() if value is not ...}
    second, _ = monitor(reasoning="auto", **parts)
    before = second.state_dict()
    with pytest.raises(SettingsError, match=message):
        second.load_state_dict(state)
    assert second.state_dict() == before
    assert before["ema"] == {} != state.get("ema")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_damaged_records_leave_a_monitor_as_it_was() -> None:
    m, _ = monitor(reasoning="auto")
    before = m.state_dict()
    name = KEY + "gap_std_ema"
    good = cd.Record(step=1, values={name: 1.0}, notes=("reasoning=completion: as asked",))
    with pytest.raises(SettingsError, match=r"gap_std is -1\.0"):
        m.continue_from([good, cd.Record(step=2, values={name: -1.0})])
    assert m.state_dict() == before
    m.continue_from([good])
    assert (m.last_step, m.state_dict()["reasoning"]) == (1, "completion")


@pytest.mark.parametrize("state", [None, [], "state", {}])
def test_what_is_no_state_is_refused(state: object) -> None:
    with pytest.raises(SettingsError, match=r"monitor state of version .* cannot be loaded"):
        monitor()[0].load_state_dict(state)  # type: ignore[arg-type]


class Unreadable:
    shape = ()

    def item(self) -> int:
        raise RuntimeError("no data")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.fault(
    "a step that is no whole number",
    "recorded under its batch's step, or the next one where that is taken; the record notes what was given",
)
@pytest.mark.faults
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "None (NoneType)"),
        ("5", "'5' (str)"),
        (True, "True (bool)"),
        (4.5, "4.5 (float)"),
        (float("nan"), "nan (float)"),
        (2**60, "1152921504606846976 (int)"),
        (10**5000, " (int)"),
        ([3], "[3] (list)"),
        (np.arange(2), "array([0, 1]) (ndarray)"),
        (Unreadable(), " (Unreadable)"),
        ("x" * 10**6, "xxx' (str)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_that_is_no_number_loses_nothing(
    tmp_path: Path, given: object, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    with cd.Monitor(PLANTED.scorer(), every=1, reasoning="completion", sinks=[cd.JsonlSink(tmp_path)]) as m:
        m.observe(0, batch(0))
        m.observe(given, batch(7))  # type: ignore[arg-type]
        m.observe(given, batch(7))  # type: ignore[arg-type]
        m.observe(given, None)  # type: ignore[arg-type]
        m.record_failure(given, ValueError("no rollouts"))  # type: ignore[arg-type]
        m.observe(11, batch(11))
    records = read_records(tmp_path)
    assert [(r.step, r.status) for r in records] == [
        *((0, "ok"), (7, "ok"), (8, "ok"), (9, "failed"), (10, "failed"), (11, "ok"))
    ]
    assert records[1].values[KEY + "n_traces"] == read_matrix(tmp_path, 7, "first_turn").n_traces
    for record, origin in zip(records[1:5], ["the step of its batch", *["the next one"] * 3], strict=True):
        assert shown in record.notes[0]
        assert f"is recorded as step {record.step}, {origin}. Give the trainer's step number" in record.notes[0]
        assert len(record.notes[0]) < 400
    assert records[5].notes == records[0].notes
    assert caplog.text.count("Said once, every record notes it.") == 1


def test_a_step_that_is_no_number_raises_offline() -> None:
    m, keep = monitor(on_error="raise")
    with pytest.raises(RolloutError, match=r"the step given was '5' \(str\)"):
        m.observe("5", batch(5))  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match=r"the step of a record is '5' \(str\)"):
        cd.Record(step="5", values={})  # type: ignore[arg-type]
    assert keep.records == []


def test_steps_out_of_numpy_are_steps() -> None:
    m, keep = monitor(every=np.int16(2))
    for step in (np.int64(0), np.uint8(1), np.float32(2.0), np.array(3), np.array([4])):
        m.observe(step, batch(int(np.ravel(step)[0])))  # type: ignore[arg-type]
    assert [(type(r.step), r.step, bool(r.matrices)) for r in keep.records] == [
        (int, step, step % 2 == 0) for step in range(5)
    ]
    assert m.last_step == 4
    json.dumps(m.state_dict())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"seed": None}, "seed=None: a whole number is needed"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"traces_kept": -1}, "traces_kept=-1: a whole number, 0 or more is needed"),
        ({"traces_kept": "32"}, "traces_kept='32'"),
        ({"context_bank": 1.5}, "context_bank=1.5"),
        ({"definition": "RAGEN"}, "definition='RAGEN': choose 'paper' or 'ragen'"),
        ({"reasoning": "cot"}, "reasoning='cot': choose 'auto' or 'think' or 'completion'"),
        ({"pairs": {"max_traces": 4}}, r"pairs={'max_traces': 4} \(dict\): pass PairSettings"),
        (
            {"rollout_options": {"fromat": None}},
            r"rollout_options holds \['fromat'\]; it is a dict with some of",
        ),
        ({"rollout_options": {"seed": 1}}, r"rollout_options holds \['seed'\]"),
        ({"rollout_options": 5}, "rollout_options holds 5"),
        ({"rollout_options": {"format": "json"}}, r"format is 'json'; pass .*, JsonFormat\("),
        ({"rollout_options": {"success_threshold": "0.5"}}, "success_threshold='0.5': a number is needed"),
        ({"rollout_options": {"success_threshold": float("nan")}}, "success_threshold=nan"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_training(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        monitor(**setting)


def test_a_name_is_no_tokenizer() -> None:
    with pytest.raises(PairError, match=r"str has no decode\(ids\) method; pass the tokenizer of the policy"):
        monitor(tokenizer="gpt2")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("success_threshold", 'rollout_options={"success_threshold": ...}'),
        ("format", 'rollout_options={"format": ...}'),
        ("max_traces", "pairs=PairSettings(max_traces=...)"),
        ("evry", "did you mean every=...?"),
        ("mx_traces", "did you mean pairs=PairSettings(max_traces=...)?"),
        ("resoning", "did you mean reasoning=...?"),
        ("zzz", "it takes scorer, every, sinks, "),
    ],
)
def test_an_argument_that_is_none_says_where_it_goes(name: str, way: str) -> None:
    with pytest.raises(TypeError, match=rf"^Monitor\(\) .*{name}.*{re.escape(way)}"):
        cd.Monitor(**{name: 1})


def test_the_reasons_name_a_way_that_is_there() -> None:
    texts = cd.RolloutBatch.from_lists(
        step=0, prompts=["q"] * 2, completions=["<think>a</think>b"] * 2, rewards=[0.9, 0.1]
    )
    reason = cd.Monitor().observe(0, texts).not_measured["pass@k"]
    assert "rollout_options" in reason
    assert cd.Monitor(rollout_options={"success_threshold": 0.5}).observe(0, texts).values["pass@1"] == 0.5


def test_settings_out_of_numpy_are_settings() -> None:
    made = {"seed": np.int64(3), "traces_kept": np.float32(2), "context_bank": np.int8(2), "every": np.int64(1)}
    m, keep = monitor(**made, rollout_options={"success_threshold": np.float32(0.5)})
    plain, expected = monitor(**{name: int(value) for name, value in made.items()})
    for one in (m, plain):
        one.observe(1, batch(1))
    assert len(keep.records[0].traces) == 2
    assert [t.row for t in keep.records[0].traces] == [t.row for t in expected.records[0].traces]


@pytest.mark.fault(
    "a batch holds what cannot be: a NaN log-probability, a reward that is text, a graded success label",
    "what depends on it is not measured, with the rollout that has it; all else is, one warning",
)
@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "reason", "families"),
    [
        ({"logprobs": float("nan")}, "rollout 5, turn 0: a log-probability is nan", {"entropy"}),
        ({"logprobs": 0.5}, "rollout 5, turn 0: a log-probability is 0.5", {"entropy"}),
        ({"reward": "1.0"}, r"the reward of rollout 5( \(group '\w+'\))? is '1.0'", {"reward", "tools"}),
        ({"success": 0.5}, r"the success label of rollout 5 \(group '\w+'\) is 0.5", {"reward", "pass@k"}),
    ],
    ids=str,
)
def test_one_impossible_number_costs_only_what_depends_on_it(
    change: dict[str, Any], reason: str, families: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    def changed(change: dict[str, Any]) -> cd.RolloutBatch:
        rollouts = []
        for i, r in enumerate(PLANTED.batch):
            logprobs = [-1.0] * len(r.turns[0].output_ids)
            if i == 5 and "logprobs" in change:
                logprobs[0] = change["logprobs"]
            turn = dataclasses.replace(r.turns[0], logprobs=logprobs)
            rollouts.append(dataclasses.replace(r, turns=(turn,), success=i % 2 == 0))
        rollouts[5] = dataclasses.replace(rollouts[5], **{k: v for k, v in change.items() if k != "logprobs"})
        return dataclasses.replace(PLANTED.batch, rollouts=tuple(rollouts))

    fine = monitor()[0].observe(0, changed({"success": True}))
    m, _ = monitor()
    records = [m.observe(step, changed(change)) for step in range(5)]
    assert [(r.status, bool(r.matrices)) for r in records] == [("ok", True)] * 5
    refused = {name for name, why in records[4].not_measured.items() if re.match(reason, why)}
    assert refused == families
    lost = {name.split("/")[0] for name in set(fine.values) - set(records[0].values)}
    assert lost - {"n_unlabelled"} == {"pass@1" if name == "pass@k" else name for name in families} | (
        {"pass@2"} if "pass@k" in families else set()
    )
    assert len([m for m in caplog.messages if "is not measured" in m]) == len(families)
    with pytest.raises(MetricError, match=reason):
        monitor(on_error="raise")[0].observe(0, changed(change))


@pytest.mark.fault(
    "a format or answer callable raises",
    "what it judges is not measured, with its error and the text; all else is, one warning",
)
@pytest.mark.faults
@pytest.mark.parametrize(("option", "family"), [("format", "format"), ("answer", "diversity")])
def test_a_callable_that_raises_costs_only_what_it_judges(
    option: str, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(text: str) -> bool:
        raise ZeroDivisionError("by nothing")

    texts = [f"{i}" for i in range(len(PLANTED.batch))]
    turns = [dataclasses.replace(r.turns[0], output=text) for r, text in zip(PLANTED.batch, texts, strict=True)]
    rows = [dataclasses.replace(r, turns=(turn,)) for r, turn in zip(PLANTED.batch, turns, strict=True)]
    wrong = dataclasses.replace(PLANTED.batch, rollouts=tuple(rows))
    m, _ = monitor(rollout_options={option: judge})
    records = [m.observe(step, wrong) for step in range(4)]
    assert [(r.status, bool(r.matrices)) for r in records] == [("ok", True)] * 4
    told = f"the {option} callable raised ZeroDivisionError: by nothing on '0'"
    assert records[3].not_measured[family] == told
    assert "reward/mean" in records[3].values
    assert [m for m in caplog.messages if "is not measured" in m] == [
        f"step 0: {family} is not measured: {told} Said once, every record says it."
    ]
    with pytest.raises(MetricError, match=told):
        monitor(rollout_options={option: judge}, on_error="raise")[0].observe(0, wrong)


def test_the_rollout_of_an_impossible_number_is_counted_in_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [
        cd.Rollout(
            turns=(cd.Turn(output_ids=[1], logprobs=[-1.0 if row < 3 else np.nan]),), group=row // 2, environment=name
        )
        for row, name in enumerate("xxyy")
    ]
    record = cd.Monitor().observe(0, cd.RolloutBatch(step=0, rollouts=rollouts))
    assert record.not_measured["entropy"].startswith("rollout 3, turn 0: ")
    assert "env/x/entropy/sampled_mean" in record.values
    assert [message[:52] for message in caplog.messages] == ["step 0: entropy is not measured: rollout 3, turn 0: "]


class BrokenTokenizer:
    def decode(self, ids: list[int]) -> str:
        raise OverflowError("id out of range")


@pytest.mark.fault(
    "the tokenizer cannot decode what was sampled",
    "no trace is kept for reading, with the reason; the numbers of the step are as without a tokenizer",
)
@pytest.mark.faults
def test_traces_that_cannot_be_written_out_cost_no_number() -> None:
    record = monitor(tokenizer=BrokenTokenizer())[0].observe(0, batch(0))
    expected = monitor()[0].observe(0, batch(0))
    assert (record.status, record.traces) == ("ok", ())
    assert record.not_measured[KEY + "traces"] == "no trace was kept: OverflowError: id out of range"
    assert (
        {n: v for n, v in record.values.items() if n.startswith(KEY)}
        == {n: v for n, v in expected.values.items() if n.startswith(KEY)}
        != {}
    )
    with pytest.raises(OverflowError):
        monitor(tokenizer=BrokenTokenizer(), on_error="raise")[0].observe(0, batch(0))


def test_a_scorer_that_mistakes_whose_trace_is_whose_fails_by_name() -> None:
    class Sorts:
        def score(self, pairs: cd.ScoringPairs) -> cd.LogLikelihoodMatrix:
            matrix = PLANTED.scorer().score(pairs)
            return dataclasses.replace(matrix, own_N=np.sort(matrix.own_N)[::-1].copy())

    record = cd.Monitor(Sorts(), every=1, reasoning="completion").observe(0, batch(0))
    assert record.status == "failed"
    assert re.match(r"Sorts returned own_N\[0\] = 3 where the trace's own context is 0; rows and", record.reason or "")
