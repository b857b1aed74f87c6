"""The TensorBoard sink, read back with TensorBoard's own Python loader and rendered by its own text plugin."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from collapsediag.errors import MissingExtraError, SettingsError
from collapsediag.integrations.tensorboard_sink import SUBRUN, EventFile, TensorBoardSink, code_block
from collapsediag.matrix_image import matrix_rgb
from collapsediag.metrics.registry import unknown_names
from collapsediag.monitor import Monitor
from collapsediag.record import Record, TraceSample
from collapsediag.testing import planted

from .conftest import import_or_skip

KEY = "collapse_first_turn_sample/"
LAYOUT = "custom_scalars__config__"
HOSTILE = (
    "# heading\n\n</code></pre><script>alert(1)</script>\n<img src=http://x/y.png onerror=alert(1)>\n"
    "[click](javascript:alert(1)) ![](http://x/y.png)\n| a | b |\n|---|---|\n```\nfence\n~~~\n\n\nafter blank lines\n"
    "\x1b[2J\x00\u202e\ud800\r& 你\ttab"
)
EVERYTHING = {"scalars": 0, "images": 0, "tensors": 0}


def read(folder: Path) -> Any:
    accumulator = import_or_skip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


def points(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def layouts(events: Any) -> list[Any]:
    pb = import_or_skip("tensorboard.plugins.custom_scalar.layout_pb2")
    return [pb.Layout.FromString(e.tensor_proto.string_val[0]) for e in events.Tensors(LAYOUT)]


def texts(events: Any, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]


class Trainer:
    """A trainer's own writer: the class that torch's SummaryWriter uses underneath."""

    def __init__(self, folder: Path) -> None:
        files = import_or_skip("tensorboard.summary.writer.event_file_writer")
        self.writer = files.EventFileWriter(str(folder))

    def log(self, tag: str, value: float, step: int) -> None:
        event = import_or_skip("tensorboard.compat.proto.event_pb2")
        summary = import_or_skip("tensorboard.compat.proto.summary_pb2").Summary
        point = summary(value=[summary.Value(tag=tag, simple_value=value)])
        self.writer.add_event(event.Event(summary=point, step=step, wall_time=time.time()))
        self.writer.flush()

    def lay_out(self, categories: dict[str, dict[str, list[Any]]]) -> None:
        event = import_or_skip("tensorboard.compat.proto.event_pb2")
        content = import_or_skip("torch.utils.tensorboard.summary").custom_scalars(categories)
        self.writer.add_event(event.Event(summary=content, step=0, wall_time=time.time()))
        self.writer.flush()


def test_a_monitored_run_is_read_back_whole(tmp_path: Path) -> None:
    step = planted("healthy")
    monitor = Monitor(step.scorer(), every=2, sinks=f"tensorboard:{tmp_path}", tokenizer=step, on_error="raise")
    records = [monitor.observe(n, planted("healthy", step=n).batch) for n in range(5)]
    monitor.close()
    events = read(tmp_path / SUBRUN)
    accuracy = KEY + "retrieval_accuracy"
    assert points(events, accuracy) == [
        (r.step, pytest.approx(r.values[accuracy], rel=1e-6)) for r in records if accuracy in r.values
    ]
    assert [s for s, _ in points(events, accuracy)] == [0, 2, 4]
    assert [s for s, _ in points(events, "collapse/reward/mean")] == [0, 1, 2, 3, 4]
    scalars = events.Tags()["scalars"]
    assert len(scalars) == len({name for r in records for name in r.values})
    assert unknown_names(scalars) == []
    assert [e.step for e in events.Images(KEY + "matrix")] == [0, 2, 4]
    assert [e.step for e in events.Tensors(KEY + "traces")] == [0, 2, 4]


def test_the_image_holds_the_pixels(tmp_path: Path) -> None:
    image = import_or_skip("PIL.Image")
    matrix = planted("compressed").matrix
    sink = TensorBoardSink(tmp_path)
    sink.write(Record(step=3, values={}, matrices={"turn": matrix}))
    sink.close()
    (event,) = read(tmp_path / SUBRUN).Images("collapse_turn_sample/matrix")
    stored = np.asarray(image.open(io.BytesIO(event.encoded_image_string)))
    np.testing.assert_array_equal(stored, matrix_rgb(matrix))
    assert (event.height, event.width) == stored.shape[:2]


def test_the_layout_is_written_once_and_each_line_matches_one_curve(tmp_path: Path) -> None:
    step = planted("healthy", n_contexts=16)  # 16 contexts: retrieval_accuracy@2, @4 and @8 are there too
    monitor = Monitor(step.scorer(), every=1, sinks=[TensorBoardSink(tmp_path)], tokenizer=step, on_error="raise")
    for n in range(3):
        monitor.observe(n, planted("healthy", n_contexts=16, step=n).batch)
    monitor.close()
    events = read(tmp_path / SUBRUN)
    scalars = events.Tags()["scalars"]
    assert KEY + "retrieval_accuracy@4" in scalars
    (layout,) = layouts(events)
    assert layout.category[0].title == "Input dependence, first turn"
    for category in layout.category:
        for chart in category.chart:
            for pattern in chart.multiline.tag:
                # TensorBoard looks for a match anywhere in the tag.
                assert len([tag for tag in scalars if re.search(pattern, tag)]) == 1, pattern
            for series in chart.margin.series:
                assert {series.value, series.lower, series.upper} <= set(scalars)
    titles = {chart.title: chart for category in layout.category for chart in category.chart}
    assert list(titles["I(X; Z) and its bound log P (nats/trace)"].multiline.tag) == [
        f"^{KEY}mi_seq_estimate$",
        f"^{KEY}mi_upper_bound$",
    ]
    assert len(titles["Retrieval accuracy, 95% interval (fraction)"].margin.series) == 1


def test_the_layout_grows_when_a_run_begins_to_be_scored_later(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(Record(step=0, values={"reward/mean": 0.5}))
    sink.write(Record(step=1, values={"reward/mean": 0.5, KEY + "mi_zscore_ema": 1.0}))
    sink.write(Record(step=2, values={"reward/mean": 0.5, KEY + "mi_zscore_ema": 1.0, KEY + "gap_std": 1.0}))
    sink.close()
    found = [[category.title for category in layout.category] for layout in layouts(read(tmp_path / SUBRUN))]
    assert found == [["Rewards"], ["Input dependence, first turn", "Rewards"]]


def test_the_trainers_curve_and_layout_stay_whole_beside_ours(tmp_path: Path) -> None:
    """Read while both write, with the Python loader (`--load_fast=false`), which follows one file per directory."""
    multiplexer = import_or_skip("tensorboard.backend.event_processing.plugin_event_multiplexer").EventMultiplexer()
    trainer, sink = Trainer(tmp_path), TensorBoardSink(tmp_path)
    for step in range(12):
        trainer.log("train/loss", step / 2, step)
        sink.write(Record(step=step, values={"reward/mean": step / 4}))
        if step % 4 == 0:
            multiplexer.AddRunsFromDirectory(str(tmp_path))
            multiplexer.Reload()
    sink.close()
    trainer.writer.close()
    multiplexer.Reload()
    assert multiplexer.Runs().keys() == {".", SUBRUN}
    assert [e.step for e in multiplexer.Tensors(".", "train/loss")] == list(range(12))
    assert [e.step for e in multiplexer.Tensors(SUBRUN, "collapse/reward/mean")] == list(range(12))
    assert multiplexer.Runs()["."]["tensors"] == ["train/loss"], "nothing of ours in the trainer's run"


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    def run(steps: range, value: float) -> None:
        sink = TensorBoardSink(tmp_path)
        for step in steps:
            sink.write(Record(step=step, values={"reward/mean": value}))
        sink.close()

    run(range(8), 0.0)
    time.sleep(1.1)  # files are read in the order of the second they were opened in
    run(range(5, 10), 1.0)
    found = points(read(tmp_path / SUBRUN), "collapse/reward/mean")
    assert found == [(step, float(step >= 5)) for step in range(10)]


def hostile_record() -> Record:
    trace = TraceSample(
        namespace="turn", row=0, own=0, best=1, group="<b>", length=2, logp_P=(-2.0, -1.0), context=HOSTILE,
        context_best=HOSTILE, trace=HOSTILE, reward=1.0,
    )  # fmt: skip
    return Record(step=0, values={}, traces=(trace, trace))


def test_hostile_traces_are_inert_on_the_page(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(hostile_record())
    sink.close()
    (event,) = read(tmp_path / SUBRUN).Tensors("collapse_turn_sample/traces")
    array = import_or_skip("tensorboard.util.tensor_util").make_ndarray(event.tensor_proto)
    page = import_or_skip("tensorboard.plugins.text.text_plugin").text_array_to_html(array, enable_markdown=True)
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z]+)", page))
    assert tags == {"pre", "code"}, page
    (inside,) = re.findall(r"<pre><code>(.*)</code></pre>", page, re.DOTALL)
    shown = html.unescape(inside)
    for line in HOSTILE.split("\n")[:-1]:
        assert shown.count(line) >= 3, line
    assert shown.count("\\x1b[2J\\x00\\u202e\\ud800\\r& 你") == 6


def test_long_traces_are_cut_and_say_so(tmp_path: Path) -> None:
    trace = TraceSample(
        namespace="turn", row=0, own=0, best=0, group="0", length=2, logp_P=(-2.0,), trace="w" * 5000, context=None
    )
    sink = TensorBoardSink(tmp_path)
    sink.write(Record(step=0, values={}, traces=(trace,)))
    sink.close()
    (text,) = texts(read(tmp_path / SUBRUN), "collapse_turn_sample/traces")
    assert text.count("w") == 2000
    assert text.endswith("    [3000 more characters]")


def test_code_block_indents_every_line() -> None:
    assert code_block("a\n\nb") == "    a\n    \n    b"


class SpyWriter:
    """A SummaryWriter as far as it is used, and whether it was closed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("add_", "flush")):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, str(args[0]) if args else ""))

    def close(self) -> None:
        self.closed = True


