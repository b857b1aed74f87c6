"""Real veRL engines on a CPU: the scorer against a plain forward, and training bit for bit. `.ci/verl` runs these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import import_or_skip

pytestmark = pytest.mark.verl
HERE = Path(__file__).parent / "verl_cpu"
TOLERANCE = 1e-5

REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding=True"
COLDER = "actor_rollout_ref.rollout.temperature=0.7"
LORA = "actor_rollout_ref.model.lora_rank=4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_or_skip("verl")
    sys.path.insert(0, str(HERE))
    import tiny_verl

    made = tmp_path_factory.mktemp("verl")
    tiny_verl.make(made)
    return made


def check(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    import tiny_verl

    command = [sys.executable, str(HERE / script), str(folder), *arguments]
    done = subprocess.run(
        command, env=tiny_verl.environment(folder), capture_output=True, text=True, timeout=900, check=False
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == 1, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(results[0].removeprefix("RESULT "))
    return found


@pytest.mark.parametrize(
    "arguments",
    [("fsdp2",), ("fsdp",), ("fsdp2", REMOVE_PADDING), ("fsdp2", LORA), ("fsdp", LORA)],
    ids=["fsdp2", "fsdp1", "remove-padding", "lora-fsdp2", "lora-fsdp1"],
)
def test_scores_are_those_of_a_plain_forward(folder: Path, arguments: tuple[str, ...]) -> None:
    found = check(folder, "engine_checks.py", "agreement", *arguments)
    differences = {name: value for name, value in found.items() if name.startswith("T=")}
    assert len(differences) == 4
    assert max(differences.values()) <= TOLERANCE, found
    if LORA in arguments:
        assert found["moved by the adapter"] > 0.1  # the adapter that trains is the one that scores


@pytest.mark.parametrize(
    "arguments", [("fsdp2",), ("fsdp",), ("fsdp2", COLDER)], ids=["fsdp2", "fsdp1", "temperature-0.7"]
)
def test_three_updates_are_bit_identical(folder: Path, arguments: tuple[str, ...]) -> None:
    found = check(folder, "engine_checks.py", "bitwise", *arguments)
    off = found["off"]
    assert off["calls"] == 3
    for way in ("on", "inside"):  # rows through the trainer's own pass, prompts shared inside the worker
        on = found[way]
        assert on["digest"] == off["digest"], way
        assert on["grad_norm"] == off["grad_norm"]
        assert on["untouched"]
        assert on["failed"] == []
        assert on["calls"] > 3  # it did measure
        assert len(on["own"]) == 3
        assert max(on["own"]) <= TOLERANCE
    assert found["inside"]["mi"] == pytest.approx(found["on"]["mi"], abs=1e-4)


def test_a_failure_in_any_stage_is_counted_and_named_and_training_goes_on(folder: Path) -> None:
    found = check(folder, "engine_checks.py", "faults", "fsdp2")
    assert len(found["named"]) == 9
    assert all(count and count >= 1 for count in found["named"].values()), found
    assert found["calls of an invalid plan"] == 0
    assert found["on"] == found["off"]  # the same parameters and moments as without diagnostics


def test_a_run_that_is_resumed_goes_on_in_its_folder_as_if_never_stopped(folder: Path) -> None:
    found = check(folder, "engine_checks.py", "resume", "fsdp2")
    assert len(found["whole"]) == 3
    assert found["whole"] == found["stopped"]
    assert "holds a run already, and trainer.resume_mode=disable begins a new one" in found["refused"]


def test_what_cannot_be_scored_is_refused_with_its_reason_and_the_rest_is_measured(folder: Path) -> None:
    found = check(folder, "engine_checks.py", "refusals", "fsdp2")
    for case in ("images", "router_replay", "switched_off"):
        told = found[case]
        assert told["refused"] == 1.0, case
        assert told["reward"] is not None
        assert told["scored"] == []
        assert told["calls"] == 0
        assert told["detached"]
    assert found["log restored"]


def test_two_ranks_with_an_odd_number_of_pairs(folder: Path) -> None:
    found = check(folder, "rank_checks.py")
    assert found["ranks"] == 2
    assert found["pairs"] == 9
    assert found["largest difference"] <= TOLERANCE
    # A row too long for a micro-batch never reaches the workers, and they go on as before.
    assert "nothing was sent" in found["refused"]
    assert found["after it"] <= TOLERANCE
    # From inside, and after a failure there that every rank shares.
    assert "temperature is -1.0" in found["failed inside"]
    assert found["inside"] <= 1e-4  # of whole traces
    assert found["after all"] <= TOLERANCE
