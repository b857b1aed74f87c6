"""Files that are not what they should be: one clear message each, or read anyway where that loses nothing."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from collapsediag.errors import CollapsediagError, ReaderError, SettingsError
from collapsediag.monitor import Monitor
from collapsediag.readers import SOURCES, from_jsonl, read_rollouts
from collapsediag.rollouts import RolloutBatch
from collapsediag.sinks import JsonlSink
from collapsediag.testing import planted

ROW = {"prompt": "p", "completion": "c", "reward": 1.0}
LINE = json.dumps(ROW).encode() + b"\n"


def read(path: Path | str, **options: Any) -> list[RolloutBatch]:
    return list(read_rollouts(path, **options))


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b"\n \n", "a.jsonl is empty"),
        ("a.jsonl", '{"prompt": "é"}\n'.encode("utf-16"), "encoded as UTF-16"),
        ("a.jsonl", (LINE * 3).decode().encode("utf-16-le"), "encoded as UTF-16 without a byte-order mark"),
        ("a.jsonl", LINE.decode().encode("utf-32"), "encoded as UTF-32"),
        ("a.jsonl", LINE + '{"prompt": "café"}\n'.encode("latin-1"), r"line 2: byte 65 of the file is 0xe9.*not UTF-8"),
        ("a.jsonl", LINE + b"\x00" * 20 + b"\n", "binary file"),
        ("a.jsonl", LINE * 100 + b"\x00" * 8000 + b"\n", "line 101: holds NUL bytes"),
        ("a.jsonl", b"\x7fELF" + bytes(range(1, 200)), "which is not JSON"),
        ("a.jsonl", b"prompt,completion\np,c\n", "which is not JSON"),
        ("a.jsonl", b"PK\x03\x04rest", "a zip archive"),
        ("a.jsonl", b"\x28\xb5\x2f\xfdrest", "zstd-compressed"),
        ("a.pkl", pickle.dumps([ROW]), "a Python pickle, which is never loaded"),
        ("a.parquet", b"PAR1 but nothing more", "not a readable parquet file"),
        ("a.jsonl", b"[]", "empty JSON array"),
        ("a.jsonl", b"[1, 2]", "element 1: is a number"),
        ("a.jsonl", LINE + b"[1, 2]\n", "line 2: is a list; one JSON object a line was expected"),
        ("a.jsonl", LINE + b"{'prompt': 1}\n", "line 2: not valid JSON.*at character 2"),
        ("a.jsonl", LINE + LINE.strip()[:-9] + b"\n" + LINE, "line 2: not valid JSON"),
        ("a.jsonl", LINE + LINE[:20], r"line 2: the last line is cut off after 20 characters.*no newline follows"),
        (
            "a.jsonl",
            LINE + b'{"prompt": "p", "completion": "c", "prompt": "q"}\n',
            "line 2: the key 'prompt' stands twice",
        ),
        (
            "a.jsonl",
            LINE + b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            "line 2: the JSON is nested too deeply",
        ),
        ("a.jsonl", LINE + b'{"reward": ' + b"9" * 5000 + b"}\n", "line 2: Exceeds the limit"),
        ("a.jsonl", b'{"loss": 1.0, "entropy": 0.3, "step": 1}\n', "a log of metrics"),
        ("a.json", b'{"log_history": [], "best_metric": null}', "trainer_state"),
        ("a.jsonl", b'{"foo": "x", "bar": 1}\n', r"no known source of rollouts has these keys: 'foo', 'bar'.*--map"),
    ],
)
def test_one_clear_message(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = put(tmp_path / name, data)
    with pytest.raises(ReaderError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_run_folder_is_said_to_be_one(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    healthy = planted("healthy", n_contexts=4, group_size=3)
    with Monitor(healthy.scorer(), every=1, sinks=[JsonlSink(run)], tokenizer=healthy) as monitor:
        monitor.observe(1, healthy.batch)
    for path in (run.parent, run, run / "metrics.jsonl", run / "traces", next((run / "traces").iterdir())):
        with pytest.raises(ReaderError, match=f"belongs to a run folder.*`collapsediag report {run}` reads it"):
            read(path)


@pytest.mark.parametrize(
    "bad",
    [
        LINE[:20],
        b"{'prompt': 1}\n",
        b"[1]\n",
        b'{"completion": "c"}\n',
        b'{"prompt": "p", "completion": "c", "reward": "x"}\n',
        b'{"prompt": "\xe9", "completion": "c"}\n',
    ],
)
def test_bad_lines_are_skipped_and_counted_when_asked(tmp_path: Path, bad: bytes) -> None:
    path = put(tmp_path / "a.jsonl", LINE + bad)
    with pytest.raises(ReaderError, match="--skip-bad-lines"):
        read(path)
    [batch] = read(path, skip_bad_lines=True)
    assert (len(batch), batch.dropped) == (1, {"bad_line": 1})


def test_bad_lines_count_with_the_step_around_them(tmp_path: Path) -> None:
    rows = b"".join(json.dumps({**ROW, "step": step}).encode() + b"\nbroken\n" for step in (1, 1, 2))
    first, second = read(put(tmp_path / "a.jsonl", rows), source="jsonl", skip_bad_lines=True)
    assert (first.dropped, second.dropped) == ({"bad_line": 2}, {"bad_line": 1})
    path = put(tmp_path / "b.jsonl", b"{broken\n" + LINE)
    [batch] = read(path, skip_bad_lines=True)
    assert batch.dropped == {"bad_line": 1}


def test_a_file_of_bad_lines_only(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", b'{"prompt": "p", "completion": 1}\n' * 3)
    with pytest.raises(ReaderError, match=r"not one of its 3 rows can be read.*line 1: field 'completion'"):
        read(path, skip_bad_lines=True)


def test_a_broken_line_shows_before_the_first_batch(tmp_path: Path) -> None:
    """Not after an hour of scoring the steps before it."""
    rows = b"".join(json.dumps({**ROW, "step": step}).encode() + b"\n" for step in range(50))
    path = put(tmp_path / "a.jsonl", rows + b'{"prompt": "p", "step": 50}\n')
    with pytest.raises(ReaderError, match="line 51"):
        next(read_rollouts(path))


@pytest.mark.parametrize("packed", [False, True])
def test_gzip_arrays_marks_and_pretty_printing_are_read_as_they_are(tmp_path: Path, packed: bool) -> None:
    bodies = {
        "lines": LINE * 2,
        "no newline at the end": LINE + LINE.strip(),
        "byte-order mark": b"\xef\xbb\xbf" + LINE * 2,
        "windows": LINE.strip() + b"\r\n\r\n" + LINE,
        "array": json.dumps([ROW, ROW]).encode(),
        "array over lines": json.dumps([ROW, ROW], indent=2).encode(),
        "array with mark": b"\xef\xbb\xbf" + json.dumps([ROW, ROW]).encode(),
    }
    for title, body in bodies.items():
        path = put(tmp_path / "a.jsonl", gzip.compress(body) if packed else body)
        [batch] = read(path)
        assert [r.turns[0].output for r in batch] == ["c", "c"], title
        assert batch.dropped == {}, title
    pretty = put(tmp_path / "b.json", json.dumps(ROW, indent=2).encode())
    assert len(read(pretty)[0]) == 1


def test_gzip_with_steps_is_read_from_the_middle(tmp_path: Path) -> None:
    rows = b"".join(json.dumps({**ROW, "completion": str(i), "step": i // 2}).encode() + b"\n" for i in range(10))
    batches = read(put(tmp_path / "a.jsonl.gz", gzip.compress(rows)))
    assert [[r.turns[0].output for r in b] for b in batches] == [[str(2 * s), str(2 * s + 1)] for s in range(5)]


def test_damaged_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(
        b"".join(json.dumps({**ROW, "id": os.urandom(20).hex()}).encode() + b"\n" for _ in range(999))
    )
    with pytest.raises(ReaderError, match="gzip data is damaged or cut off"):
        read(put(tmp_path / "a.jsonl.gz", packed[: len(packed) // 2]))
    whole = gzip.compress(LINE * 5000)
    with pytest.raises(ReaderError, match="gzip data is damaged or cut off"):
        read(put(tmp_path / "b.jsonl.gz", whole[:-12]))


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    body = rb'{"prompt": "a\ud800b \ud83d\ude00", "completion": "\uDFFF", "x": {"\ud800": 1}}'
    path = put(tmp_path / "a.jsonl", body)
    [batch] = read(path)
    [rollout] = batch.rollouts
    assert rollout.turns[0].context == "a\ufffdb \U0001f600"
    assert rollout.turns[0].output == "\ufffd"
    json.dumps(rollout.metadata, ensure_ascii=False).encode("utf-8")


def test_a_row_with_a_hundred_thousand_keys(tmp_path: Path) -> None:
    wide = {f"key{i}": i for i in range(100_000)}
    [batch] = read(put(tmp_path / "a.jsonl", json.dumps({**ROW, **wide}).encode() + b"\n"))
    assert len(batch.rollouts[0].metadata) == 100_000
    with pytest.raises(ReaderError) as caught:
        read(put(tmp_path / "b.jsonl", json.dumps({**wide, "prompt": "p"}).encode() + b"\n"), source="jsonl")
    assert "and 99989 more" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_lines_of_a_megabyte(tmp_path: Path) -> None:
    big = {"prompt": "p" * 1_000_000, "completion": "c" * 1_000_000}
    [batch] = read(put(tmp_path / "a.jsonl", (json.dumps(big) + "\n").encode() * 3))
    assert [len(r.turns[0].output or "") for r in batch] == [1_000_000] * 3


def test_huge_values_are_cut_in_messages(tmp_path: Path) -> None:
    with pytest.raises(ReaderError) as caught:
        read(put(tmp_path / "a.jsonl", json.dumps({"prompt": "p", "completion": "c", "reward": "r" * 10**6}).encode()))
    assert len(str(caught.value)) < 1000


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ReaderError, match=r"nothing.jsonl does not exist"):
        read(tmp_path / "nothing.jsonl")
    wanted = r"\(wanted: .jsonl, .ndjson, .parquet, .json, also .gz; found: nothing\)"
    with pytest.raises(ReaderError, match=rf"folder without rollout files {wanted}"):
        read(tmp_path)
    put(tmp_path / "weights.safetensors", b"x")
    with pytest.raises(ReaderError, match=r"found: .safetensors"):
        read(tmp_path)
    with pytest.raises(ReaderError, match="no files were named"):
        list(read_rollouts([]))
    with pytest.raises(ReaderError, match="does not exist"):
        read(str(tmp_path / "*.jsonl"))
    (tmp_path / "folder.d").mkdir()
    with pytest.raises(ReaderError, match=r"is a pattern that folders match, and no file"):
        read(str(tmp_path / "folder.*"))
    with pytest.raises(ReaderError, match="a path is empty"):
        read("")
    for source in (None, "verl"):
        with pytest.raises(ReaderError, match="x cannot be read: File name too long"):
            list(read_rollouts("x" * 300, source=source))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs links and a pipe")
def test_links_that_lead_nowhere_and_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("gone", "loop"):
        with pytest.raises(ReaderError, match=rf"{name} is a link that leads nowhere"):
            read(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    for source in (None, "jsonl"):  # nobody writes to it: opening it would wait for ever
        with pytest.raises(ReaderError, match="it is a device or a pipe; save what comes out of it as a file"):
            list(read_rollouts(tmp_path / "pipe", source=source))


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "a.jsonl", LINE)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ReaderError, match=r"a.jsonl cannot be read: Permission denied"):
        read(path)


def test_patterns_and_several_paths(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        put(tmp_path / f"dump_{step}.jsonl", json.dumps({**ROW, "step": step}).encode() + b"\n")
    assert [b.step for b in read(str(tmp_path / "dump_*.jsonl"))] == [1, 2, 10]
    paths = [tmp_path / "dump_10.jsonl", tmp_path / "dump_2.jsonl"]
    assert [b.step for b in list(read_rollouts(paths))] == [2, 10]


def test_files_of_two_sources_are_named(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", LINE)
    put(tmp_path / "b.jsonl", b'{"input": "i", "output": "o", "score": 1.0, "step": 1}\n')
    with pytest.raises(ReaderError, match=r"of two sources: .*a.jsonl is rollout JSONL.*b.jsonl is V0 veRL dump"):
        read(tmp_path)


def test_settings_are_checked_at_once(tmp_path: Path) -> None:
    for options in ({"source": "wandb"}, {"max_groups": 0}, {"max_rollouts": -1}, {"repeated_steps": "first"}):
        with pytest.raises(SettingsError):
            read_rollouts(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="readers have no setting 'max_rows'"):
        from_jsonl(tmp_path, max_rows=3)


def test_a_wrong_source_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Every source, given rows of every shape, either reads them or says what is missing."""
    rows: list[dict[str, Any]] = [
        ROW,
        {},
        {"input": "i", "output": "o", "score": 1.0, "step": 1, "uid": 5},
        {"responses_create_params": [], "response": {}},
        {"responses_create_params": {}, "response": {"output": [5]}},
        {"responses_create_params": {}, "response": {"output": [{"type": "function_call", "name": 4}]}},
        {"tokens": [5], "masks": [[1]], "scores": [1]},
        {"tokens": [[5]], "masks": [[1]], "scores": [1], "messages": [[{"role": 5}]]},
        {"rollouts": [{"role": "user"}], "metrics": [], "env_type": 3},
        {"rollouts": [[]], "env_type": "e"},
        {"question": "q", "rollouts": [None]},
        {"prompt": [{"role": "user", "content": None}], "completion": [{"role": "assistant", "tool_calls": "x"}]},
        {"prompt": [{"role": "user"}], "completion": [{"role": "assistant", "tool_calls": [["x"]]}], "example_id": 1},
        {"prompt": [], "completion": [], "example_id": None},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": None, "arguments": 5}}]}]},
        {"prompt": None, "completion": None, "turns": [{}], "score": []},
    ]
    outcomes = []
    for name in SOURCES:
        for i, row in enumerate(rows):
            path = put(tmp_path / f"{i}.jsonl", json.dumps(row).encode() + b"\n")
            try:
                read(path, source=name)
                outcomes.append("read")
            except CollapsediagError as error:
                outcomes.append("named" if path.name in str(error) else f"{name} {row}: {error}")
    assert set(outcomes) == {"read", "named"}
