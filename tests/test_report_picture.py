"""The picture: what is drawn, read back from the drawing and from the pixels."""

from __future__ import annotations

import io
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collapsediag.cli import main
from collapsediag.monitor import Monitor
from collapsediag.record import Record
from collapsediag.report import series_payload
from collapsediag.run_folder import RunStore
from collapsediag.sinks import JsonlSink
from collapsediag.testing import planted

from .conftest import import_or_skip
from .report_runs import write_noise

import_or_skip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from PIL import Image  # noqa: E402

from collapsediag.report.picture import picture_png  # noqa: E402
from collapsediag.report.picture_panels import draw_chart, draw_map, spread  # noqa: E402

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run: Path = tmp_path_factory.mktemp("picture") / "run"
    first = planted("healthy", n_contexts=6, group_size=4)
    with Monitor(first.scorer(), every=1, sinks=[JsonlSink(run)], tokenizer=first, on_error="raise") as monitor:
        for step in range(14):
            now = planted("healthy" if step < 6 else "template", n_contexts=6, group_size=4, step=step)
            monitor.scorer = now.scorer()
            monitor.observe(step, now.batch)
    return run


@pytest.fixture(scope="module")
def series(collapsed: Path) -> dict[str, Any]:
    return series_payload(collapsed)


@pytest.fixture(scope="module")
def png(series: dict[str, Any]) -> bytes:
    return picture_png(series)


def pixels(png: bytes) -> NDArray[np.uint8]:
    """[height, width, 3]"""
    with Image.open(io.BytesIO(png)) as picture:
        return np.asarray(picture.convert("RGB"))


def css(name: str) -> tuple[int, int, int]:
    """A colour of the page's light theme: the first one of that name."""
    style = (ROOT / "collapsediag/report/assets/style.css").read_text()
    found = re.search(rf"--{name}:\s*#([0-9a-f]{{6}}|[0-9a-f]{{3}})\b", style)
    assert found
    digits = found[1] if len(found[1]) == 6 else "".join(2 * d for d in found[1])
    return (int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16))


def test_it_has_a_printed_pages_width_and_the_colours_of_the_page(png: bytes) -> None:
    picture = pixels(png)
    assert picture.shape[1] == 2160
    assert 2000 < picture.shape[0] < 2700
    for name in ("paper", "main", "third", "reference", "bad", "template", "diverse"):
        assert (picture == css(name)).all(axis=2).any(), name
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    assert (border == css("paper")).all()  # nothing is cut off at an edge


def test_the_same_run_gives_the_same_file(series: dict[str, Any], png: bytes) -> None:
    assert picture_png(series) == png


PALETTE = dict.fromkeys(
    ("main", "second", "third", "fourth", "reference", "bad", "soft", "faint", "paper", "ink", "pale"), "#123456"
) | {"paper": "#ffffff", "template": "#aa0000", "diverse": "#00aa00", "compressed": "#0000aa", "low-entropy": "#aaaa00"}


def drawn(series: dict[str, Any], key: str) -> Any:
    axes = Figure().add_subplot()
    (chart,) = (chart for chart in series["charts"] if chart["key"] == key)
    draw_chart(axes, chart, series, "first_turn", PALETTE)
    return axes


def test_a_chart_holds_the_numbers_with_their_interval_and_their_chance(series: dict[str, Any]) -> None:
    axes = drawn(series, "retrieval")
    name = "collapse_first_turn_sample/retrieval_accuracy"
    value, chance = (line for line in axes.lines if len(line.get_xdata()) == 14)
    np.testing.assert_array_equal(value.get_xdata(), range(14))
    np.testing.assert_array_equal(value.get_ydata(), series["columns"][name])
    np.testing.assert_allclose(chance.get_ydata(), 1 / 6, rtol=1e-5)
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    for step in range(14):
        reach = corners[corners[:, 0] == step][:, 1]
        assert reach.min() == series["columns"][f"{name}/ci_low"][step]
        assert reach.max() == series["columns"][f"{name}/ci_high"][step]
    (since,) = (line for line in axes.lines if len(line.get_xdata()) == 2)
    lead = next(f for f in series["verdict"]["findings"] if f["check"] == series["verdict"]["lead"])
    assert list(since.get_xdata()) == [lead["since_step"]] * 2
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["Retrieval of the own prompt", "bad when its band reaches chance", "retrieval", "chance"]


