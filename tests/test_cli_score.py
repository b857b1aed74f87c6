"""`collapsediag score` under hostile input: one message, exit code 2, no traceback, a run folder that can be read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collapsediag.cli import main
from collapsediag.run_folder import iter_records, read_matrix, read_records, read_run, read_traces

from .conftest import import_or_skip

import_or_skip("torch")
import_or_skip("transformers")

from .tiny_policy import LIMIT, copied, dump, rows, save_policy  # noqa: E402

KEY = "collapse_first_turn_sample/"


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def score(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command; gives its exit code and what it said on standard error."""

    def run(lines: Any, *arguments: object, model: object = policy, out: object = None) -> tuple[int, str]:
        file = lines if isinstance(lines, (str, Path)) else dump(tmp_path / "rollouts.jsonl", lines)
        where = tmp_path / "run" if out is None else out
        try:
            code = main(["score", str(file), "--model", str(model), "--out", str(where), *map(str, arguments)])
        except SystemExit as stop:  # argparse's own way to say 2
            code = int(stop.code or 0)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return code, said

    return run


def without_clock(values: Any) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith("timing_s/")}


def test_the_main_job(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = score(rows(steps=(1, 2)))
    assert code == 0
    assert all(len(line) < 400 for line in said.splitlines())
    assert "step 1: 6 outputs were re-tokenised from text: their log-likelihoods are near, not equal to," in said
    assert [record.step for record in read_records(tmp_path / "run")] == [1, 2]
    assert read_matrix(tmp_path / "run", 2, "first_turn").logp_NP.shape == (6, 3)
    assert read_run(tmp_path / "run")["settings"]["max_traces"] == 64


def test_a_budget_of_prompts_per_trace(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = score(rows(steps=(1, 2)), "--budget", 1)
    assert code == 0
    (cost, _) = [line for line in said.splitlines() if "tokens to run" in line]
    assert cost.startswith("12 pairs: ")
    assert "; the whole matrix: 18 pairs, " in cost
    whole = score(rows(steps=(1, 2)), out=tmp_path / "whole")[1]
    assert f"{cost.rpartition(', ')[2].split()[0]} tokens to run" in whole.replace("pairs: ", "pairs, ")
    found, exact = (read_matrix(tmp_path / name, 2, "first_turn") for name in ("run", "whole"))
    assert found.scored_NP.sum(axis=1).tolist() == [2] * 6
    assert found.scored_NP[range(6), found.own_N].all()
    assert found.logp_NP[found.scored_NP] == pytest.approx(exact.logp_NP[found.scored_NP], abs=1e-4)
    names = {name.rpartition("/")[2] for name in read_records(tmp_path / "run")[-1].values}
    assert {"retrieval_accuracy_subset", "mi_estimate"} <= names
    assert "retrieval_accuracy" not in names
    code, said = score(rows(steps=(1, 2, 3)), "--resume", "--budget", 2)
    assert code == 2
    assert "--budget was 1 and now is 2" in said


# -- rollouts --------------------------------------------------------------------------------------------------------

GOOD = "".join(json.dumps(row) + "\n" for row in rows()).encode()
FILES = {
    "empty file": (b"", "is empty"),
    "half a last line": (GOOD[:-40], "line 6: the last line is cut off"),
    "wrong encoding": (GOOD.replace(b"well", b"w\xe9ll"), "line 1: byte 61 of the file is 0xe9, which is not UTF-8"),
    "missing columns": (b'{"foo": 1}\n', "no known source of rollouts has these keys: 'foo'"),
    "own prompt missing": (GOOD.replace(b'"prompt"', b'"nothing"', 1), "line 1: field 'prompt' is missing"),
    "step that is no number": (GOOD.replace(b'"step": 1', b'"step": 1.5', 1), "'step' must be a whole number"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read(score: Callable[..., tuple[int, str]], tmp_path: Path, name: str) -> None:
    content, message = FILES[name]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    code, said = score(file)
    assert code == 2
    assert message in said
    assert str(file) in said
    assert not (tmp_path / "run").exists()


def ids(*outputs: list[int], prompts: int = 3) -> list[dict[str, Any]]:
    return [
        {"step": 1, "prompt_ids": [1, 2, 3 + p], "completion_ids": outputs[p % len(outputs)], "group": p}
        for p in range(prompts)
    ]


NOTHING_TO_SCORE = {
    "empty reasoning": (rows(completion="<think></think>x"), "--reasoning completion"),
    "empty completions": (rows(completion=""), "6 empty reasoning"),
    "unclosed": (rows(completion="<think>so"), "--reasoning completion"),
    "no room": (rows(completion="x" * LIMIT), "The prompts leave no room within what the model can read"),
    "empty ids": (ids([]), "3 empty reasoning"),
}


@pytest.mark.parametrize("name", NOTHING_TO_SCORE)
def test_nothing_to_score_is_an_error_with_the_reason(
    score: Callable[..., tuple[int, str]], tmp_path: Path, name: str
) -> None:
    lines, message = NOTHING_TO_SCORE[name]
    code, said = score(lines)
    assert code == 2
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: step 1 could not be scored: ")
    assert message in last
    assert ".." not in last.replace(str(tmp_path), "")
    (record,) = read_records(tmp_path / "run")
    assert "reward/mean" in record.values or "reward" in record.not_measured


@pytest.mark.parametrize(
    "lines",
    [
        rows(prompts=1),
        [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows(prompts=1)],
        [{**row, "prompt_ids": [1, 2, 3], "group": 0} for row in ids([4, 5], [6])],
    ],
    ids=["text", "messages", "ids"],
)
def test_one_prompt_is_told_before_the_model_is_loaded(
    score: Callable[..., tuple[int, str]], tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    code, said = score(lines, model="/nowhere/at/all")
    assert code == 2
    assert said.startswith("error: step 1 holds one prompt only, so there is nothing to tell apart; ")
    assert not (tmp_path / "run").exists()
    code, said = score([*rows(steps=(1, 2), prompts=1)], model="/nowhere/at/all")
    assert said.startswith("error: each of 2 steps holds one prompt only")


def test_what_was_said_of_a_step_is_not_said_again(score: Callable[..., tuple[int, str]], policy: Path) -> None:
    lines = [*rows(steps=(1, 2)), *rows(steps=(3,), prompts=4), *rows(steps=(4,), prompts=1)]
    code, said = score(lines, "--max-traces", "4")
    assert code == 0
    assert said.splitlines()[0] == f"loading {policy}"
    assert [line for line in said.splitlines() if "re-tokenised" in line] == [
        "step 1: 6 outputs were re-tokenised from text: their log-likelihoods are near, not equal to, the run's own"
    ]
    left_out = [line for line in said.splitlines() if "left out" in line]
    assert left_out == ["step 1: left out 2 first_turn/subsampled", "step 3: left out 4 first_turn/subsampled"]
    assert [line for line in said.splitlines() if line.startswith("step 2")] == ["step 2: recorded"]
    assert said.count("What was said of a step is said once; every record holds it.") == 1
    assert "step 4: collapse_first_turn_sample not measured: only one distinct context" in said
    assert "\n\n" not in said


def test_one_step_without_traces_does_not_spoil_the_others(
    score: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, said = score([*rows(steps=(1,)), *rows(steps=(2,), prompts=1)])
    assert code == 0
    assert "step 2: collapse_first_turn_sample not measured" in said
    assert [KEY + "n_traces" in record.values for record in read_records(tmp_path / "run")] == [True, False]


def test_a_prompt_too_long_is_left_out_and_counted(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    lines = rows()
    lines[0]["prompt"] = lines[1]["prompt"] = "x " * 50_000
    lines[2]["note"] = "x" * 1_000_000
    code, said = score(lines)
    assert code == 0
    assert "left out 2 first_turn/context_too_long" in said


def test_messages_without_a_chat_template(score: Callable[..., tuple[int, str]]) -> None:
    lines = rows()
    for line in lines:
        line["prompt"] = [{"role": "user", "content": line["prompt"]}]
    code, said = score(lines)
    assert code == 2
    assert "no chat template" in said
    assert score(lines, "--plain-prompts")[0] == 0


def test_steps_before_training_and_steps_that_come_back(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert score(rows(steps=(-1, 0)))[0] == 0
    assert [record.step for record in read_records(tmp_path / "run")] == [-1, 0]
    assert len(read_traces(tmp_path / "run", -1)) == 6
    code, said = score(rows(steps=(1, 2, 1, 2)), out=tmp_path / "other")
    assert code == 2
    assert "--repeated-steps" in said


def test_control_characters_reach_no_terminal(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    evil = "\x1b[31mred\x1b]0;title\x07\u202e\u2066\x00\x08\r\t\ud800"
    lines = rows(environment=evil, id=evil)
    for line in lines:
        line["prompt"] += evil
        line["completion"] += evil
        line["group"] = line["prompt"]
    code, said = score(lines)
    assert code == 0
    lines[0]["prompt"] = [{"role": evil, "content": evil}]
    code, refused = score(lines, out=tmp_path / ("run" + evil[:4]))
    assert code == 2
    for text in (said, refused):
        assert not set(text) & set("\x1b\x07\u202e\u2066\x00\x08\t\ud800")
    assert len(read_traces(tmp_path / "run", 1)) == 6


# -- models ----------------------------------------------------------------------------------------------------------


def _config(policy: Path, **changes: object) -> bytes:
    return json.dumps({**json.loads((policy / "config.json").read_text()), **changes}).encode()


BROKEN: dict[str, tuple[Callable[[Path], dict[str, bytes | None]], str]] = {
    "no weights": (lambda _: {"model_safetensors": None}, "no file named model.safetensors"),
    "cut weights": (
        lambda p: {"model_safetensors": (p / "model.safetensors").read_bytes()[:3000]},
        "SafetensorError",
    ),
    "garbage": (lambda _: {"model_safetensors": b"garbage" * 100}, "SafetensorError"),
    "unknown": (lambda _: {"config_json": b'{"model_type": "foobar"}'}, "model type `foobar`"),
    "torn config": (lambda _: {"config_json": b'{"model_type":'}, "not a valid JSON file"),
    "more layers": (lambda p: {"config_json": _config(p, num_hidden_layers=2)}, "9 weights of the LlamaForCausalLM"),
    "other width": (lambda p: {"config_json": _config(p, hidden_size=32)}, "have another shape"),
    "torn tokenizer": (lambda _: {"tokenizer_json": b"{tor"}, "no tokenizer can be read in"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_folder_that_is_damaged(
    score: Callable[..., tuple[int, str]], policy: Path, tmp_path: Path, name: str
) -> None:
    changes, message = BROKEN[name]
    code, said = score(rows(), model=copied(policy, tmp_path / "model", **changes(policy)))
    assert code == 2
    assert message in said.splitlines()[-1]
    assert str(tmp_path / "model") in said
    assert not (tmp_path / "run").exists()


def test_folders_that_are_no_model(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("x")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 50)
    for model, message in (
        (tmp_path / "photos", "no config.json and no .gguf file (found: a.jpg)"),
        (tmp_path / "nowhere", "no such folder or file"),
        (tmp_path / "photos" / "a.jpg", "is a file, but a model is a folder"),
        (tmp_path / "gguf", "not a causal language model"),
        ("", "name is empty"),
    ):
        code, said = score(rows(), model=model)
        assert (code, message in said) == (2, True), said


def test_vocabularies_that_differ_and_weights_that_are_nan(
    score: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, said = score(ids([5, 6, 9999]))
    assert code == 2
    assert "token id 9999 at position 2, but the model's vocabulary has 272 entries" in said
    code, said = score(rows(), model=save_policy(tmp_path / "nan", nan=True), out=tmp_path / "of nan")
    assert code == 2
    assert "6 with a non-finite log-likelihood. The model gives no finite log-probabilities" in said
    (record,) = read_records(tmp_path / "of nan")
    assert KEY + "mi_estimate" not in record.values


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cuda:9"), "device 'cuda:9' cannot be used here"),
        (("--device", "meta"), "device 'meta' cannot be used here"),
        (("--dtype", "float7"), "dtype 'float7' is not known"),
        (("--temperature", "0"), "it must be above 0"),
        (("--temperature", "inf"), "'inf' is not a number"),
        (("--token-budget", "-5"), "at least 16 tokens"),
        (("--max-traces", "-1"), "0 means no limit"),
        (("--max-traces", "x"), "'x' is not a whole number"),
        (("--success-threshold", "nan"), "'nan' is not a number"),
        (("--format", "verl"), "'verl' is no form of outputs"),
        (("--map", "zzz"), "write OURS=THEIRS"),
        (("--map", "foo=bar"), "'foo' is not a name"),
        (("--map", "completion=nope"), "field 'nope' is missing"),
        (("--map", "completion=completion", "--map", "completion=prompt"), "names 'completion' twice"),
        (("--open-tag", ""), "is blank"),
        (("--open-tag", "\ud800"), "half a character"),
        (("--max-contexts", "1"), "at least two prompts"),
        (("--budget", "0"), "at least 1 is needed"),
        (("--ray-workers", "0"), "at least 1 is needed"),
        (("--budget", "1", "--definition", "ragen"), "--definition ragen needs every cell of the matrix"),
        (("--gguf-file", "y.gguf"), "holds no y.gguf"),
        (("--tokenizer", "/nowhere/x"), "no such folder or file"),
    ],
)
def test_settings_that_do_not_fit(
    score: Callable[..., tuple[int, str]], arguments: tuple[str, ...], message: str
) -> None:
    code, said = score(rows(), *arguments)
    assert code == 2
    assert message in said


@pytest.mark.parametrize(
    "arguments",
    [("--seed", "-1"), ("--seed", "9" * 40), ("--max-traces", "1"), ("--token-budget", "1" + "0" * 30)],
)
def test_odd_settings_that_do(score: Callable[..., tuple[int, str]], arguments: tuple[str, ...]) -> None:
    assert score(rows(), *arguments)[0] == 0


# -- the run folder --------------------------------------------------------------------------------------------------


def test_an_out_that_cannot_be_written_is_told_before_the_model_is_loaded(
    score: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "odd" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "locked").mkdir()
    for out, message in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "sub", "is a file"),
        (tmp_path / "odd", "is a folder"),
        ("a\0b", "cannot be a run folder"),
        (tmp_path / ("x" * 300), "name too long"),
        ("", "has no name"),
    ):
        code, said = score(rows(), model="/nowhere/at/all", out=out)
        assert (code, message.lower() in said.lower()) == (2, True), said
    # Root may write anywhere, so the refusal itself is staged.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "locked")
    code, said = score(rows(), model="/nowhere/at/all", out=tmp_path / "locked" / "run")
    assert code == 2
    assert f"{tmp_path / 'locked'} cannot be written to" in said


def test_a_run_is_not_written_over(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert score(rows())[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, said = score(rows())
    assert code == 2
    assert "--resume" in said
    code, said = score(rows(), "--resume")
    assert code == 0
    assert said == "1 step already recorded, not redone\nnothing new to score\n"  # and no model was loaded for it
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_the_declared_format_is_in_the_numbers_and_in_the_settings(
    score: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    lines = rows(completion="<think>a</think>up")
    for form, valid in (("tags:think", 1.0), ("tags:think,answer", 0.0), ("regex:.*up", 1.0)):
        out = tmp_path / form
        assert score(lines, "--format", form, out=out)[0] == 0
        assert read_records(out)[0].values["format/valid_fraction"] == valid
        assert read_run(out)["settings"]["format"] == form
    code, said = score(rows(steps=(1, 2)), "--resume", "--format", "tags:think", out=out)
    assert (code, "--format was 'regex:.*up' and now is 'tags:think'" in said) == (2, True)


def test_a_run_is_resumed_with_its_own_settings_only(score: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert score(rows())[0] == 0
    code, said = score(rows(steps=(1, 2)), "--resume", "--seed", "3", "--temperature", "0.5")
    assert code == 2
    assert "--temperature was 1.0 and now is 0.5; --seed was 0 and now is 3" in said
    (tmp_path / "run" / "run.json").write_text('{"schema_version": 99}')
    code, said = score(rows(steps=(1, 2)), "--resume")
    assert code == 2
    assert "Upgrade collapsediag" in said


KILLED = """
    import os, signal, sys
    from collapsediag import run_folder
    from collapsediag.cli import main
    from collapsediag.whole_files import replacing

    whole = run_folder.RunStore.append

    def append(self, record):
        if record.step == 3:
            # As far as a kill in the middle of a write gets: half a matrix, and half of the line.
            line = run_folder._json_line(record.to_json())
            with replacing(self.path / "matrices" / run_folder.matrix_name(3, "first_turn")) as half:
                half.write_bytes(b"PK half")
                os.utime(half, (0, 0))  # long ago
                self._stream.write(line[: len(line) // 2])
                self._stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        whole(self, record)

    run_folder.RunStore.append = append
    main(sys.argv[1:])
"""


@pytest.mark.faults
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(
    score: Callable[..., tuple[int, str]], policy: Path, tmp_path: Path
) -> None:
    # The step that is redone has no tags: what a trace is must be remembered, not decided anew.
    lines = [*rows(steps=(1, 2)), *rows(steps=(3,), completion="no tags here"), *rows(steps=(4, 5))]
    file = dump(tmp_path / "steps.jsonl", lines)
    assert score(file, out=tmp_path / "whole")[0] == 0
    command = ["score", str(file), "--model", str(policy), "--out", str(tmp_path / "run")]
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), *command],
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert [record.step for record in read_records(tmp_path / "run")] == [1, 2]
    assert len(list((tmp_path / "run" / "matrices").glob(".*"))) == 1

    code, said = score(file, "--resume")
    assert code == 0
    assert list((tmp_path / "run" / "matrices").glob(".*")) == []
    assert "2 steps already recorded, not redone" in said
    assert said.count(" pairs: ") == 2  # of steps 4 and 5: 3 has nothing to score
    assert [record.step for record in iter_records(tmp_path / "run")] == [1, 2, 3, 4, 5]
    for whole, resumed in zip(read_records(tmp_path / "whole"), read_records(tmp_path / "run"), strict=True):
        assert without_clock(resumed.values) == without_clock(whole.values)
        assert resumed.not_measured == whole.not_measured
    assert KEY + "gap_std_ema" in read_records(tmp_path / "run")[3].values
    assert "collapse_first_turn_sample" in read_records(tmp_path / "run")[2].not_measured


def test_a_terminal_without_a_character_ends_no_run(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    file = dump(tmp_path / "a.jsonl", rows())
    assert main(["score", str(file), "--model", str(policy), "--out", str(tmp_path / "läuft")]) == 0
    sys.stdout.flush()
    assert b"l\\xe4uft, step 1" in written.getvalue()
