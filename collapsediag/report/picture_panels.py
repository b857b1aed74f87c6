"""Single panels of the picture: a chart as the page defines it, and the regime map.

`axes` is a matplotlib axes; nothing here imports matplotlib.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from collapsediag.report.charts import DRAW

# Dashes in points, as in the page: colours alone do not tell lines apart for everyone.
DASHES = {"reference": (3, 2.6), "second": (5.2, 1.9), "fourth": (1.5, 1.9)}
LABEL_GAP = 0.115  # of a panel's height, between the middles of two labels
WHY_CHARACTERS = 34
REGIONS = (
    ("compressed reasoning", "compressed", 0, 1),
    ("diverse reasoning", "diverse", 1, 1),
    ("low-entropy collapse", "low-entropy", 0, 0),
    ("template collapse", "template", 1, 0),
)


def draw_chart(
    axes: Any, chart: Mapping[str, Any], series: Mapping[str, Any], draw: str, colours: Mapping[str, str]
) -> None:
    """One chart of the page; where no line of it was measured, the reason."""
    _title(axes, chart["title"], colours)
    lines = [{**line, **{key: _named(line[key], draw) for key in ("name", "low", "high")}} for line in chart["lines"]]
    shown = [line for line in lines if line["name"] in series["columns"]]
    if not shown:
        _why(axes, series["reasons"].get(lines[0]["name"], "this run did not record it"), colours)
        return
    steps, columns = series["steps"], series["columns"]
    _frame(axes, steps, colours)
    values = [*chart["reach"]]
    labels = []
    for line in shown:
        colour = colours[line["style"]]
        x, y = _points(steps, columns[line["name"]])
        width = 0.8 if line["style"] == "reference" else 1.2
        (drawn,) = axes.plot(x, y, color=colour, linewidth=width, solid_capstyle="round", marker="." * (len(x) == 1))
        if line["style"] in DASHES:
            drawn.set_dashes([length / width for length in DASHES[line["style"]]])
        values += y
        if line["low"] in columns and line["high"] in columns:
            band = _band(steps, columns[line["low"]], columns[line["high"]])
            axes.fill_between(*band, color=colour, alpha=0.16, linewidth=0)
            values += [*band[1], *band[2]]
        labels.append((y[-1], line["label"], colour))
    if chart["gap"]:
        _gap(axes, series, [_named(name, draw) for name in chart["gap"]], colours)
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - (pad if low < 0 else 0), high + pad)
    _since(axes, series, colours)
    _labels(axes, labels)


def draw_map(axes: Any, series: Mapping[str, Any], draw: str, colours: Mapping[str, str], serif: Sequence[str]) -> None:
    """The path over the regime map; filled dots are collapsed steps, dots in red those at chance."""
    _title(axes, "Path over the regime map: bad when it sinks", colours)
    regimes = series["regimes"].get(draw) or {"points": [], "borders": None, "mi_range": 0.0}
    points, borders = regimes["points"], regimes["borders"]
    if not points:
        reason = series["reasons"].get(f"collapse_{draw}_sample/mi_seq_estimate", "no scored step has both numbers")
        _why(axes, reason, colours)
        return
    x, y = [p[1] for p in points], [p[2] for p in points]
    _map_limits(axes, x, [*y, min(*y, 0.0) + regimes["mi_range"]], borders)
    _frame(axes, None, colours)
    if borders:
        _regions(axes, borders, colours, serif)
    axes.plot(x, y, color=colours["main"], linewidth=0.8, zorder=3)
    for i, point in enumerate(points):
        colour = colours["bad" if point[4] else "main"]
        fill = colour if "collapse" in (point[3] or "") else colours["paper"]
        size = 4.5 if i == len(points) - 1 else 3.2
        dot = {"markersize": size, "markerfacecolor": fill, "markeredgecolor": colour}
        axes.plot(point[1], point[2], "o", markeredgewidth=0.9, zorder=4, **dot)
    _ends(axes, points, colours)
    words = {"color": colours["soft"], "fontsize": 6, "linespacing": 1.3}
    axes.set_xlabel("how much reasoning varies for one prompt:\nH(Z|X), nats/token \N{RIGHTWARDS ARROW}", **words)
    axes.set_ylabel("how much it says about the prompt: I(X; Z), nats \N{RIGHTWARDS ARROW}", loc="top", **words)


def _ends(axes: Any, points: Sequence[Sequence[Any]], colours: Mapping[str, str]) -> None:
    """The first and the last step by number, one above and one below where they are neighbours."""
    first, last = points[0], points[-1]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    is_near = abs(first[1] - last[1]) < 0.3 * (right - left) and abs(first[2] - last[2]) < 0.1 * (high - low)
    box = {"boxstyle": "square,pad=0.12", "facecolor": colours["paper"], "edgecolor": "none", "alpha": 0.75}
    style = {"ha": "center", "fontsize": 6.5, "fontweight": "bold", "color": colours["main"], "bbox": box, "zorder": 5}
    ends = [(last, 6, "bottom")] + ([(first, -6 if is_near else 6, "top" if is_near else "bottom")] * (last != first))
    for point, rise, anchor in ends:
        place = {"xytext": (0, rise), "textcoords": "offset points", "va": anchor}
        axes.annotate(f"step {point[0]}", (point[1], point[2]), **place, **style)


def _named(name: str | None, draw: str) -> str | None:
    return None if name is None else name.replace(DRAW, f"collapse_{draw}_sample/")


def _title(axes: Any, title: str, colours: Mapping[str, str]) -> None:
    """What it is, and under it what is bad; the first colon parts them, as in the page."""
    name, _, bad = title.partition(": ")
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(name, (0, 1), xytext=(0, 13), fontsize=7.2, fontweight="bold", **place)
    axes.annotate(bad, (0, 1), xytext=(0, 4.5), fontsize=6.2, color=colours["bad"], **place)


def _frame(axes: Any, steps: Sequence[int] | None, colours: Mapping[str, str]) -> None:
    axes.set_facecolor(colours["paper"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=2, width=0.5, pad=2, labelsize=6)
    axes.locator_params(nbins=4, axis="y")
    if steps is None:
        return
    axes.locator_params(nbins=5, axis="x", integer=True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=colours["faint"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))


def _why(axes: Any, reason: str, colours: Mapping[str, str]) -> None:
    axes.set_axis_off()
    words = textwrap.fill(f"Not measured, because {reason}.", WHY_CHARACTERS)
    place = {"xycoords": "axes fraction", "xytext": (0, -8), "textcoords": "offset points", "va": "top"}
    axes.annotate(words, (0, 1), style="italic", color=colours["soft"], **place)


def _points(steps: Sequence[int], column: Sequence[float | None]) -> tuple[list[int], list[float]]:
    kept = [(step, value) for step, value in zip(steps, column, strict=True) if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def _band(
    steps: Sequence[int], low: Sequence[float | None], high: Sequence[float | None]
) -> tuple[list[int], list[float], list[float]]:
    both = [(s, a, b) for s, a, b in zip(steps, low, high, strict=True) if a is not None and b is not None]
    return [s for s, _, _ in both], [a for _, a, _ in both], [b for _, _, b in both]


def _gap(axes: Any, series: Mapping[str, Any], names: Sequence[str | None], colours: Mapping[str, str]) -> None:
    if all(name in series["columns"] for name in names):
        band = _band(series["steps"], *(series["columns"][name] for name in names))
        axes.fill_between(*band, color=colours["third"], alpha=0.18, linewidth=0)


def _since(axes: Any, series: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Where the trouble began that the verdict is about."""
    verdict = series["verdict"]
    for finding in verdict["findings"]:
        if finding["check"] == verdict["lead"] and finding["since_step"] is not None:
            axes.axvline(finding["since_step"], color=colours["bad"], linewidth=0.7, dashes=(1, 2.5))


