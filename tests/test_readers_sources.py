"""Parallel lists, nested dumps and Atropos, against the raw JSON parsed here by itself."""

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
    from_nested,
    from_parallel,
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
    assert (
        "48 prompts are bare questions, read as the user's chat message "
        "(as they stand: --plain-prompts, from Python wrap_questions=False)" in batch.notes
    )


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
    zero = {"tokens": [[5, 0, 7]], "masks": [[-100, 0, 7]], "scores": [1.0]}
    [rollout] = next(from_atropos(write(tmp_path / "a.jsonl", zero))).rollouts
    assert rollout.turns[0].output_ids is not None
    assert rollout.turns[0].output_ids.tolist() == [0, 7], "token 0 is a token too"
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
