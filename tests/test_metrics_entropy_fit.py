"""The fit R = -a e^H + b: against scipy's, over simulated runs, and where it must refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from collapsediag.errors import MetricError
from collapsediag.metrics.entropy_fit import EntropyFit, fit_reward_entropy
from collapsediag.metrics.registry import find

STEPS = np.arange(40) * 5


def run(seed: int, a: float = 0.25, b: float = 0.9, noise: float = 0.01) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A run whose entropy decays from 1.2 towards 0.3 and whose reward follows the curve."""
    rng = np.random.default_rng(seed)
    entropy = 0.3 + 0.9 * np.exp(-STEPS / 60)
    return STEPS, entropy, -a * np.exp(entropy) + b + noise * rng.normal(size=STEPS.size)


def test_against_two_other_fits() -> None:
    step, entropy, reward = run(0)
    fit = fit_reward_entropy(step, entropy, reward)
    line = scipy.stats.linregress(np.exp(entropy), reward)
    np.testing.assert_allclose(
        [fit.a, fit.b, fit.a_se, fit.b_se], [-line.slope, line.intercept, line.stderr, line.intercept_stderr]
    )
    np.testing.assert_allclose(fit.r_squared, line.rvalue**2)
    (a, b), cov = scipy.optimize.curve_fit(lambda h, a, b: -a * np.exp(h) + b, entropy, reward)
    np.testing.assert_allclose([fit.a, fit.b], [a, b], rtol=1e-5)
    np.testing.assert_allclose(fit.ceiling, b - a, rtol=1e-5)
    np.testing.assert_allclose(fit.ceiling_se, math.sqrt(cov[0, 0] + cov[1, 1] - 2 * cov[0, 1]), rtol=1e-4)
    residual = reward - (b - a * np.exp(entropy))
    np.testing.assert_allclose(fit.residual_std, math.sqrt(np.sum(residual**2) / 38), rtol=1e-6)
    assert (fit.n, fit.entropy_low, fit.entropy_high) == (40, entropy.min(), entropy.max())


def test_standard_errors_cover_the_truth() -> None:
    """95% intervals of 400 runs must hold the planted values about 95 times in 100."""
    t = scipy.stats.t.ppf(0.975, 38)
    covered = np.zeros(3)
    for seed in range(400):
        fit = fit_reward_entropy(*run(seed))
        pairs = ((fit.a, fit.a_se, 0.25), (fit.b, fit.b_se, 0.9), (fit.ceiling, fit.ceiling_se, 0.65))
        covered += [abs(value - truth) <= t * se for value, se, truth in pairs]
    # Binomial, n = 400: 0.95 +- 3 standard errors.
    np.testing.assert_allclose(covered / 400, 0.95, atol=3 * math.sqrt(0.95 * 0.05 / 400))


def test_when_the_entropy_is_spent() -> None:
    step = np.arange(20)
    entropy = 1.0 - 0.04 * step
    reward = 1 - 0.2 * np.exp(entropy)
    fit = fit_reward_entropy(step, entropy, reward)
    np.testing.assert_allclose([fit.rate, fit.step_at_floor], [-0.04, (1.0 - 0.05) / 0.04])
    # The rate is that of the last ten points: a run that has flattened out has longer to go.
    flat = np.concatenate([entropy, entropy[-1] - 0.001 * np.arange(1, 11)])
    late = fit_reward_entropy(np.arange(30), flat, 1 - 0.2 * np.exp(flat))
    np.testing.assert_allclose(late.rate, -0.001)
    np.testing.assert_allclose(late.step_at_floor, 29 + (flat[-1] - 0.05) / 0.001)


def test_entropy_that_rises_or_is_spent_already() -> None:
    step = np.arange(10)
    rising = fit_reward_entropy(step, 0.2 + 0.1 * step, -np.exp(0.2 + 0.1 * step))
    assert rising.step_at_floor is None
    assert "entropy_fit/step_at_floor" not in rising.values()
    spent = np.maximum(1.0 - 0.2 * step, 0.01)
    assert fit_reward_entropy(step, spent, -np.exp(spent)).step_at_floor == 5.0
    assert fit_reward_entropy(step, spent, -np.exp(spent), floor=0.5).step_at_floor == 3.0


def test_the_order_of_the_points_does_not_matter() -> None:
    step, entropy, reward = run(1)
    order = np.random.default_rng(0).permutation(step.size)
    there = fit_reward_entropy(step, entropy, reward).values()
    back = fit_reward_entropy(step[order], entropy[order], reward[order]).values()
    assert there.keys() == back.keys()
    for name, value in there.items():
        np.testing.assert_allclose(back[name], value, err_msg=name)


def test_a_reward_that_rises_with_entropy_has_a_negative_a() -> None:
    step, entropy, reward = run(2, a=-0.25)
    assert fit_reward_entropy(step, entropy, reward).a < 0


@pytest.mark.parametrize(
    ("entropy", "reward", "message"),
    [
        ([1.0, 0.8, 0.6, 0.4], [0.1, 0.2, 0.3, 0.4], "4 points cannot carry"),
        ([0.5, 0.51, 0.52, 0.53, 0.54], [0.1, 0.2, 0.3, 0.4, 0.5], "moved by 0.04 nats"),
        ([0.5] * 9, list(range(9)), "moved by 0 nats"),
        ([1.0, 0.8, 0.6, 0.4, 0.2], [0.1] * 5, "reward is 0.1 at every step"),
        ([1.0, 0.8, 0.6, 0.4, 0.2], [0.3, 0.1, 0.32, 0.08, 0.3], "does not depend on e\\^H"),
        ([1.0, 0.8, float("nan"), 0.4, 0.2], [0.1, 0.2, 0.3, 0.4, 0.5], r"entropy\[2\] is nan"),
        ([1.0, 0.8, 0.6, 0.4, 0.2], [0.1, 0.2, 0.3, float("inf"), 0.5], r"reward\[3\] is inf"),
        ([1.0, 0.8, 0.6, 0.4, -0.2], [0.1, 0.2, 0.3, 0.4, 0.5], r"entropy\[4\] is -0.2"),
        ([900.0, 0.8, 0.6, 0.4, 0.2], [0.1, 0.2, 0.3, 0.4, 0.5], r"entropy\[0\] is 900"),
        ([1.0, 0.8, 0.6, 0.4, 0.2], [0.1, 0.2], "equally long"),
    ],
)
def test_data_that_cannot_carry_the_fit_are_refused(entropy: list[float], reward: list[float], message: str) -> None:
    with pytest.raises(MetricError, match=message):
        fit_reward_entropy(np.arange(len(entropy)), entropy, reward)


def test_pure_noise_is_refused_about_as_often_as_promised() -> None:
    rng = np.random.default_rng(9)
    entropy = np.linspace(1.0, 0.3, 15)
    refused = 0
    for _ in range(400):
        try:
            fit_reward_entropy(np.arange(15), entropy, rng.normal(size=15))
        except MetricError:
            refused += 1
    np.testing.assert_allclose(refused / 400, 0.95, atol=3 * math.sqrt(0.95 * 0.05 / 400))


def test_names_are_registered() -> None:
    values = fit_reward_entropy(*run(0)).values()
    assert len(values) == 8
    for name in values:
        assert find(name) is not None, name
    assert isinstance(fit_reward_entropy(*run(0)), EntropyFit)