def test_a_given_writer_gets_no_layout_and_is_not_closed() -> None:
    writer = SpyWriter()
    sink = TensorBoardSink(writer)
    sink.write(Record(step=0, values={"reward/mean": 1.0}))
    sink.close()
    assert writer.calls == [("add_scalar", "collapse/reward/mean"), ("flush", "")]
    assert not writer.closed
    TensorBoardSink(writer, layout=True).write(Record(step=0, values={"reward/mean": 1.0}))
    assert writer.calls[2][0] == "add_custom_scalars"


def test_torchs_writer_is_written_to_like_our_own(tmp_path: Path) -> None:
    import_or_skip("torch")
    from torch.utils.tensorboard import SummaryWriter

    step = planted("healthy")
    kept = Record(step=4, values={"reward/mean": 0.5}, matrices={"turn": step.matrix}, traces=hostile_record().traces)
    with SummaryWriter(str(tmp_path / "torch")) as writer:
        TensorBoardSink(writer, layout=True).write(kept)
    sink = TensorBoardSink(tmp_path / "own")
    sink.write(kept)
    sink.close()
    theirs, ours = read(tmp_path / "torch"), read(tmp_path / "own" / SUBRUN)
    assert points(theirs, "collapse/reward/mean") == points(ours, "collapse/reward/mean") == [(4, 0.5)]
    assert layouts(theirs) == layouts(ours)
    assert texts(theirs, "collapse_turn_sample/traces/text_summary") == texts(ours, "collapse_turn_sample/traces")
    assert len(theirs.Images("collapse_turn_sample/matrix")) == len(ours.Images("collapse_turn_sample/matrix")) == 1


