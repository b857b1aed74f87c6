"""The log-likelihood matrix as a picture, drawn without a plotting library.

What is drawn is pointwise mutual information, `log p(Z_i|X_j) - log p(Z_i)`: raw log-likelihoods show how long and how
fluent each trace is (bands along rows), which hides whether it depends on its prompt. The colour range never adapts to
the picture: a range fitted to each step would make a collapsed matrix look as vivid as a healthy one.

Legend: N traces (rows), P distinct contexts (columns).
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from collapsediag.matrix import IntArray, LogLikelihoodMatrix
from collapsediag.metrics.information import row_values
from collapsediag.metrics.rows import usable_rows

FloatArray = NDArray[np.float64]
Pixels = NDArray[np.uint8]

# Orange, white, blue: told apart with every common colour blindness, and white means "says nothing".
_BELOW, _ZERO, _ABOVE = (253, 184, 99), (247, 247, 247), (5, 48, 97)
NOT_SCORED = (190, 190, 190)
FRAME = (60, 60, 60)
TARGET_PIXELS = 480
MAX_ROWS = 960
# Two pixels, because trackers show the picture smaller and drop lines of one. Around cells smaller than _MIN_FRAMED the
# frame would cover what it frames.
_FRAME_WIDTH = 2
_MIN_FRAMED = 6


def pointwise_mi_NP(matrix: LogLikelihoodMatrix) -> FloatArray:
    """`log p(Z_i|X_j) - log p(Z_i)` of the usable rows, nats per trace, [N, P]; NaN where a cell was not scored.

    At most log P, reached where no other context explains the trace at all; 0 where the context says nothing about it.
    Raises MetricError where no matrix metric is defined.

    >>> m = LogLikelihoodMatrix(logp_NP=[[-1.0, -1.0], [-9.0, -2.0]], length_N=[1, 1], own_N=[0, 1])
    >>> pointwise_mi_NP(m).round(3).tolist()
    [[0.0, 0.0], [-6.308, 0.692]]
    """
    rows = usable_rows(matrix)
    marginal_N = row_values(rows, normalization="sequence").marginal_N
    pmi_NP: FloatArray = rows.logp_NP - marginal_N[:, None]
    return pmi_NP


def matrix_rgb(matrix: LogLikelihoodMatrix) -> Pixels:
    """The matrix as pixels [height, width, 3], about 480 on a side.

    Rows are ordered by their own context, so that a healthy policy draws a blue diagonal; each context's own traces are
    framed. Blue: above 0, full at log P. Orange: below 0, full at -log P. White: 0. Grey: not scored.
    Of more than 960 usable traces, 960 evenly spaced ones are drawn.
    """
    rows = usable_rows(matrix)
    order_N = _drawn_rows(rows)
    share_NP = pointwise_mi_NP(rows)[order_N] / np.log(rows.n_contexts)
    height, width = (max(1, TARGET_PIXELS // size) for size in share_NP.shape)
    pixels = _colours(share_NP).repeat(height, axis=0).repeat(width, axis=1)
    if min(height, width) >= _MIN_FRAMED:
        _draw_frames(pixels, rows.own_N[order_N], height, width)
    return pixels


def matrix_caption(matrix: LogLikelihoodMatrix, step: int) -> str:
    """One line that says what the picture shows, its range and what is left out.

    >>> m = LogLikelihoodMatrix(logp_NP=[[-1.0, -1.0], [-9.0, -2.0]], length_N=[1, 1], own_N=[0, 1])
    >>> matrix_caption(m, 7)
    'step 7: log p(trace|prompt) - log p(trace), colour range +-0.69 nats (log P), rows by own prompt, 2 x 2'
    """
    rows = usable_rows(matrix)
    drawn = len(_drawn_rows(rows))
    shown = f"{drawn} x {rows.n_contexts}"
    if drawn < matrix.n_traces:
        shown += f" of {matrix.n_traces} traces"
    return (
        f"step {step}: log p(trace|prompt) - log p(trace), colour range +-{np.log(rows.n_contexts):.2f} nats (log P), "
        f"rows by own prompt, {shown}"
    )


def encode_png(pixels: Pixels) -> bytes:
    """An RGB image [height, width, 3] as a PNG file.

    >>> encode_png(np.zeros((2, 3, 3), dtype=np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + width * 3), dtype=np.uint8)  # filter type 0 before each line
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _drawn_rows(rows: LogLikelihoodMatrix) -> IntArray:
    order_N = np.argsort(rows.own_N, kind="stable")
    if order_N.size > MAX_ROWS:
        order_N = order_N[np.linspace(0, order_N.size - 1, MAX_ROWS).round().astype(np.int64)]
    return order_N


def _colours(share_NP: FloatArray) -> Pixels:
    clipped_NP = np.nan_to_num(np.clip(share_NP, -1.0, 1.0), nan=0.0)
    zero = np.array(_ZERO, dtype=np.float64)
    full_NP3 = np.where((clipped_NP < 0)[..., None], np.array(_BELOW), np.array(_ABOVE))
    blended_NP3 = zero + np.abs(clipped_NP)[..., None] * (full_NP3 - zero)
    pixels: Pixels = blended_NP3.round().astype(np.uint8)
    pixels[np.isnan(share_NP)] = NOT_SCORED
    return pixels


def _draw_frames(pixels: Pixels, own_N: IntArray, height: int, width: int) -> None:
    for column in np.unique(own_N):
        rows = np.flatnonzero(own_N == column)
        block = pixels[rows[0] * height : (rows[-1] + 1) * height, column * width : (column + 1) * width]
        inside = block[_FRAME_WIDTH:-_FRAME_WIDTH, _FRAME_WIDTH:-_FRAME_WIDTH].copy()
        block[:] = FRAME
        block[_FRAME_WIDTH:-_FRAME_WIDTH, _FRAME_WIDTH:-_FRAME_WIDTH] = inside
