"""The documented JSONL schema: every field, every way to say a turn, and a round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapsediag.errors import ReaderError, SettingsError
from collapsediag.readers import from_jsonl, read_rollouts
from collapsediag.rollouts import Rollout, RolloutBatch


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def one(tmp_path: Path, row: dict[str, Any], **options: Any) -> Rollout:
    [batch] = from_jsonl(write(tmp_path / "a.jsonl", row), **options)
    [rollout] = batch.rollouts
    return rollout


FULL = {
    "step": 40.0,
    "group": "g1",
    "environment": "math",
    "prompt": "2+2=",
    "prompt_ids": [5, 6],
    "completion": "4",
    "completion_ids": [7],
    "logprobs": [-0.5],
    "entropies": [0.25],
    "finish_reason": "stop",
    "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": 2}}],
    "observation": "right",
    "reward": 1,
    "rewards": {"correct": 1.0, "format": None},
    "success": True,
    "answer": 4,
    "advantage": 0.5,
    "id": "r1",
    "temperature": 0.6,
    "max_output_tokens": 512,
    "eos_token_ids": [2],
    "metadata": {"level": 3},
    "extra": "kept",
}


def test_every_field_of_the_schema(tmp_path: Path) -> None:
    [batch] = read_rollouts(write(tmp_path / "a.jsonl", FULL))
    [rollout] = batch.rollouts
    [turn] = rollout.turns
    assert (batch.step, batch.temperature, batch.max_output_tokens, batch.eos_token_ids) == (40, 0.6, 512, (2,))
    assert (rollout.group, rollout.environment, rollout.id) == ("g1", "math", "r1")
    assert (rollout.reward, rollout.rewards, rollout.success) == (1.0, {"correct": 1.0, "format": None}, True)
    assert (rollout.answer, rollout.advantage) == ("4", 0.5)
    assert rollout.metadata == {"level": 3, "extra": "kept"}
    assert (turn.context, turn.output, turn.observation, turn.finish_reason) == ("2+2=", "4", "right", "stop")
    assert turn.context_ids is not None
    assert turn.output_ids is not None
    assert (turn.context_ids.tolist(), turn.output_ids.tolist()) == ([5, 6], [7])
    np.testing.assert_array_equal(turn.logprobs, [-0.5])  # type: ignore[arg-type]
    np.testing.assert_array_equal(turn.entropies, [0.25])  # type: ignore[arg-type]
    assert turn.tool_calls is not None
    assert [(c.name, c.arguments) for c in turn.tool_calls] == [("f", '{"a": 2, "b": 1}')]


@pytest.mark.parametrize(("cut", "reason"), [(True, "length"), (False, "stop"), (None, None)])
def test_truncated_is_a_finish_reason(tmp_path: Path, cut: bool | None, reason: str | None) -> None:
    rollout = one(tmp_path, {"prompt": "p", "completion": "c", "truncated": cut})
    assert rollout.turns[0].finish_reason == reason


def test_equal_prompts_are_one_group_where_no_id_is_given(tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": "c", "step": s} for s in (1, 2) for p in "aba"]
    first, second = read_rollouts(write(tmp_path / "a.jsonl", *rows))
    assert list(first.groups().values()) == [[0, 2], [1]]
    # The same prompt has the same name in every step.
    assert list(first.groups()) == list(second.groups())
    assert any(note.startswith("3 rollouts have no group id") for note in first.notes)


def test_groups_by_ids_and_by_messages(tmp_path: Path) -> None:
    ids = [{"prompt_ids": i, "completion_ids": [1]} for i in ([1, 2], [3], [1, 2])]
    chat = [{"prompt": [{"role": "user", "content": c}], "completion": "x"} for c in "aba"]
    for rows in (ids, chat):
        [batch] = read_rollouts(write(tmp_path / "a.jsonl", *rows))
        assert list(batch.groups().values()) == [[0, 2], [1]]


def test_a_total_is_made_of_components_and_said(tmp_path: Path) -> None:
    row = {"prompt": "p", "completion": "c", "rewards": {"a": 1.0, "b": 0.5, "c": None}}
    path = write(tmp_path / "a.jsonl", row)
    [batch] = from_jsonl(path)
    assert batch.rollouts[0].reward == 1.5
    assert any("plain sum of a, b, c" in note for note in batch.notes)
    [batch] = from_jsonl(path, reward_weights={"a": 2.0, "b": -1.0})
    assert batch.rollouts[0].reward == 1.5
    [batch] = from_jsonl(path, reward_weights={"b": 4.0})
    assert batch.rollouts[0].reward == 2.0
    with pytest.raises(SettingsError, match="reward_weights name"):
        list(from_jsonl(path, reward_weights={"z": 1.0}))
    assert one(tmp_path, {"prompt": "p", "completion": "c", "rewards": {"a": None}}).reward is None


@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), (float("nan"), None), (True, 1.0), (False, 0.0), (3, 3.0), (-0.5, -0.5)]
)
def test_rewards(tmp_path: Path, value: Any, expected: float | None) -> None:
    assert one(tmp_path, {"prompt": "p", "completion": "c", "reward": value}).reward == expected


def test_keys_by_other_names(tmp_path: Path) -> None:
    row = {"q": "2+2=", "answer_text": "4", "verdict": {"points": 1}, "completion": "not this"}
    keys = {"prompt": "q", "completion": "answer_text", "reward": "verdict.points"}
    [batch] = read_rollouts(write(tmp_path / "a.jsonl", row), key_map=keys)
    [rollout] = batch.rollouts
    assert (rollout.turns[0].context, rollout.turns[0].output, rollout.reward) == ("2+2=", "4", 1.0)
    assert rollout.metadata == {"completion": "not this"}
    with pytest.raises(SettingsError, match="'completon' is not a name"):
        list(read_rollouts(tmp_path / "a.jsonl", source="jsonl", key_map={"completon": "answer_text"}))
    with pytest.raises(ReaderError, match=r"field 'anser' is missing.*correct the map"):
        list(read_rollouts(tmp_path / "a.jsonl", key_map={"prompt": "q", "completion": "anser"}))


def test_a_flat_trajectory_with_a_mask(tmp_path: Path) -> None:
    row = {
        "group": 1,
        "token_ids": [1, 2, 3, 4, 5, 6],
        "model_mask": [0, 0, 1, 0, 1, 1],
        "logprobs": [0, 0, -1, 0, -2, -3],
    }
    turns = one(tmp_path, row).turns
    assert [t.context_ids.tolist() for t in turns if t.context_ids is not None] == [[1, 2], [1, 2, 3, 4]]
    assert [t.output_ids.tolist() for t in turns if t.output_ids is not None] == [[3], [5, 6]]
    assert [t.logprobs.tolist() for t in turns if t.logprobs is not None] == [[-1.0], [-2.0, -3.0]]


def test_a_masked_completion_is_cut_into_turns_and_keeps_its_text(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "q"}],
        "prompt_ids": [1, 2],
        "completion": [
            {"role": "assistant", "content": "a"},
            {"role": "tool", "content": "t"},
            {"role": "assistant", "content": "b"},
        ],
        "completion_ids": [3, 4, 5, 6],
        "tool_mask": [1, 0, 1, 1],
        "logprobs": [-1.0, 0.0, -2.0, -3.0],
    }
    turns = one(tmp_path, row).turns
    assert [t.output for t in turns] == ["a", "b"]
    assert [t.observation for t in turns] == ["t", None]
    assert [t.context_ids.tolist() for t in turns if t.context_ids is not None] == [[1, 2], [1, 2, 3, 4]]
    assert [t.output_ids.tolist() for t in turns if t.output_ids is not None] == [[3], [5, 6]]
    assert [t.logprobs.tolist() for t in turns if t.logprobs is not None] == [[-1.0], [-2.0, -3.0]]
    with pytest.raises(ReaderError, match="hold 2 messages of the policy and no mask"):
        one(tmp_path, {k: v for k, v in row.items() if k not in ("tool_mask", "logprobs")})


def test_a_conversation_is_a_turn_for_each_message_of_the_policy(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "two"},
    ]
    turns = one(tmp_path, {"messages": chat, "reward": 1.0}).turns
    assert [t.output for t in turns] == ["one", "two"]
    assert [len(t.context_messages or ()) for t in turns] == [2, 4]
    assert [t.observation for t in turns] == ["more", None]


def test_explicit_turns(tmp_path: Path) -> None:
    row = {
        "prompt": "start",
        "group": 0,
        "turns": [
            {"output": "left", "observation": "wall", "finish_reason": "stop"},
            {"context": "start left wall", "output": "right", "output_ids": [1], "context_ids": [2, 3]},
        ],
    }
    first, second = one(tmp_path, row).turns
    assert (first.context, first.output, first.observation) == ("start", "left", "wall")
    assert (second.context, second.has_ids) == ("start left wall", True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p"}, "field 'completion' is missing .*--map completion=THEIR_NAME"),
        ({"completion": "c"}, "field 'prompt' is missing .*Which rollouts share a prompt"),
        ({"prompt": "p", "completion": 5}, r"field 'completion' must be text, found a number \(5\)"),
        ({"prompt": 5, "completion": "c"}, "field 'prompt' must be text"),
        ({"prompt": "p", "completion": "c", "reward": "1.0"}, "field 'reward' must be a number, found text"),
        ({"prompt": "p", "completion": "c", "reward": float("inf")}, "field 'reward' is inf"),
        ({"prompt": "p", "completion": "c", "reward": 10**400}, "a reward must be finite"),
        ({"prompt": "p", "completion": "c", "reward": [1]}, "found a list"),
        ({"prompt": "p", "completion": "c", "rewards": [1]}, "'rewards' must be an object of components"),
        ({"prompt": "p", "completion": "c", "step": "40"}, "field 'step' must be a whole number, found text"),
        ({"prompt": "p", "completion": "c", "step": 1.5}, "field 'step' must be a whole number"),
        ({"prompt": "p", "completion": "c", "step": True}, "field 'step' must be a whole number"),
        ({"prompt": "p", "completion": "c", "step": 10**30}, "field 'step' must be a whole number"),
        ({"prompt": "p", "completion": "c", "success": "yes"}, "field 'success' must be true or false"),
        ({"prompt": "p", "completion": "c", "success": 0.5}, "field 'success' must be true or false"),
        ({"prompt": "p", "completion": "c", "group": ["a"]}, "field 'group' must name a group"),
        ({"prompt": "p", "completion": "c", "group": True}, "field 'group' must name a group"),
        ({"prompt_ids": [1], "completion_ids": [[1]]}, "must be a flat list of token ids, found a list"),
        ({"prompt_ids": [1], "completion_ids": [1, 2], "logprobs": [-1]}, "one value per output token"),
        ({"prompt_ids": [1], "completion_ids": [1], "logprobs": [None]}, "flat list of numbers, found null"),
        ({"prompt_ids": [1], "completion_ids": [1, -100]}, "negative token id -100"),
        ({"group": 1, "token_ids": [1, 2]}, "field 'model_mask' is missing"),
        ({"group": 1, "token_ids": [1, 2], "model_mask": [0, 0]}, "marks no token of the policy"),
        ({"group": 1, "token_ids": [1, 2], "model_mask": [1]}, "model_mask has shape"),
        ({"group": 1, "completion_ids": [1, 2], "model_mask": [1, 0]}, "needs 'prompt_ids' too"),
        ({"prompt": "p", "turns": []}, "'turns' is empty"),
        ({"prompt": "p", "turns": [{"observation": "o"}]}, r"turns\[0\] has neither 'output' nor 'output_ids'"),
        ({"prompt": "p", "turns": ["text"]}, r"field 'turns\[0\]' must be an object"),
        ({"messages": [{"role": "user", "content": "q"}]}, "holds no message of the policy"),
        ({"messages": ["text"]}, "must be a list of chat messages"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "must be text or a list of parts, found an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "holds a part that is not text"),
        (
            {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "tool", "content": ""}]},
            "no message of",
        ),
    ],
)
def test_bad_rows_name_line_and_key(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ReaderError, match=f"a.jsonl, line 1: .*{message}"):
        one(tmp_path, row)


def test_rows_of_one_step_that_disagree_on_the_temperature(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c", "temperature": t} for t in (0.6, 1.0)]
    [batch] = from_jsonl(write(tmp_path / "a.jsonl", *rows))
    assert batch.temperature == 0.6
    assert any("differ in temperature" in note for note in batch.notes)


def test_evaluation_rows_of_a_training_step_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": m, "mode": m} for m in ("train", "eval", "train")]
    [batch] = from_jsonl(write(tmp_path / "a.jsonl", *rows))
    assert [r.turns[0].output for r in batch] == ["train", "train"]
    assert batch.dropped == {"not_training": 1}
    [batch] = from_jsonl(write(tmp_path / "b.jsonl", rows[1]))
    assert len(batch) == 1


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": texts,
                "completion": texts,
                "step": st.integers(0, 3),
                "reward": st.none() | st.floats(allow_nan=False, allow_infinity=False),
                "success": st.none() | st.booleans(),
            }
        ),
        min_size=1,
        max_size=12,
    ),
    ascii_only=st.booleans(),
)
def test_what_is_written_is_read(rows: list[dict[str, Any]], ascii_only: bool, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("r") / "a.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    path.write_bytes(text.encode("utf-8"))
    batches: list[RolloutBatch] = list(from_jsonl(path, repeated_steps="merge"))
    assert [b.step for b in batches] == sorted({row["step"] for row in rows})
    for batch in batches:
        mine = [row for row in rows if row["step"] == batch.step]
        assert [r.turns[0].context for r in batch] == [row["prompt"] for row in mine]
        assert [r.turns[0].output for r in batch] == [row["completion"] for row in mine]
        assert [r.reward for r in batch] == [row["reward"] for row in mine]
        assert [r.success for r in batch] == [row["success"] for row in mine]
        same = [[a["prompt"] == b["prompt"] for b in mine] for a in mine]
        assert [[a.group == b.group for b in batch] for a in batch] == same
