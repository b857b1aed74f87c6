"""veRL's own training command on a CPU, unmodified, through each of the front doors. `.ci/verl` runs these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import collapsediag as cd

from .conftest import import_or_skip

pytestmark = pytest.mark.verl
HERE = Path(__file__).parent / "verl_cpu"
PREFIX = "collapse_first_turn_sample/"
PLUGIN = "collapsediag.integrations.verl.plugin"
NO_ENTRY_POINTS = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
# Clocks, and what depends on how many processes there are.
CLOCKS = ("timing", "perf/", "global_seqlen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_or_skip("verl")
    sys.path.insert(0, str(HERE))
    import tiny_verl

    made = tmp_path_factory.mktemp("verl")
    tiny_verl.make(made)
    return made


def run(folder: Path, name: str, *overrides: str, **settings: Any) -> tuple[Path, list[dict[str, Any]]]:
    """(output folder, the trainer's own records) of one run that must end well."""
    import tiny_verl

    out = folder / name
    section = [f"+collapsediag.{s}" for s in ("every=1", "reasoning=completion", "dump=true", f"out={out / 'run'}")]
    done = tiny_verl.train(folder, out, *section, *overrides, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return out, [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def front(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """`python -m`, the trainer of 0.9."""
    return run(folder, "front", main="collapsediag.integrations.verl", variables=NO_ENTRY_POINTS)


@pytest.fixture(scope="module")
def before(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The variable, the trainer before that of 0.9, and scoring inside the workers."""
    more = ("trainer.use_v1=False", "+collapsediag.share_prefixes=true")
    return run(folder, "before", *more, modules=(PLUGIN,), variables=NO_ENTRY_POINTS)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """`python -m` on two ranks, with groups that do not divide: the trainer adds padding rows."""
    more = ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "data.train_batch_size=5")
    more += ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",)
    return run(folder, "two", *more, main="collapsediag.integrations.verl", ranks=2, variables=NO_ENTRY_POINTS)


def values(record: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = record["data"]
    return found


def check_steps(out: Path, records: list[dict[str, Any]], rollouts: int = 16) -> None:
    kept = cd.read_records(out / "run")
    assert [record["step"] for record in records] == [record.step for record in kept] == [1, 2]
    for record, ours in zip(records, kept, strict=True):
        line = values(record)
        assert line["training/global_step"] == record["step"]
        assert not [name for name in line if "failed" in name or "failures" in name]
        assert 0 <= line[f"{PREFIX}retrieval_accuracy"] <= 1
        # veRL's own numbers of the same rows.
        assert line["collapse/reward/mean"] == pytest.approx(line["critic/score/mean"], rel=1e-5)
        assert ours.values["length/mean"] == pytest.approx(line["response_length/mean"], rel=1e-6)
        assert ours.values["n_rollouts"] == rollouts
        assert {name.split("/")[1] for name in ours.values if name.startswith("env/")} == {"toy%2F0", "toy%2F1"}
        assert line["collapse/own_logp_difference"] <= 1e-5
        assert line["timing_s/collapsediag"] > 0


def test_the_numbers_are_in_the_trainers_own_record(front: Any) -> None:
    check_steps(*front)


def test_both_trainers_and_both_ways_to_score_give_the_same_numbers(front: Any, before: Any) -> None:
    check_steps(*before)
    for ours, theirs in zip(front[1], before[1], strict=True):
        names = {n for n in values(theirs) if n.startswith("collapse") and not any(c in n for c in CLOCKS)}
        assert len(names) > 15
        new = {n for n in values(ours) if n.startswith("collapse")} - names
        assert all(n.startswith("collapse/entropy/") for n in new)  # the trainer before drops exact entropies
        for name in names - {"collapse/own_logp_difference"}:
            assert values(ours)[name] == pytest.approx(values(theirs)[name], abs=1e-4), name


def test_padding_rows_are_no_rollouts(two_ranks: Any) -> None:
    out, records = two_ranks
    check_steps(out, records, rollouts=20)
    assert all(record.dropped["padding_row"] > 0 for record in cd.read_records(out / "run"))
    rows = [json.loads(line) for line in (out / "run" / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 20


def test_an_asynchronous_trainer_is_measured_once_a_step_before_its_first_update(folder: Path) -> None:
    mode = ("trainer.v1.trainer_mode=colocate_async", "++trainer.v1.colocate_async.parameter_sync_step=2")
    small = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    main = "collapsediag.integrations.verl"
    out, records = run(folder, "async", *mode, small, main=main, variables=NO_ENTRY_POINTS)
    assert [record["step"] for record in records] == [1, 2]
    first, second = cd.read_records(out / "run")
    for record, ours in zip(records, (first, second), strict=True):
        assert values(record)["collapse/own_logp_difference"] <= 1e-5  # the second update's policy would be off
        assert ours.values["n_rollouts"] == 8  # of 16
        assert "measured on the first of the 2 batches of this step" in ours.notes
    assert "8 of 8 rollouts were written by weights up to 1 steps older than the scorer's" in second.notes


def test_the_dump_scored_offline_gives_the_live_numbers(front: Any, folder: Path) -> None:
    out, _ = front
    live = cd.read_records(out / "run")[0]
    dumped = out / "run" / "rollouts" / "1.jsonl"  # the policy of step 1 is the one on disk
    offline = out / "offline"
    command = ["score", str(dumped), "--model", str(folder / "policy"), "--out", str(offline)]
    done = subprocess.run(
        [sys.executable, "-m", "collapsediag", *command, "--reasoning", "completion"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (again,) = cd.read_records(offline)
    names = [name for name in live.values if not any(clock in name for clock in CLOCKS)]
    assert len(names) > 50
    for name in names:
        assert again.values[name] == pytest.approx(live.values[name], abs=1e-4), name


def test_a_wrong_setting_ends_the_command_before_ray_starts(folder: Path) -> None:
    import tiny_verl

    done = tiny_verl.train(folder, folder / "wrong", "+collapsediag.evry=5", main="collapsediag.integrations.verl")
    assert done.returncode == 1
    assert "error: collapsediag.evry is no setting; did you mean every?" in done.stderr
    assert "ray init kwargs" not in done.stdout


def test_importing_verl_loads_nothing_but_the_waiting_hooks(folder: Path) -> None:
    import tiny_verl

    script = "import sys, verl\nprint(sorted(n for n in sys.modules if n.startswith('collapsediag')))"
    found = []
    for module, entry_points in (("", "none"), (PLUGIN, "none"), ("", "auto")):
        variables = tiny_verl.environment(folder)
        variables |= {"VERL_USE_EXTERNAL_MODULES": module, "VERL_USE_EXTERNAL_PLUGINS": entry_points}
        done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
        found.append(done.stdout.splitlines()[-1])
    names = ["", ".integrations", ".integrations.verl", ".integrations.verl.plugin"]
    ours = str([f"collapsediag{name}" for name in names])
    assert found == ["[]", ours, ours]
