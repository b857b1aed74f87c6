"""What the page shows, as JSON values: every number against the run folder it came from."""

from __future__ import annotations

import base64
import json
import math
import zlib
from pathlib import Path

import numpy as np
import pytest

from collapsediag.errors import RunFolderError
from collapsediag.findings import judge
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.registry import find
from collapsediag.record import Record, TraceSample
from collapsediag.report import scored_payload, series_payload
from collapsediag.report.charts import CHARTS, DRAW
from collapsediag.report.live import LiveRun
from collapsediag.report.payload import MAX_CHARACTERS, MAX_ROWS
from collapsediag.run_folder import RunStore, read_matrix, read_records
from collapsediag.run_writer import writer_of

from .report_runs import write_noise, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("payload") / "run a", environments=["maze", "shop"])


def store_one(folder: Path, matrix: LogLikelihoodMatrix, traces: tuple[TraceSample, ...] = ()) -> Path:
    with RunStore(folder) as store:
        store.append(Record(step=3, values={"reward/mean": 1.0}, matrices={"turn": matrix}, traces=traces))
    return folder


def sample(**changes: object) -> TraceSample:
    fields: dict[str, object] = {
        "namespace": "turn", "row": 0, "own": 0, "best": 0, "group": "g", "length": 1, "logp_P": (-1.0, -2.0),
    }  # fmt: skip
    return TraceSample(**{**fields, **changes})  # type: ignore[arg-type]


def test_columns_are_the_records_with_null_where_nothing_was_measured(folder: Path) -> None:
    series = series_payload(folder)
    records = read_records(folder)
    assert series["name"] == "run a"
    assert series["steps"] == [record.step for record in records]
    for name, column in series["columns"].items():
        for record, value in zip(records, column, strict=True):
            if name in record.values:
                np.testing.assert_allclose(value, record.values[name], rtol=5e-6)
            else:
                assert value is None
    assert set(series["columns"]) == {name for record in records for name in record.values}
    json.dumps(series, allow_nan=False)


def test_what_is_not_measured_says_why(folder: Path) -> None:
    series = series_payload(folder)
    assert series["reasons"]["pass@k"] == "no rollout has a success label"
    assert series["not_measured"]["pass@k"] == [["no rollout has a success label", 0, 80, 80]]
    wanted = find("format/valid_fraction")
    assert wanted is not None
    assert series["reasons"]["format/valid_fraction"] == f"it needs {wanted.needs}"
    assert series["failed"] == [[7, "out of <b>memory</b>"]]
    assert "reward/mean" not in series["reasons"]


def test_the_verdict_is_that_of_the_library_and_names_traces_that_can_be_read(folder: Path) -> None:
    series = series_payload(folder)
    verdict = judge(read_records(folder))
    said = series["verdict"]
    assert (said["status"], said["lead"]) == (verdict.status, "template_collapse")
    assert said["title"] == f"Template collapse since step {verdict['template_collapse'].since_step}"
    assert [f["check"] for f in said["findings"]][:1] == [verdict.alarms[0].check]
    assert {f["check"] for f in said["findings"]} == {f.check for f in verdict.findings}
    lead = next(f for f in said["findings"] if f["check"] == said["lead"])
    kept = {trace["row"]: trace for trace in scored_payload(folder, said["traces_step"])["traces"]}
    assert len(lead["traces"]) > 1
    assert all(kept[row]["own"] != kept[row]["best"] or kept[row]["tied"] for row in lead["traces"])


def test_the_map_has_every_scored_step_and_the_borders_of_the_judgement(folder: Path) -> None:
    series = series_payload(folder)
    path = series["regimes"]["first_turn"]
    records = {record.step: record.values for record in read_records(folder)}
    prefix = "collapse_first_turn_sample/"
    assert [p[0] for p in path["points"]] == series["scored_steps"] == list(range(0, 81, 10))
    for step, entropy, mi, *_ in path["points"]:
        np.testing.assert_allclose(entropy, records[step][prefix + "conditional_entropy_est"], atol=6e-5)
        np.testing.assert_allclose(mi, records[step][prefix + "mi_seq_estimate"], atol=6e-5)
    # The baseline is the first five scored steps: 0.8 of their MI, 0.7 of their H(Z|X).
    base = np.mean([p[1:3] for p in path["points"][:5]], axis=0)
    np.testing.assert_allclose([path["borders"]["entropy"], path["borders"]["mi"]], base * [0.7, 0.8], rtol=1e-3)
    assert path["points"][-1][3] == "template collapse"
    assert [p[4] for p in path["points"]] == [False] * 5 + [True] * 4
    assert not path["borders"]["is_chance"]


