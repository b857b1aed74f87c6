"""The page of a large run against a plotly page of the same data, in one Chromium.

    python benchmarks/page.py --plotly-python /path/to/a/python/with/plotly

10,000 steps of 60 numbers, 50 scored steps of 1,024 traces under 64 prompts. Both pages draw the numbers of eight
charts (17 lines) and the matrix of the last scored step, and step through the matrices with a slider; ours also draws
its other charts, the map and the trace reader. Times are medians over alternating visits, by the clock and, because a
busy computer stretches the clock, as processor time of the page's main thread. Ready: from navigation until everything
is drawn and a frame was shown. Slide: from the change of the slider until the frame that shows it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from collapsediag.cli.report import build_page
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.record import Provenance, Record, TraceSample
from collapsediag.run_folder import RunStore
from tests import chromium as driver
from tests.chromium import Chromium, chromium

N_STEPS, N_METRICS, N_SCORED, N_TRACES, N_PROMPTS, N_KEPT = 10_000, 60, 50, 1024, 64, 64
PREFIX = "collapse_first_turn_sample/"
CHARTS = (
    ("retrieval_accuracy", "retrieval_chance_level"),
    ("mi_seq_estimate", "mi_upper_bound"),
    ("reasoning_entropy_est", "conditional_entropy_est"),
    ("mi_zscore_ema",),
    ("reward/mean", "reward/within_group_std"),
    ("length/p10", "length/mean", "length/p90"),
    ("entropy/token_mean", "entropy/token_p80"),
    ("format/valid_fraction", "diversity/distinct_answers_per_group", "tools/calls_per_rollout"),
)
PER_SCORED = tuple(PREFIX + name for chart in CHARTS[:4] for name in chart)
PER_STEP = tuple(name for chart in CHARTS[4:] for name in chart)
SLIDES = 8
driver.SECONDS = 900

PLOTLY = """
import json, sys, numpy as np, plotly.graph_objects as go
from plotly.subplots import make_subplots
data = np.load(sys.argv[1]); charts = json.loads(sys.argv[2])
specs = [[{}, {}]] * 4 + [[{"colspan": 2}, None]]
figure = make_subplots(rows=5, cols=2, specs=specs, subplot_titles=[c[0] for c in charts])
for i, names in enumerate(charts):
    for name in names:
        y = data[name]; keep = ~np.isnan(y)
        line = go.Scatter(x=data["steps"][keep], y=y[keep].astype("f4"), name=name, mode="lines")
        figure.add_trace(line, row=i // 2 + 1, col=i % 2 + 1)
z = data["matrices"].astype("f4")
at = len(figure.data)
heat = dict(zmin=-float(data["range"]), zmax=float(data["range"]), colorscale="RdBu")
figure.add_trace(go.Heatmap(z=z[-1], **heat), row=5, col=1)
figure.frames = [go.Frame(data=[go.Heatmap(z=one, **heat)], traces=[at], name=str(i)) for i, one in enumerate(z)]
move = dict(mode="immediate", frame=dict(duration=0, redraw=True), transition=dict(duration=0))
steps = [dict(method="animate", label=str(i), args=[[str(i)], move]) for i in range(len(z))]
figure.update_layout(height=1900, sliders=[dict(active=len(z) - 1, steps=steps)])
ready = "document.body.dataset.ready = 'yes';"  # plotly runs it once the plot is drawn and the frames are added
figure.write_html(sys.argv[3], include_plotlyjs=True, auto_play=False, div_id="plot", post_script=ready)
"""
# Runs before the page's own scripts, in either page.
WATCH = """(function watch() {
  if (!document.body?.dataset.ready) return void requestAnimationFrame(watch);
  requestAnimationFrame(() => requestAnimationFrame(() => { window.readyAt = performance.now(); }));
})()"""
FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
SLIDE = {
    "ours": "(s => {{ s.value = {i}; s.dispatchEvent(new Event('input')); }})(document.getElementById('slider'));"
    " while (!document.querySelector('#matrix .told').textContent.startsWith('step ' + {step} + ' ')) await {frame};",
    "plotly": "await Plotly.animate('plot', ['{i}'], {{mode: 'immediate', frame: {{duration: 0, redraw: true}},"
    " transition: {{duration: 0}}}});",
}


def write_run(folder: Path) -> dict[str, np.ndarray]:
    """The run folder, and the same numbers as arrays for plotly."""
    rng = np.random.default_rng(0)
    others = N_METRICS - len(PER_SCORED) - len(PER_STEP)
    names = [*PER_SCORED, *PER_STEP, *(f"reward/part{i}/mean" for i in range(others))]
    scored_at = np.linspace(0, N_STEPS - 1, N_SCORED).round().astype(int)
    values = {name: np.abs(np.cumsum(rng.normal(size=N_STEPS)) * 0.01 + 1) for name in names}
    for name in PER_SCORED:
        values[name][np.setdiff1d(np.arange(N_STEPS), scored_at)] = np.nan
    own_N = np.arange(N_TRACES) * N_PROMPTS // N_TRACES
    matrices = []
    with RunStore(folder, provenance=Provenance(created=0.0)) as store:
        for step in range(N_STEPS):
            row = {name: float(column[step]) for name, column in values.items() if not np.isnan(column[step])}
            if step not in scored_at:
                store.append(Record(step=step, values=row))
                continue
            share = 1 - len(matrices) / N_SCORED
            logp_NP = -20 + rng.normal(size=(N_TRACES, N_PROMPTS))
            logp_NP[np.arange(N_TRACES), own_N] += 6 * share
            matrix = LogLikelihoodMatrix(logp_NP=logp_NP, length_N=np.full(N_TRACES, 30), own_N=own_N)
            traces = tuple(_sample(rng, matrix, int(i)) for i in rng.choice(N_TRACES, N_KEPT, replace=False))
            matrices.append(logp_NP - np.log(np.mean(np.exp(logp_NP + 20), axis=1))[:, None] + 20)
            store.append(Record(step=step, values=row, matrices={"first_turn": matrix}, traces=traces))
    return {
        **values, "steps": np.arange(N_STEPS), "matrices": np.round(matrices, 2), "range": np.log(N_PROMPTS)
    }  # fmt: skip


def _sample(rng: np.random.Generator, matrix: LogLikelihoodMatrix, row: int) -> TraceSample:
    own, best = int(matrix.own_N[row]), int(matrix.logp_NP[row].argmax())
    words = " ".join(f"word{i}" for i in rng.integers(0, 5000, size=120))
    return TraceSample(
        namespace="first_turn", row=row, own=own, best=best, group=str(own), length=30, reward=float(rng.integers(2)),
        logp_P=tuple(matrix.logp_NP[row].tolist()), context=f"prompt {own}: {words[:200]}",
        context_best=None if best == own else f"prompt {best}: {words[:200]}", trace=words,
    )  # fmt: skip


def plotly_page(python: str, data: dict[str, np.ndarray], folder: Path) -> Path:
    charts = [[PREFIX + name if PREFIX + name in data else name for name in chart] for chart in CHARTS]
    np.savez(folder / "data.npz", **data)
    out = folder / "plotly.html"
    subprocess.run([python, "-c", PLOTLY, folder / "data.npz", json.dumps(charts), out], check=True)
    return out


def visit(browser: Chromium, kind: str, page: Path, steps: list[int]) -> dict[str, float]:
    """Milliseconds until ready and of a slider step, by the clock and by the main thread's use of the processor."""
    browser.open("about:blank", ready="true")
    browser.call("Performance.enable", timeDomain="threadTicks")
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    start = busy(browser)
    browser.call("Page.navigate", url=page.as_uri())
    ready, loaded = float(browser.wait("window.readyAt")), busy(browser)
    slides = []
    for k in range(SLIDES):
        i = (7 * k + 3) % N_SCORED
        act = SLIDE[kind].format(i=i, step=steps[i], frame=FRAME)
        timed = f"const t = performance.now(); {act} await {FRAME}; return performance.now() - t;"
        slides.append(float(browser.evaluate(f"(async () => {{ {timed} }})()")))
    return {
        "ready": ready,
        "slide": statistics.median(slides),
        "busy until ready": loaded - start,
        "busy per slide": (busy(browser) - loaded) / SLIDES,
    }


def busy(browser: Chromium) -> float:
    """Processor time of the page's main thread so far, milliseconds."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return 1000 * float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plotly-python", required=True, help="a Python that has plotly and numpy")
    parser.add_argument("--folder", type=Path, help="where to keep the run and the pages")
    parser.add_argument("--visits", type=int, default=5, help="of each page, in turn (default 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = args.folder or Path(temporary)
        data = write_run(folder / "run")
        start = time.perf_counter()
        ours = folder / "ours.html"
        ours.write_text(build_page([str(folder / "run")]), encoding="utf-8")
        built = time.perf_counter() - start
        start = time.perf_counter()
        pages = {"ours": ours, "plotly": plotly_page(args.plotly_python, data, folder)}
        print(f"built: ours {built:.1f} s, plotly {time.perf_counter() - start:.1f} s")
        sizes = {kind: page.stat().st_size for kind, page in pages.items()}
        steps = np.linspace(0, N_STEPS - 1, N_SCORED).round().astype(int).tolist()
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in pages}
        with chromium(Path(temporary)) as browser:
            for _ in range(args.visits):
                for kind, page in pages.items():
                    found[kind].append(visit(browser, kind, page, steps))
                    print(kind, {name: round(value) for name, value in found[kind][-1].items()}, flush=True)
    print(f"pages: ours {sizes['ours'] / 1e6:.1f} MB, plotly {sizes['plotly'] / 1e6:.1f} MB")
    for name in found["ours"][0]:
        own, theirs = (statistics.median(one[name] for one in found[kind]) for kind in ("ours", "plotly"))
        print(f"{name}: ours {own:.0f} ms, plotly {theirs:.0f} ms, {theirs / own:.1f} times")


if __name__ == "__main__":
    main()