def test_the_gap_between_the_entropies_is_shaded(series: dict[str, Any]) -> None:
    axes = drawn(series, "entropies")
    names = [f"collapse_first_turn_sample/{name}" for name in ("reasoning_entropy_est", "conditional_entropy_est")]
    corners = axes.collections[-1].get_paths()[0].vertices
    for step in range(14):
        reach = {round(float(y), 6) for y in corners[corners[:, 0] == step][:, 1]}
        assert {round(series["columns"][name][step], 6) for name in names} <= reach


def test_the_map_has_the_path_its_regions_and_filled_dots_where_it_collapsed(series: dict[str, Any]) -> None:
    axes = Figure().add_subplot()
    draw_map(axes, series, "first_turn", PALETTE, ["DejaVu Serif"])
    points = series["regimes"]["first_turn"]["points"]
    path, *dots = axes.lines
    np.testing.assert_array_equal(path.get_xydata(), [[p[1], p[2]] for p in points])
    filled = [dot.get_markerfacecolor() == PALETTE["main"] for dot in dots]
    names = [point[3] for point in points]
    assert filled == [name is not None and "collapse" in name for name in names]
    assert any(filled)
    assert not all(filled)
    borders = series["regimes"]["first_turn"]["borders"]
    for region in axes.collections:
        (x0, y0), (x1, y1) = region.get_paths()[0].vertices.min(axis=0), region.get_paths()[0].vertices.max(axis=0)
        assert borders["entropy"] in (x0, x1)
        assert borders["mi"] in (y0, y1)
    assert {"step 0", "step 13", "template collapse", "diverse reasoning"} <= {text.get_text() for text in axes.texts}


def test_noise_around_zero_stays_small_and_in_the_colour_of_collapse(tmp_path: Path) -> None:
    axes = Figure().add_subplot()
    series = series_payload(write_noise(tmp_path / "noise"))
    draw_map(axes, series, "first_turn", PALETTE | {"bad": "#bb0000"}, ["DejaVu Serif"])
    low, high = axes.get_ylim()
    assert low < 0 < 0.1 * np.log(4) <= high - low
    at_chance = [point[4] for point in series["regimes"]["first_turn"]["points"]]
    assert [dot.get_markeredgecolor() == "#bb0000" for dot in axes.lines[1:]] == at_chance
    assert any(at_chance)


def test_what_was_not_measured_says_why_and_a_dollar_is_a_dollar(tmp_path: Path) -> None:
    reason = "only one distinct context, so there is nothing to tell apart; at least two prompts are needed"
    run = tmp_path / "$x^2$ \u65e5 \u202e"
    with RunStore(run) as store:
        store.append(Record(step=0, values={"reward/mean": 0.5}, not_measured={"collapse_first_turn_sample": reason}))
    series = series_payload(run)
    axes = drawn(series, "mi")
    assert axes.texts[-1].get_text().replace("\n", " ") == f"Not measured, because {reason}."
    assert len(drawn(series, "reward").lines) == 1
    assert pixels(picture_png(series)).shape[1] == 2160


def test_names_at_the_ends_of_lines_keep_apart_in_order_and_inside() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        wanted = rng.random(int(rng.integers(1, 6))).tolist()
        found = spread(wanted, 0.12)
        places = [found[i] for i in np.argsort(wanted, kind="stable")]
        assert all(b - a >= 0.12 - 1e-9 for a, b in itertools.pairwise(places))
        assert min(places) >= 0
        assert max(places) <= 1
    assert spread([0.2, 0.8], 0.12) == [0.2, 0.8]  # and stay where they are if they can


def test_the_command_writes_a_picture_in_place_of_the_page_or_beside_it(
    collapsed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], png: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(collapsed), "--png", "a.png"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png"]
    assert (tmp_path / "a.png").read_bytes() == png
    assert capsys.readouterr().out == f"a.png: a PNG picture of {collapsed}\n"
    assert main(["report", str(collapsed), "--png", "a.png", "-o", "a.html"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png"]


def test_wrong_use_leaves_nothing_and_says_what_to_do(
    collapsed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["--png", str(tmp_path)], f"{tmp_path} is a folder; --png is the file to write"),
        ([str(tmp_path), "--png", "a.png"], "a picture is of one run and 2 were given; the page takes several"),
        (["--png", "a.pdf"], "--png a.pdf: the picture is a PNG; give a name that ends in .png"),
        (["--png", "nowhere/a.png"], "nowhere/a.png cannot be written (No such file or directory)"),
    ):
        assert main(["report", str(collapsed), *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(collapsed), "--png", "a.png"]) == 2
    said = capsys.readouterr().err
    assert "a picture needs the package 'matplotlib', which is not installed." in said
    assert "pip install 'collapsediag[png]'" in said
    assert list(tmp_path.iterdir()) == []
