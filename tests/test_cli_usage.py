"""Wrong use of the command line: one line that says what is wrong, and where the help is."""

from __future__ import annotations

import pytest

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
