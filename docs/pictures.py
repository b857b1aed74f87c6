"""Draws docs/pictures/: the page of four runs, as it is, in a headless Chromium, and the figure of one of them.

    python docs/pictures.py runs/demo-healthy runs/demo-template-collapse

The first two runs are those of `collapsediag demo`; the other two, which no demo shows, are planted: policies that are
known exactly, scored and judged like any other. Needs pillow besides the test extra.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from collapsediag.cli.report import build_page
from collapsediag.metrics.from_matrix import matrix_metrics
from collapsediag.metrics.from_rollouts import rollout_metrics
from collapsediag.record import Provenance, Record, TraceSample
from collapsediag.report import series_payload
from collapsediag.report.picture import picture_png
from collapsediag.run_folder import RunStore
from collapsediag.testing import Planted, Regime, planted
from tests.chromium import Chromium, chromium

PICTURES = Path(__file__).parent / "pictures"
PREFIX = "collapse_first_turn_sample/"
# The pictures that stand side by side show the verdict, the map, two charts and the matrix.
HIDDEN = "nav, .answers, .checks, .traces, .tables, footer, h2, .kicker, #signal, #behaviour"
CHARTS = ("retrieval", "entropies")


def write_planted(folder: Path, regimes: Sequence[Regime], calls: Sequence[float] | None = None) -> Path:
    """A run of one scored step in ten, each of a planted policy; calls: tool calls per rollout at each of them."""
    with RunStore(folder, provenance=Provenance(created=0.0, model="planted policy")) as store:
        for index, regime in enumerate(regimes):
            one = planted(regime, n_contexts=12, group_size=8, seed=index, step=10 * index)
            values = rollout_metrics(one.batch)
            values |= {PREFIX + name: value for name, value in matrix_metrics(one.matrix, n_resamples=200).items()}
            if calls is not None:
                values["tools/calls_per_rollout"] = calls[index]
            record = Record(step=10 * index, values=values, matrices={"first_turn": one.matrix})
            store.append(dataclasses.replace(record, traces=_traces(one)))
    return folder


def _traces(one: Planted) -> tuple[TraceSample, ...]:
    pairs = one.pairs()
    found = []
    for row, logp_P in enumerate(one.matrix.logp_NP):
        own = int(one.matrix.own_N[row])
        best = own if logp_P[own] >= logp_P.max() else int(logp_P.argmax())
        found.append(
            TraceSample(
                namespace="first_turn",
                row=row,
                own=own,
                best=best,
                group=str(own),
                length=len(pairs.traces[row]),
                logp_P=tuple(logp_P.tolist()),
                context=one.decode(pairs.contexts[own]),
                context_best=None if best == own else one.decode(pairs.contexts[best]),
                trace=one.decode(pairs.traces[row]),
                reward=one.batch.rollouts[row].reward,
            )
        )
    return tuple(found)


def draw(browser: Chromium, page: Path, out: Path, *, width: int, height: int | None = None, hidden: str = "") -> None:
    """One picture of a page. height: of the whole page where not given."""
    browser.open(page.as_uri(), width=width)
    if hidden:
        browser.evaluate(f"document.querySelectorAll('{hidden}').forEach(e => {{ e.hidden = true; }})")
    browser.resize(width, height or int(browser.evaluate("document.body.scrollHeight")))
    time.sleep(1)  # the charts follow the width
    browser.screenshot(out, full=False)
    save_small(Image.open(out), out)


def save_small(image: Image.Image, out: Path) -> None:
    """256 colours will do, a page being mostly paper: those of its areas as they are, and one near each of the rest."""
    image = image.convert("RGB")
    often = [colour for _, colour in sorted(image.getcolors(image.width * image.height))[-64:]]
    rest = image.quantize(256 - 64, Image.Quantize.MAXCOVERAGE, kmeans=4).getpalette()
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in often for value in colour] + rest)
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(out, optimize=True)


def draw_figure(run: Path, out: Path) -> None:
    """What `report --png` draws for paper, at the resolution of a screen."""
    save_small(Image.open(io.BytesIO(picture_png(series_payload(run)))).reduce(2), out)


def main() -> None:
    """Write all pictures."""
    healthy, template = map(Path, sys.argv[1:3])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary, chromium(Path(temporary)) as browser:
        folder = Path(temporary)
        runs = {
            "healthy": healthy,
            "template-collapse": template,
            "low-entropy-collapse": write_planted(folder / "low-entropy", ["healthy"] * 6 + ["low_entropy"] * 6),
            "tool-use-collapse": write_planted(
                folder / "tool-use", ["healthy"] * 12, [2.1, 2.2, 2.0, 2.1, 2.2, 1.9, 0.9, 0.3, 0.1, 0.1, 0.0, 0.0]
            ),
        }
        PICTURES.mkdir(exist_ok=True)
        for name, run in runs.items():
            page = folder / f"{name}.html"
            page.write_text(build_page([str(run)]), encoding="utf-8")
            charts = ("retrieval", "tool_calls") if name == "tool-use-collapse" else CHARTS
            rest = ".chart" + "".join(f":not([data-chart={chart}])" for chart in charts)
            hidden = HIDDEN.replace("#behaviour", ".none") if "tool_calls" in charts else HIDDEN
            draw(browser, page, PICTURES / f"{name}.png", width=400, hidden=f"{hidden}, {rest}")
        draw(browser, folder / "template-collapse.html", PICTURES / "page.png", width=1280, height=1800)
    draw_figure(template, PICTURES / "figure.png")


if __name__ == "__main__":
    main()
