"""The picture of a matrix: pixels decoded by Pillow, values recomputed in plain loops."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from collapsediag.chart_layout import BUDGET_CHART, MATRIX_CHARTS, ROLLOUT_CATEGORIES, layout
from collapsediag.errors import MetricError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.matrix_image import (
    _ABOVE,
    _BELOW,
    _ZERO,
    FRAME,
    MAX_ROWS,
    NOT_SCORED,
    encode_png,
    matrix_caption,
    matrix_rgb,
    pointwise_mi_NP,
)
from collapsediag.metrics.registry import registered
from collapsediag.testing import planted

from .conftest import import_or_skip


def cells(matrix: LogLikelihoodMatrix, n: int, p: int) -> np.ndarray:
    """The colour in the middle of every cell."""
    pixels = matrix_rgb(matrix)
    height, width = pixels.shape[0] // n, pixels.shape[1] // p
    return pixels[height // 2 :: height, width // 2 :: width]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (480, 2), (5, 480)])
def test_png_is_decoded_to_the_same_pixels(shape: tuple[int, int]) -> None:
    image = import_or_skip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, size=(*shape, 3), dtype=np.uint8)
    decoded = image.open(io.BytesIO(encode_png(pixels)))
    assert (decoded.mode, decoded.format) == ("RGB", "PNG")
    np.testing.assert_array_equal(np.asarray(decoded), pixels)


def test_pointwise_mi_against_a_loop() -> None:
    rng = np.random.default_rng(1)
    logp = -rng.random((7, 4)) * 20
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=np.ones(7, dtype=int), own_N=np.arange(7) % 4)
    found = pointwise_mi_NP(matrix)
    for i in range(7):
        mixture = math.log(sum(math.exp(logp[i, j]) for j in range(4)) / 4)
        for j in range(4):
            assert found[i, j] == pytest.approx(logp[i, j] - mixture, abs=1e-12)


def test_pointwise_mi_of_a_budgeted_matrix_reweights_the_others() -> None:
    logp = np.array([[-1.0, -3.0, np.nan, np.nan], [-2.0, -4.0, np.nan, -5.0]])
    scored = np.isfinite(logp)
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=[1, 1], own_N=[0, 1], scored_NP=scored)
    found = pointwise_mi_NP(matrix)
    first = math.log(math.exp(-1) / 4 + 3 * math.exp(-3) / 4)
    second = math.log(math.exp(-4) / 4 + (3 / 2) * (math.exp(-2) + math.exp(-5)) / 4)
    np.testing.assert_allclose(
        found, [[-1 - first, -3 - first, np.nan, np.nan], np.array(logp[1]) - second], rtol=1e-12
    )


def test_a_clear_policy_draws_a_blue_diagonal_in_the_order_of_prompts() -> None:
    own = np.array([2, 0, 1, 0, 2, 1])
    logp = np.full((6, 3), -500.0)
    logp[np.arange(6), own] = -1.0
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=np.ones(6, dtype=int), own_N=own)
    for row, colours in enumerate(cells(matrix, 6, 3)):
        for column, colour in enumerate(colours):
            assert tuple(colour) == (_ABOVE if column == row // 2 else _BELOW), (row, column)


def test_collapse_is_white_whatever_the_log_likelihoods() -> None:
    level_N = -np.linspace(1, 400, 12)
    matrix = LogLikelihoodMatrix(
        logp_NP=np.repeat(level_N[:, None], 4, axis=1), length_N=np.ones(12, dtype=int), own_N=np.arange(12) % 4
    )
    colours = matrix_rgb(matrix).reshape(-1, 3)
    assert {tuple(int(v) for v in c) for c in colours} == {_ZERO, FRAME}


def test_the_colour_range_does_not_follow_the_picture() -> None:
    """Half of log P is half-way to blue, also where it is the largest value there is."""
    p = 4
    gap = math.log(2)  # half of log 4
    others = math.log((p * math.exp(-gap) - 1) / (p - 1))  # so that the mixture is exactly `gap` below the own column
    logp = np.full((p, p), -5.0 + others)
    np.fill_diagonal(logp, -5.0)
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=np.ones(p, dtype=int), own_N=np.arange(p))
    expected = (np.array(_ZERO) + np.array(_ABOVE)) / 2
    np.testing.assert_allclose(cells(matrix, p, p)[0, 0], expected, atol=0.5001)  # whole colour levels
    assert "+-1.39 nats" in matrix_caption(matrix, 0)


def test_cells_that_were_not_scored_are_grey_and_bad_rows_are_left_out_and_counted() -> None:
    logp = np.array([[-1.0, -3.0, np.nan], [-4.0, -2.0, -2.0], [np.inf * -1, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=[1, 1, 1, 0], own_N=[0, 1, 2, 2], scored_NP=~np.isnan(logp))
    assert tuple(cells(matrix, 2, 3)[0, 2]) == NOT_SCORED
    assert matrix_caption(matrix, 5).endswith("2 x 3 of 4 traces")


def test_many_rows_are_thinned_evenly_and_stay_in_order() -> None:
    n, p = 4 * MAX_ROWS, 4
    own = np.repeat(np.arange(p), MAX_ROWS)
    logp = np.full((n, p), -500.0)
    logp[np.arange(n), own] = -1.0
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=np.ones(n, dtype=int), own_N=own)
    pixels = matrix_rgb(matrix)
    assert pixels.shape == (MAX_ROWS, 480, 3)
    blue_N = (pixels[:, 60::120] == _ABOVE).all(axis=2)
    np.testing.assert_array_equal(blue_N.argmax(axis=1), np.repeat(np.arange(p), MAX_ROWS // p))


def test_one_prompt_has_no_picture() -> None:
    matrix = LogLikelihoodMatrix(logp_NP=[[-1.0]], length_N=[1], own_N=[0])
    with pytest.raises(MetricError, match="at least 2"):
        matrix_rgb(matrix)


def test_the_chart_layout_names_registered_metrics_of_one_unit() -> None:
    known = registered()
    charts = [*MATRIX_CHARTS, BUDGET_CHART, *(chart for category in ROLLOUT_CATEGORIES for chart in category.charts)]
    for chart in charts:
        units = {known[name].unit for name in chart.names if not name.startswith("timing_s/")}
        assert len(units) <= 1, chart.title
    assert [c.title for c in layout([])] == []


def test_a_band_needs_its_interval() -> None:
    name = "collapse_turn_sample/retrieval_accuracy"
    (without,) = layout([name])
    (with_interval,) = layout([name, f"{name}/ci_low", f"{name}/ci_high"])
    assert [chart.has_band for chart in without.charts] == [False]
    assert [chart.has_band for chart in with_interval.charts] == [False, True]


def test_a_planted_step_is_drawn() -> None:
    assert matrix_rgb(planted("healthy").matrix).shape == (448, 480, 3)
