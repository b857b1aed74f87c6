"""The runs of the validity study: their settings, their trainer, their truth."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
import_or_skip("transformers")

from benchmarks.validity.behaviour import behaviour, read_behaviour  # noqa: E402
from benchmarks.validity.outcomes import KINDS, Outcome, halves  # noqa: E402
from benchmarks.validity.runs import FACTORS, N_GRID, SIGNALS, StudyRun, grid_runs, study_runs  # noqa: E402
from benchmarks.validity.training import train  # noqa: E402
from collapsediag.demo import DemoTraining, TrainingSettings, task  # noqa: E402
from collapsediag.run_folder import read_records  # noqa: E402

TINY = TrainingSettings(steps=3, n_prompts=4, group_size=4, warm_up_steps=5)


def weights(training: DemoTraining) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in training.policy.parameters()])


def test_each_level_of_each_factor_is_used_equally_often() -> None:
    runs = grid_runs()
    for name, levels in FACTORS.items():
        counts = Counter(getattr(run.settings, name) for run in runs)
        assert set(counts) == set(levels)
        assert max(counts.values()) - min(counts.values()) <= 1
    signals = Counter((run.settings.reward, run.settings.reward_noise) for run in runs)
    assert set(signals.values()) == {N_GRID // len(SIGNALS)}


def test_runs_have_names_of_their_own_and_any_beginning_is_a_fair_share() -> None:
    runs = study_runs()
    assert len({run.name for run in runs}) == len(runs) == 88
    assert Counter(run.family for run in runs[:20]) == {"healthy": 4, "template": 4, "grid": 8, "squeezed": 4}
    assert runs == study_runs()


def rewarded(settings: TrainingSettings, reward_PG: list[list[float]]) -> tuple[DemoTraining, torch.Tensor]:
    """A training whose next update sees these rewards, and the gradient that it leaves."""
    training = DemoTraining(settings)
    prompts = task.draw_prompts(np.random.default_rng(3), 4)[: len(reward_PG)]
    prompt = torch.tensor([p.ids for p in prompts]).repeat_interleave(settings.group_size, dim=0)
    output = torch.randint(len(task.WORDS), (len(prompt), 9), generator=torch.Generator().manual_seed(0))
    training._rewards = lambda *_: [(r, False) for group in reward_PG for r in group]  # type: ignore[method-assign]
    training._update(prompts, prompt, output)
    gradients = [p.grad.flatten() for p in training.policy.parameters() if p.grad is not None]
    return training, torch.cat(gradients) if gradients else torch.zeros(0)


def test_a_filtered_update_is_that_of_the_prompts_with_the_variance() -> None:
    settings = dataclasses.replace(TINY, entropy_bonus=0.3, filter_rho=0.9)
    signal = [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]
    _, filtered = rewarded(settings, [*signal, [0.5] * 4, [1.0] * 4])
    _, alone = rewarded(dataclasses.replace(settings, filter_rho=None), signal)
    _, whole = rewarded(dataclasses.replace(settings, filter_rho=None), [*signal, [0.5] * 4, [1.0] * 4])
    np.testing.assert_allclose(filtered.numpy(), alone.numpy(), atol=1e-6)
    # Not so without the filter: the entropy bonus acts on prompts without signal as well.
    assert float((whole - alone).abs().max()) > 1e-3


def test_a_filtered_update_without_any_variance_changes_nothing() -> None:
    settings = dataclasses.replace(TINY, entropy_bonus=0.3, filter_rho=0.9)
    before = weights(DemoTraining(settings))
    training, _ = rewarded(settings, [[1.0] * 4] * 4)
    assert torch.equal(weights(training), before)
    # The next step draws other noise all the same.
    assert training._updates == 1


def test_a_given_policy_and_skipped_batches_change_nothing() -> None:
    own = DemoTraining(TINY)
    every = dict(own.steps())
    start = DemoTraining(dataclasses.replace(TINY, steps=0)).policy
    given = DemoTraining(TINY, policy=start)
    some = dict(given.steps(every=2))
    assert list(every) == [0, 1, 2, 3]
    assert list(some) == [0, 2]
    for a, b in zip(every[2].rollouts, some[2].rollouts, strict=True):
        assert a.turns[0].output == b.turns[0].output
    assert torch.equal(weights(own), weights(given))


def test_a_run_is_trained_once_and_begun_anew_if_it_was_stopped(tmp_path: Path) -> None:
    run = StudyRun(name="tiny", family="grid", settings=TINY)
    train(run, tmp_path)
    folder = tmp_path / "tiny"
    assert [record.step for record in read_records(folder)] == [0, 3]
    steps, found = read_behaviour(folder)
    assert steps == [0, 3]
    written = (folder / "metrics.jsonl").read_bytes()
    train(run, tmp_path)
    assert (folder / "metrics.jsonl").read_bytes() == written
    (folder / "answers.npz").unlink()
    train(run, tmp_path)
    again = read_behaviour(folder)[1]
    assert {name: values.tolist() for name, values in again.items()} == {n: v.tolist() for n, v in found.items()}


def words(text: str) -> list[int]:
    return [task.IDS[word] for word in text.split()]


def test_behaviour_is_read_off_the_words() -> None:
    red, blue, gold = (task.COLOURS.index(colour) for colour in ("red", "blue", "gold"))
    shown = [(red, red, blue), (gold, gold, gold)]
    right = words(
        f"<think> so see red next find red also mark blue </think> <answer> {task.DOORS[red]} </answer> <eos>"
    )
    same = words("<think> so see red next find red also mark blue </think> <answer> up </answer>")
    found = behaviour(shown, [right, same])
    # The first names both of its colours and not the other's; the second none of its own and both of the other's.
    assert found == {"success": 0.5, "reading": 0.5 - 0.5, "valid": 0.5, "distinct": 0.5}
    assert behaviour(shown, [right, words("<think> so")])["reading"] == pytest.approx(0.5)
    own = words(
        f"<think> so see gold next find gold and mark gold </think> <answer> {task.DOORS[gold]} </answer> <eos>"
    )
    assert behaviour(shown, [right, own]) == {"success": 1.0, "reading": 1.0, "valid": 1.0, "distinct": 1.0}


def outcome(name: str = "a", family: str = "grid", **behaviour: list[float]) -> Outcome:
    n = max(map(len, behaviour.values()))
    whole = {"success": [0.6] * n, "reading": [0.6] * n, "valid": [1.0] * n, "distinct": [1.0] * n, **behaviour}
    arrays = {key: np.array(values) for key, values in whole.items()}
    return Outcome(name, family, TINY, Path(name), tuple(range(0, 3 * n, 3)), arrays, ())


GONE = [0.6, 0.6, 0.2, 0.1, 0.1, 0.1]


def test_what_is_lost_is_lost_for_good_and_dated() -> None:
    assert outcome(reading=GONE).lost_at("reading") == 6
    assert outcome(reading=[0.6, 0.1, 0.1, 0.1, 0.6, 0.6]).lost_at("reading") is None
    assert outcome(reading=[0.6, 0.6, 0.6, 0.6, 0.1, 0.1]).lost_at("reading") is None
    # Half of the start above chance: 0.125 + 0.475 / 2 = 0.3625.
    assert outcome(success=[0.6, 0.6, 0.36, 0.36, 0.36, 0.36]).lost_at("success") == 6
    assert outcome(success=[0.6, 0.6, 0.37, 0.37, 0.37, 0.37]).lost_at("success") is None


def test_kinds() -> None:
    few = [1.0, 1.0, 0.9, 0.1, 0.1, 0.1]
    found = [
        outcome(reading=[0.6, 0.4, 0.4, 0.6, 0.5, 0.6]).kind,
        outcome(reading=GONE).kind,
        outcome(reading=GONE, distinct=few).kind,
        outcome(valid=GONE, reading=GONE, success=GONE).kind,
        outcome(success=GONE).kind,
        outcome(success=[0.6, 0.4, 0.4, 0.4, 0.4, 0.6]).kind,
    ]
    assert tuple(found) == KINDS


def test_halves_are_every_other_run_of_each_family() -> None:
    runs = [outcome(f"{family}-{i}", family, valid=[1.0]) for i in range(3) for family in ("grid", "healthy")]
    first, second = halves(runs)
    assert [one.name for one in first] == ["grid-0", "grid-2", "healthy-0", "healthy-2"]
    assert [one.name for one in second] == ["grid-1", "healthy-1"]
