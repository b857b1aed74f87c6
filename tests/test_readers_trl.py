"""TRL's completions files against pyarrow's own rows, and against the ids that the same runs saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from collapsediag.errors import MissingExtraError, ReaderError
from collapsediag.readers import from_jsonl, from_trl, read_rollouts

TRL = Path(__file__).parent / "data" / "rollouts" / "trl"
WITH_IDS = TRL.parent / "trl_with_ids"


def table_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_text_completions() -> None:
    batches = list(read_rollouts(TRL / "text"))
    assert [b.step for b in batches] == [1, 2, 3]
    for batch in batches:
        rows = table_rows(TRL / "text" / f"completions_{batch.step:05d}.parquet")
        assert [r.turns[0].context for r in batch] == [row["prompt"] for row in rows]
        assert [r.turns[0].output for r in batch] == [row["completion"] for row in rows]
        assert [r.rewards for r in batch] == [{"correct": row["correct"], "fmt": row["fmt"]} for row in rows]
        np.testing.assert_allclose([r.reward for r in batch], [row["correct"] + row["fmt"] for row in rows])  # type: ignore[arg-type]
        assert [r.advantage for r in batch] == [row["advantage"] for row in rows]
        assert [r.metadata["qid"] for r in batch] == [row["qid"] for row in rows]
        # qid is the run's own prompt id, which the reader does not use.
        assert [[rows[i]["qid"] for i in g] for g in batch.groups().values()] == [
            [q] * 4 for q in dict.fromkeys(row["qid"] for row in rows)
        ]
        assert any("plain sum of correct, fmt" in note for note in batch.notes)
        assert any("consecutive rows" in note for note in batch.notes)


def test_conversational_completions() -> None:
    batches = list(read_rollouts(TRL / "conversational"))
    assert [len(b.groups()) for b in batches] == [3, 3, 3]
    for batch in batches:
        rows = table_rows(TRL / "conversational" / f"completions_{batch.step:05d}.parquet")
        for rollout, row in zip(batch, rows, strict=True):
            [turn] = rollout.turns
            assert turn.context_messages is not None
            assert [dict(m) for m in turn.context_messages] == row["prompt"]
            assert turn.output == row["completion"][0]["content"]
            assert turn.context is None


def test_tools_become_turns_with_calls_and_observations() -> None:
    [batch] = read_rollouts(TRL / "tools")
    rows = table_rows(TRL / "tools" / "completions_00001.parquet")
    assert [len(r.turns) for r in batch] == [sum(m["role"] == "assistant" for m in row["completion"]) for row in rows]
    first, second = batch.rollouts[0].turns
    assert first.output == (
        '<think>need the tool 0</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 0, "b": 2}}\n</tool_call>'
    )
    assert first.tool_calls is not None
    [call] = first.tool_calls
    assert (call.name, call.arguments, call.result, call.malformed) == ("add", '{"a": 0, "b": 2}', "2", False)
    assert first.observation == "2"
    assert second.output == "<think>the tool said so 0</think>The answer is 2"
    assert second.tool_calls == ()
    assert second.context_messages is not None
    assert [m["role"] for m in second.context_messages] == ["user", "assistant", "tool"]
    # Parquet writes every field into every message; what is null there is not a field.
    assert set(second.context_messages[2]) == {"role", "content", "name"}
    assert set(second.context_messages[0]) == {"role", "content"}
    assert any("put together" in note for note in batch.notes)


def test_arguments_that_another_tool_has_are_not_arguments(tmp_path: Path) -> None:
    """Parquet gives every call the arguments of all tools, null where they are another tool's."""

    def said(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]

    prompt = [{"role": "user", "content": "q"}]
    rows = [
        {"step": 1, "prompt": prompt, "completion": said("add", {"a": 1, "b": 2}), "r": 0.0},
        {"step": 1, "prompt": prompt, "completion": said("look", {"what": "it"}), "r": 0.0},
    ]
    [batch] = from_trl(write(tmp_path / "completions_00001.parquet", rows))
    calls = [call for r in batch for turn in r.turns for call in turn.tool_calls or ()]
    assert [(c.name, c.arguments) for c in calls] == [("add", '{"a": 1, "b": 2}'), ("look", '{"what": "it"}')]


def test_null_rewards_are_no_value_and_text_columns_no_reward() -> None:
    batches = list(from_trl(TRL / "eval_overwrite_demo"))
    assert [b.step for b in batches] == [1, 2, 3, 4]
    for batch in batches:
        rows = table_rows(TRL / "eval_overwrite_demo" / f"completions_{batch.step:05d}.parquet")
        assert [r.rewards for r in batch] == [{"r_vowel": row["r_vowel"], "rlog": row["rlog"]} for row in rows]
        assert any(row["rlog"] is None for row in rows)
        expected = [row["r_vowel"] + (row["rlog"] or 0.0) for row in rows]
        np.testing.assert_allclose([r.reward for r in batch], expected)  # type: ignore[arg-type]


