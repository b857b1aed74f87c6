"""The validity study's answers, from runs with planted behaviour and planted matrices."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from .conftest import import_or_skip

import_or_skip("torch")
import_or_skip("transformers")

from benchmarks.validity import answers, estimators  # noqa: E402
from benchmarks.validity.answers import PREFIX, Rate  # noqa: E402
from benchmarks.validity.outcomes import DEPENDENCE_CHECKS, Outcome  # noqa: E402
from collapsediag.demo import TrainingSettings  # noqa: E402
from collapsediag.metrics.from_matrix import matrix_metrics  # noqa: E402
from collapsediag.record import Record  # noqa: E402
from collapsediag.run_folder import RunStore  # noqa: E402
from collapsediag.testing import planted, random_policy  # noqa: E402

N = 12


def outcome(folder: Path, *, collapsed_from: int = N, lost_from: int = N) -> Outcome:
    """A run whose matrices collapse from one scored step on, and whose behaviour is lost from another."""
    store = RunStore(folder)
    records = []
    for i in range(N):
        matrix = planted("template" if i >= collapsed_from else "healthy", group_size=4, seed=i).matrix
        values = {PREFIX + k: v for k, v in matrix_metrics(matrix, n_resamples=100).items()}
        reading = 0.05 if i >= lost_from else 0.6
        values |= {"behaviour/reading": reading, "behaviour/success": reading, "reward/mean": 0.5}
        record = Record(step=3 * i, values=values, matrices={"first_turn": matrix})
        store.append(record)
        records.append(record)
    store.close()
    behaviour = {
        "success": np.full(N, 0.6),
        "reading": np.array([r.values["behaviour/reading"] for r in records]),
        "valid": np.ones(N),
        "distinct": np.ones(N),
    }
    steps = tuple(range(0, 3 * N, 3))
    return Outcome(folder.name, "grid", TrainingSettings(), folder, steps, behaviour, tuple(records))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Healthy twice; collapsed from the sixth step, lost from the ninth; lost and never collapsed; a false alarm."""
    out = tmp_path_factory.mktemp("study")
    return [
        outcome(out / "healthy"),
        outcome(out / "healthy-too"),
        outcome(out / "found", collapsed_from=5, lost_from=9),
        outcome(out / "missed", lost_from=6),
        outcome(out / "false", collapsed_from=8),
    ]


def test_alarms_are_counted_against_behaviour(runs: list[Outcome]) -> None:
    found = answers.alarmed(runs, answers.by_checks(DEPENDENCE_CHECKS))
    assert (found.detected, found.false_runs) == (Rate(k=1, n=2), Rate(k=1, n=3))
    # Known at the third collapsed step: 10 and 11 of the twelve, in one of three healthy runs.
    assert found.false_steps == Rate(k=2, n=3 * N)
    assert found.false_per_thousand == pytest.approx(1000 * 2 / 36)
    # Collapsed at steps 15, 18, 21, lost at 27.
    assert found.leads == (27 - 21,)
    assert runs[2].dated == 15
    assert answers.alarmed(runs, answers.by_checks(("format_loss",))).detected.k == 0


def test_a_bare_alarm_needs_three_in_a_row_below_its_share(runs: list[Outcome]) -> None:
    up = answers.by_ratio(PREFIX + "mi_seq_estimate", 0.5)
    assert list(up(runs[2])) == [False] * 7 + [True] * 5
    assert not any(up(runs[0]))
    ratio, best = answers.best_ratio(runs[:4], PREFIX + "mi_seq_estimate", (0.1, 0.5, 0.9))
    assert (best.detected.k, best.false_runs.k) == (1, 0)
    assert ratio in (0.1, 0.5)


def test_fewer_traces_are_the_first_of_the_first_prompts() -> None:
    matrix = planted("healthy", n_contexts=6, group_size=4, seed=1).matrix
    part = answers.part_of(matrix, 3, 2)
    assert part is not None
    rows = [0, 1, 4, 5, 8, 9]
    np.testing.assert_array_equal(part.logp_NP, matrix.logp_NP[rows][:, :3])
    assert part.own_N.tolist() == [0, 0, 1, 1, 2, 2]
    same = answers.part_of(matrix, 6, 4)
    assert same is not None
    assert matrix_metrics(same, intervals=False) == matrix_metrics(matrix, intervals=False)
    lonely = dataclasses.replace(matrix, length_N=np.where(matrix.own_N == 0, 3, 0))
    assert answers.part_of(lonely, 6, 4) is None


def test_judged_on_all_traces_is_judged_as_before(runs: list[Outcome]) -> None:
    assert answers.fewer_traces(runs[2], 8, 4) == list(answers.by_checks(DEPENDENCE_CHECKS)(runs[2]))
    assert not any(answers.fewer_traces(runs[0], 4, 2))


def test_correlations_are_of_the_grid_with_a_behaviour(runs: list[Outcome]) -> None:
    found = answers.correlations(runs, "behaviour/reading")
    assert {summary for _, summary in found} == {"mean", "last", "minimum", "slope"}
    assert (PREFIX + "mi_seq_estimate", "mean") in found


def test_batches_of_a_policy_estimate_what_its_prompts_can_show() -> None:
    """The mean over many steps at P of all 8 prompts is the enumerated truth; at fewer prompts it is less."""
    policy = random_policy(n_contexts=8, dependence=0.6, sharpness=1.5, length=3, seed=2)
    whole, few = (
        [matrix_metrics(m, intervals=False)["mi_seq_estimate"] for m in estimators.batches(policy, p, 8, 150)]
        for p in (8, 2)
    )
    error = np.std(whole) / np.sqrt(len(whole))
    assert np.mean(whole) == pytest.approx(policy.mutual_information(), abs=4 * error)
    assert np.mean(few) < policy.mutual_information() - 0.1
    assert max(few) <= np.log(2) + 1e-9


@pytest.mark.calibration
def test_intervals_of_four_prompts_cover() -> None:
    policy = random_policy(n_contexts=64, dependence=0.5, sharpness=1.5, length=3, seed=5)
    covered = estimators.coverage(policy, 4, 4, 150).share
    # Percentiles of a bootstrap over four groups cover about 0.8; 0.95 less 4 standard errors of 150 is 0.88.
    assert min(covered.values()) > 0.88


def test_the_page_is_written_with_its_plots(
    runs: list[Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_or_skip("matplotlib")
    from benchmarks.validity import page, study

    families = ("healthy", "grid", "template", "grid", "grid")
    named = [dataclasses.replace(one, family=family) for one, family in zip(runs, families, strict=True)]
    monkeypatch.setattr(study, "read_outcomes", lambda out: named)
    for name, few in (("biases", 3), ("coverages", 3)):
        whole = getattr(estimators, name)
        monkeypatch.setattr(estimators, name, lambda whole=whole, few=few: whole(few))
    monkeypatch.setattr(estimators, "stationary", lambda whole=estimators.stationary: whole(1, 6))
    file = tmp_path / "docs" / "validity.md"
    page.write(study.analyse(tmp_path), file)
    text = file.read_text(encoding="utf-8")
    for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (file.parent / link).read_text(encoding="utf-8").startswith("<?xml")
    for table in re.findall(r"(?m)(?:^\|.*\n)+", text + "\n"):
        assert len({line.count(" | ") for line in table.splitlines()}) == 1, table
    assert "| template | 1 | 0 | 0 | 1 | 21 (21 to 21) |" in text
    assert (
        "| template or low-entropy collapse | 1 of 2 [0.09, 0.91] | 1 of 3 [0.06, 0.79] | 55.6 | +6 (+6 to +6) |"
        in text
    )
