"""Which source a file is of, and the page that tells people about sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from collapsediag.errors import ReaderError
from collapsediag.readers import SOURCES, detect_source, read_rollouts
from collapsediag.rollouts import RolloutBatch

LINE = b'{"prompt": "p", "completion": "c", "reward": 1.0}\n'


def read(path: Path) -> list[RolloutBatch]:
    return list(read_rollouts(path))


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_detection_says_why(tmp_path: Path) -> None:
    data = Path(__file__).parent / "data" / "rollouts"
    expected = {
        "verl/verl-0.9.1/v1_rollout_data_dir/40.jsonl": "verl: V1 veRL dump: keys input, output, score, step, gts, uid",
        "verl/verl-0.9.1/v0_rollout_data_dir": "verl: V0 veRL dump: keys input, output, score, step, gts",
        "verl/verl-0.4.1": "verl: V0 veRL dump: keys input, output, score, step",
        "trl/text": "trl: TRL completions: parquet with keys step, prompt, completion",
        "trl_with_ids/text.jsonl": "jsonl: rollout JSONL: keys prompt, prompt_ids, completion, completion_ids",
        "simplerl_math_first6.jsonl": (
            "parallel: parallel lists: 8 texts under 'response' beside the scores under 'score'"
        ),
        "atropos_rubiks_2x4.jsonl.gz": (
            "atropos: Atropos dump: lists of trajectories under keys tokens, masks, scores, messages"
        ),
        "reasoning_gym_example_rollouts.jsonl": ("nemo_gym: NeMo-Gym rollouts: keys responses_create_params, response"),
        "tinker_chat_tool_use.json": "tinker: tinker chat log: keys rollouts, metrics, env_type, env_config",
    }
    found = {path: detect_source(data / path) for path in expected}
    assert {path: f"{f.source}: {f.reason}" for path, f in found.items()} == expected
    row = {"example_id": 1, "prompt": [], "completion": []}
    assert detect_source(put(tmp_path / "r.jsonl", json.dumps(row).encode())).source == "verifiers"
    row = {"question": "q", "rollouts": [{"text": "t"}]}
    assert detect_source(put(tmp_path / "r.jsonl", json.dumps(row).encode())).source == "nested"


def test_a_folder_is_searched_past_metric_logs(tmp_path: Path) -> None:
    put(tmp_path / "a_metrics.jsonl", b'{"loss": 1.0, "lr": 0.1}\n')
    with pytest.raises(ReaderError, match="a log of metrics"):
        detect_source(tmp_path)
    put(tmp_path / "rollouts" / "b.jsonl", LINE)
    assert detect_source(tmp_path).source == "jsonl"
    put(tmp_path / "config.json", b'{"hidden_size": 8}')
    assert len(read(tmp_path)[0]) == 1


def test_the_page_on_formats_shows_what_is_true(tmp_path: Path) -> None:
    """Its example reads, its sources are the known ones, and each message of its table is one that the readers say."""
    page = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    [batch] = read(put(tmp_path / "a.jsonl", example.encode()))
    assert (batch.step, batch.rollouts[0].group, batch.rollouts[0].success) == (40, "p17", True)
    known = page.split("## What is known")[1].split("## The schema")[0]
    assert {line.split("`")[1] for line in known.splitlines() if line.startswith("| `")} == set(SOURCES)
    room = Path(__file__).parents[1] / "collapsediag" / "readers"
    sources = [*room.glob("*.py"), room.with_name("whole_files.py")]
    said = "".join(path.read_text(encoding="utf-8") for path in sources).replace("\n", " ")
    said = re.sub(r'"\s+f?"', "", re.sub(r"\{[^{}]*\}", "#", said))
    table = page.split("## Errors and what to do")[1]
    messages = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert len(messages) > 10
    for message in (part for line in messages for part in re.findall("`([^`]+)`", line)):
        words = [w for w in re.split(r"'[^']*'|\(.*|\.\.\.|[0-9]\w*|UTF-\w+|, found.*", message) if len(w.strip()) > 3]
        assert words, message
        assert all(word.strip() in said for word in words), (message, words)
