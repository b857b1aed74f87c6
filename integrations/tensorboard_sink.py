"""TensorBoard without torch: a run of its own beside the trainer's curves.

Two writers in one directory lose each other's data in TensorBoard's Python loader, and a layout written there replaces
the user's own. So everything goes to LOGDIR/collapsediag/, which TensorBoard shows as one more run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from collapsediag._optional import require
from collapsediag.chart_layout import Category, Chart, layout
from collapsediag.errors import SettingsError
from collapsediag.main_process import MainProcess
from collapsediag.matrix_image import encode_png, matrix_rgb
from collapsediag.record import Record
from collapsediag.tracker_values import namespaces_with_traces, traces_as_text, tracker_values

logger = logging.getLogger("collapsediag")

SUBRUN = "collapsediag"
# Where transformers and veRL are told to write, in this order.
LOGDIR_VARIABLES = ("TENSORBOARD_LOGGING_DIR", "TENSORBOARD_DIR")


class TensorBoardSink:
    """Writes records where TensorBoard looks.

    target: the LOGDIR of the trainer's run (a sub-run is made in it), or an open SummaryWriter (torch, tensorboardX),
        which is written to and never closed. Where not given: the directory in TENSORBOARD_LOGGING_DIR or
        TENSORBOARD_DIR, else a new one under runs/.
    layout: write the custom-scalars layout. By default only into a sub-run: in a given writer it would replace yours.
    matrix: also write the matrix as an image. traces: also write the kept traces as text.

    Going on in a LOGDIR takes the place of what was written there from the first new step on. Raises
    MissingExtraError without tensorboard.
    """

    def __init__(
        self, target: Any = None, *, layout: bool | None = None, matrix: bool = True, traces: bool = True
    ) -> None:
        is_writer = callable(getattr(target, "add_scalar", None))
        if not is_writer and target is not None and not isinstance(target, (str, os.PathLike)):
            raise SettingsError(
                f"TensorBoardSink takes a directory or a SummaryWriter, found {type(target).__name__} (no add_scalar)."
            )
        self._writer: Any = target if is_writer else EventFile(_run_directory(target))
        self._layout = not is_writer if layout is None else layout
        self._matrix, self._traces = matrix, traces
        self._process = MainProcess()
        self._names: set[str] = set()
        self._written: list[Category] = []

    def write(self, record: Record) -> None:
        """Write one record and flush it; on another process, nothing happens."""
        if not self._process.is_here():
            return
        if isinstance(self._writer, EventFile) and self._writer.begin(record.step):
            self._names, self._written = set(), []
        values = tracker_values(record)
        self._write_layout(set(values))
        for name, value in values.items():
            self._writer.add_scalar(name, value, record.step)
        if self._matrix:
            for namespace, matrix in record.matrices.items():
                pixels = matrix_rgb(matrix)
                self._writer.add_image(f"collapse_{namespace}_sample/matrix", pixels, record.step, dataformats="HWC")
        if self._traces:
            for namespace in namespaces_with_traces(record):
                text = code_block(traces_as_text(record, namespace))
                self._writer.add_text(f"collapse_{namespace}_sample/traces", text, record.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files written here; a given writer belongs to its owner."""
        if isinstance(self._writer, EventFile) and not self._process.is_forked():
            self._writer.close()

    def _write_layout(self, names: set[str]) -> None:
        if not self._layout or names <= self._names:
            return
        self._names |= names
        categories = layout(self._names)
        # TensorBoard keeps the last one written: a run that begins to be scored later still gets its charts.
        if categories != self._written:
            self._writer.add_custom_scalars(
                {c.title: {ch.heading(): _content(ch) for ch in c.charts} for c in categories}
            )
            self._written = categories


