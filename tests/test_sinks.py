from __future__ import annotations

import dataclasses
import io
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import collapsediag as cd
from collapsediag.console import ConsoleSink, retrieval_bar, summary_lines
from collapsediag.errors import RunFolderError, SettingsError
from collapsediag.main_process import is_worker
from collapsediag.plain_text import printable
from collapsediag.record import Record
from collapsediag.run_folder import read_records, read_run
from collapsediag.sink_names import resolve_sinks
from collapsediag.sinks import FanOut, JsonlSink, Sink

BATCH = cd.RolloutBatch.from_lists(step=0, prompts=["a"], completions=["b"], rewards=[1.0])


class Recorder:
    def __init__(self, fail_at: set[int] | None = None) -> None:
        self.steps: list[int] = []
        self.closed = 0
        self.fail_at = fail_at or set()

    def write(self, record: Record) -> None:
        if record.step in self.fail_at:
            raise RuntimeError(f"no disk at {record.step}")
        self.steps.append(record.step)

    def close(self) -> None:
        self.closed += 1


def records(n: int) -> list[Record]:
    return [Record(step=step, values={"reward/mean": 0.5}) for step in range(n)]


def test_the_shipped_sinks_are_sinks(tmp_path: Path) -> None:
    for sink in (JsonlSink(tmp_path), ConsoleSink(io.StringIO()), Recorder(), FanOut([])):
        assert isinstance(sink, Sink)


