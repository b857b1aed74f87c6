"""Where untrusted text goes: never to a terminal as control sequences, into a file name, or into code."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path

import pytest

import collapsediag as cd
from collapsediag.cli import main
from collapsediag.findings.words import verdict_lines
from collapsediag.run_folder import read_records

from .report_runs import write_run

ROOT = Path(__file__).resolve().parent.parent

EVIL = "\x1b[31mred\x1b]0;title\x07\u202egnp\x9b2J\r\x08{0.__class__}%s[bold]b[/bold]"


def terminal(capsys: pytest.CaptureFixture[str], *, shows: str = "red") -> str:
    said = capsys.readouterr()
    shown = said.out + said.err
    assert shows in shown
    assert [c for c in shown if not c.isprintable() and c != "\n"] == []
    return shown


def evil_rollouts(folder: Path) -> Path:
    rows = [
        {
            "step": 1,
            "prompt": f"q{i % 2}{EVIL}",
            "output": f"<think>{EVIL}</think>{i}",
            "reward": float(i % 3),
            "group": f"{EVIL}{i % 2}",
            "environment": EVIL,
        }
        for i in range(8)
    ]
    folder.mkdir()
    (folder / "dump.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "dump.jsonl"


def test_no_command_lets_a_file_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = evil_rollouts(tmp_path / f"dump{EVIL}".replace("/", ""))
    main(["preflight", str(file)])
    terminal(capsys)
    for row in ({"prompt": "q", EVIL: 1}, {"prompt": EVIL, "output": 5, "step": EVIL}, {EVIL: EVIL}):
        broken = tmp_path / f"broken{EVIL}.jsonl".replace("/", "")
        broken.write_text(json.dumps(row) + "\n")
        for command in ("preflight", "score"):
            extra = ["--model", "none", "--out", str(tmp_path / "x")] if command == "score" else []
            assert main([command, str(broken), *extra]) == 2
            terminal(capsys)
    broken.write_text(f'{{"prompt": "{EVIL}')
    assert main(["preflight", str(broken)]) == 2
    terminal(capsys)
    runs = [write_run(tmp_path / f"run{i}{EVIL}".replace("/", ""), texts=[EVIL], environments=[EVIL]) for i in range(3)]
    for run in runs:
        with open(run / "metrics.jsonl", "a") as stream:
            stream.write(json.dumps({"step": 999, "values": {f"reward/{EVIL}/mean": 1.0}, "notes": [EVIL]}) + "\n")
            stream.write(EVIL)
    main(["compare", *map(str, runs), "--outcome", f"reward/{EVIL}/mean"])
    terminal(capsys)
    main(["compare", *map(str, runs)])
    terminal(capsys, shows="outcome")
    print("\n".join(verdict_lines(cd.judge(read_records(runs[0])), width=100)))
    terminal(capsys, shows="COLLAPSE")
    assert main(["report", str(runs[0]), "--out", str(tmp_path / f"{EVIL}.html".replace("/", ""))]) == 0
    terminal(capsys)
    assert main(["report", str(tmp_path / EVIL.replace("/", "")), "--out", str(tmp_path / "a.html")]) == 2
    terminal(capsys)


def test_the_console_sink_shows_what_a_failure_says_and_obeys_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails:
        def score(self, pairs: cd.ScoringPairs) -> cd.LogLikelihoodMatrix:
            raise RuntimeError(EVIL)

    batch = cd.RolloutBatch.from_lists(step=1, prompts=[[1], [2]], completions=[[3], [4]])
    logging.getLogger("collapsediag").setLevel(logging.CRITICAL)
    cd.Monitor(Fails(), every=1, reasoning="completion", sinks=["console"]).observe(1, batch)
    logging.getLogger("collapsediag").setLevel(logging.NOTSET)
    assert "[bold]b[/bold]" in terminal(capsys)


def test_warnings_of_the_monitor_are_safe_to_print(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def score(self, pairs: cd.ScoringPairs) -> cd.LogLikelihoodMatrix:
            raise RuntimeError(EVIL)

    batch = cd.RolloutBatch.from_lists(step=1, prompts=[[1], [2]], completions=[[3], [4]])
    cd.Monitor(Fails(), every=1, reasoning="completion").observe(1, batch)
    assert "red" in caplog.text
    assert [c for c in caplog.messages[0] if not c.isprintable()] == []


def test_no_text_chooses_a_file_name(tmp_path: Path) -> None:
    """Groups, environments, prompts and traces that try to be paths: everything stays where a run keeps it."""
    away = "../../away"
    rollouts = [
        cd.Rollout(turns=(cd.Turn(context=text, output=text),), group=text, environment=text)
        for text in (away, "/etc/x")
    ]
    batch = cd.RolloutBatch(step=1, rollouts=tuple(rollouts))
    with cd.Monitor(None, every=1, sinks=[cd.JsonlSink(tmp_path / "runs" / "a")]) as monitor:
        monitor.observe(1, batch)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["runs/a/metrics.jsonl", "runs/a/run.json"]


FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
    "os.system",
    "marshal.loads",
}


def test_nothing_read_is_ever_run() -> None:
    """No call that turns data into code; numpy reads without objects; remote code only where it was asked for."""
    for file in sorted((ROOT / "collapsediag").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert name not in FORBIDDEN_CALLS, f"{file}: {name}"
            assert keywords.get("shell") != "True", f"{file}: {name}(shell=True)"
            assert keywords.get("trust_remote_code") != "True", f"{file}: {name}"
            if name == "np.load":
                assert keywords["allow_pickle"] == "False", file
