from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from collapsediag.errors import CollapsediagError, MatrixError, RunFolderError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.record import SCHEMA_VERSION, Provenance, Record, TraceSample
from collapsediag.report.tail import RecordTail
from collapsediag.run_folder import (
    RunStore,
    iter_records,
    matrix_name,
    read_matrix,
    read_records,
    read_run,
    read_traces,
)
from collapsediag.run_writer import WRITER_FILE, Writer, writer_of
from collapsediag.whole_files import replacing


def matrix() -> LogLikelihoodMatrix:
    return LogLikelihoodMatrix(logp_NP=[[-1.5, -3.25], [-4.0, -2.0]], length_N=[2, 3], own_N=[0, 1], group_N=[7, 9])


def record(step: int, **fields: object) -> Record:
    return Record(step=step, values={"reward/mean": 0.1 + step}, **fields)  # type: ignore[arg-type]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    trace = TraceSample(
        namespace="first_turn",
        row=0,
        own=0,
        best=1,
        group="a",
        length=2,
        logp_P=(-1.5, float("nan")),
        trace="\ud800<b>",
    )
    written = Record(
        step=3,
        values={"x": 0.1 + 0.2},
        not_measured={"y": "because"},
        dropped={"padding_row": 8},
        notes=("a note",),
        time=12.5,
        matrices={"first_turn": matrix()},
        traces=(trace,),
    )
    with RunStore(tmp_path / "run", provenance=Provenance.collect(model="m", settings={"seed": 1})) as store:
        store.append(written)

    (read,) = read_records(tmp_path / "run")
    assert read.to_json() == written.to_json()
    assert read.values["x"] == 0.1 + 0.2  # every bit
    back = read_matrix(tmp_path / "run", 3, "first_turn")
    for name, array in matrix().arrays().items():
        np.testing.assert_array_equal(getattr(back, name), array)
    (line,) = read_traces(tmp_path / "run", 3)
    assert line["trace"] == "\ud800<b>"
    assert line["logp_P"] == [-1.5, None]
    run = read_run(tmp_path / "run")
    assert (run["model"], run["settings"], run["schema_version"]) == ("m", {"seed": 1}, SCHEMA_VERSION)
    assert run["versions"]["numpy"] == np.__version__


def test_constructing_touches_nothing(tmp_path: Path) -> None:
    RunStore(tmp_path / "run").close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_records_is_refused_unless_resumed(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.append(record(1))
    with pytest.raises(RunFolderError, match="already holds records"):
        RunStore(tmp_path).append(record(2))
    with RunStore(tmp_path, resume=True) as store:
        store.append(record(2))
    assert [r.step for r in read_records(tmp_path)] == [1, 2]


def test_of_a_step_written_twice_the_last_record_holds(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)):
            store.append(Record(step=step, values={"v": value}))
    assert [(r.step, r.values["v"]) for r in read_records(tmp_path)] == [(1, 1.0), (2, 20.0), (3, 3.0)]
    assert [r.step for r in iter_records(tmp_path)] == [1, 2, 3, 2]


