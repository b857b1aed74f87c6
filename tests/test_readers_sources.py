"""The other sources, on real files, against the raw JSON parsed here by itself."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import ReaderError
from collapsediag.readers import (
    from_atropos,
    from_nemo_gym,
    from_nested,
    from_parallel,
    from_tinker,
    from_verifiers,
    read_rollouts,
)
from collapsediag.rollouts import RolloutBatch

DATA = Path(__file__).parent / "data" / "rollouts"


def raw_rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in text.strip().split("\n")]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def only(path: Path, **options: Any) -> RolloutBatch:
    [batch] = read_rollouts(path, **options)
    return batch


# --- parallel lists ---------------------------------------------------------------------------------------------------


def test_parallel_lists_of_a_real_evaluation() -> None:
    path = DATA / "simplerl_math_first6.jsonl"
    rows = raw_rows(path)
    batch = only(path)
    flat = [(row, i) for row in rows for i in range(8)]
    assert len(batch) == 48
    for rollout, (row, i) in zip(batch, flat, strict=True):
        assert rollout.turns[0].output == row["response"][i]
        assert rollout.reward == float(row["score"][i])
        assert rollout.success is row["score"][i]
        assert rollout.answer == row["pred"][i]
        assert rollout.turns[0].context_messages == (
            {"role": "system", "content": row["system"]},
            {"role": "user", "content": row["question"]},
        )
    assert list(batch.groups().values()) == [list(range(8 * g, 8 * g + 8)) for g in range(6)]
    # Not all are solved, so that a reader which reads True everywhere would be caught.
    assert 0 < sum(bool(r.success) for r in batch) < 48
    assert any(note.startswith("48 prompts are bare questions") for note in batch.notes)


def test_bare_questions_can_be_taken_as_they_stand() -> None:
    path = DATA / "simplerl_math_first6.jsonl"
    [batch] = from_parallel(path, wrap_questions=False)
    assert [r.turns[0].context for r in batch][::8] == [row["question"] for row in raw_rows(path)]
    assert all(r.turns[0].context_messages is None for r in batch)


def test_prompts_that_went_through_a_template_are_not_wrapped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "<|im_start|>user\nhi", "response": ["a"], "score": [0.5]})
    [rollout] = only(path).rollouts
    assert rollout.turns[0].context_messages is None
    assert (rollout.reward, rollout.success) == (0.5, None)


def test_code_stands_in_for_response_and_scores_may_be_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "code": ["x", "y", "z"], "score": [True, None, float("nan")]})
    batch = only(path)
    assert [r.turns[0].output for r in batch] == ["x", "y", "z"]
    assert [r.reward for r in batch] == [1.0, None, None]
    assert [r.success for r in batch] == [True, None, None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "response": ["a", "b"], "score": [1]}, r"differ in length: 'response' has 2, 'score' has 1"),
        ({"question": "q", "response": ["a"], "score": ["1.0"]}, r"field 'score\[0\]' must be a number, found text"),
        ({"question": "q", "response": ["a"], "score": [float("-inf")]}, r"field 'score\[0\]' is -inf"),
        ({"question": "q", "response": [5], "score": [1]}, r"field 'response\[0\]' must be text, found a number \(5\)"),
        ({"response": ["a"], "score": [1]}, "field 'question' is missing"),
        ({"question": 3, "response": ["a"], "score": [1]}, "field 'question' must be text"),
    ],
)
def test_bad_parallel_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "response": ["a"], "score": [1]}, row)
    with pytest.raises(ReaderError, match=f"a.jsonl, line 2: .*{message}"):
        list(from_parallel(path))
    [batch] = from_parallel(path, skip_bad_lines=True)
    assert (len(batch), batch.dropped) == (1, {"bad_line": 1})


def test_an_empty_group_is_counted(tmp_path: Path) -> None:
    rows = [{"question": "q", "response": [], "score": []}, {"question": "q", "response": ["a"], "score": [1]}]
    [batch] = from_parallel(write(tmp_path / "a.jsonl", *rows))
    assert (len(batch), batch.dropped) == (1, {"empty_group": 1})


# --- nested -----------------------------------------------------------------------------------------------------------


def test_nested_samples(tmp_path: Path) -> None:
    samples = [
        {"text": "a", "correct": True, "pred": 7, "note": "n"},
        {"text": "b", "correct": False, "reward": 0.25, "rewards": {"format": 1}, "finish_reason": "length"},
    ]
    batch = only(write(tmp_path / "a.jsonl", {"question": "q", "system": "s", "rollouts": samples, "step": 3}))
    assert batch.step == 3
    first, second = batch.rollouts
    assert (first.turns[0].output, first.reward, first.success, first.answer) == ("a", 1.0, True, "7")
    assert first.metadata == {"note": "n"}
    assert (second.reward, second.rewards, second.success) == (0.25, {"format": 1.0}, False)
    assert second.turns[0].finish_reason == "length"
    assert first.group == second.group
    assert first.turns[0].context_messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})


def test_nested_samples_under_other_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": "what", "tries": [{"answer_text": "a", "points": 2}]})
    keys = {"question": "q", "rollouts": "tries", "completion": "answer_text", "reward": "points"}
    [batch] = from_nested(path, key_map=keys)
    assert (batch.rollouts[0].turns[0].output, batch.rollouts[0].reward) == ("a", 2.0)


def test_a_nested_sample_without_text_names_its_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "rollouts": [{"answer_text": "a"}]})
    with pytest.raises(ReaderError, match=r"rollouts\[0\] has none of 'text'.*found: 'answer_text'"):
        list(read_rollouts(path))


# --- Atropos ----------------------------------------------------------------------------------------------------------


def test_atropos_turns_are_the_runs_of_the_mask() -> None:
    path = DATA / "atropos_rubiks_2x4.jsonl.gz"
    rows = raw_rows(path)
    batch = only(path)
    assert [len(g) for g in batch.groups().values()] == [4, 4]
    np.testing.assert_array_equal([r.reward for r in batch], [s for row in rows for s in row["scores"]])
    flat = [(row, i) for row in rows for i in range(4)]
    by_mask = 0
    for rollout, (row, i) in zip(batch, flat, strict=True):
        ids, mask, messages = row["tokens"][i], row["masks"][i], row["messages"][i]
        runs = [list(g) for on, g in itertools.groupby(range(len(ids)), lambda t, m=mask: m[t] != -100) if on]
        assert len(rollout.turns) == 1 == len(runs)
        [turn] = rollout.turns
        if messages[-1]["role"] == "agent":
            by_mask += 1
            np.testing.assert_array_equal(turn.output_ids, [ids[t] for t in runs[0]])  # type: ignore[arg-type]
            np.testing.assert_array_equal(turn.context_ids, ids[: runs[0][0]])  # type: ignore[arg-type]
            assert turn.output == messages[-1]["content"]
        else:
            # The file marks the environment's words; the policy's last message is what counts.
            spoken = [m["content"] for m in messages if m["role"] == "agent"]
            assert turn.output == spoken[-1]
            assert turn.observation == messages[-1]["content"]
            assert turn.output_ids is None
    assert by_mask == 3
    assert any(note.startswith("5 masks mark the closing message of the environment") for note in batch.notes)


def test_atropos_masks_in_both_conventions_and_several_turns(tmp_path: Path) -> None:
    ids = [5, 6, 7, 8, 9, 10, 11]
    marked = {"tokens": [ids], "masks": [[-100, -100, 7, 8, -100, 10, 11]], "scores": [1.0]}
    binary = {**marked, "masks": [[0, 0, 1, 1, 0, 1, 1]]}
    for row in (marked, binary):
        [rollout] = next(from_atropos(write(tmp_path / "a.jsonl", row))).rollouts
        assert [t.output_ids.tolist() for t in rollout.turns if t.output_ids is not None] == [[7, 8], [10, 11]]
        assert [t.context_ids.tolist() for t in rollout.turns if t.context_ids is not None] == [[5, 6], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1.0, 2.0]}, "differ in length: token_ids 1, model_mask 1, reward 2"),
        ({"masks": [[-100, 7]]}, r"masks\[0\] has 2 entries for 3 tokens"),
        ({"masks": [[-100] * 3]}, r"masks\[0\] marks no token"),
        (
            {"tokens": [[5, "6", 7]]},
            r"field 'tokens\[0\]' must be a flat list of token ids, found text \('6'\) at position 1",
        ),
        ({"tokens": [[5, 2**70, 7]]}, "at position 1"),
        ({"tokens": [[5, -6, 7]]}, "negative token id -6"),
        ({"scores": None}, "field 'scores' is missing"),
    ],
)
def test_bad_atropos_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {"tokens": [[5, 6, 7]], "masks": [[-100, -100, 7]], "scores": [1.0], **change}
    with pytest.raises(ReaderError, match=f"line 1: .*{message}"):
        list(from_atropos(write(tmp_path / "a.jsonl", row)))


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
