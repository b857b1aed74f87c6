"""`collapsediag preflight` at the command line: exit codes, what it says of a policy, and hostile input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collapsediag.cli import main

from .conftest import import_or_skip

import_or_skip("torch")
import_or_skip("transformers")

from .tiny_policy import LIMIT, copied, dump, rows, save_policy  # noqa: E402

Check = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs the command; gives its exit code and all that it said, line breaks as spaces."""

    def run(lines: list[dict[str, Any]], *arguments: object) -> tuple[int, str]:
        file = dump(tmp_path / "rollouts.jsonl", lines)
        try:
            code = main(["preflight", str(file), *map(str, arguments)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return code, " ".join((told.out + told.err).split())

    return run


def test_exit_codes(check: Check) -> None:
    code, said = check(rows(group=4))
    assert code == 0
    assert "step 1: 12 rollouts in 3 groups" in said
    assert check(rows(group=4), "--fail-on", "info")[0] == 1
    one_for_all = rows(group=4, completion="the same every time")
    assert [check(one_for_all, "--fail-on", level)[0] for level in ("warning", "critical")] == [1, 0]


def test_a_step_that_is_not_there(check: Check) -> None:
    code, said = check(rows(steps=(1, 2)), "--step", "9")
    assert (code, "step 9 is not there; found steps 1 to 2" in said) == (2, True)
    assert "step 2: 6 rollouts" in check(rows(steps=(1, 2)), "--step", "2")[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (rows(prompts=1), "at least two prompts are needed"),
        (rows(completion="x" * LIMIT), "6 context too long"),
        (rows(completion="<think></think>x"), "6 empty reasoning"),
        (rows(prompts=1, group=1), "at least two prompts are needed"),
    ],
)
def test_a_policy_that_could_not_score_is_not_called_missing(
    check: Check, policy: Path, lines: list[dict[str, Any]], message: str
) -> None:
    code, said = check(lines, "--model", policy)
    assert said.endswith(f"loading {policy}")  # on standard error, which comes last here
    assert code in (0, 1)
    assert message in said
    assert "no policy was given" not in said
    assert "no policy was given" in check(lines)[1]


def test_a_policy_whose_weights_are_nan_is_critical(check: Check, tmp_path: Path) -> None:
    code, said = check(rows(), "--model", save_policy(tmp_path / "nan", nan=True))
    assert code == 1
    assert "gives no finite log-probability to any of the outputs" in said


def test_what_cannot_be_checked_is_refused(check: Check, policy: Path, tmp_path: Path) -> None:
    torn = copied(policy, tmp_path / "torn", tokenizer_json=b"{")
    cases: tuple[tuple[tuple[object, ...], str], ...] = (
        (("--model", torn), "no tokenizer can be read in"),
        (("--model", tmp_path), "holds no config.json"),
        (("--model", tmp_path / "nowhere"), "no such folder or file"),
        (("--success-threshold", "nan"), "'nan' is not a number"),
        (("--map", "x"), "write OURS=THEIRS"),
    )
    for arguments, message in cases:
        code, said = check(rows(), *arguments)
        assert (code, message in said) == (2, True), said


def test_a_wrong_file_costs_no_loading_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("")
    assert main(["preflight", str(tmp_path / "a.jsonl"), "--model", "/nowhere/at/all"]) == 2
    assert "is empty" in capsys.readouterr().err


def test_seeds_and_steps_below_zero(check: Check, policy: Path) -> None:
    code, said = check(rows(steps=(-3,), prompts=4), "--seed", "-1", "--model", policy)
    assert code in (0, 1)
    assert "step -3: 8 rollouts" in said


def test_control_characters_reach_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[31mred\x1b]0;title\x07\u202e\x00\ud800"
    lines = rows(environment=evil, id=evil)
    for line in lines:
        line["prompt"] += evil
        line["completion"] += evil
        line["group"] = line["prompt"]
    main(["preflight", str(dump(tmp_path / "a.jsonl", lines))])
    told = capsys.readouterr()
    assert not set(told.out + told.err) & set("\x1b\x07\u202e\x00\ud800")


def test_advice_names_the_option_of_the_command_line(check: Check) -> None:
    said = check(rows(group=4))[1]
    assert "no rollout has a success label; --success-threshold makes labels of rewards (in Python success" in said
    assert "has a success label" not in check(rows(group=4), "--success-threshold", 1)[1]


def test_the_format_is_declared_at_the_command_line(check: Check) -> None:
    lines = rows(group=4, completion="Move: up")
    said = check(lines)[1]
    assert "Declare the format that your reward expects, --format (format=), to have it checked." in said
    assert "format 1 100% of the outputs are in the format." in check(lines, "--format", "regex:Move: \\w+")[1]
    assert "0% of the outputs are in the format (no match 100%)" in check(lines, "--format", "regex:Move")[1]
    tagged = rows(group=4, completion="<plan>a</plan><move>up</move>")
    assert "100% of the outputs are in the format." in check(tagged, "--format", "tags:plan,look,move")[1]
    assert "100% of the outputs are in the format." in check(tagged, "--format", "tags:plan")[1]
    assert "the format (no answer 100%)." in check(tagged, "--format", "tags:plan,look")[1]
    for form, why in (
        ("verl", "'verl' is no form of outputs: write tags:REASONING,ACTION,... or regex:PATTERN."),
        ("tags:", "is no form of outputs"),
        ("tags:<think>", "give it without brackets"),
        ("regex:(", "is not a regular expression"),
    ):
        code, said = check(lines, "--format", form)
        assert (code, why in said) == (2, True), said
