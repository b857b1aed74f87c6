"""The W&B sink against the real package, offline: what is on disk afterwards is what counts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collapsediag.errors import MissingExtraError, SettingsError
from collapsediag.integrations.wandb_sink import STEP, WandbSink
from collapsediag.monitor import Monitor
from collapsediag.record import Record, TraceSample
from collapsediag.testing import planted

from .conftest import import_or_skip
from .wandb_offline import OfflineRun, wait_closed

MI = "collapse_first_turn_sample/mi_estimate"
HOSTILE = "</script><img src=x onerror=alert(1)> | # **b** \x1b[2J\x00\u202e\ud800 你\nnext\tcell"


@pytest.fixture(scope="module")
def wandb_module() -> Iterator[Any]:
    wandb = import_or_skip("wandb")
    yield wandb
    wandb.teardown()  # ends the background process


@pytest.fixture
def wandb(wandb_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for variable in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    if os.environ["WANDB_MODE"] != wandb_module.setup().settings.mode:
        wandb_module.teardown()  # W&B reads the environment once a process, and another test came first
    yield wandb_module
    if wandb_module.run is not None:
        wandb_module.run.finish()


def finished(run: Any) -> OfflineRun:
    folder = Path(run.dir).parent
    run.finish()
    return wait_closed(folder)


def record(step: int, **values: float) -> Record:
    return Record(step=step, values={MI: step / 10, **values})


class Loop:
    """A training loop that keeps account of what each side has logged."""

    def __init__(self, run: Any) -> None:
        self.run, self.sink = run, WandbSink()
        self.trained: list[tuple[int]] = []
        self.late: list[tuple[int]] = []
        self.observed: list[tuple[int, float]] = []

    def train(self, step: int) -> None:
        self.run.log({"train/loss": step}, step=step)
        self.trained.append((step,))

    def observe(self, step: int) -> None:
        self.sink.write(record(step))
        self.observed.append((step, step / 10))


def explicit_step_then_library(loop: Loop) -> None:
    for step in range(10, 40):
        loop.train(step)
        if step % 5 == 0:
            loop.observe(step)


def library_then_explicit_step(loop: Loop) -> None:
    for step in range(10, 40):
        if step % 5 == 0:
            loop.observe(step)
        loop.train(step)


def trainer_logs_twice_a_step(loop: Loop) -> None:
    for step in range(10, 40):
        loop.train(step)
        loop.observe(step)
        loop.run.log({"train/late": step}, step=step)
        loop.late.append((step,))


def trainer_every_20_library_every_step(loop: Loop) -> None:
    for step in range(1, 60):
        if step % 20 == 0:
            loop.train(step)
        loop.observe(step)


def transformers_trainer(loop: Loop) -> None:
    loop.run.define_metric("train/global_step")
    loop.run.define_metric("*", step_metric="train/global_step", step_sync=True)
    for step in range(1, 40):
        if step % 3 == 0:
            loop.observe(step)
        if step % 10 == 0:
            loop.run.log({"train/loss": step, "train/global_step": step})
            loop.trained.append((step,))


def trainer_without_steps_is_far_ahead(loop: Loop) -> None:
    """W&B's counter passes the step number: a row sent with step= would be dropped."""
    for step in range(1, 12):
        for _ in range(4):
            loop.run.log({"train/loss": step})
            loop.trained.append((step,))
        loop.observe(step)


STYLES = (
    explicit_step_then_library,
    library_then_explicit_step,
    trainer_logs_twice_a_step,
    trainer_every_20_library_every_step,
    transformers_trainer,
    trainer_without_steps_is_far_ahead,
)


@pytest.mark.fault("W&B is offline", "everything is in the offline run on disk, the trainer's rows and ours")
@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_no_row_is_lost_on_either_side(style: Callable[[Loop], None], wandb: Any) -> None:
    run = wandb.init(project="styles")
    loop = Loop(run)
    style(loop)
    loop.sink.close()
    run.log({"train/after": 1.0})
    found = finished(run)
    assert found.column("train/after") == [(1.0,)], "the run is the trainer's to finish"
    assert found.column("train/loss") == loop.trained
    assert found.column("train/late") == loop.late
    assert found.column(STEP, MI) == loop.observed
    assert found.metrics[MI] == {STEP}
    assert found.exit_code == 0


