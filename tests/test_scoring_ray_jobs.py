"""Ray jobs: order, one model per worker, failures in words, workers that die, and jobs that go on after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.cli import main
from collapsediag.errors import MissingExtraError, ScoringError, SettingsError
from collapsediag.pairs import ScoringPairs
from collapsediag.run_folder import read_records
from collapsediag.scoring.function import FunctionScorer
from collapsediag.scoring.ray_jobs import KeepingScorer, KeptScorer, ordered_map

if os.environ.get("COLLAPSEDIAG_REQUIRE_ALL") != "1":
    pytest.importorskip("ray")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    # Ray leaves its processes' pipes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One local cluster for all tests: starting it is what costs."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


def test_results_come_in_order_and_models_are_loaded_once_a_worker(tmp_path: Path) -> None:
    def make_worker() -> Any:
        (tmp_path / f"loaded-{os.getpid()}").write_text("")

        def work(item: int) -> tuple[int, int]:
            import time

            time.sleep(0.3 if item % 2 == 0 else 0.0)  # the even ones are overtaken
            return item * item, os.getpid()

        return work

    results = list(ordered_map(make_worker, range(8), workers=2))
    assert [square for square, _ in results] == [n * n for n in range(8)]
    processes = {pid for _, pid in results}
    assert len(processes) == 2
    assert {f"loaded-{pid}" for pid in processes} == {path.name for path in tmp_path.iterdir()}
    assert os.getpid() not in processes


def test_items_are_taken_no_further_ahead_than_asked() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    for result in ordered_map(lambda: lambda item: item, items(), workers=1, ahead=3):
        assert len(taken) <= result + 1 + 3


def test_a_failing_step_says_why() -> None:
    def make_worker() -> Any:
        def work(item: int) -> int:
            if item == 2:
                raise ScoringError("context 3 is empty")
            return item

        return work

    results = ordered_map(make_worker, range(5), workers=1)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ScoringError, match=r"a Ray worker failed: ScoringError: context 3 is empty"):
        next(results)


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    def make_worker() -> Any:
        def work(item: int) -> int:
            marker = tmp_path / f"died-{item}"
            if item == 1 and not marker.exists():
                marker.write_text("")
                os._exit(1)
            return item

        return work

    assert list(ordered_map(make_worker, range(4), workers=1)) == [0, 1, 2, 3]
    assert (tmp_path / "died-1").exists()


def test_a_worker_that_always_dies_ends_the_job() -> None:
    def make_worker() -> Any:
        return lambda item: os._exit(1)

    with pytest.raises(ScoringError, match="a Ray worker died 3 times"):
        list(ordered_map(make_worker, range(2), workers=1))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(SettingsError, match="workers=0"):
        list(ordered_map(lambda: lambda item: item, [1], workers=0))


def test_ray_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises((MissingExtraError, ModuleNotFoundError), match="ray"):
        next(ordered_map(lambda: lambda item: item, [1]))


def some_pairs(offset: int = 0) -> ScoringPairs:
    zero = np.zeros(2, dtype=np.int64)
    ids = np.array([3 + offset]), np.array([4, 5])
    return ScoringPairs(
        contexts=ids, traces=ids, own_N=np.array([0, 1]), group_N=np.array([0, 1]), multiplicity_P=np.array([1, 1]),
        rollout_N=zero, turn_N=zero,
    )  # fmt: skip


def test_the_driver_gets_the_matrix_of_its_own_pairs_or_an_error() -> None:
    keeping = KeepingScorer(FunctionScorer(lambda batch: [-float(len(c + t)) for c, t in batch]))
    matrix = keeping.score(some_pairs())
    kept = KeptScorer()
    kept.matrices = keeping.take()
    assert keeping.take() == {}
    np.testing.assert_array_equal(kept.score(some_pairs()).logp_NP, matrix.logp_NP)
    with pytest.raises(ScoringError, match="other pairs than the worker"):
        kept.score(some_pairs(1))


# --- the command ----------------------------------------------------------------------------------------------------


def write_policy(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_rollouts(path: Path, steps: range) -> None:
    lines = []
    for step in steps:
        rng = np.random.default_rng(step)
        for group in range(3):
            prompt = [1, 2, *rng.integers(3, 97, 4 + group).tolist()]
            for _ in range(2):
                completion = rng.integers(3, 97, 9).tolist()
                row = {"step": step, "group": group, "prompt_ids": prompt, "completion_ids": completion}
                lines.append(json.dumps({**row, "reward": float(rng.integers(0, 2))}))
    path.write_text("\n".join(lines) + "\n")


def values_by_step(run: Path) -> dict[int, dict[str, float]]:
    records = {}
    for record in read_records(run):
        timings = [name for name in record.values if name.startswith("timing_s/")]
        records[record.step] = {name: value for name, value in record.values.items() if name not in timings}
    return records


@pytest.mark.parametrize("options", [[], ["--budget", "1"]], ids=["whole", "budget"])
def test_the_command_gives_the_same_records_and_goes_on_where_it_was_killed(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policy(tmp_path / "policy")
    write_rollouts(tmp_path / "two.jsonl", range(1, 3))
    write_rollouts(tmp_path / "four.jsonl", range(1, 5))
    common = ["--model", str(tmp_path / "policy"), "--device", "cpu", "--reasoning", "completion", *options]

    def score(rollouts: str, out: str, *more: str) -> None:
        assert main(["score", str(tmp_path / rollouts), "--out", str(tmp_path / out), *common, *more]) == 0

    score("four.jsonl", "plain")
    score("two.jsonl", "ray", "--ray", "--ray-workers", "2")
    with open(tmp_path / "ray" / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 3, "stat')  # what a killed job leaves behind
    score("four.jsonl", "ray", "--ray", "--ray-workers", "2", "--resume")
    assert "2 steps already recorded, not redone" in capsys.readouterr().err
    plain, ray = values_by_step(tmp_path / "plain"), values_by_step(tmp_path / "ray")
    assert list(ray) == [1, 2, 3, 4]
    for step, expected in plain.items():
        assert ray[step].keys() == expected.keys()
        assert any("mi_zscore_ema" in name for name in expected)
        for name, value in expected.items():
            np.testing.assert_allclose(ray[step][name], value, rtol=1e-4, atol=1e-6, err_msg=f"step {step}: {name}")
    matrices = sorted(path.name for path in (tmp_path / "plain" / "matrices").iterdir())
    assert sorted(path.name for path in (tmp_path / "ray" / "matrices").iterdir()) == matrices
