"""The TRL callback in a job of two gloo processes: the numbers of one process, and no rank left waiting."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
import_or_skip("trl")
import_or_skip("datasets")

from collapsediag.monitor import Monitor  # noqa: E402
from collapsediag.scoring.hf import HFScorer  # noqa: E402

from . import trl_tiny as tiny  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
TIME_LIMIT_S = 300
SEQUENCE_TOLERANCE = 1e-4  # nats; sums of about 40
FAULTS = {
    "scoring fails on rank 1": "rank 1 of 2 failed: RuntimeError: rank 1 on purpose",
    "scoring fails on rank 0": "rank 0 of 2 failed: RuntimeError: rank 0 on purpose",
    "rollouts fail on rank 1": "rank 1 of 2 has no rollouts: RuntimeError: rank 1 on purpose",
    "measuring fails on rank 0": "RuntimeError: rank 0 on purpose",
}


def two_processes(out: Path, *scenarios: str) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("trl_two_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(script), str(out), *scenarios],
        capture_output=True, text=True, timeout=TIME_LIMIT_S, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One pair of processes for all scenarios: starting them is what costs."""
    out = tmp_path_factory.mktemp("job")
    return out, two_processes(out, "without", "observed", *FAULTS)


def test_both_ranks_train_bit_identically_with_the_callback(job: tuple[Path, list[dict[str, Any]]]) -> None:
    n_evaluations = len(job[1][0]["observed"]["evaluations"])
    for rank in job[1]:
        assert rank["observed"]["fingerprint"] == rank["without"]["fingerprint"]
        assert len(rank["observed"]["fingerprint"]["completions"]) == 3 + 2 * n_evaluations


def test_two_processes_measure_what_one_measures(job: tuple[Path, list[dict[str, Any]]]) -> None:
    out, ranks = job
    batch = assert_first_record_is_that_of_one_process(out / "observed.pickle")
    assert len(batch) == 24
    assert ranks[0]["observed"]["group_sizes"] == {str(g): 4 for g in range(6)}


def assert_first_record_is_that_of_one_process(file: Path) -> Any:
    """Score the rollouts of the first step again, here and alone; returns them."""
    with open(file, "rb") as stream:
        batch, record = pickle.load(stream)
    # The weights of the first step are those that the run began with.
    model = tiny.gpt2(tiny.tokenizer(), dropout=0.1)
    alone = Monitor(HFScorer(model), every=1, reasoning="completion", tokenizer=tiny.tokenizer()).observe(0, batch)
    ours, theirs = alone.matrices["first_turn"], record.matrices["first_turn"]
    assert ours.n_contexts >= 3
    np.testing.assert_allclose(theirs.logp_NP, ours.logp_NP, atol=SEQUENCE_TOLERANCE, rtol=0)
    np.testing.assert_array_equal(theirs.own_N, ours.own_N)
    assert set(record.values) == set(alone.values)
    for name, value in alone.values.items():
        if not name.startswith("timing_s/"):
            np.testing.assert_allclose(record.values[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    return batch


def test_every_rank_has_the_numbers_and_the_first_alone_writes(job: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (rank["observed"] for rank in job[1])
    assert first["statuses"] == [[0, "ok", None], [1, "ok", None], [2, "ok", None]]
    assert second["statuses"] == second["evaluations"] == []
    assert first["logged"] == second["logged"]
    assert any("collapse_first_turn_sample/retrieval_accuracy" in row for row in second["logged"])
    assert first["state"] == second["state"]
    # Newer releases of transformers evaluate once more at the end.
    assert [(step, status) for step, status, _ in first["evaluations"]] in ([(2, "ok")], [(2, "ok"), (3, "ok")])


@pytest.mark.fault(
    "one rank of several fails",
    "the step is recorded as failed on all; nobody hangs, training stays bit-identical",
)
@pytest.mark.faults
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_on_one_rank_neither_hangs_nor_kills(job: tuple[Path, list[dict[str, Any]]], fault: str) -> None:
    first, second = (rank[fault] for rank in job[1])
    assert [status for _, status, _ in first["statuses"]] == ["ok", "failed", "ok"]
    assert FAULTS[fault] in first["statuses"][1][2]
    for rank in job[1]:
        assert rank[fault]["fingerprint"] == rank["without"]["fingerprint"]
    assert first["state"] == second["state"]
    assert first["state"]["train"]["failures"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_sharded_models_train_bit_identically(tmp_path: Path, sharding: str) -> None:
    """Every forward pass is a collective of both ranks."""
    if sharding == "zero3":
        pytest.importorskip("deepspeed")  # optional also in the full run: no extra of ours brings it
    ranks = two_processes(tmp_path, sharding, "without")
    for rank in ranks:
        assert sharding == "zero3" or rank[sharding]["model"].startswith("FSDP")
        assert rank[sharding]["state"]["train"]["failures"] == 0
        assert rank[sharding]["fingerprint"] == rank["without"]["fingerprint"]
    assert [s for _, s, _ in ranks[0][sharding]["statuses"]] == ["ok"] * 3
    assert any("collapse_first_turn_sample/n_traces" in v for v in ranks[0][sharding]["values"])
    assert_first_record_is_that_of_one_process(tmp_path / "observed.pickle")
