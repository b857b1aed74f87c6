"""Files that would fill the memory: refused or passed over at a limit that is stated."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import MatrixError, MetricError, ReaderError, RunFolderError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.readers import read_rollouts
from collapsediag.run_folder import MAX_LINE_BYTES, read_traces

from .conftest import import_or_skip


def peak_mb(script: str, *arguments: object) -> tuple[int, str]:
    """(MB that running the script took beyond importing the library, what it printed)."""
    head = (
        "import resource, sys, collapsediag as cd, collapsediag.readers, collapsediag.run_folder\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    )
    tail = "\nprint((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    command = [sys.executable, "-c", head + script + tail, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    *said, mb = done.stdout.strip().splitlines()
    return int(mb), "\n".join(said)


def test_a_line_of_a_gigabyte_is_refused_at_a_limit(tmp_path: Path) -> None:
    with open(tmp_path / "dump.jsonl", "wb") as stream:
        stream.write(b'{"prompt": "' + b"a" * 5000)
        stream.truncate(2**30)  # a hole in the file: zeros that take no space
    script = """
try:
    list(cd.read_rollouts(sys.argv[1], source="jsonl"))
except cd.errors.ReaderError as error:
    print(error)
"""
    mb, said = peak_mb(script, tmp_path / "dump.jsonl")
    assert "line 1 is longer than 256 MB" in said
    assert mb < 700


@pytest.mark.slow
def test_a_record_of_a_gigabyte_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with open(file, "wb") as stream:
        stream.write(b'{"step": 1, "values": {}}\n{"a": "')
        stream.truncate(2**30)
    with open(file, "ab") as stream:
        stream.write(b'"}\n{"step": 2, "values": {}}\n')
    script = """
import logging; logging.disable(logging.CRITICAL)
print([record.step for record in cd.run_folder.read_records(sys.argv[1])])
from collapsediag.report.tail import RecordTail
tail = RecordTail(sys.argv[1]); tail.poll()
print([record.step for record in tail.records])
"""
    mb, said = peak_mb(script, tmp_path)
    assert said == "[1, 2]\n[1, 2]"
    assert mb < 20 * MAX_LINE_BYTES / 2**20


def parquet(path: Path, n_rows: int, **columns: Any) -> Path:
    arrow, writer = import_or_skip("pyarrow"), import_or_skip("pyarrow.parquet")
    table = arrow.table({"step": [1] * n_rows, "prompt": ["q"] * n_rows, **columns})
    writer.write_table(table, path, compression="zstd", dictionary_pagesize_limit=2**30)
    return path


@pytest.mark.slow
def test_a_parquet_file_that_expands_is_refused(tmp_path: Path) -> None:
    """One text of 32 MB that 100 rows share: a file of a few kilobytes that stands for 3 GB."""
    arrow = import_or_skip("pyarrow")
    text = arrow.array(["a" * 2**25])
    indices = arrow.array([0] * 100, arrow.int32())
    file = parquet(tmp_path / "a.parquet", 100, completion=arrow.DictionaryArray.from_arrays(indices, text))
    assert file.stat().st_size < 20_000
    script = """
try:
    list(cd.read_rollouts(sys.argv[1]))
except cd.errors.ReaderError as error:
    print(error)
"""
    mb, said = peak_mb(script, file)
    assert "a.parquet expands to more than 1,024 MB" in said
    assert mb < 1000


@pytest.mark.slow
def test_a_parquet_row_of_endless_ids_is_refused(tmp_path: Path) -> None:
    arrow = import_or_skip("pyarrow")
    n = 60_000_000
    ids = arrow.ListArray.from_arrays(arrow.array([0, n], arrow.int32()), arrow.array(np.full(n, 5, dtype=np.int8)))
    file = parquet(tmp_path / "a.parquet", 1, completion=["a"], completion_ids=ids)
    with pytest.raises(ReaderError, match=r"'completion_ids.list.element' stands for 60,000,000 values in \d+ bytes"):
        list(read_rollouts(file))


@pytest.mark.slow
def test_gzip_that_unpacks_to_one_endless_line_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "dump.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(b'{"prompt": "')
        for _ in range(260):
            stream.write(b"a" * 2**20)
    with pytest.raises(ReaderError, match="longer than 256 MB"):
        list(read_rollouts(tmp_path / "dump.jsonl.gz", source="jsonl"))


@pytest.mark.slow
def test_a_matrix_file_that_expands_is_refused(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "m.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("logp_NP.npy", "w", force_zip64=True) as entry,
    ):
        for _ in range(1100):
            entry.write(bytes(2**20))
    assert (tmp_path / "m.npz").stat().st_size < 10 * 2**20
    with pytest.raises(MatrixError, match="unpacked it has 1100 MB, more than 1024"):
        LogLikelihoodMatrix.load(tmp_path / "m.npz")


def test_traces_of_another_make_are_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    good = {"namespace": "turn", "row": 0, "own": 0, "best": 1, "logp_P": [-1.0, None], "reward": None}
    for change in (
        {"own": 2},
        {"best": -1},
        {"row": True},
        {"logp_P": "ab"},
        {"reward": "1"},
        {"trace": 5},
        {"pmi": ["x"]},
        {"tokens": "ab"},
        {"namespace": None},
        {"logp_P": [10**400, 0]},
    ):
        lines = [json.dumps(good), json.dumps({**good, **change})]
        (tmp_path / "traces" / "000000001.jsonl").write_text("\n".join(lines))
        with pytest.raises(RunFolderError, match=r"line 2 is no trace|int too large"):
            read_traces(tmp_path, 1)


@pytest.mark.slow
def test_a_million_groups(tmp_path: Path) -> None:
    """Time and memory grow with the number of groups and no faster."""
    script = """
import time
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
for n in (100_000, 1_000_000):
    turn = Turn(context="q", output="a")
    batch = RolloutBatch(step=0, rollouts=tuple(Rollout(turns=(turn,), group=i, reward=float(i % 2)) for i in range(n)))
    start = time.process_time()
    cd.rollout_metrics(batch)
    print(time.process_time() - start)
"""
    mb, said = peak_mb(script)
    short, long = map(float, said.split())
    assert long < 20 * short
    assert mb < 4000


def test_numbers_that_no_axis_holds_are_named(tmp_path: Path) -> None:
    import_or_skip("matplotlib")
    lines = [{"step": step, "values": {"reward/mean": value}} for step, value in enumerate((1e308, -1e308))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "run.json").write_text('{"schema_version": 1}')
    from collapsediag.report import series_payload
    from collapsediag.report.picture import picture_png

    with pytest.raises(MetricError, match=r"reward/mean is 1e\+308 at step 0"):
        picture_png(series_payload(tmp_path))
