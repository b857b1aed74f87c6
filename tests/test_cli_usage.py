"""Wrong use of the command line: one line that says what is wrong, and where the help is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collapsediag import cli
from collapsediag.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["preflight", "a.jsonl", "--succes-threshold", "1"],
            "error: unrecognized arguments: --succes-threshold 1 (did you mean --success-threshold?)\n"
            "see collapsediag preflight --help\n",
        ),
        (
            ["preflight", "a.jsonl", "--sed=1"],
            "error: unrecognized arguments: --sed=1 (did you mean --seed?)\nsee collapsediag preflight --help\n",
        ),
        (
            ["compare", "a", "b", "--xyzzy"],
            "error: unrecognized arguments: --xyzzy\nsee collapsediag compare --help\n",
        ),
        (
            ["score", "a.jsonl", "--out", "a"],
            "error: the following arguments are required: --model\nsee collapsediag score --help\n",
        ),
        (
            ["score", "a.jsonl", "--modle", "X", "--out", "Y"],
            "error: unrecognized arguments: --modle (did you mean --model?)\nsee collapsediag score --help\n",
        ),
        (
            ["score", "--mod=X", "--out", "Y"],  # a beginning of a name will do
            "error: the following arguments are required: ROLLOUTS\nsee collapsediag score --help\n",
        ),
        (
            ["--versoin"],
            "error: unrecognized arguments: --versoin (did you mean --version?)\nsee collapsediag --help\n",
        ),
        (["scor"], "error: 'scor' is no command (did you mean score?)\nsee collapsediag --help\n"),
        (
            ["xyzzy", "--out", "a"],
            "error: 'xyzzy' is no command (there are demo, score, preflight, report, dashboard, compare, doctor, "
            "wandb-workspace)\nsee collapsediag --help\n",
        ),
        ([], "error: the following arguments are required: COMMAND\nsee collapsediag --help\n"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", said)


def rollouts(folder: Path) -> Path:
    """A step that is fine but for its size; nothing in it is critical."""
    lines = [
        {"group": f"{g}", "prompt": f"{g}?", "completion": f"{i}", "reward": float(i % 2)}
        for g in range(4)
        for i in range(4)
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "a.jsonl"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_finding(tmp_path: Path, unbuffered: str) -> None:
    file = rollouts(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "collapsediag", "preflight", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "collapsediag", "preflight", str(rollouts(tmp_path))],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == b"error: what is printed cannot be written (No space left on device)\n"


def test_an_interruption_while_the_commands_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert main(["report", "runs/a"]) == 130
    assert capsys.readouterr().err == "interrupted; what was recorded so far is intact\n"
