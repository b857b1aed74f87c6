"""Real faults, one test each: the disk, the process, the sinks, the model, the clock, the step numbers.

What is marked `fault` is a row of docs/reliability.md, here and in the other test files: python docs/generate.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collapsediag as cd
from collapsediag.run_folder import read_matrix, read_records, read_traces
from collapsediag.sinks import FanOut
from collapsediag.testing import planted

from .conftest import import_or_skip
from .keep import Keep

pytestmark = pytest.mark.faults

PLANTED = planted("healthy", n_contexts=4, group_size=3, length=3)
BATCH = PLANTED.batch
KEY = "collapse_first_turn_sample/"


def monitor(*sinks: Any, scorer: Any = None, **options: Any) -> cd.Monitor:
    settings = {"every": 1, "reasoning": "completion", **options}
    return cd.Monitor(PLANTED.scorer() if scorer is None else scorer, sinks=list(sinks), **settings)


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    head = "import collapsediag as cd\nfrom collapsediag.testing import planted\n"
    code = head + textwrap.dedent(script)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# -- the disk --------------------------------------------------------------------------------------------------------

FULL_DISK = """
    import resource, sys
    p = planted("healthy", n_contexts=4, group_size=3, length=3)
    kept = []
    with cd.Monitor(p.scorer(), every=5, reasoning="completion",
                    sinks=[cd.JsonlSink(sys.argv[1]), lambda metrics, step: kept.append(step)]) as monitor:
        for step in range(12):
            if step == 3:
                # No file of this process may grow beyond this: in the middle of the next line.
                size = (__import__("os").stat(sys.argv[1] + "/metrics.jsonl").st_size + 700)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            if step == 5:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            monitor.observe(step, p.batch)
    print(kept)
"""


@pytest.mark.fault(
    "the disk is full while a record is written",
    "that record is lost, its half-written line is taken back, training and the other sinks go on; records are written "
    "again as soon as there is space, unless three in a row failed",
)
def test_a_full_disk(tmp_path: Path) -> None:
    process = python(FULL_DISK, tmp_path / "run")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.strip() == str(list(range(12)))
    assert "step 3 could not be written (File too large). Earlier records are intact" in err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") == 10
    records = read_records(tmp_path / "run")  # a torn line would warn, and so fail
    assert [record.step for record in records] == [0, 1, 2, *range(5, 12)]
    assert not list((tmp_path / "run").rglob("*.tmp"))


@pytest.mark.fault(
    "a matrix or the traces do not fit on the disk",
    "nothing half-written is left under any name, and the step has no record, so that every record has its matrix",
)
def test_a_disk_too_full_for_the_matrix(tmp_path: Path) -> None:
    script = """
        import resource, sys
        p = planted("healthy", n_contexts=4, group_size=3, length=3)
        store = cd.JsonlSink(sys.argv[1])
        monitor = cd.Monitor(p.scorer(), every=1, reasoning="completion", sinks=[store])
        monitor.observe(0, p.batch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        monitor.observe(1, p.batch)
    """
    process = python(script, tmp_path / "run")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "step 1 could not be written" in err
    found = sorted(path.name for path in (tmp_path / "run").rglob("0*"))
    assert found == ["000000000-first_turn.npz", "000000000.jsonl"]
    assert [record.step for record in read_records(tmp_path / "run")] == [0]


@contextmanager
def without_root() -> Iterator[None]:
    """As a user for whom permissions hold."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.fault(
    "the run folder cannot be written to",
    "one warning names the folder and the reason, the sink is switched off after three steps, training and the other "
    "sinks go on",
)
def test_a_run_folder_that_is_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path("/tmp") / f"collapsediag-read-only-{os.getpid()}"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    keep = Keep()
    m = monitor(cd.JsonlSink(folder / "run"), keep)
    try:
        with without_root(), caplog.at_level(logging.WARNING, logger="collapsediag"):
            statuses = [m.observe(step, BATCH).status for step in range(5)]
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(folder)
    assert statuses == ["ok"] * 5
    assert keep.steps == list(range(5))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert f"{folder}/run: step 0 could not be written (Permission denied)" in messages[0]
    assert "switched off" in messages[1]


@pytest.mark.fault(
    "the run folder is deleted during the run",
    "it is made anew with the records from then on, and a warning says that its past is gone",
)
def test_a_run_folder_that_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    m = monitor(cd.JsonlSink(tmp_path / "run"), every=2)
    for step in range(6):
        if step == 3:
            shutil.rmtree(tmp_path / "run")
        m.observe(step, BATCH)
    m.close()
    assert [record.step for record in read_records(tmp_path / "run")] == [3, 4, 5]
    assert read_matrix(tmp_path / "run", 4, "first_turn").n_traces == 12
    assert caplog.text.count("was deleted while the run went on") == 1