@pytest.mark.fault("the last line was torn by a crash", "skipped with a warning; the resumed run begins a new line")
def test_a_torn_line_is_sealed_skipped_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunStore(tmp_path) as store:
        store.append(record(1))
    with open(tmp_path / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"step":2,"val')
    with RunStore(tmp_path, resume=True) as store:
        store.append(record(3))
    assert [r.step for r in read_records(tmp_path)] == [1, 3]
    assert "skipped 1 unreadable line" in caplog.text
    assert b'{"step":2,"val' in (tmp_path / "metrics.jsonl").read_bytes()


def test_a_number_that_is_not_finite_never_reaches_the_file_as_one(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.append(Record(step=1, values={"good": 1.0, "bad": float("nan"), "huge": float("inf")}))
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["values"] == {"good": 1.0}
    assert line["not_measured"] == {"bad": "came out nan", "huge": "came out inf"}


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no run\.json"):
        read_run(tmp_path)
    with pytest.raises(RunFolderError, match=r"no metrics\.jsonl"):
        read_records(tmp_path)
    (tmp_path / "run.json").write_text('{"schema_version": 99}')
    with pytest.raises(RunFolderError, match="Upgrade collapsediag"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(RunFolderError, match="no schema_version"):
        read_run(tmp_path)
    with pytest.raises(RunFolderError, match="no matrix of step 5"):
        read_matrix(tmp_path, 5, "turn")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(RunFolderError):
        RunStore(file).append(record(1))


@pytest.mark.fault("a damaged matrix file", "an error that names the file; metrics and traces are in other files")
def test_a_damaged_matrix_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "matrices").mkdir()
    (tmp_path / "matrices" / matrix_name(1, "turn")).write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(MatrixError, match=r"000000001-turn\.npz: not a readable matrix"):
        read_matrix(tmp_path, 1, "turn")


def test_a_matrix_file_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.npz"
    np.savez(path, logp_NP=np.array([{"a": 1}], dtype=object), length_N=[1], own_N=[0])
    with pytest.raises(MatrixError, match="not a readable matrix"):
        LogLikelihoodMatrix.load(path)


def test_a_step_that_could_not_be_written_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path)
    store.append(record(1))
    monkeypatch.setattr(
        LogLikelihoodMatrix, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(RunFolderError, match=r"step 2 could not be written \(No space left on device"):
        store.append(record(2, matrices={"first_turn": matrix()}))
    store.append(record(3))
    store.close()
    assert [r.step for r in read_records(tmp_path)] == [1, 3]


# -- who writes ----------------------------------------------------------------------------------------------------


def test_a_run_names_its_writer_while_it_is_open(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        assert writer_of(tmp_path) is None  # nothing has been written yet
        store.append(record(1))
        assert writer_of(tmp_path) == Writer.here()
    assert writer_of(tmp_path) is None
    store.close()
    assert not (tmp_path / WRITER_FILE).exists()


def test_a_killed_writer_is_seen_to_be_gone_even_before_it_is_buried_and_the_next_one_takes_over(
    tmp_path: Path,
) -> None:
    code = textwrap.dedent(f"""
        import time
        from collapsediag.record import Record
        from collapsediag.run_folder import RunStore
        RunStore({str(tmp_path)!r}).append(Record(step=1, values={{}}))
        print("written", flush=True)
        time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        writer = writer_of(tmp_path)
        assert writer is not None
        assert (writer.pid, writer.is_alive) == (process.pid, True)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert writer.is_alive is False  # a zombie, which still has its number
    assert writer.is_alive is False
    with RunStore(tmp_path, resume=True) as store:
        store.append(record(2))
        assert writer_of(tmp_path) == Writer.here()


def test_a_process_that_has_anothers_number_is_not_the_writer() -> None:
    here = Writer.here()
    assert Writer(host=here.host, pid=here.pid, started="1").is_alive is False
    assert Writer(host=here.host, pid=here.pid, started=None).is_alive is True
    assert Writer(host="elsewhere", pid=here.pid, started=here.started).is_alive is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "a"}', '{"host": "a", "pid": null, "started": null}'])
def test_a_damaged_writer_file_names_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / WRITER_FILE).write_text(content)
    assert writer_of(tmp_path) is None


def test_matrices_and_traces_of_as_many_steps_as_are_to_be_kept(tmp_path: Path) -> None:
    rng = random.Random(0)
    step, steps = 0, []
    for part in range(2):  # the second part resumes
        with RunStore(tmp_path, resume=part == 1, keep=8) as store:
            for _ in range(60):
                steps.append(step)
                store.append(record(step, matrices={"first_turn": matrix(), "turn": matrix()}))
                step += rng.choice([5, 5, 5, 10])
    assert [r.step for r in read_records(tmp_path)] == steps
    kept = sorted({int(file.name[:9]) for file in (tmp_path / "matrices").iterdir()})
    assert (len(kept), kept[0], kept[-1]) == (8, steps[0], steps[-1])
    assert len(list((tmp_path / "matrices").iterdir())) == 16
    gaps = np.diff(kept)
    assert gaps.max() <= 3 * gaps[:-1].min()  # the last one is as recent as it is
    assert read_matrix(tmp_path, kept[3], "turn").n_traces == matrix().n_traces


def test_a_file_that_cannot_be_deleted_costs_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunStore(tmp_path, keep=2) as store:
        store.append(record(0, matrices={"turn": matrix()}))
        (tmp_path / "matrices" / "000000001-turn.npz").mkdir()  # unlink refuses a folder
        for step in (2, 3):
            store.append(record(step, matrices={"turn": matrix()}))
    assert [r.step for r in read_records(tmp_path)] == [0, 2, 3]
    assert "could not be deleted" in caplog.text


def test_the_first_and_the_last_step_are_always_kept(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="keep=1"):
        RunStore(tmp_path, keep=1)
    with RunStore(tmp_path, keep=2) as store:
        for step in range(5):
            store.append(record(step, matrices={"turn": matrix()}))
    assert sorted(file.name for file in (tmp_path / "matrices").iterdir()) == [
        "000000000-turn.npz",
        "000000004-turn.npz",
    ]


# -- what does not end, and what must stay what it is ----------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="needs a device")
def test_a_device_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    """A link to /dev/zero, or a pipe, in a folder that somebody sent would be read for ever."""
    with RunStore(tmp_path) as store:
        store.append(Record(step=1, values={"a": 1.0}))
    files = ("metrics.jsonl", "run.json", "writer.json", "traces/000000001.jsonl", "matrices/000000001-first_turn.npz")
    for name in files:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("/dev/null")
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_records(tmp_path),
        lambda: read_run(tmp_path),
        lambda: read_traces(tmp_path, 1),
        lambda: read_matrix(tmp_path, 1, "first_turn"),
        lambda: RecordTail(tmp_path).poll(),
    )
    for read in readers:
        with pytest.raises(CollapsediagError, match="a device or a pipe"):
            read()
    assert writer_of(tmp_path) is None


def test_a_file_is_not_a_run_folder(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        store.append(Record(step=1, values={"a": 1.0}))
    for read in (read_records, read_run):
        with pytest.raises(RunFolderError, match=r"it is a file\. Its folder may be one: .*run\.$"):
            read(tmp_path / "run" / "metrics.jsonl")
        (tmp_path / "rollouts.jsonl").touch()
        with pytest.raises(RunFolderError, match=r"rollouts.jsonl is not a run folder: it is a file\.$"):
            read(tmp_path / "rollouts.jsonl")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As /dev/null is; root could replace it by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with replacing(pipe) as name:
        name.write_bytes(b"page")
    assert os.read(reader, 10) == b"page"
    os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
