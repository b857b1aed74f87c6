"""Sinks by name, anything that logs, MLflow, Trackio, and which process writes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from collapsediag.callable_sink import CallableSink
from collapsediag.errors import CollapsediagError, MissingExtraError, SettingsError
from collapsediag.integrations.mlflow_sink import mlflow_name
from collapsediag.main_process import is_main_process
from collapsediag.metrics.registry import unknown_names
from collapsediag.monitor import Monitor
from collapsediag.record import Record, TraceSample
from collapsediag.run_folder import read_records
from collapsediag.sink_names import known_sinks, resolve_sinks
from collapsediag.sinks import FanOut, JsonlSink, Sink
from collapsediag.testing import planted
from collapsediag.tracker_values import TRACE_COLUMNS, trace_rows, traces_as_text, tracker_values

RECORD = Record(step=7, values={"reward/mean": 0.5, "collapse_turn_sample/retrieval_accuracy@4": 1.0})
SENT = {"collapse/reward/mean": 0.5, "collapse_turn_sample/retrieval_accuracy@4": 1.0}
EXTRAS = ("wandb", "tensorboard", "mlflow", "trackio")


def run_python(code: str, *, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- anything that logs ------------------------------------------------------------------------------------------------


class Tracking:
    """veRL's shape: log(data, step, backend)."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, data: dict[str, float], step: int, backend: Any = None) -> None:
        self.calls.append((data, step))


class Tracker:
    """Accelerate's shape: log(values, step, **kwargs), with more around it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step))

    def finish(self) -> None:
        raise AssertionError("it belongs to the user")


class Logger:
    """Lightning's shape, which also has a `log` of another meaning."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def log(self, message: str) -> None:
        raise AssertionError("not this one")


@pytest.mark.parametrize("kind", [Tracking, Tracker, Logger])
def test_loggers_of_the_field_are_called_their_own_way(kind: type[Any]) -> None:
    target = kind()
    sink = CallableSink(target)
    sink.write(RECORD)
    sink.write(Record(step=8, values={}))  # nothing measured: nothing logged
    sink.close()
    assert target.calls == [(SENT, 7)]


def test_functions_modules_and_renaming() -> None:
    calls: list[Any] = []

    def function(metrics: dict[str, float], step: int) -> None:
        calls.append((metrics, step))

    CallableSink(function).write(RECORD)
    module = ModuleType("swanlab_like")
    module.log = function  # type: ignore[attr-defined]
    CallableSink(module, rename=str.upper).write(RECORD)
    assert calls == [(SENT, 7), ({name.upper(): value for name, value in SENT.items()}, 7)]


def test_what_cannot_be_logged_to_is_refused() -> None:
    async def later(metrics: dict[str, float], step: int) -> None: ...

    with pytest.raises(TypeError, match="int cannot be logged to"):
        CallableSink(3)
    with pytest.raises(SettingsError, match="is a coroutine function"):
        CallableSink(later)
    run = type("Run", (), {"__module__": "wandb.sdk.wandb_run", "log": print})()
    for target in (run, ModuleType("wandb")):
        with pytest.raises(SettingsError, match="WandbSink"):
            CallableSink(target)


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_string_a_list_of_strings_and_instances_all_work(tmp_path: Path) -> None:
    calls: list[int] = []
    jsonl = JsonlSink(tmp_path / "b")
    sinks = [f"jsonl:{tmp_path / 'a'}", jsonl, lambda metrics, step: calls.append(step)]
    with Monitor(sinks=sinks, on_error="raise") as monitor:
        monitor.observe(3, planted("healthy").batch)
    assert [r.step for r in read_records(tmp_path / "a")] == [3]
    assert [r.step for r in read_records(tmp_path / "b")] == [3]
    assert calls == [3]
    assert resolve_sinks([jsonl]) == [jsonl]
    assert all(isinstance(sink, Sink) for sink in resolve_sinks(f"jsonl:{tmp_path}"))