def test_jsonl_sink_writes_a_run_folder(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run")
    for r in records(3):
        sink.write(r)
    sink.close()
    sink.close()
    assert [r.step for r in read_records(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.fault(
    "a script is run twice with one run folder",
    "the second run stops where its sink is made, before it trains; the first one's records stay as they are",
)
@pytest.mark.parametrize("named", [False, True])
def test_a_used_folder_is_refused_before_training(tmp_path: Path, named: bool) -> None:
    with cd.Monitor(sinks=[JsonlSink(tmp_path / "run")]) as monitor:
        monitor.observe(0, cd.RolloutBatch.from_lists(step=0, prompts=["a"], completions=["b"], rewards=[1.0]))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"already holds records of a run\. Choose another folder, or resume"):
        cd.Monitor(sinks=f"jsonl:{tmp_path / 'run'}" if named else [JsonlSink(tmp_path / "run")])
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    JsonlSink(tmp_path / "run", resume=True)


def test_a_rank_that_does_not_write_neither_looks_at_the_folder_nor_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JsonlSink(tmp_path / "run")._store as store:
        store.append(Record(step=0, values={}))
    monkeypatch.setenv("RANK", "1")
    JsonlSink(tmp_path / "run")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunFolderError, match="already holds"):
        JsonlSink(tmp_path / "run")
    JsonlSink(tmp_path / "new")
    JsonlSink(tmp_path / ("long" * 100))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


SINK_IN_THE_SCRIPT = """
import multiprocessing, sys
import collapsediag as cd
from collapsediag.record import Record
sink = cd.JsonlSink(sys.argv[1])
def work(found):
    found.put("worked")
if __name__ == "__main__":
    sink.write(Record(step=0, values={}))
    method = multiprocessing.get_context(sys.argv[2])
    found = method.Queue()
    worker = method.Process(target=work, args=(found,))
    worker.start()
    worker.join(60)
    print(worker.exitcode, found.get(timeout=1) if worker.exitcode == 0 else "died")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_worker_that_imports_the_script_of_its_run_is_not_stopped(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SINK_IN_THE_SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run", method], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "0 worked", done.stderr


def test_a_fork_server_that_imports_the_script_of_its_run_is_not_stopped(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "run")._store as store:
        store.append(Record(step=0, values={}))
    script = tmp_path / "train.py"
    script.write_text(SINK_IN_THE_SCRIPT)
    # What a fork server does before it starts any worker; before Python 3.14 it left this out.
    code = "import sys; from multiprocessing.spawn import import_main_path; import_main_path(sys.argv.pop(1))"
    subprocess.run([sys.executable, "-c", code, script, tmp_path / "run"], check=True)


def test_a_debugger_that_renames_itself_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__mp_main__", types.ModuleType("pydevd"))  # which runs the user's as __main__
    assert not is_worker()


@pytest.mark.fault("a sink raises", "warned once; switched off after three failures in a row; the others go on")
def test_a_failing_sink_does_not_touch_the_others_and_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    good, bad, flaky = Recorder(), Recorder(fail_at=set(range(2, 99))), Recorder(fail_at={1, 2, 4, 5, 7, 8})
    fan = FanOut([bad, flaky, good])
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        for r in records(10):
            fan.write(r)
    fan.close()
    assert good.steps == list(range(10))
    assert bad.steps == [0, 1]
    # Never three in a row: kept to the end.
    assert flaky.steps == [0, 3, 6, 9]
    assert caplog.text.count("switched off") == 1
    assert (good.closed, flaky.closed) == (1, 1)


def test_strict_raises_at_once() -> None:
    fan = FanOut([Recorder(fail_at={0})], strict=True)
    with pytest.raises(RuntimeError, match="no disk"):
        fan.write(records(1)[0])


@pytest.mark.fault("a sink is given twice", "it is written to and closed once")
def test_a_sink_that_is_given_twice_is_written_to_once() -> None:
    sink, steps = Recorder(), []

    def note(metrics: dict[str, float], step: int) -> None:
        steps.append(step)

    with cd.Monitor(sinks=[sink, note, sink, note]) as monitor:
        monitor.observe(3, BATCH)
    assert (sink.steps, sink.closed, steps) == ([3], 1, [3])
    assert len(resolve_sinks(["console", "console"])) == 1
    fan = FanOut([sink, sink])
    fan.write(records(5)[4])
    assert sink.steps == [3, 4]


@pytest.mark.parametrize("wrapped", [False, True])
def test_one_sink_needs_no_list(wrapped: bool) -> None:
    sink, steps = Recorder(), []
    for one in (sink, lambda metrics, step: steps.append(step)):
        cd.Monitor(sinks=(one for one in [one]) if wrapped else one).observe(3, BATCH)  # type: ignore[arg-type]
    assert (sink.steps, steps) == ([3], [3])
    for odd in (None, 5, Path("runs/a")):
        with pytest.raises(TypeError, match="is not a sink: it needs write"):
            cd.Monitor(sinks=odd)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Recorder is a class; pass an instance"):
        cd.Monitor(sinks=Recorder)  # type: ignore[arg-type]


class AlwaysEqual(Recorder):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = Recorder.__hash__


def test_of_equal_sinks_the_one_that_fails_is_switched_off() -> None:
    good, bad = AlwaysEqual(), AlwaysEqual(fail_at=set(range(99)))
    fan = FanOut([good, bad])
    for r in records(5):
        fan.write(r)
    assert good.steps == [0, 1, 2, 3, 4]


class UnshowableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.fault(
    "a sink calls sys.exit(), or raises an error whose message cannot be shown",
    "a failure of that sink as any other; training goes on",
)
@pytest.mark.parametrize("in_caller_thread", [False, True])
@pytest.mark.parametrize("error", [SystemExit(1), UnshowableError()])
def test_a_sink_neither_ends_the_process_nor_needs_a_readable_error(
    error: BaseException, in_caller_thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Ends(Recorder):
        def write(self, record: Record) -> None:
            raise error

        def close(self) -> None:
            raise error

    sink, ends = Recorder(), Ends()
    ends.in_caller_thread = in_caller_thread  # type: ignore[attr-defined]
    with cd.Monitor(sinks=[ends, sink]) as monitor:
        for step in range(2):
            monitor.observe(step, BATCH)
    assert (sink.steps, sink.closed) == ([0, 1], 1)
    found = "TrackerError: it raised SystemExit" if isinstance(error, SystemExit) else "(its message cannot be shown)"
    assert [found in message for message in caplog.messages] == [True, True]


def test_what_is_observed_after_closing_is_said_to_be_written_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    monitor = cd.Monitor(sinks=[Recorder()])
    monitor.close()
    monitor.close()
    assert [monitor.observe(step, BATCH).status for step in (4, 5)] == ["ok", "ok"]
    assert caplog.messages == ["the sinks have been closed: step 4 and those after it are not written"]
    without = cd.Monitor()
    without.close()
    without.observe(0, BATCH)
    assert len(caplog.messages) == 1


def test_strict_closes_the_others_before_it_raises() -> None:
    class Refuses(Recorder):
        def close(self) -> None:
            raise RuntimeError("no")

    last = Recorder()
    with pytest.raises(RuntimeError, match="no"):
        FanOut([Refuses(), last], strict=True).close()
    assert last.closed == 1


class Coroutine(Recorder):
    async def write(self, record: Record) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: JsonlSink(""), RunFolderError, "the run folder has no name; give one"),
        (lambda: JsonlSink("run", keep="3"), SettingsError, "keep='3': a whole number of scored steps"),  # type: ignore[arg-type]
        (lambda: JsonlSink("run", keep=2.5), SettingsError, "keep=2.5"),  # type: ignore[arg-type]
        (lambda: JsonlSink("run", keep=0), SettingsError, "keep=0: a whole number of scored steps is needed, 2"),
        (lambda: JsonlSink("run", provenance={"model": "m"}), SettingsError, "provenance is of type dict; make it"),  # type: ignore[arg-type]
        (lambda: FanOut([io.StringIO()]), TypeError, "StringIO is not a sink"),  # type: ignore[list-item]
        (lambda: FanOut([Coroutine()]), SettingsError, r"Coroutine\.write is a coroutine function"),
    ],
)
def test_what_would_fail_at_every_step_is_refused_at_construction(
    make: Callable[[], object], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        make()
    assert list(tmp_path.iterdir()) == []


def test_no_setting_and_no_text_keeps_a_run_from_being_written(tmp_path: Path) -> None:
    settings = {"lr": np.float32(0.5), ("a", 1): float("nan"), "model": object, "steps": (1, [np.int64(2)])}
    odd = Record(step=1, values={}, status="failed", reason=KeyError("x"), not_measured={"a": None}, notes=(None, 5))  # type: ignore[arg-type, dict-item]
    sink = JsonlSink(tmp_path / "run", provenance=cd.Provenance.collect(settings=settings), keep=np.int64(3))  # type: ignore[arg-type]
    sink.write(dataclasses.replace(odd, dropped={("first_turn", 1): np.int64(2)}))  # type: ignore[dict-item]
    sink.close()
    assert read_run(tmp_path / "run")["settings"] == {
        "lr": 0.5, "('a', 1)": "nan", "model": "<class 'object'>", "steps": [1, [2]],
    }  # fmt: skip
    (record,) = read_records(tmp_path / "run")
    assert (record.reason, record.notes) == ("'x'", ("None", "5"))
    assert (record.not_measured, record.dropped) == ({"a": "None"}, {"('first_turn', 1)": 2})


def test_something_that_is_no_sink_is_refused_at_construction() -> None:
    with pytest.raises(TypeError, match="needs write"):
        FanOut([object()])  # type: ignore[list-item]


def scored_record(**extra: float) -> Record:
    prefix = "collapse_first_turn_sample/"
    values = {
        "retrieval_accuracy": 0.15,
        "retrieval_accuracy/ci_low": 0.11,
        "retrieval_accuracy/ci_high": 0.2,
        "retrieval_chance_level": 0.125,
        "mi_estimate": 0.01,
        "mi_seq_estimate": 0.2,
        "mi_upper_bound": 2.079,
        "n_traces": 64.0,
        "n_contexts": 8.0,
    }
    return Record(step=180, values={prefix + k: v for k, v in values.items()} | {"reward/mean": 0.25} | extra)


def test_a_terminal_that_went_away_ends_no_training(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    sink = ConsoleSink(stream)
    with pytest.raises(BrokenPipeError):  # a failed sink, which the monitor says and survives
        sink.write(scored_record())
    with pytest.raises(BrokenPipeError):
        stream.close()
    os.write(1, b"the training's own output")
    assert capfd.readouterr().out == "the training's own output"


def test_console_line_and_failure() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, width=120)
    sink.write(scored_record())
    sink.write(Record(step=181, values={"reward/mean": 0.1}))
    sink.write(Record(step=182, values={}, status="failed", reason="boom \x1b[2J"))
    sink.write(Record(step=183, values={}, not_measured={"collapse_first_turn_sample": "1 distinct context"}))
    header, line, failed, missing = stream.getvalue().splitlines()
    assert header.split()[:2] == ["step", "retrieval"]
    assert line.split()[0] == "180"
    assert "0.15" in line
    assert "\x1b[2J" not in failed
    assert failed.endswith("failed: boom \\x1b[2J")
    assert missing.split(maxsplit=1) == ["183", "not measured: 1 distinct context"]


def test_the_summary_shows_interval_chance_bound_and_n() -> None:
    text = "\n".join(summary_lines(scored_record(), width=120))
    row = next(line for line in text.splitlines() if "retrieval_accuracy" in line)
    assert row.split() == ["retrieval_accuracy", "0.15", "[0.11,", "0.2]", "chance", "0.125", "fraction"]
    assert "bound 2.08" in next(line for line in text.splitlines() if "mi_seq_estimate" in line)
    assert "64 traces under 8 prompts" in text


def test_the_summary_fits_a_narrow_terminal() -> None:
    record = scored_record(**{"diversity/identical_completion_fraction": 0.25, "n_rollouts": 8.0, "n_groups": 2.0})
    lines = summary_lines(record, width=80)
    assert max(len(line) for line in lines) <= 80
    assert any("diversity/identical_completion" in line for line in lines)
    assert "all rollouts of the step: 8 rollouts in 2 groups" in lines
    lone = scored_record(**{"reward/mean": 0.25, "n_rollouts": 1.0, "n_groups": 1.0})
    assert "all rollouts of the step: 1 rollout in 1 group" in summary_lines(lone)


@pytest.mark.parametrize("width", [100, 120])
def test_the_columns_of_the_summary_stay_in_line_where_an_interval_is_long(width: int) -> None:
    prefix = "collapse_first_turn_sample/mi_estimate"
    record = scored_record(
        n_rollouts=8.0, **{prefix: -5.4931e-05, f"{prefix}/ci_low": -0.0001972, f"{prefix}/ci_high": 0.0002093}
    )
    header, *rows = [line for line in summary_lines(record, width=width) if line.startswith(("metric", "  "))]
    for row in rows:
        if "]" in row:
            assert row.index("]") == header.index("95% interval") + len("95% interval") - 1
        assert row.rpartition("  ")[0].rstrip() == row[: header.index("unit")].rstrip()


@pytest.mark.parametrize(("accuracy", "chance", "bar"), [(1.0, 0.25, "█│██"), (0.0, 0.0, "│···"), (0.5, 1.0, "██·│")])
def test_bar(accuracy: float, chance: float, bar: str) -> None:
    assert retrieval_bar(accuracy, chance, cells=4) == bar


def test_printable_shows_what_could_act_on_a_terminal() -> None:
    assert printable("ok ünïcode 你\n") == "ok ünïcode 你\n"
    assert printable("\x1b]0;title\x07\r\u202e\ud800") == "\\x1b]0;title\\x07\\r\\u202e\\ud800"