def _labels(axes: Any, labels: Sequence[tuple[float, str, str]]) -> None:
    """Names at the ends of the lines, moved apart where they would touch."""
    low, high = axes.get_ylim()
    wanted = [(value - low) / (high - low) for value, _, _ in labels]
    for place, (_, label, colour) in zip(spread(wanted, LABEL_GAP), labels, strict=True):
        style = {"color": colour, "fontsize": 6.3, "fontweight": "bold"}
        axes.annotate(
            label, (1, place), xytext=(3, 0), xycoords="axes fraction", textcoords="offset points", va="center", **style
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places between 0 and 1 at least `gap` apart, in the order of those wanted and near them.

    >>> [round(place, 2) for place in spread([0.5, 0.52, 0.1], 0.1)]
    [0.46, 0.56, 0.1]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    clusters: list[list[int]] = []
    centre = {}
    for i in order:
        clusters.append([i])
        while len(clusters) > 1 and _low(clusters[-1], wanted, gap) < _high(clusters[-2], wanted, gap) + gap:
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    for cluster in clusters:
        start = _low(cluster, wanted, gap)
        for rank, i in enumerate(cluster):
            centre[i] = start + rank * gap
    return [centre[i] for i in range(len(wanted))]


def _low(cluster: Sequence[int], wanted: Sequence[float], gap: float) -> float:
    length = (len(cluster) - 1) * gap
    middle = sum(wanted[i] for i in cluster) / len(cluster)
    return min(max(middle - length / 2, 0.0), max(1.0 - length, 0.0))


def _high(cluster: Sequence[int], wanted: Sequence[float], gap: float) -> float:
    return _low(cluster, wanted, gap) + (len(cluster) - 1) * gap


def _map_limits(axes: Any, x: Sequence[float], y: Sequence[float], borders: Mapping[str, float] | None) -> None:
    xs = [*x, *([borders["entropy"]] if borders else [])]
    ys = [*y, 0.0, *([borders["mi"]] if borders else [])]
    low, high = min(xs), max(xs)
    pad = 0.14 * ((high - low) or 1)
    left, right = max(0.0, low - pad), high + pad
    if borders:
        # The region of low entropy has room for its name, also while nothing is in it.
        left = min(max(borders["entropy"] - (right - borders["entropy"]) / 2.3, 0.0), left)
    # Above and below the path there is room for the names of the regions.
    rise = (max(ys) - min(ys)) or 1
    axes.set_xlim(left, right)
    axes.set_ylim(min(ys) - 0.14 * rise, max(ys) + 0.2 * rise)


def _regions(axes: Any, borders: Mapping[str, float], colours: Mapping[str, str], serif: Sequence[str]) -> None:
    xs = (axes.get_xlim()[0], borders["entropy"], axes.get_xlim()[1])
    ys = (axes.get_ylim()[0], borders["mi"], axes.get_ylim()[1])
    for name, colour, i, j in REGIONS:
        axes.fill_between(xs[i : i + 2], ys[j], ys[j + 1], color=colours[colour], linewidth=0, zorder=0)
        words = name.replace(" ", "\n") if i == 0 else name
        place = {"ha": "right" if i else "left", "va": "top" if j else "bottom"}
        inset = {"xytext": (-4 if i else 4, -4 if j else 4), "textcoords": "offset points", "zorder": 2}
        text = {"style": "italic", "fontsize": 6.2, "fontfamily": list(serif)}
        axes.annotate(words, (xs[2] if i else xs[0], ys[2] if j else ys[0]), **place, **inset, **text)