def test_where_nothing_rises_above_chance_the_map_puts_no_step_above_its_border(tmp_path: Path) -> None:
    path = series_payload(write_noise(tmp_path / "noise"))["regimes"]["first_turn"]
    at_chance = [p[2] for p in path["points"] if p[4]]
    assert len(at_chance) >= 7
    assert path["points"][-1][3:] == ["template collapse", True]
    assert path["borders"]["is_chance"]
    # 0.8 of the mean of such numbers is no border: the largest of them is.
    np.testing.assert_allclose(path["borders"]["mi"], max(at_chance), atol=6e-5)
    np.testing.assert_allclose(path["mi_range"], 0.1 * np.log(4))


def test_the_matrix_comes_back_in_order_and_within_half_a_level(folder: Path) -> None:
    drawn = scored_payload(folder, 20)["draws"]["first_turn"]
    matrix = read_matrix(folder, 20, "first_turn")
    marginal_N = np.log(np.mean(np.exp(matrix.logp_NP), axis=1))
    exact_NP = np.clip(matrix.logp_NP - marginal_N[:, None], -drawn["range"], drawn["range"])
    levels = np.frombuffer(zlib.decompress(base64.b64decode(drawn["pmi"])), dtype=np.uint8)
    found_NP = (levels.reshape(drawn["n_rows"], drawn["n_columns"]).astype(float) - 128) / 127 * drawn["range"]
    np.testing.assert_allclose(drawn["range"], np.log(matrix.n_contexts), rtol=1e-5)
    np.testing.assert_allclose(found_NP, exact_NP[drawn["rows"]], atol=0.51 * drawn["range"] / 127)
    assert drawn["own"] == matrix.own_N[drawn["rows"]].tolist() == sorted(matrix.own_N.tolist())


def test_cells_that_were_not_scored_and_rows_that_cannot_be_are_told_apart(tmp_path: Path) -> None:
    nan = float("nan")
    matrix = LogLikelihoodMatrix(
        logp_NP=[[-1.0, -2.0, nan], [-3.0, -1.0, -2.0], [nan, nan, nan]],
        length_N=[2, 2, 2],
        own_N=[0, 1, 2],
        scored_NP=np.array([[True, True, False], [True, True, True], [True, True, True]]),
    )
    traces = (sample(row=1, own=1, best=1, logp_P=(-3.0, -1.0, -2.0)), sample(row=2, own=2, logp_P=(nan, nan, nan)))
    scored = scored_payload(store_one(tmp_path / "run", matrix, traces), 3)
    drawn = scored["draws"]["turn"]
    levels = zlib.decompress(base64.b64decode(drawn["pmi"]))
    assert (drawn["n_traces"], drawn["n_left_out"], drawn["rows"]) == (3, 1, [0, 1])
    assert levels[2] == 0
    assert min(levels[:2] + levels[3:]) > 0
    assert [trace["own_pmi"] is None for trace in scored["traces"]] == [False, True]
    json.dumps(scored, allow_nan=False)


def test_of_too_many_rows_the_sampled_ones_stay(tmp_path: Path) -> None:
    n = MAX_ROWS + 500
    rng = np.random.default_rng(1)
    own_N = np.arange(n) % 2
    matrix = LogLikelihoodMatrix(logp_NP=-1 - rng.random((n, 2)), length_N=np.ones(n, dtype=int), own_N=own_N)
    kept = tuple(sample(row=row, own=int(own_N[row])) for row in (3, 501, n - 1))
    drawn = scored_payload(store_one(tmp_path / "run", matrix, kept), 3)["draws"]["turn"]
    assert MAX_ROWS - 3 <= drawn["n_rows"] <= MAX_ROWS
    assert {3, 501, n - 1} <= set(drawn["rows"])
    assert drawn["own"] == sorted(drawn["own"])


def test_more_sampled_rows_than_are_drawn_are_all_drawn(tmp_path: Path) -> None:
    n = MAX_ROWS + 10
    own_N = np.arange(n) % 2
    matrix = LogLikelihoodMatrix(logp_NP=np.full((n, 2), -1.0), length_N=np.ones(n, dtype=int), own_N=own_N)
    kept = tuple(sample(row=row, own=int(own_N[row])) for row in range(MAX_ROWS + 5))
    drawn = scored_payload(store_one(tmp_path / "run", matrix, kept), 3)["draws"]["turn"]
    assert sorted(drawn["rows"]) == list(range(MAX_ROWS + 5))