# -- the process -----------------------------------------------------------------------------------------------------

KILLED = """
    import os, random, signal, sys, time
    from collapsediag.run_folder import RunStore
    p = planted("healthy", n_contexts=4, group_size=3, length=3)
    rng = random.Random(int(sys.argv[2]))
    traces = cd.Monitor(p.scorer(), every=1, reasoning="completion").observe(0, p.batch).traces
    step = 0
    for attempt in range(50):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            store = RunStore(sys.argv[1], resume=True)
            while True:
                values = {f"v{i}": step + i / 7 for i in range(200)}
                store.append(cd.Record(step=step, values=values, matrices={"turn": p.matrix}, traces=traces))
                os.write(write, b"x")  # acknowledged
                step += 1
        os.close(write)
        os.read(read, 1)
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        acknowledged = 1
        while chunk := os.read(read, 65536):
            acknowledged += len(chunk)
        os.close(read)
        # The next attempt begins after what was acknowledged, and may write one step again.
        step += acknowledged
    print(step)
"""


@pytest.mark.fault(
    "kill -9 at any moment (50 random ones in one run)",
    "every record whose writing had returned is readable, with its matrix and traces; the run resumes in the folder",
)
def test_fifty_kills(tmp_path: Path) -> None:
    process = python(KILLED, tmp_path / "run", random.randrange(10**6))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    n_acknowledged = int(out)
    logging.getLogger("collapsediag").setLevel(logging.ERROR)  # of the torn lines, which are meant
    try:
        records = read_records(tmp_path / "run")
    finally:
        logging.getLogger("collapsediag").setLevel(logging.NOTSET)
    assert n_acknowledged >= 50
    steps = [record.step for record in records]
    assert steps[:n_acknowledged] == list(range(n_acknowledged))
    assert steps[n_acknowledged:] in ([], [n_acknowledged])  # written, and killed before it could be said
    for record in records:
        assert record.values["v7"] == record.step + 1
        assert read_matrix(tmp_path / "run", record.step, "turn").n_traces == 12
        assert len(read_traces(tmp_path / "run", record.step)) == 12


SCORES_SLOWLY = """
    import signal, sys, time
    p = planted("healthy", n_contexts=4, group_size=3, length=3)

    class Slow:
        def score(self, pairs):
            print("scoring", flush=True)
            time.sleep(60 if monitor.last_step == 1 else 0)
            return p.scorer().score(pairs)

    if sys.argv[2] == "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as trainers do that save a checkpoint on the way out
    with cd.Monitor(Slow(), every=1, reasoning="completion", sinks=[cd.JsonlSink(sys.argv[1])]) as monitor:
        for step in range(3):
            monitor.observe(step, p.batch)
"""


@pytest.mark.parametrize("handling", ["handler", "default"])
@pytest.mark.fault(
    "SIGTERM during scoring",
    "the process ends at once, by the trainer's own handler where it has one; earlier records are whole, the run "
    "resumes",
)
def test_sigterm_during_scoring(tmp_path: Path, handling: str) -> None:
    process = python(SCORES_SLOWLY, tmp_path / "run", handling)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == (143 if handling == "handler" else -signal.SIGTERM)
    assert [record.step for record in read_records(tmp_path / "run")] == [0, 1]
    with cd.Monitor(None, sinks=[cd.JsonlSink(tmp_path / "run", resume=True)]) as resumed:
        resumed.observe(2, BATCH)
    assert [record.step for record in read_records(tmp_path / "run")] == [0, 1, 2]


def observe_in_spawned_process(folder: str, keep: Any) -> None:
    m = monitor(cd.JsonlSink(folder))
    keep.put([m.observe(step, BATCH).status for step in range(2)])
    m.close()


@pytest.mark.fault(
    "a spawned process makes the same monitor again",
    "it measures, but the run folder refuses a second run; the first one's records stay as they are",
)
def test_spawn(tmp_path: Path) -> None:
    m = monitor(cd.JsonlSink(tmp_path / "run"))
    m.observe(0, BATCH)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    spawn = multiprocessing.get_context("spawn")
    keep = spawn.Queue()
    child = spawn.Process(target=observe_in_spawned_process, args=(str(tmp_path / "run"), keep))
    child.start()
    assert keep.get(timeout=120) == ["ok", "ok"]
    child.join(30)
    assert (child.exitcode, (tmp_path / "run" / "metrics.jsonl").read_bytes()) == (0, before)
    m.observe(1, BATCH)
    m.close()
    assert [record.step for record in read_records(tmp_path / "run")] == [0, 1]


