"""Wilson, Spearman and the moving averages against scipy and hand-made sums."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from collapsediag.errors import MetricError, SettingsError
from collapsediag.statistics import EmaStd, spearman, wilson_interval

ROUNDING = 1e-12


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_wilson_is_scipys(n: int, confidence: float) -> None:
    for successes in {0, 1, n // 3, n // 2, n - 1, n}:
        expected = stats.binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
        np.testing.assert_allclose(wilson_interval(successes, n, confidence), tuple(expected), atol=ROUNDING)


def test_wilson_ends_are_exact_and_nothing_is_known_from_nothing() -> None:
    for n in range(1, 200):
        assert wilson_interval(0, n)[0] == 0.0
        assert wilson_interval(n, n)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(-1, 5), (6, 5), (math.nan, 5), (0, -1), (1, math.inf)])
def test_wilson_refuses_counts_that_are_none(successes: float, n: float) -> None:
    with pytest.raises(MetricError, match="0 <= successes <= n"):
        wilson_interval(successes, n)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, -0.1, math.nan])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(SettingsError, match="between 0 and 1"):
        wilson_interval(1, 2, confidence)
    with pytest.raises(SettingsError, match="between 0 and 1"):
        spearman([1, 2, 3], [1, 2, 3], confidence=confidence)


@pytest.mark.parametrize("seed", range(5))
def test_spearman_is_scipys_with_and_without_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=30)
    y = 0.5 * x + rng.normal(size=30)
    np.testing.assert_allclose(spearman(x, y).rho, stats.spearmanr(x, y).statistic, atol=ROUNDING)
    coarse_x, coarse_y = np.round(x), np.round(y)
    expected = stats.spearmanr(coarse_x, coarse_y).statistic
    np.testing.assert_allclose(spearman(coarse_x, coarse_y).rho, expected, atol=ROUNDING)


def test_spearman_interval_is_the_published_formula() -> None:
    rng = np.random.default_rng(7)
    x = rng.normal(size=40)
    y = x + rng.normal(size=40)
    found = spearman(x, y, confidence=0.9)
    z = np.arctanh(found.rho)
    half = stats.norm.ppf(0.95) * np.sqrt((1 + found.rho**2 / 2) / 37)
    np.testing.assert_allclose([found.low, found.high], np.tanh([z - half, z + half]), atol=ROUNDING)
    assert found.n == 40
    mirrored = spearman(x, -y, confidence=0.9)
    np.testing.assert_allclose([mirrored.low, mirrored.high], [-found.high, -found.low], atol=ROUNDING)


def test_a_few_points_in_perfect_order_are_not_certainty() -> None:
    assert spearman([1, 2, 3], [4, 5, 6]).low == -1.0
    five = spearman(range(5), range(5))
    assert five.rho == 1.0
    assert five.high == 1.0
    assert -1.0 < five.low < 0.9
    assert spearman(range(50), range(50)).low > 0.99
    assert spearman(range(5), [4, 3, 2, 1, 0]).low == -1.0


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1, 2, 3], "equal length"),
        ([1], [1], ">= 2"),
        ([1, math.nan, 3], [1, 2, 3], "finite"),
        ([1, 1, 1], [1, 2, 3], "constant"),
    ],
)
def test_spearman_refuses(x: list[float], y: list[float], message: str) -> None:
    with pytest.raises(MetricError, match=message):
        spearman(x, y)


@pytest.mark.calibration
def test_spearman_interval_covers() -> None:
    """Bivariate normal, where Spearman's rho of the population is 6/pi asin(r/2)."""
    rng = np.random.default_rng(11)
    n, r, simulations = 25, 0.6, 400
    truth = 6 / math.pi * math.asin(r / 2)
    covered = 0
    for _ in range(simulations):
        x = rng.normal(size=n)
        y = r * x + math.sqrt(1 - r * r) * rng.normal(size=n)
        found = spearman(x, y)
        covered += found.low <= truth <= found.high
    # 0.95 +/- 3.5 binomial standard errors of 400 simulations.
    assert 0.91 <= covered / simulations <= 0.99


def test_ema_is_the_recursion_with_the_first_value_as_start() -> None:
    ema = EmaStd(decay=0.8)
    expected = None
    for value in [3.0, 1.0, 0.0, 7.5]:
        expected = value if expected is None else 0.8 * expected + 0.2 * value
        assert ema.preview("a", value) == pytest.approx(expected, rel=1e-15)
        assert ema.update("a", value) == pytest.approx(expected, rel=1e-15)
    assert ema.update("b", 2.0) == 2.0
    assert dict(ema.values) == {"a": pytest.approx(expected, rel=1e-15), "b": 2.0}


def test_preview_takes_arrays_and_stores_nothing() -> None:
    ema = EmaStd()
    ema.update("a", 1.0)
    np.testing.assert_allclose(ema.preview("a", np.array([1.0, 2.0])), [1.0, 1.1])
    np.testing.assert_allclose(ema.preview("new", np.array([1.0, 2.0])), [1.0, 2.0])
    assert dict(ema.values) == {"a": 1.0}


def test_ema_goes_on_after_a_round_trip_through_json() -> None:
    ema = EmaStd()
    for value in [0.1, 0.7, 0.3]:
        ema.update("gap_std", value)
    restored = EmaStd()
    restored.load_state_dict(json.loads(json.dumps(ema.state_dict())))
    assert restored.update("gap_std", 0.9) == ema.update("gap_std", 0.9)
    ema.state_dict()["values"]["gap_std"] = 5.0
    assert restored.state_dict() == ema.state_dict()


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, "1", None, True, np.array([1.0])])
def test_ema_refuses_what_would_poison_it(value: object) -> None:
    ema = EmaStd()
    ema.update("a", 1.0)
    with pytest.raises(MetricError, match="standard deviation"):
        ema.update("a", value)  # type: ignore[arg-type]
    assert dict(ema.values) == {"a": 1.0}


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan, "0.9", None, True])
def test_ema_refuses_a_decay_that_is_none(decay: object) -> None:
    with pytest.raises(SettingsError, match="decay"):
        EmaStd(decay=decay)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "keys 'decay' and 'values'"),
        ([], "found list"),
        ({"decay": 0.9}, "keys"),
        ({"decay": 0.9, "values": {}, "more": 1}, "keys"),
        ({"decay": 0.5, "values": {}}, "Construct EmaStd"),
        ({"decay": 0.9, "values": [1.0]}, "map names"),
        ({"decay": 0.9, "values": {"a": math.nan}}, "damaged"),
        ({"decay": 0.9, "values": {"b": 1.0, "a": -1.0}}, "damaged"),
        ({"decay": 0.9, "values": {"a": "x"}}, "damaged"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state: object, message: str) -> None:
    ema = EmaStd()
    ema.update("a", 1.0)
    with pytest.raises(SettingsError, match=message):
        ema.load_state_dict(state)  # type: ignore[arg-type]
    assert dict(ema.values) == {"a": 1.0}
