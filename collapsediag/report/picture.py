"""The page's most telling charts as one picture, for papers and for where there is no browser."""

from __future__ import annotations

import importlib.resources
import io
import re
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any

from collapsediag._optional import require
from collapsediag.errors import MetricError
from collapsediag.plain_text import printable
from collapsediag.report.picture_panels import draw_chart, draw_map

# Inches: the width of a printed page between its margins.
WIDTH, HEIGHT = 7.2, 8.1
BOTTOM = 0.045  # of the height
DPI = 300
HEADER_CHARACTERS = 124
# Beyond it, differences and margins leave the range of a float.
LARGEST = 1e150
# Fonts of the page, the first that is installed; matplotlib brings the last one.
SERIF = ("Charter", "Source Serif 4", "Georgia", "DejaVu Serif")
SANS = ("Noto Sans", "Liberation Sans", "DejaVu Sans")
# Three rows: the map beside the numbers of dependence, then the signal, then the behaviour.
WHOLE_ROWS = (("reward", "reward_std", "all_equal"), ("format", "length", "token_entropy"))
_COLOUR = re.compile(r"--([\w-]+): (#[0-9a-f]{3,6});")


def picture_png(series: Mapping[str, Any]) -> bytes:
    """One run as a PNG of a printed page's width, 300 dots an inch.

    series: a `series_payload`. What was not measured says why, in the place of its chart.
    Raises MissingExtraError without matplotlib, MetricError for numbers that no axis holds.
    """
    _check_sizes(series)
    matplotlib = require("matplotlib", extra="png", feature="a picture")
    figures = require("matplotlib.figure", extra="png", feature="a picture")
    colours = palette()
    settings = {
        "font.family": _installed(SANS),
        "font.size": 6.5,
        # A `$` in a run's name is a `$`.
        "text.parse_math": False,
        "text.color": colours["ink"],
        "axes.edgecolor": colours["pale"],
        "axes.linewidth": 0.6,
        "xtick.color": colours["soft"],
        "ytick.color": colours["soft"],
    }
    stream = io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Names of runs may hold letters that no installed font has; a box in their place is fine.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = figures.Figure(figsize=(WIDTH, HEIGHT), facecolor=colours["paper"])
        top = _header(figure, series, colours)
        _panels(figure, series, colours, top)
        figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    return stream.getvalue()


def _check_sizes(series: Mapping[str, Any]) -> None:
    for name, column in series["columns"].items():
        for step, value in zip(series["steps"], column, strict=True):
            if value is not None and abs(value) > LARGEST:
                raise MetricError(f"{series['name']}: {name} is {value:.3g} at step {step}, which no axis can hold.")


def palette() -> dict[str, str]:
    """Colours of the page's light theme by name, from its style sheet: there is one place to change them.

    >>> sorted(palette())[:3]
    ['bad', 'compressed', 'diverse']
    """
    style = importlib.resources.files("collapsediag.report").joinpath("assets").joinpath("style.css")
    found: dict[str, str] = {}
    for name, colour in _COLOUR.findall(style.read_text(encoding="utf-8")):
        found.setdefault(name, colour)
    return found


def _installed(wanted: tuple[str, ...]) -> list[str]:
    fonts = require("matplotlib.font_manager", extra="png", feature="a picture")
    known = set(fonts.get_font_names())
    return [name for name in wanted if name in known]


def _header(figure: Any, series: Mapping[str, Any], colours: Mapping[str, str]) -> float:
    """The run and its verdict; returns where they end, as a share of the height."""
    verdict = series["verdict"]
    lead = next((f for f in verdict["findings"] if f["check"] == verdict["lead"]), None)
    words = f"{lead['evidence']} {lead['meaning']}" if lead is not None else verdict["counts"]
    lines = textwrap.wrap(printable(words), HEADER_CHARACTERS)
    is_bad = verdict["status"] in ("critical", "warning")
    serif = {"fontfamily": _installed(SERIF)}
    y = 1 - 0.2 / HEIGHT
    figure.text(0.035, y, _about(series), va="top", fontsize=6, color=colours["soft"])
    y -= 0.17 / HEIGHT
    title = {"fontsize": 14, "fontweight": "bold", "color": colours["bad" if is_bad else "ink"]}
    figure.text(0.035, y, printable(verdict["title"]), va="top", **serif, **title)
    y -= 0.31 / HEIGHT
    figure.text(0.035, y, "\n".join(lines), va="top", fontsize=7.5, linespacing=1.4, **serif)
    return float(y - (0.155 * len(lines) + 0.42) / HEIGHT)


def _about(series: Mapping[str, Any]) -> str:
    about, verdict = series["about"], series["verdict"]
    steps = f"{len(series['steps'])} steps, {verdict['n_scored']} of them scored, the last one {verdict['last_step']}"
    parts = (series["name"], about.get("model"), steps, f"scored: {next(iter(series['draws'].values()))}")
    return printable("   ".join(textwrap.shorten(str(part), 70) for part in parts if part))


def _panels(figure: Any, series: Mapping[str, Any], colours: Mapping[str, str], top: float) -> None:
    charts = {chart["key"]: chart for chart in series["charts"]}
    draw = next(iter(series["draws"]))
    # A matrix scored on a budget has the one in place of the other.
    is_whole = f"collapse_{draw}_sample/retrieval_accuracy" in series["columns"]
    retrieval = "retrieval" if is_whole or "subset" not in charts else "subset"
    # Three columns of 14 with room for the names at the lines' ends; what the runs are judged by is a little larger.
    columns = {"ncols": 60, "left": 0.06, "right": 0.9, "hspace": 0.6, "wspace": 0}
    middle = BOTTOM + 0.43 * (top - BOTTOM)
    upper = figure.add_gridspec(2, top=top, bottom=middle + 0.75 / HEIGHT, **columns)
    lower = figure.add_gridspec(2, top=middle, bottom=BOTTOM, **columns)
    draw_map(figure.add_subplot(upper[:, :18]), series, draw, colours, _installed(SERIF))
    places = [(upper[0, 23:37], retrieval), (upper[0, 46:], "mi"), (upper[1, 23:], "entropies")]
    for row, keys in enumerate(WHOLE_ROWS):
        places += [(lower[row, 23 * i : 23 * i + 14], key) for i, key in enumerate(keys)]
    for place, key in places:
        axes = figure.add_subplot(place)
        draw_chart(axes, charts[key], series, draw, colours)
        if key in WHOLE_ROWS[-1]:
            axes.set_xlabel("step", loc="right", fontsize=6, labelpad=1, color=colours["soft"])