def test_ties_are_counted_and_long_texts_lose_their_middle(tmp_path: Path) -> None:
    matrix = LogLikelihoodMatrix(logp_NP=[[-1.0, -1.0]], length_N=[1], own_N=[0])
    long = "a" * MAX_CHARACTERS + "b" * MAX_CHARACTERS
    traces = (sample(logp_P=(-1.0, -1.0), trace=long, context=long, tokens=("x",), pmi=(0.123456,)),)
    scored = scored_payload(store_one(tmp_path / "run", matrix, traces), 3)
    (trace,) = scored["traces"]
    assert (trace["tied"], trace["cut"]) == (1, MAX_CHARACTERS)
    assert trace["trace"] == "a" * (MAX_CHARACTERS // 2) + "\n[...]\n" + "b" * (MAX_CHARACTERS // 2)
    assert scored["contexts"][trace["context"]].endswith(f"[{MAX_CHARACTERS} characters left out of the middle]")
    assert (trace["tokens"], trace["pmi"]) == (["x"], [0.123])


def test_a_damaged_matrix_costs_its_picture_alone(folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "matrices" / "000000080-first_turn.npz").write_bytes(b"PK\x03\x04 torn")
    scored = scored_payload(run, 80)
    assert "not a readable matrix file" in scored["draws"]["first_turn"]["missing"]
    assert len(scored["traces"]) == 64
    (run / "matrices" / "000000080-first_turn.npz").unlink()
    assert scored_payload(run, 80)["draws"]["first_turn"] == {"missing": "its matrix is not in the run folder"}


def test_files_of_another_make_beside_ours_cost_nothing(folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("12.json", "\u00b2.jsonl", "000000080.jsonl.tmp", "7-x.npz.tmp", "x"):
        (run / "traces" / name).touch()
        (run / "matrices" / name).touch()
    assert series_payload(run)["scored_steps"] == series_payload(folder)["scored_steps"]
    # The least that a line of traces must hold.
    lines = [json.dumps({"namespace": "first_turn", "row": 1, "own": 0, "best": 1, "logp_P": [-2.0, -1.0]})]
    (run / "traces" / "000000080.jsonl").write_text("\n".join(lines))
    lead = next(f for f in series_payload(run)["verdict"]["findings"] if f["check"] == "template_collapse")
    assert lead["traces"] == [1]
    assert [trace["length"] for trace in scored_payload(run, 80)["traces"]] == [None]


@pytest.mark.parametrize(
    "line",
    [
        {"notes": [math.nan]},
        {"notes": [[1]]},
        {"status": "failed", "reason": math.nan},
        {"not_measured": {"x": [1]}},
        {"time": "noon"},
        {"time": math.nan},
        {"time": 1e300},
    ],
    ids=str,
)
def test_a_line_that_is_no_record_is_passed_over(tmp_path: Path, line: dict[str, object]) -> None:
    with RunStore(tmp_path / "run") as store:
        store.append(Record(step=0, values={"reward/mean": 1.0}))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps({"step": 1, "values": {}, **line}) + "\n")
    series = LiveRun(tmp_path / "run").series()
    assert series is not None
    assert json.loads(series.body)["steps"] == series_payload(tmp_path / "run")["steps"] == [0]


@pytest.mark.parametrize("created", ["NaN", "1e300", '"yesterday"', "-1"])
def test_a_date_that_is_none_is_left_out(tmp_path: Path, created: str) -> None:
    with RunStore(tmp_path / "run") as store:
        store.append(Record(step=0, values={"reward/mean": 1.0}))
    (tmp_path / "run" / "run.json").write_text(f'{{"schema_version": 1, "model": ["m"], "created": {created}}}')
    (tmp_path / "run" / "writer.json").write_text('{"host": "h", "pid": Infinity, "started": null}')
    series = LiveRun(tmp_path / "run").series()
    assert series is not None
    assert json.loads(series.body)["about"] == {"model": "['m']"}


def test_files_that_nest_without_end_are_no_run_and_no_writer(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        store.append(Record(step=0, values={}))
    (tmp_path / "run" / "writer.json").write_text("[" * 100_000)
    assert writer_of(tmp_path / "run") is None
    (tmp_path / "run" / "run.json").write_text("[" * 100_000)
    with pytest.raises(RunFolderError, match=r"run\.json: cannot be read"):
        series_payload(tmp_path / "run")


def test_a_run_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder"):
        series_payload(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(RunFolderError, match="no step has been recorded yet"):
        series_payload(tmp_path)


def test_a_run_that_was_never_scored_says_so(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run") as store:
        store.append(Record(step=0, values={"reward/mean": 1.0}))
    series = series_payload(tmp_path / "run")
    reason = series["reasons"]["collapse_first_turn_sample/retrieval_accuracy"]
    assert reason == "it needs traces of at least 2 prompts, scored crosswise by the policy"
    assert series["scored_steps"] == []
    assert series["verdict"]["lead"] is None


def test_every_number_that_a_chart_draws_is_registered() -> None:
    for chart in CHARTS:
        for line in chart.lines:
            for name in filter(None, (line.name, line.low, line.high)):
                assert find(name.replace(DRAW, "").replace("*", "1")) is not None, name
        assert ": " in chart.title, chart.title