def test_reward_weights_and_a_mapped_total() -> None:
    path = TRL / "eval_overwrite_demo" / "completions_00001.parquet"
    rows = table_rows(path)
    [batch] = from_trl(path, reward_weights={"r_vowel": 2.0})
    np.testing.assert_allclose([r.reward for r in batch], [2 * row["r_vowel"] for row in rows])  # type: ignore[arg-type]
    [batch] = from_trl(path, key_map={"reward": "rlog"})
    assert [r.reward for r in batch] == [row["rlog"] for row in rows]
    [batch] = from_trl(TRL / "text" / "completions_00001.parquet", key_map={"group": "qid", "answer": "parsed_answer"})
    assert set(batch.groups()) == {row["qid"] for row in table_rows(TRL / "text" / "completions_00001.parquet")}


def test_prompts_that_come_back_are_another_group(tmp_path: Path) -> None:
    rows = [{"step": 1, "prompt": p, "completion": str(i), "r": 0.0} for i, p in enumerate("aabbaa")]
    [batch] = from_trl(write(tmp_path / "completions_00001.parquet", rows))
    assert list(batch.groups().values()) == [[0, 1], [2, 3], [4, 5]]


def test_files_with_the_same_rows_are_read_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        same = step < 3
        rows = [
            {"step": step, "prompt": "p", "completion": "x" if same else "y", "r": 1.0, "advantage": 0.0} for _ in "ab"
        ]
        write(tmp_path / f"completions_{step:05d}.parquet", rows)
    batches = list(from_trl(tmp_path))
    assert [b.step for b in batches] == [1, 3]
    assert any(
        "completions_00001.parquet and completions_00002.parquet hold the same rows" in n for n in batches[0].notes
    )


def test_a_column_is_a_reward_if_any_file_says_so(tmp_path: Path) -> None:
    base = {"prompt": "p", "completion": "c", "sure": 1.0, "why": "text"}
    write(tmp_path / "completions_00001.parquet", [{"step": 1, **base, "rare": None, "why": None}])
    write(tmp_path / "completions_00002.parquet", [{"step": 2, **base, "rare": 0.5}])
    first, second = from_trl(tmp_path)
    assert first.rollouts[0].rewards == {"sure": 1.0, "rare": None}
    assert second.rollouts[0].rewards == {"sure": 1.0, "rare": 0.5}
    assert (first.rollouts[0].reward, second.rollouts[0].reward) == (1.0, 1.5)


def test_the_same_rollouts_with_ids_read_through_the_generic_reader() -> None:
    for name in ("text", "conversational"):
        plain = [r for b in from_trl(TRL / name) for r in b]
        with_ids = [r for b in read_rollouts(WITH_IDS / f"{name}.jsonl") for r in b]
        assert len(plain) == len(with_ids) == 36
        for ours, theirs in zip(plain, with_ids, strict=True):
            assert ours.turns[0].output == theirs.turns[0].output
            assert ours.rewards == theirs.rewards
            assert ours.reward == theirs.reward
            assert theirs.turns[0].has_ids
            assert theirs.turns[0].finish_reason in ("length", "stop")
    batches = list(from_jsonl(WITH_IDS / "text.jsonl"))
    assert [b.step for b in batches] == [0, 1, 2]
    assert [list(b.groups()) for b in batches] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"step": 1, "prompt": "p"}], "row 1: field 'completion' is missing"),
        ([{"step": 1, "prompt": "p", "completion": [{"role": "assistant", "content": "x"}]}], "both must be text"),
        (
            [
                {
                    "step": 1,
                    "prompt": [{"role": "user", "content": "x"}],
                    "completion": [{"role": "tool", "content": "x"}],
                }
            ],
            "no message of the assistant",
        ),
        ([{"step": "one", "prompt": "p", "completion": "c"}], "field 'step' must be a whole number"),
        ([{"step": 1, "prompt": "p", "completion": "c", "r": float("inf")}], "field 'r' is inf"),
    ],
)
def test_bad_rows(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    path = write(tmp_path / "completions_00001.parquet", rows)
    with pytest.raises(ReaderError, match=message):
        list(from_trl(path))


def test_broken_parquet_and_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (TRL / "text" / "completions_00001.parquet").read_bytes()
    cut = tmp_path / "completions_00001.parquet"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ReaderError, match="not a readable parquet file"):
        list(read_rollouts(cut))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"collapsediag\[parquet\]"):
        list(read_rollouts(TRL / "text"))