@pytest.mark.parametrize("name", ["wandB", "", "all", "tensorboardx"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(SettingsError, match=r"known ones are jsonl:RUN_FOLDER, console, wandb.*tensorboard.*mlflow"):
        Monitor(sinks=[name])


@pytest.mark.parametrize("text", ["jsonl", "jsonl:", "console:x", "wandb:", "trackio:x", "tensorboard:"])
def test_an_argument_that_does_not_fit_says_the_form(text: str) -> None:
    with pytest.raises(SettingsError, match=f"{text!r} does not fit; write {text.split(':', maxsplit=1)[0]}"):
        resolve_sinks(text)


def test_a_class_and_a_thing_that_is_no_sink_are_refused() -> None:
    with pytest.raises(TypeError, match=r"JsonlSink is a class.*sinks=\[JsonlSink\(...\)\]"):
        Monitor(sinks=[JsonlSink])
    with pytest.raises(TypeError, match="needs write"):
        Monitor(sinks=[3])


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_name_without_its_package_says_which_pip_line(extra: str) -> None:
    out = run_python(
        f"""
        import sys
        sys.modules[{extra!r}] = None
        from collapsediag import Monitor
        try:
            Monitor(sinks=[{extra!r}])
        except ImportError as error:
            print(type(error).__name__, error)
        """
    )
    assert out.startswith("MissingExtraError the ")
    assert f"needs the package '{extra}', which is not installed.\n  pip install 'collapsediag[{extra}]'" in out
    assert issubclass(MissingExtraError, CollapsediagError)


def test_every_extra_named_in_a_hint_exists() -> None:
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for extra in EXTRAS:
        assert f"\n{extra} = [" in text
        assert extra in known_sinks()


def test_importing_the_adapters_imports_no_tracker() -> None:
    out = run_python(
        """
        import sys
        import collapsediag.monitor, collapsediag.integrations
        from collapsediag.integrations import mlflow_sink, tensorboard_sink, trackio_sink, wandb_sink
        heavy = {"wandb", "tensorboard", "mlflow", "trackio", "torch", "PIL", "rich", "swanlab"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert out == "[]"


def test_the_tensorboard_sink_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = run_python(
        f"""
        import sys
        from collapsediag.integrations.tensorboard_sink import TensorBoardSink
        from collapsediag.testing import planted
        from collapsediag.record import Record
        sink = TensorBoardSink({str(tmp_path)!r})
        sink.write(Record(step=0, values={{"reward/mean": 1.0}}, matrices={{"turn": planted("healthy").matrix}}))
        sink.close()
        print("torch" in sys.modules, "PIL" in sys.modules, "matplotlib" in sys.modules)
        """
    )
    assert out == "False False False"


# -- what trackers are given -------------------------------------------------------------------------------------------


def test_every_tracker_name_is_in_the_registry_and_is_not_a_trainers() -> None:
    step = planted("healthy")
    monitor = Monitor(step.scorer(), every=1, tokenizer=step, on_error="raise")
    values = tracker_values(monitor.observe(0, step.batch))
    values |= tracker_values(Record(step=0, values={"env/maze/reward/mean": 1.0, "collapse/failures": 1.0}))
    assert unknown_names(values) == []
    assert all(name.startswith(("collapse/", "collapse_", "timing_s/collapse_")) for name in values)
    assert "collapse/env/maze/reward/mean" in values
    assert "collapse/failures" in values


def trace(**fields: Any) -> TraceSample:
    base: dict[str, Any] = {"namespace": "turn", "row": 4, "own": 1, "best": 0, "group": "g", "length": 3}
    return TraceSample(**{**base, "logp_P": (-1.5, -2.25), **fields})


def test_trace_cells_have_one_type_per_column_and_safe_text() -> None:
    record = Record(step=9, values={}, traces=(trace(trace="a\ud800", reward=2), trace(namespace="trajectory")))
    (cells,) = trace_rows(record, "turn")
    named = dict(zip(TRACE_COLUMNS, cells, strict=True))
    assert named == {
        "step": 9,
        "trace": 4,
        "group": "g",
        "own_prompt": 1,
        "best_prompt": 0,
        "retrieved": False,
        "own_logp": -2.25,
        "best_logp": -1.5,
        "tokens": 3,
        "reward": 2.0,
        "environment": None,
        "context": None,
        "reasoning": "a\\ud800",
        "best_context": None,
    }
    assert type(named["reward"]) is float


def test_traces_as_text_say_what_a_reader_needs() -> None:
    record = Record(
        step=9, values={}, traces=(trace(trace="because", context="why?", context_best="how?", reward=1.0),)
    )
    assert traces_as_text(record, "turn") == (
        "=== trace 4 of prompt 1 (group g): retrieved as prompt 0; log p -2.25 nats under its own prompt, -1.50 under "
        "that one; 3 tokens, reward 1\n--- prompt\nwhy?\n--- reasoning\nbecause\n--- prompt 0\nhow?"
    )
    assert traces_as_text(record, "trajectory") == ""


def test_a_trace_that_scores_the_same_everywhere_was_not_retrieved() -> None:
    tied = trace(own=0, best=0, logp_P=(-1.0, -1.0, -2.0, -1.0))
    record = Record(step=9, values={}, traces=(tied, trace(own=0, best=0, logp_P=(-1.0, -2.0))))
    assert [row[TRACE_COLUMNS.index("retrieved")] for row in trace_rows(record, "turn")] == [False, True]
    assert "(group g): not told apart from 2 other prompts; log p -1.00 nats;" in traces_as_text(record, "turn")


# -- MLflow, and Trackio, which is 135 MB and therefore not in the test extra: .ci/more runs its test ------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("collapse_turn_sample/retrieval_accuracy@4", "collapse_turn_sample/retrieval_accuracy_at_4"),
        ("collapse/reward/mean", "collapse/reward/mean"),
        ("collapse/reward/tests (hidden)|x/mean", "collapse/reward/tests _hidden__x/mean"),
        ("collapse/pass@4/ci_low", "collapse/pass_at_4_ci_low"),
        ("//a///b/", "a/b"),
    ],
)
def test_mlflow_names(name: str, expected: str) -> None:
    assert mlflow_name(name) == expected


def test_mlflow_takes_every_name_and_no_run_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    mlflow = pytest.importorskip("mlflow")
    from collapsediag.integrations.mlflow_sink import MlflowSink

    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    step = planted("healthy")
    monitor = Monitor(step.scorer(), every=1, tokenizer=step, sinks=["mlflow"], on_error="raise")
    monitor.observe(0, step.batch)
    assert mlflow.active_run() is None
    with mlflow.start_run() as run:
        record = monitor.observe(1, step.batch)
        monitor.close()
        assert mlflow.active_run() is not None
    client = mlflow.MlflowClient()
    stored = client.get_run(run.info.run_id).data.metrics
    assert stored == {mlflow_name(name): pytest.approx(value) for name, value in tracker_values(record).items()}
    by_id = MlflowSink(run.info.run_id)
    by_id.write(RECORD)
    by_id.close()
    with pytest.raises(Exception, match="not found"):  # noqa: PT012  asynchronous: said at close, not lost
        gone = MlflowSink("0" * 32)
        gone.write(RECORD)
        gone.close()
    history = client.get_metric_history(run.info.run_id, "collapse/reward/mean")
    assert [(m.step, m.value) for m in history][-1] == (7, 0.5)
    assert len(client.search_runs(["0"])) == 1


def test_trackio_joins_the_open_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    out = run_python(
        f"""
        import os
        os.environ["TRACKIO_DIR"] = {str(tmp_path)!r}
        import trackio
        from collapsediag.integrations.trackio_sink import TrackioSink
        from collapsediag.record import Record
        sink = TrackioSink()
        sink.write(Record(step=0, values={{"a": 1.0}}))
        trackio.init(project="p", name="r", auto_log_cpu=False)
        for step in range(3):
            sink.write(Record(step=step, values={{"pass@2": step / 2}}))
            trackio.log({{"loss": step}}, step=step)
        sink.close()
        trackio.log({{"loss": 3}}, step=3)
        trackio.finish()
        from trackio.sqlite_storage import SQLiteStorage
        rows = SQLiteStorage.get_logs("p", "r")
        print([(r["step"], r["collapse/pass@2"]) for r in rows if "collapse/pass@2" in r], end=" ")
        print([r["loss"] for r in rows if "loss" in r])
        """,
        cwd=tmp_path,
    )
    assert out.splitlines()[-1] == "[(0, 0.0), (1, 0.5), (2, 1.0)] [0, 1, 2, 3]"


# -- which process writes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "main"), [(None, True), ("", True), ("0", True), ("1", False), ("12", False)])
def test_rank_by_variable(rank: str | None, main: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    assert is_main_process() is main
    with Monitor(sinks=f"jsonl:{tmp_path / 'run'}", on_error="raise") as monitor:
        record = monitor.observe(0, planted("healthy").batch)
    assert record.status == "ok"
    assert (tmp_path / "run").exists() is main


@pytest.mark.parametrize(("initialized", "rank", "main"), [(True, 0, True), (True, 1, False), (False, 1, True)])
def test_a_process_group_goes_before_the_variable(
    initialized: bool, rank: int, main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: initialized, get_rank=lambda: rank)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=group))  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "5" if main and initialized else "0")
    assert is_main_process() is main


def test_a_rank_that_becomes_known_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    fan = FanOut(resolve_sinks([lambda metrics, step: steps.append(step)]))
    fan.write(RECORD)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    fan.write(RECORD)
    assert steps == [7]


@pytest.mark.fault("fork", "the child neither writes nor closes what is its parent's")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_writes_nor_closes(tmp_path: Path) -> None:
    out = run_python(
        f"""
        import os
        from collapsediag.record import Record
        from collapsediag.sinks import FanOut, JsonlSink

        class Loud(JsonlSink):
            def close(self):
                os.write(1, b"closed ")
                super().close()

        fan = FanOut([Loud({str(tmp_path / "run")!r})])
        fan.write(Record(step=0, values={{}}))
        child = os.fork()
        if child == 0:
            fan.write(Record(step=1, values={{}}))
            fan.close()
            os._exit(0)
        os.waitpid(child, 0)
        fan.write(Record(step=2, values={{}}))
        fan.close()
        """
    )
    assert out == "closed"
    assert [r.step for r in read_records(tmp_path / "run")] == [0, 2]