def test_where_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("TENSORBOARD_LOGGING_DIR", "TENSORBOARD_DIR"):
        monkeypatch.delenv(variable, raising=False)

    def written() -> str:
        sink = TensorBoardSink()
        assert list(tmp_path.iterdir()) == before, "constructing touches nothing"
        sink.write(Record(step=0, values={"a": 1.0}))
        sink.close()
        (file,) = (f for f in tmp_path.rglob("*tfevents*") if f not in seen)
        seen.append(file)
        return str(file.parent.relative_to(tmp_path))

    seen: list[Path] = []
    before: list[Path] = []
    assert re.fullmatch(r"runs/collapsediag-\d{8}-\d{6}", written())
    before = list(tmp_path.iterdir())
    monkeypatch.setenv("TENSORBOARD_DIR", "verl")
    assert written() == "verl/collapsediag"
    before = list(tmp_path.iterdir())
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "hf")
    assert written() == "hf/collapsediag"


def test_other_ranks_and_forked_children_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = TensorBoardSink(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "3")
        sink.write(Record(step=0, values={"a": 1.0}))
    real = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: real + 1)
        sink.write(Record(step=0, values={"a": 1.0}))
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_target_and_a_missing_package_are_said_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="a directory or a SummaryWriter, found int"):
        TensorBoardSink(3)
    for name in [n for n in sys.modules if n == "tensorboard" or n.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'collapsediag\[tensorboard\]'"):
        TensorBoardSink("runs")


# -- the real page -----------------------------------------------------------------------------------------------------


class Relay(BaseHTTPRequestHandler):
    """Passes a page's requests on and remembers them."""

    target: ClassVar[str]
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _pass_on(self, body: bytes | None) -> None:
        self.asked.append(self.path)
        headers = {"Content-Type": self.headers["Content-Type"]} if body is not None else {}
        request = urllib.request.Request(self.target + self.path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, kind, content = answer.status, answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, kind, content = error.code, "text/plain", error.read()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextlib.contextmanager
def relay(target: str) -> Iterator[str]:
    Relay.target = target
    server = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def tensorboard_server(logdir: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--load_fast=false"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def wait_for_runs(page: str, runs: set[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if set(fetch(f"{page}/data/runs")) == runs:
                return
        time.sleep(0.3)
    raise TimeoutError(f"{page} did not serve {runs}")


def open_in_browser(url: str, folder: Path) -> Path:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed")
    picture = folder / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", f"--screenshot={picture}"]
    subprocess.run([browser, *options, url], check=True, capture_output=True, timeout=120)
    return picture


@pytest.mark.browser
@pytest.mark.slow
def test_the_real_page_shows_both_runs_and_fetches_nothing_a_trace_asks_for(tmp_path: Path) -> None:
    logdir = tmp_path / "logs"
    trainer, sink = Trainer(logdir), TensorBoardSink(logdir)
    asks = TraceSample(
        namespace="turn", row=0, own=0, best=0, group="0", length=1, logp_P=(-1.0,),
        trace="\n\n![](/trace.png)\n<img src=/trace.png>\n",
    )  # fmt: skip
    trainer.lay_out({"Mine": {"loss": ["Multiline", ["train/loss"]]}})
    for step in range(5):
        trainer.log("train/loss", step / 2, step)
        sink.write(Record(step=step, values={"reward/mean": step / 4}, traces=(asks,)))
    # The same as markdown that is not indented: shows that the page is drawn, and that such an image is asked for.
    assert isinstance(sink._writer, EventFile)
    sink._writer.add_text("collapse_turn_sample/control", "\n\n![](/control.png)", 0)
    sink.close()
    trainer.writer.close()
    with tensorboard_server(logdir) as page, relay(page) as seen_page:
        wait_for_runs(page, {".", SUBRUN})
        curve = fetch(f"{page}/data/plugin/scalars/scalars?run=.&tag=train/loss")
        assert [(step, value) for _, step, value in curve] == [(step, step / 2) for step in range(5)]
        ours = fetch(f"{page}/data/plugin/scalars/scalars?run={SUBRUN}&tag=collapse/reward/mean")
        assert [(step, value) for _, step, value in ours] == [(step, step / 4) for step in range(5)]
        charts = fetch(f"{page}/data/plugin/custom_scalars/layout")
        assert [category["title"] for category in charts["category"]] == ["Mine", "Rewards"]
        assert charts["category"][0]["chart"] == [{"title": "loss", "multiline": {"tag": ["train/loss"]}}]
        open_in_browser(f"{seen_page}/#text", tmp_path)
    assert [path for path in Relay.asked if path.endswith(".png")] == ["/control.png"]