class EventFile:
    """The part of a SummaryWriter that is used here, on the tensorboard package alone.

    Constructing touches nothing on disk; `begin` does.
    """

    def __init__(self, directory: Path) -> None:
        feature = "the TensorBoard sink"
        self._files = require("tensorboard.summary.writer.event_file_writer", extra="tensorboard", feature=feature)
        self._events = require("tensorboard.compat.proto.event_pb2", extra="tensorboard", feature=feature)
        self._summary = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard", feature=feature)
        self._tensor = require("tensorboard.compat.proto.tensor_pb2", extra="tensorboard", feature=feature)
        self._shape = require("tensorboard.compat.proto.tensor_shape_pb2", extra="tensorboard", feature=feature)
        self._charts = require("tensorboard.plugins.custom_scalar.layout_pb2", extra="tensorboard", feature=feature)
        self._directory = directory
        self._writer: Any = None

    def begin(self, step: int) -> bool:
        """Open the file, once, and again where its directory was deleted; whether it is new.

        In a directory that holds an earlier run's, steps from `step` on are taken over.
        """
        if self._writer is not None:
            if self._directory.is_dir():
                return False
            with contextlib.suppress(OSError):  # its last bytes went with the directory
                self._writer.close()
            logger.warning("%s was deleted; curves go on in a new file from step %d on", self._directory, step)
        is_resumed = any(self._directory.glob("*tfevents*"))
        self._writer = self._files.EventFileWriter(str(self._directory))
        if is_resumed:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(session_log=start, step=step, wall_time=time.time()))
        return True

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """One point of a curve."""
        self._add(step, tag=tag, simple_value=value)

    def add_image(self, tag: str, pixels: Any, step: int, *, dataformats: str) -> None:
        """One RGB image, [height, width, 3]."""
        assert dataformats == "HWC"
        height, width, _ = pixels.shape
        png = encode_png(pixels)
        image = self._summary.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._add(step, tag=tag, image=image)

    def add_text(self, tag: str, markdown: str, step: int) -> None:
        """One piece of markdown."""
        self._add_tensor(step, tag, "text", markdown.encode())

    def add_custom_scalars(self, categories: dict[str, dict[str, list[Any]]]) -> None:
        """The layout of the custom-scalars page, in the form of torch's SummaryWriter."""
        listed = [
            self._charts.Category(title=title, chart=[self._chart(*chart) for chart in charts.items()])
            for title, charts in categories.items()
        ]
        content = self._charts.Layout(category=listed).SerializeToString()
        self._add_tensor(0, "custom_scalars__config__", "custom_scalars", content)

    def flush(self) -> None:
        """Put everything on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _chart(self, title: str, content: list[Any]) -> Any:
        kind, tags = content
        if kind == "Multiline":
            return self._charts.Chart(title=title, multiline=self._charts.MultilineChartContent(tag=tags))
        series = self._charts.MarginChartContent.Series(value=tags[0], lower=tags[1], upper=tags[2])
        return self._charts.Chart(title=title, margin=self._charts.MarginChartContent(series=[series]))

    def _add_tensor(self, step: int, tag: str, plugin: str, content: bytes) -> None:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name=plugin)
        )
        shape = self._shape.TensorShapeProto()  # one string, not a list of them, which would be shown as a table
        tensor = self._tensor.TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=shape)
        self._add(step, tag=tag, metadata=metadata, tensor=tensor)

    def _add(self, step: int, **value: Any) -> None:
        summary = self._summary.Summary(value=[self._summary.Summary.Value(**value)])
        self._writer.add_event(self._events.Event(summary=summary, step=step, wall_time=time.time()))


def code_block(text: str) -> str:
    """Text as a markdown code block by indentation: nothing in it is markup, whatever it says.

    A fence could be closed from inside; unindented text may hold an image that a viewer's browser would fetch.

    >>> code_block("# no heading\\n\\n![](x)")
    '    # no heading\\n    \\n    ![](x)'
    """
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _content(chart: Chart) -> list[Any]:
    if chart.has_band:
        name = chart.names[0]
        return ["Margin", [name, f"{name}/ci_low", f"{name}/ci_high"]]
    # Lines of a chart are regular expressions: without anchors, retrieval_accuracy would draw retrieval_accuracy@4 too.
    return ["Multiline", [f"^{re.escape(name)}$" for name in chart.names]]


def _run_directory(target: str | os.PathLike[str] | None) -> Path:
    if target is not None:
        return Path(target) / SUBRUN
    for variable in LOGDIR_VARIABLES:
        if os.environ.get(variable):
            return Path(os.environ[variable]) / SUBRUN
    # A new one for every run: two runs in one directory would be read as one that was resumed.
    return Path("runs") / f"{SUBRUN}-{time.strftime('%Y%m%d-%H%M%S')}"