def test_two_records_of_one_step_share_a_row_and_cost_the_trainer_nothing(wandb: Any) -> None:
    run = wandb.init(project="evaluation")
    sink = WandbSink()
    for step in range(5):
        sink.write(record(step))
        sink.write(Record(step=step, values={"collapse_turn_sample/mi_estimate": 1.0}))
        run.log({"train/loss": step}, step=step)
    found = finished(run)
    assert found.column("train/loss") == [(s,) for s in range(5)]
    assert found.column(STEP, MI, "collapse_turn_sample/mi_estimate") == [(s, s / 10, 1.0) for s in range(5)]


@pytest.mark.parametrize("attempt", range(3))
def test_x_axes_are_ours_beside_a_trainers_pattern_every_time(attempt: int, wandb: Any) -> None:
    """Where patterns overlap W&B picks one at random, so once is not enough."""
    names = [
        f"collapse_{n}_sample/{m}" for n in ("first_turn", "turn") for m in ("mi_estimate", "retrieval_accuracy@4")
    ]
    run = wandb.init(project="axes")
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step", step_sync=True)
    sink = WandbSink()
    for step in range(3):
        sink.write(Record(step=step, values=dict.fromkeys(names, 0.5)))
        run.log({"train/loss": 1.0, "train/global_step": step})
    # A name that appears late is defined before its first row.
    sink.write(Record(step=3, values={"reward/mean": 1.0}))
    found = finished(run)
    for name in (*names, "collapse/reward/mean"):
        assert found.metrics[name] == {STEP}, name
    assert found.globs == {"*": {"train/global_step"}}
    assert found.column(STEP, "collapse/reward/mean") == [(3, 1.0)]


def test_scored_steps_bring_matrix_and_traces_and_one_alert(wandb: Any) -> None:
    step = planted("healthy")
    run = wandb.init(project="media")
    sink = WandbSink(traces=True)
    monitor = Monitor(step.scorer(), every=1, sinks=[sink], tokenizer=step, on_error="raise")
    for number in range(6):
        collapsed = planted("template" if number >= 2 else "healthy", step=number)
        monitor.scorer = collapsed.scorer()
        kept = monitor.observe(number, collapsed.batch)
    monitor.close()
    found = finished(run)
    captions = [caption for (caption,) in found.column("collapse_first_turn_sample/matrix.caption")]
    assert [caption.split(":")[0] for caption in captions] == [f"step {n}" for n in range(6)]
    assert len({caption.split(":")[1] for caption in captions}) == 1, "one colour range for all steps"
    pictures = list(found.folder.rglob("*.png"))
    assert len(pictures) == 6
    tables = found.tables()
    assert len(tables) == 6, "a fresh table per step"
    by_step = {table["data"][0][0]: table for table in tables}
    columns = by_step[5]["columns"]
    for cells, trace in zip(by_step[5]["data"], kept.traces, strict=True):
        named = dict(zip(columns, cells, strict=True))
        assert (named["trace"], named["own_prompt"], named["reasoning"]) == (trace.row, trace.own, trace.trace)
        assert named["own_logp"] == pytest.approx(trace.logp_P[trace.own])
    assert [title for title, _, _ in found.alerts] == ["Reasoning retrieved at chance"]
    assert "Step 3 (first turn)" in found.alerts[0][1]


def test_traces_stay_here_unless_asked_for_and_hostile_text_is_inert(wandb: Any) -> None:
    trace = TraceSample(
        namespace="turn", row=0, own=0, best=1, group=HOSTILE, length=2, logp_P=(float("nan"), -1.0), context=HOSTILE,
        context_best=None, trace=HOSTILE, reward=1,
    )  # fmt: skip
    run = wandb.init(project="text")
    WandbSink().write(Record(step=0, values={}, traces=(trace,)))
    WandbSink(traces=True).write(Record(step=1, values={}, traces=(trace, trace)))
    found = finished(run)
    (table,) = found.tables()
    cells = dict(zip(table["columns"], table["data"][0], strict=True))
    assert table["data"][0] == table["data"][1]
    assert cells["reasoning"] == (
        "</script><img src=x onerror=alert(1)> | # **b** \\x1b[2J\\x00\\u202e\\ud800 你\nnext\tcell"
    )
    assert (cells["step"], cells["own_logp"], cells["best_logp"], cells["retrieved"]) == (1, None, -1.0, False)


