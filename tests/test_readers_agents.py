"""Agents' rollouts: NeMo-Gym, verifiers and prime-rl, tinker; against the raw JSON parsed here by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import ReaderError
from collapsediag.readers import from_nemo_gym, from_tinker, from_verifiers, read_rollouts
from collapsediag.rollouts import RolloutBatch

DATA = Path(__file__).parent / "data" / "rollouts"


def raw_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def only(path: Path, **options: Any) -> RolloutBatch:
    [batch] = read_rollouts(path, **options)
    return batch


# --- NeMo-Gym ---------------------------------------------------------------------------------------------------------


def test_nemo_gym_tool_calls_become_turns() -> None:
    path = DATA / "example_multi_step_example_rollouts.jsonl"
    rows = raw_rows(path)
    batch = only(path)
    assert [r.reward for r in batch] == [row["reward"] for row in rows]
    for rollout, row in zip(batch, rows, strict=True):
        items = row["response"]["output"]
        calls = [item for item in items if item["type"] == "function_call"]
        results = {item["call_id"]: item["output"] for item in items if item["type"] == "function_call_output"}
        made = [call for turn in rollout.turns for call in turn.tool_calls or ()]
        assert [(c.name, json.loads(c.arguments), c.result, c.malformed) for c in made] == [
            (c["name"], json.loads(c["arguments"]), results[c["call_id"]], False) for c in calls
        ]
        assert [turn.observation for turn in rollout.turns] == [*(results[c["call_id"]] for c in calls), None]
        assert rollout.turns[-1].output == items[-1]["content"][0]["text"]
        assert rollout.turns[-1].finish_reason == "stop"
        # Each turn sees everything before it.
        lengths = [len(turn.context_messages or ()) for turn in rollout.turns]
        assert lengths == [2 + 2 * k for k in range(len(rollout.turns))]
        assert [t["function"]["name"] for t in rollout.metadata["tools"]] == [
            t["name"] for t in row["responses_create_params"]["tools"]
        ]


def test_nemo_gym_reasoning_goes_between_think_tags() -> None:
    path = DATA / "reasoning_gym_example_rollouts.jsonl"
    batch = only(path)
    for rollout, row in zip(batch, raw_rows(path), strict=True):
        reasoning, message = row["response"]["output"]
        expected = "<think>" + reasoning["summary"][0]["text"] + "</think>" + message["content"][0]["text"]
        assert [turn.output for turn in rollout.turns] == [expected]
        assert rollout.turns[0].tool_calls == (), "the items say that no call was made"
        assert rollout.environment == "knights_knaves"
        assert rollout.answer == row["extracted_answer"]
    assert any(note.startswith("5 outputs were put together") for note in batch.notes)
    assert any("no _ng_task_index" in note for note in batch.notes)


def test_nemo_gym_history_in_the_input_is_context() -> None:
    path = DATA / "single_step_tool_use_first3.jsonl"
    batch = only(path)
    roles = [[m["role"] for m in rollout.turns[0].context_messages or ()] for rollout in batch]
    assert roles[0] == ["system", "user", "assistant", "tool"]
    assert roles[1] == ["system", "user", "assistant", "user"]
    assert all(len(rollout.turns) == 1 for rollout in batch)
    second = batch.rollouts[1].turns[0]
    assert second.tool_calls is not None
    assert [c.name for c in second.tool_calls] == ["authenticate_user"]


def nemo_row(task: int | None, text: str, **item: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **item}
    row = {
        "responses_create_params": {"input": "hi"},
        "response": {"output": [message], "temperature": 0.7},
        "reward": 1,
    }
    return row if task is None else {**row, "_ng_task_index": task, "_ng_rollout_index": 0}


def test_nemo_gym_groups_and_training_ids(tmp_path: Path) -> None:
    ids = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4, 5], "generation_log_probs": [-1.0, -2.0, -0.5]}
    path = write(tmp_path / "a.jsonl", nemo_row(7, "a", **ids), nemo_row(7, "b"), nemo_row(0, "c"))
    batch = only(path)
    assert batch.groups() == {7: [0, 1], 0: [2]}
    assert batch.temperature == 0.7
    turn = batch.rollouts[0].turns[0]
    assert turn.has_ids
    np.testing.assert_array_equal(turn.output_ids, [3, 4, 5])  # type: ignore[arg-type]
    np.testing.assert_allclose(turn.logprobs, [-1.0, -2.0, -0.5])  # type: ignore[arg-type]
    assert turn.output == "a"


def test_nemo_gym_items_with_ids_of_their_own_are_turns_of_their_own(tmp_path: Path) -> None:
    row = nemo_row(1, "a", prompt_token_ids=[1], generation_token_ids=[2])
    row["response"]["output"] += nemo_row(1, "b", prompt_token_ids=[1, 2], generation_token_ids=[3])["response"][
        "output"
    ]
    [rollout] = only(write(tmp_path / "a.jsonl", row)).rollouts
    assert [t.output for t in rollout.turns] == ["a", "b"]
    assert [t.output_ids.tolist() for t in rollout.turns if t.output_ids is not None] == [[2], [3]]
    assert [t.context_ids.tolist() for t in rollout.turns if t.context_ids is not None] == [[1], [1, 2]]


def test_nemo_gym_items_that_are_unknown_or_cut(tmp_path: Path) -> None:
    row = nemo_row(1, "a")
    row["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    [rollout] = only(write(tmp_path / "a.jsonl", row)).rollouts
    assert rollout.turns[0].finish_reason == "length"
    row["response"]["output"].append({"type": "web_search_call"})
    with pytest.raises(ReaderError, match=r"response.output\[1\]' is an item of the unknown type 'web_search_call'"):
        list(from_nemo_gym(write(tmp_path / "a.jsonl", row)))


# --- verifiers, prime-rl ----------------------------------------------------------------------------------------------


def verifiers_row(example: int, completion: Any, **more: Any) -> dict[str, Any]:
    return {
        "example_id": example,
        "prompt": [{"role": "user", "content": f"question {example}"}],
        "completion": completion,
        "answer": "the reference",
        "info": {"level": 1},
        "reward": 0.5,
        "metrics": {"correct": 0.0, "format": 1.0},
        "is_truncated": False,
        "task": "math",
        **more,
    }


def test_verifiers_results(tmp_path: Path) -> None:
    say = {"role": "assistant", "content": "hello"}
    call = json.dumps({"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}})
    tool = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
    ]
    failed = verifiers_row(1, None, error="boom")
    path = write(tmp_path / "results.jsonl", verifiers_row(0, [say]), verifiers_row(0, tool, is_truncated=True), failed)
    batch = only(path)
    assert batch.groups() == {"math/0": [0, 1]}
    assert batch.dropped == {"failed_rollout": 1}
    first, second = batch.rollouts
    assert (first.reward, first.rewards) == (0.5, {"correct": 0.0, "format": 1.0})
    assert first.answer is None
    assert first.metadata["answer"] == "the reference"
    assert first.turns[0].finish_reason == "stop"
    assert len(second.turns) == 2
    assert second.turns[0].tool_calls is not None
    assert [(c.name, c.arguments, c.result) for c in second.turns[0].tool_calls] == [("f", '{"a": 2, "b": 1}', "42")]
    assert second.turns[-1].finish_reason == "length"


def test_prime_rl_steps_come_from_the_folder_and_flat_metrics_are_components(tmp_path: Path) -> None:
    for step in (3, 20):
        folder = tmp_path / "rollouts" / f"step_{step}"
        folder.mkdir(parents=True)
        row = verifiers_row(0, "text", metrics=None, exact=1.0, generation_ms=12.5, prompt="a text prompt")
        write(folder / "train_rollouts.jsonl", row)
    batches = list(from_verifiers(tmp_path))
    assert [b.step for b in batches] == [3, 20]
    assert batches[0].rollouts[0].rewards == {"exact": 1.0}
    assert batches[0].rollouts[0].turns[0].context == "a text prompt"


# --- tinker -----------------------------------------------------------------------------------------------------------


def test_tinker_chat_log() -> None:
    path = DATA / "tinker_chat_tool_use.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    batch = only(path)
    [rollout] = batch.rollouts
    [turn] = rollout.turns
    assert [m["content"] for m in turn.context_messages or ()] == [m["content"] for m in raw["rollouts"][:2]]
    assert turn.tool_calls is not None
    [call] = turn.tool_calls
    function = raw["rollouts"][2]["tool_calls"][0]["function"]
    assert (call.name, json.loads(call.arguments)) == (function["name"], json.loads(function["arguments"]))
    assert rollout.environment == "BashCodeforcesEnv"
    assert rollout.reward is None
    assert rollout.rewards == raw["metrics"]
    assert any("no total reward" in note and "public_reward" in note for note in batch.notes)
    [batch] = from_tinker(path, key_map={"reward": "metrics.docker_error"})
    assert batch.rollouts[0].reward == 1.0


def test_tinker_thinking_parts_and_several_conversations(tmp_path: Path) -> None:
    thinking = {"type": "thinking", "thinking": "hm"}
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "a"}]},
    ]
    log = {"rollouts": [chat, chat], "metrics": {"reward": 2}, "env_type": "E", "env_config": {}}
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log, indent=1), encoding="utf-8")
    batch = only(path)
    assert [r.turns[0].output for r in batch] == ["<think>hm</think>a"] * 2
    assert [r.reward for r in batch] == [2.0, 2.0]
    assert len(batch.groups()) == 1