@pytest.mark.fault(
    "two monitors in one process",
    "each has its own averages, failures and folder; the second that is pointed at the first one's folder is refused",
)
def test_two_monitors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = monitor()
    expected = [alone.observe(step, BATCH).values[KEY + "gap_std_ema"] for step in range(4)]
    first, second = monitor(cd.JsonlSink(tmp_path / "a")), monitor(cd.JsonlSink(tmp_path / "b"), scorer=Broken())
    third = monitor(cd.JsonlSink(tmp_path / "a"))
    found = []
    for step in range(4):
        found.append(first.observe(step, BATCH).values[KEY + "gap_std_ema"])
        second.observe(step, BATCH)
        third.observe(step, BATCH)
    for m in (first, second, third):
        m.close()
    assert found == expected
    assert [record.status for record in read_records(tmp_path / "a")] == ["ok"] * 4
    assert [record.status for record in read_records(tmp_path / "b")] == ["failed"] * 3 + ["ok"]  # then unscored
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes().count(b"\n") == 4
    assert "already holds records of a run" in caplog.text


class Broken:
    def score(self, pairs: cd.ScoringPairs) -> cd.LogLikelihoodMatrix:
        raise RuntimeError("broken")


# -- the sinks -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "a sink hangs",
    "it is left behind after its time limit (120 s) and switched off at once; training and the other sinks go on",
)
def test_a_sink_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    class Hangs(Keep):
        def write(self, record: cd.Record) -> None:
            super().write(record)
            if record.step == 1:
                never.wait()

    never = threading.Event()
    hangs, keep = Hangs(), Keep()
    fan = FanOut([hangs, keep], write_limit_s=0.2, close_limit_s=0.2)
    began = time.perf_counter()
    for step in range(4):
        fan.write(cd.Record(step=step, values={}))
    fan.close()
    assert time.perf_counter() - began < 10
    never.set()
    assert (hangs.steps, keep.steps) == ([0, 1], [0, 1, 2, 3])
    assert caplog.text.count("sink Hangs did not come back within 0.2 s; it is switched off") == 1


@pytest.mark.fault(
    "a sink hangs while it is closed",
    "closing goes on after its time limit (600 s); the other sinks are closed",
)
def test_a_sink_that_hangs_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Hangs(Keep):
        def close(self) -> None:
            never.wait()

    never = threading.Event()
    fan = FanOut([Hangs(), cd.JsonlSink(tmp_path)], close_limit_s=0.2)
    fan.write(cd.Record(step=0, values={}))
    fan.close()
    never.set()
    assert "Hangs failed to close" in caplog.text
    assert not (tmp_path / "writer.json").exists()  # the store was closed


def test_sinks_are_called_with_the_context_of_the_caller_and_may_ask_for_its_thread() -> None:
    import contextvars

    variable = contextvars.ContextVar("variable", default="unset")

    class Notes(Keep):
        def write(self, record: cd.Record) -> None:
            seen.append((variable.get(), threading.current_thread() is threading.main_thread()))

    class Bound(Notes):
        in_caller_thread = True

    seen: list[tuple[str, bool]] = []
    variable.set("set")
    FanOut([Notes(), Bound()]).write(cd.Record(step=0, values={}))
    FanOut([Notes()], strict=True).write(cd.Record(step=0, values={}))
    assert seen == [("set", False), ("set", True), ("set", True)]


@pytest.mark.fault(
    "the TensorBoard folder is deleted during the run",
    "a new file is begun there, with the layout; what was in the folder is gone",
)
def test_a_tensorboard_folder_that_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accumulator = import_or_skip("tensorboard.backend.event_processing.event_accumulator")
    m = monitor(f"tensorboard:{tmp_path}")
    for step in range(6):
        if step == 3:
            shutil.rmtree(tmp_path / "collapsediag")
        m.observe(step, BATCH)
    m.close()
    events = accumulator.EventAccumulator(str(tmp_path / "collapsediag"))
    events.Reload()
    assert [event.step for event in events.Scalars(KEY + "retrieval_accuracy")] == [3, 4, 5]
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert "was deleted; curves go on in a new file from step 3 on" in caplog.text


@pytest.mark.fault(
    "W&B has no network",
    "a run of our own cannot be opened: three failures (W&B tries for 90 s each), then the sink is switched off; "
    "training and the other sinks go on",
)
def test_wandb_without_a_network(tmp_path: Path) -> None:
    import_or_skip("wandb")
    script = """
        import os, sys, time
        os.environ.update(WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40,
                          WANDB_DIR=sys.argv[1], WANDB_SILENT="true")
        import wandb
        from collapsediag.integrations.wandb_sink import WandbSink
        p = planted("healthy", n_contexts=4, group_size=3, length=3)
        sink = WandbSink(mode="own_run", init={"settings": wandb.Settings(init_timeout=1, console="off")})
        sinks = [sink, cd.JsonlSink(sys.argv[1] + "/run")]
        with cd.Monitor(p.scorer(), every=1, reasoning="completion", sinks=sinks) as m:
            print([m.observe(step, p.batch).status for step in range(5)])
    """
    process = python(script, tmp_path)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.strip() == str(["ok"] * 5)
    assert "sink WandbSink failed 3 times in a row and is switched off" in err
    assert [record.step for record in read_records(tmp_path / "run")] == list(range(5))


