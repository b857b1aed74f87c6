"""`collapsediag compare`: rank correlations of diagnostics with an outcome across runs."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from collapsediag.cli import main
from collapsediag.errors import MetricError
from collapsediag.findings.across_runs import Correlation, compare_runs, summarise
from collapsediag.plain_text import number
from collapsediag.record import Record
from collapsediag.run_folder import RunStore

Z = "collapse_first_turn_sample/mi_zscore_ema"


def runs(n: int = 12, *, seed: int = 0, n_steps: int = 8) -> dict[str, list[Record]]:
    """Success follows the MI z-score with noise; entropy is unrelated; length falls faster in better runs."""
    rng = np.random.default_rng(seed)
    found = {}
    for r in range(n):
        quality = rng.uniform(0, 1)
        found[f"run{r:02d}"] = [
            Record(
                step=5 * i,
                values={
                    Z: quality + rng.normal(0, 0.1),
                    f"{Z}/ci_low": quality,
                    "entropy/token_mean": rng.uniform(0, 2),
                    "length/mean": 100 - quality * i + rng.normal(0, 0.01),
                    "pass@1": min(1.0, max(0.0, quality + rng.normal(0, 0.05))),
                    "format/valid_fraction": 1.0,
                    "n_rollouts": 64.0 + quality,
                    "timing_s/collapse_step": quality,
                },
            )
            for i in range(n_steps)
        ]
    return found


def row(correlations: tuple[Correlation, ...], metric: str, summary: str) -> Correlation:
    (found,) = [c for c in correlations if (c.metric, c.summary) == (metric, summary)]
    return found


def test_every_summary_against_scipy() -> None:
    data = runs()
    comparison = compare_runs(data, outcome="pass@1")
    outcome = [np.mean([r.values["pass@1"] for r in records][-5:]) for records in data.values()]
    np.testing.assert_allclose(list(comparison.outcomes.values()), outcome)
    by_hand = {
        "mean": np.mean,
        "last": lambda v: v[-1],
        "minimum": np.min,
        "slope": lambda v: np.polyfit(5 * np.arange(len(v)), v, 1)[0],
    }
    for metric in (Z, "entropy/token_mean", "length/mean"):
        for summary, function in by_hand.items():
            x = [function([r.values[metric] for r in records]) for records in data.values()]
            found = row(comparison.correlations, metric, summary)
            np.testing.assert_allclose(found.rho, stats.spearmanr(x, outcome).statistic, atol=1e-12)
            assert found.n == 12
            assert found.low <= found.rho <= found.high
    assert row(comparison.correlations, Z, "mean").excludes_zero
    assert row(comparison.correlations, "length/mean", "slope").rho < -0.9
    assert row(comparison.correlations, "length/mean", "slope").excludes_zero
    assert comparison.correlations[0].metric in (Z, "length/mean")


def test_counts_times_intervals_and_the_outcome_itself_are_no_diagnostics() -> None:
    comparison = compare_runs(runs(), outcome="pass@1")
    assert {c.metric for c in comparison.correlations} == {Z, "entropy/token_mean", "length/mean"}
    assert set(comparison.left_out) == {f"format/valid_fraction ({s})" for s in ("mean", "last", "minimum", "slope")}
    assert "constant" in comparison.left_out["format/valid_fraction (mean)"]


def test_slope_is_per_step_and_needs_two() -> None:
    assert summarise([0, 10, 40], [1.0, 2.0, 5.0], "slope") == pytest.approx(0.1)
    assert summarise([0], [1.0], "slope") is None


def test_values_at_the_end_of_floats_against_exact_arithmetic() -> None:
    huge = sys.float_info.max
    for values in ([huge] * 3, [huge, -huge, huge / 2, 1e300], [1e308, 1.2e308, 1.7e308], [5e-324, 1e-323, 0.0]):
        exact = [Fraction(value) for value in values]
        assert summarise([0, 1, 2, 3], values, "mean") == pytest.approx(float(sum(exact) / len(exact)), rel=1e-15)
        steps = [1000 * i for i in range(len(values))]
        centred = [step - Fraction(sum(steps), len(steps)) for step in steps]
        slope = sum(c * v for c, v in zip(centred, exact, strict=True)) / sum(c * c for c in centred)
        assert summarise(steps, values, "slope") == pytest.approx(float(slope), rel=1e-14, abs=5e-324)
    assert summarise([0, 1], [-huge, huge], "slope") is None
    assert summarise([0, 1, 2], [0.1] * 3, "mean") == 0.1


def test_huge_values_are_ranked_and_shown_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for r in range(5):
        with RunStore(tmp_path / str(r)) as store:
            for i in range(6):
                values = {"reward/mean": (r + 1) * 3.4e307, "length/mean": 1.7e308 - (r + i) * 1e306}
                store.append(Record(step=i, values=values))
        folders.append(str(tmp_path / str(r)))
    assert main(["compare", *folders, "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    data = json.loads(told.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert sorted(data["outcomes"].values()) == pytest.approx([(r + 1) * 3.4e307 for r in range(5)], rel=1e-15)
    rhos = {(c["metric"], c["summary"]): c["rho"] for c in data["correlations"]}
    assert rhos[("length/mean", "mean")] == pytest.approx(-1)
    assert main(["compare", *folders]) == 0
    assert "1.7e+308" in capsys.readouterr().out


def test_few_runs_are_said_to_be_few() -> None:
    few = compare_runs(runs(4))
    assert few.warning.startswith("4 runs are too few: below 8 ")
    assert "12 correlations were computed" in few.warning
    assert "about 1 would by chance" in few.warning
    assert not compare_runs(runs(12)).warning.startswith("12 runs are too few")


def test_each_row_counts_its_own_runs() -> None:
    data = runs()
    for name in list(data)[:4]:
        data[name] = [Record(step=r.step, values={k: v for k, v in r.values.items() if k != Z}) for r in data[name]]
    comparison = compare_runs(data, outcome="pass@1")
    assert row(comparison.correlations, Z, "mean").n == 8
    assert row(comparison.correlations, "length/mean", "mean").n == 12


def test_runs_without_the_outcome_are_left_out_and_named() -> None:
    data = runs()
    data["other"] = [Record(step=0, values={"reward/mean": 1.0})]
    comparison = compare_runs(data, outcome="pass@1")
    assert (comparison.n_runs, comparison.runs_left_out) == (12, ("other",))
    with pytest.raises(MetricError, match=r"1 of 13 runs hold 'reward/mean'.*The runs hold: .*entropy/token_mean"):
        compare_runs(data)  # pass@1 is not in all runs, so the mean reward would be the outcome


def test_failed_steps_and_repeated_steps() -> None:
    data = runs(4)
    name = next(iter(data))
    noisy = [
        *(Record(step=r.step, values={**r.values, Z: 99.0}) for r in data[name]),
        *data[name],
        Record(step=1, values={"collapse/failures": 1.0}, status="failed", reason="x"),
    ]
    assert compare_runs({**data, name: noisy}) == compare_runs(data)


def written(folder: Path, n: int) -> list[str]:
    for name, records in runs(n).items():
        with RunStore(folder / name) as store:
            for record in records:
                store.append(record)
    return [str(folder / name) for name in runs(n)]


def test_the_command_prints_a_table_with_intervals_and_its_doubts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["compare", *written(tmp_path, 6), "--top", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    first = compare_runs(runs(6), outcome="pass@1").correlations[0]
    assert f"{first.rho:+.2f} [{first.low:+.2f}, {first.high:+.2f}] 6" in shown
    assert "pass@1, 6 runs" in shown
    assert "10 more rows" in shown
    # What takes the rows' worth away is read before them; what only tempers it, after.
    assert shown.index("6 runs are too few") < shown.index("pass@1, 6 runs")
    assert main(["compare", *written(tmp_path / "more", 9), "--top", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.index("would by chance") > shown.index("10 more rows")


def test_two_runs_are_shown_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folders = written(tmp_path, 2)
    with RunStore(folders[0], resume=True) as store:
        store.append(Record(step=99, values={"length/mean": 12345.0}))
    assert main(["compare", *folders]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    first, second = (records[-1].values for records in runs(2).values())
    assert ["length/mean", "12345", number(second["length/mean"])] in lines
    assert ["pass@1", number(first["pass@1"]), number(second["pass@1"])] in lines
    assert ["diagnostic", *folders] in lines
    assert f"collapsediag report {folders[0]} {folders[1]} -o report.html" in shown
    assert "left out" not in shown
    assert not [line for line in shown.splitlines() if line.endswith(" ")]


def test_no_name_is_cut_away_where_there_is_little_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    folders = written(tmp_path / ("long" * 20), 3)
    assert main(["compare", *folders]) == 0
    shown = capsys.readouterr().out
    first_column = "".join(line.split()[0] for line in shown.splitlines() if line.strip())
    assert all(folder in first_column for folder in folders)
    assert all(c.metric in first_column for c in compare_runs(runs(3)).correlations)
    assert "\u2026" not in shown


def test_the_command_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = written(tmp_path, 9)
    assert main(["compare", *folders, "--outcome", "pass@1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["n_runs"], data["outcome"], len(data["correlations"])) == (9, "pass@1", 12)
    assert set(data["outcomes"]) == set(folders)


@pytest.mark.parametrize(
    ("extra", "words"),
    [([], "one run was given"), (["--top", "-1"], "--top -1"), (["elsewhere"], "is not a run folder")],
)
def test_wrong_input_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], words: str
) -> None:
    (folder,) = written(tmp_path, 1)
    assert main(["compare", folder, folder + "/", *extra]) == 2
    assert words in capsys.readouterr().err


def test_an_outcome_nobody_holds_lists_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *written(tmp_path, 3), "--outcome", "sucess"]) == 2
    assert "0 of 3 runs hold 'sucess'" in capsys.readouterr().err


def test_of_many_names_the_nearest_are_said() -> None:
    values = {"reward/mean": 1.0} | {f"tools/of_{letter}": 1.0 for letter in "abcdefgh"}
    data = {name: [Record(step=0, values=values)] for name in "ab"}
    with pytest.raises(MetricError, match=r"Nearest to it: reward/mean\. All 9 names are in .* of RUN/metrics.jsonl"):
        compare_runs(data, outcome="rewrad/mean")
    with pytest.raises(MetricError, match=r"None of their names is near to it\. All 9 names"):
        compare_runs(data, outcome="xyz")
