"""veRL dumps of every version, against the raw lines parsed here by themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from collapsediag.errors import ReaderError
from collapsediag.readers import from_verl, read_rollouts
from collapsediag.readers.verl import messages_from_stripped

DATA = Path(__file__).parent / "data" / "rollouts"
VERL = DATA / "verl"
V0 = ["verl-0.4.1", "verl-0.5.0", "verl-0.6.1", "verl-0.7.1", "verl-0.8.0", "verl-0.9.1"]


def raw_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("version", V0)
def test_v0_groups_by_identical_prompt_and_says_so(version: str) -> None:
    folder = VERL / version / "v0_rollout_data_dir"
    rows = raw_rows(folder / "40.jsonl")
    [batch] = read_rollouts(folder)
    assert batch.step == 40
    assert [r.turns[0].context for r in batch] == [row["input"] for row in rows]
    assert [r.turns[0].output for r in batch] == [row["output"] for row in rows]
    assert [r.reward for r in batch] == [row["score"] for row in rows]
    # The groups are exactly the partition of the rows by prompt text: four prompts, four rows each, shuffled.
    expected: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        expected.setdefault(row["input"], []).append(i)
    assert list(batch.groups().values()) == list(expected.values())
    assert Counter(map(len, expected.values())) == {4: 4}
    assert expected[rows[0]["input"]] != [0, 1, 2, 3]
    assert any("grouped by identical prompt" in note and note.startswith("16 ") for note in batch.notes)
    assert [r.rewards for r in batch] == [{"acc": row["acc"], "format_ok": row["format_ok"]} for row in rows]
    assert [r.success for r in batch] == [row["acc"] == 1.0 for row in rows]
    assert [r.metadata.get("gts") for r in batch] == [row.get("gts") for row in rows]


def test_v1_groups_by_the_uid_without_session_and_index() -> None:
    path = VERL / "verl-0.9.1" / "v1_rollout_data_dir" / "40.jsonl"
    rows = raw_rows(path)
    [batch] = read_rollouts(path)
    assert [r.group for r in batch] == [row["uid"].rsplit("_", 2)[0] for row in rows]
    assert [r.id for r in batch] == [row["uid"] for row in rows]
    assert Counter(r.group for r in batch).most_common()[-1][1] == 4
    assert len(batch.groups()) == 4
    assert not any("grouped by identical" in note for note in batch.notes)


def test_padding_rows_are_dropped_and_counted() -> None:
    path = VERL / "e2e-cpu-0.9.1" / "v1_dp2_with_padding_rows_step1.jsonl"
    rows = raw_rows(path)
    padding = [row for row in rows if row["uid"].startswith("pad")]
    [batch] = read_rollouts(path)
    assert (len(rows), len(padding)) == (24, 8)
    assert batch.dropped == {"padding_row": 8}
    assert [r.turns[0].output for r in batch] == [row["output"] for row in rows if row not in padding]
    assert [len(v) for v in batch.groups().values()] == [4, 4, 4, 4]


def test_only_padding_without_text_is_dropped(tmp_path: Path) -> None:
    row = {"input": "a", "output": "b", "score": 0.0, "step": 1}
    rows = [
        {**row, "uid": "pad1_0_0"},
        {**row, "uid": "pad2_0_0", "input": "", "output": ""},
        {**row, "uid": "p_0_0", "output": ""},
    ]
    [batch] = from_verl(write(tmp_path / "1.jsonl", rows))
    assert batch.dropped == {"padding_row": 1}
    assert [r.id for r in batch] == ["pad1_0_0", "p_0_0"]


def test_a_folder_is_read_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        write(tmp_path / f"{step}.jsonl", [{"input": "q", "output": f"at {step}", "score": 0.0, "step": step}])
    batches = list(from_verl(tmp_path))
    assert [b.step for b in batches] == [1, 2, 10]
    assert [b.rollouts[0].turns[0].output for b in batches] == ["at 1", "at 2", "at 10"]


def test_a_metric_log_in_the_folder_is_left_out_and_said(tmp_path: Path) -> None:
    source = VERL / "e2e-cpu-0.9.1"
    for name in ("v0_file_logger_metrics.jsonl", "v0_step2.jsonl"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    [batch] = read_rollouts(tmp_path)
    assert len(batch) == 16
    assert any("v0_file_logger_metrics.jsonl" in note for note in batch.notes)
    with pytest.raises(ReaderError, match="metric log of veRL's file logger"):
        list(read_rollouts(tmp_path / "v0_file_logger_metrics.jsonl"))


def test_two_prompts_under_one_id_are_an_error_that_names_both_lines(tmp_path: Path) -> None:
    row = {"output": "b", "score": 0.0, "step": 1}
    rows = [{**row, "input": "one", "uid": "p_0_0"}, {**row, "input": "two", "uid": "p_1_0"}]
    path = write(tmp_path / "1.jsonl", rows)
    with pytest.raises(ReaderError, match=r"line 2: group 'p' has another prompt here than in .*line 1"):
        list(from_verl(path))
    [batch] = from_verl(path, check_groups=False)
    assert batch.groups() == {"p": [0, 1]}
    [batch] = from_verl(path, skip_bad_lines=True)
    assert (len(batch), batch.dropped) == (1, {"bad_line": 1})


def test_further_outputs_of_a_session_have_prompts_of_their_own(tmp_path: Path) -> None:
    row = {"output": "b", "score": 0.0, "step": 1}
    rows = [{**row, "input": "one", "uid": "p_0_0"}, {**row, "input": "one b and more", "uid": "p_0_1"}]
    [batch] = from_verl(write(tmp_path / "1.jsonl", rows))
    assert batch.groups() == {"p": [0, 1]}
    assert any(note.startswith("1 rows are further outputs of a session") for note in batch.notes)


def test_extras_keep_their_type(tmp_path: Path) -> None:
    row = {"input": "q", "output": "a", "score": float("nan"), "step": 1, "acc": "True", "pred": "72", "len": 3}
    row |= {"gts": ["72"], "feedback": "good", "judge": None, "ok": True}
    [batch] = from_verl(write(tmp_path / "1.jsonl", [row]))
    [rollout] = batch.rollouts
    assert rollout.reward is None
    assert rollout.success is True
    assert rollout.answer == "72"
    assert rollout.rewards == {"len": 3.0, "ok": 1.0}
    assert rollout.metadata["gts"] == ["72"]
    assert rollout.metadata["feedback"] == "good"


def test_real_dumps_of_others_read_too() -> None:
    [batch] = read_rollouts(DATA / "verl_dump_3_records.jsonl")
    assert [r.success for r in batch] == [row["acc"] == 1.0 for row in raw_rows(DATA / "verl_dump_3_records.jsonl")]
    assert [r.success for r in batch] == [False, False, True]
    path = DATA / "verl_layout_from_simplerl_4x8.jsonl"
    [batch] = read_rollouts(path)
    assert [len(v) for v in batch.groups().values()] == [8, 8, 8, 8]
    assert [r.success for r in batch] == [row["acc"] for row in raw_rows(path)]


def test_stripped_prompts_are_parsed_back_only_without_doubt() -> None:
    for path in sorted(VERL.glob("verl-*/*/40.jsonl")):
        for row in raw_rows(path):
            messages = messages_from_stripped(row["input"])
            assert messages is not None
            assert [m["role"] for m in messages] == ["system", "user"]
            joined = "".join(f"{m['role']}\n{m['content']}\n" for m in messages) + "assistant\n"
            assert joined == row["input"]


@pytest.mark.parametrize(
    "text",
    [
        "plain question",
        "user\nhi",  # the answer's start is missing
        "user\nhi\nassistant",  # no newline after the last role
        "assistant\nhi\nassistant\n",
        "user\na\nuser\nb\nassistant\n",
        "system\nx\nassistant\n",
        "Hi\nuser\nhi\nassistant\n",
        "user\nsay\nsystem\nassistant\n",
        "",
    ],
)
def test_doubtful_prompts_are_not_parsed(text: str) -> None:
    assert messages_from_stripped(text) is None


def test_several_turns_and_a_forced_start_are_parsed() -> None:
    messages = messages_from_stripped("user\na\nb\nassistant\nc\nuser\nd\nassistant\n<think>\n")
    assert messages == (
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    )