# -- the model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Any:
    from .scoring_tiny import make_model

    return make_model


@pytest.mark.fault(
    "the weights become NaN",
    "the step's matrix metrics are not measured, with the reason; no number of it looks healthy, and the averages do "
    "not move",
)
def test_weights_that_are_nan(tiny: Any) -> None:
    import torch

    model = tiny(dtype=torch.float32)
    m = monitor(scorer=cd.HFScorer(model))
    healthy = m.observe(0, BATCH)
    averages = m.state_dict()["ema"]
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    record = m.observe(1, BATCH)
    assert KEY + "retrieval_accuracy" in healthy.values
    assert [name for name in record.values if name.startswith("collapse_")] == []
    assert "non-finite" in record.not_measured[KEY[:-1]]
    assert record.values["reward/mean"] == healthy.values["reward/mean"]
    assert m.state_dict()["ema"] == averages


@pytest.mark.fault(
    "another model is put in the scorer's place",
    "it is scored with its own limits, and checked against the plain path anew",
)
def test_a_model_that_is_swapped(tiny: Any) -> None:
    first, second = tiny(), tiny(seed=2, max_position_embeddings=64)
    scorer = cd.HFScorer(first, check_every=50)
    pairs = PLANTED.pairs()
    scorer.score(pairs)
    scorer.score(pairs)
    assert scorer.info is not None
    assert scorer.info.check is None  # passed, and not due again for long
    scorer.model = second
    found = scorer.score(pairs)
    assert scorer.info.check is not None
    assert scorer.max_tokens == 64
    np.testing.assert_array_equal(found.logp_NP, cd.HFScorer(second).score(pairs).logp_NP)


@pytest.mark.fault(
    "out of memory in the scorer, again and again",
    "the token budget is halved down to the smallest, then the step is recorded as failed with the sizes; the next "
    "step tries again, and three failures in a row end scoring",
)
def test_out_of_memory_in_the_monitor(tiny: Any) -> None:
    import torch

    model = tiny()

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    m = monitor(scorer=cd.HFScorer(model))
    handle = model.register_forward_pre_hook(refuse)
    failed = m.observe(0, BATCH)
    handle.remove()
    assert failed.status == "failed"
    assert failed.reason is not None
    assert "out of memory on cpu even at 16 tokens a forward pass (CUDA out of memory" in failed.reason
    assert dict(failed.values) == {"collapse/failures": 1.0}
    assert KEY + "retrieval_accuracy" in m.observe(1, BATCH).values


# -- the clock and the step numbers ----------------------------------------------------------------------------------


@pytest.mark.fault(
    "the clock goes backwards",
    "records keep the order of their steps and durations stay positive; only their time of day goes back",
)
def test_a_clock_that_goes_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    m = monitor(cd.JsonlSink(tmp_path / "run"), f"tensorboard:{tmp_path / 'tb'}", time_budget=0.5)
    for step in range(4):
        monkeypatch.setattr(time, "time", lambda step=step: real() - 3600 * step)
        m.observe(step, BATCH)
    m.close()
    monkeypatch.undo()
    records = read_records(tmp_path / "run")
    assert [record.step for record in records] == [0, 1, 2, 3]
    times = [record.time for record in records if record.time is not None]
    assert times == sorted(times, reverse=True)
    for record in records:
        assert all(value >= 0 for name, value in record.values.items() if name.startswith("timing_s/"))
        assert record.values.get("collapse/scoring_time_share", 0.0) <= 1.0


@pytest.mark.fault(
    "step numbers repeat or go back",
    "each observation is recorded; of a step that came twice, the last record and its matrix hold",
)
def test_steps_that_repeat_and_rewind(tmp_path: Path) -> None:
    other = planted("template", n_contexts=4, group_size=3, length=3)
    with monitor(cd.JsonlSink(tmp_path), every=2) as m:
        for step in (0, 1, 2, 3, 4):
            m.observe(step, BATCH)
        m.scorer = other.scorer()
        for step in (4, 2, 3, 4, 5, 5, 6):
            m.observe(step, other.batch)
    records = read_records(tmp_path)
    assert [record.step for record in records] == list(range(7))
    accuracy = {record.step: record.values.get(KEY + "retrieval_accuracy") for record in records}
    assert accuracy[0] is not None
    assert accuracy[0] > 0.5
    assert (accuracy[2], accuracy[4]) == (pytest.approx(0.25), pytest.approx(0.25))  # the second policy's, at chance
    np.testing.assert_array_equal(read_matrix(tmp_path, 2, "first_turn").logp_NP.std(axis=1).round(9), 0.0)