def test_own_run_leaves_the_trainers_alone(wandb: Any) -> None:
    run = wandb.init(project="both", name="mine")
    sink = WandbSink(mode="own_run", init={"tags": ["probe"]})
    for step in (1, 2, 3):
        # An epoch for a step: in the trainer's own run these rows would run ahead of it.
        sink.write(record(step))
        sink.write(record(step + 10))
    own = sink._own
    own_folder = Path(own.dir).parent
    assert wandb.run is run
    sink.close()
    sink.close()
    run.log({"train/loss": 1.0}, step=1)
    trainers, ours = finished(run), wait_closed(own_folder)
    assert trainers.column("train/loss") == [(1.0,)]
    assert trainers.column(STEP) == []
    assert ours.column(STEP) == [(1,), (11,), (2,), (12,), (3,), (13,)]
    assert (ours.run["project"], ours.run["group"], ours.run["job_type"]) == (
        "both",
        trainers.run["id"],
        "collapsediag",
    )
    assert ours.run["name"] == "mine-collapsediag"


def test_without_a_run_and_with_a_disabled_one_nothing_happens(wandb: Any, tmp_path: Path) -> None:
    sink = WandbSink()
    sink.write(record(0))
    sink.alert("title", "text")
    sink.close()
    assert wandb.run is None
    assert list(tmp_path.iterdir()) == []
    run = wandb.init(mode="disabled")
    for step in range(3):
        sink.write(record(step))
    run.finish()


class FakeRun:
    """What the sink may call on a run; anything else is an AttributeError."""

    def __init__(self) -> None:
        self.id, self.step = "a", 0
        self.rows: list[Any] = []
        self.alerts: list[tuple[str, str, str]] = []

    def define_metric(self, name: str, **options: Any) -> None: ...

    def log(self, row: Any, *, commit: bool) -> None:
        self.rows.append(row)

    def alert(self, *, title: str, text: str, level: str) -> None:
        self.alerts.append((title, text, level))


def test_other_ranks_and_forked_children_write_nothing(wandb_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    sink = WandbSink(run)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        sink.write(record(0))
    with monkeypatch.context() as patch:
        real = os.getpid()
        patch.setattr(os, "getpid", lambda: real + 1)
        sink.write(record(0))
        sink.alert("a", "b")
    assert (run.rows, run.alerts) == ([], [])
    sink.write(record(0))
    assert len(run.rows) == 1


def test_an_alert_is_sent_once_until_it_says_something_else(wandb_module: Any) -> None:
    run = FakeRun()
    sink = WandbSink(run)
    for text in ("a", "a", "b", "a"):
        sink.alert("T" * 80, text, level="ERROR")
    assert [text for _, text, _ in run.alerts] == ["a", "b", "a"]
    assert {len(title) for title, _, _ in run.alerts} == {63}, "W&B takes titles of less than 64 characters"
    failed = Record(step=3, values={}, status="failed", reason="out of memory")
    for _ in range(3):
        sink.write(failed)
    assert [title for title, _, _ in run.alerts[3:]] == ["Collapse diagnostics fail"]
    quiet = FakeRun()
    WandbSink(quiet, alerts=False).write(failed)
    assert quiet.alerts == []


def test_settings_that_cannot_be_are_refused(wandb_module: Any) -> None:
    with pytest.raises(SettingsError, match="choose 'join'"):
        WandbSink(mode="shared")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="own_run"):
        WandbSink(init={"project": "x"})


@pytest.mark.parametrize("missing", ["wandb", "PIL.Image"])
def test_a_missing_package_is_said_at_construction(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'collapsediag\[wandb\]'"):
        WandbSink()


def test_without_pillow_the_numbers_still_go(wandb_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    run = FakeRun()
    WandbSink(run, matrix=False).write(Record(step=0, values={}, matrices={"turn": planted("healthy").matrix}))
    assert run.rows == [{STEP: 0}]
