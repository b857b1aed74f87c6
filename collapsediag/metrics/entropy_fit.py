"""How much reward the entropy still buys: the curve `R = -a e^H + b` over a run, and where it ends.

Cui et al. (arXiv 2505.22617, Eq. 1) found that without an intervention reward is bought with entropy along this curve.
At H = 0 nothing is left to spend, and the reward ends at the ceiling `b - a`.

The curve is a straight line in `e^H`, so least squares have a closed form, with the standard errors of any line. They
assume independent residuals; the steps of a run are not quite that, so read them as lower bounds.

Legend: S steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from collapsediag.errors import MetricError
from collapsediag.metrics.grouped import FloatArray
from collapsediag.metrics.registry import MetricInfo, register

MIN_POINTS = 5
# Over less than this the curve is a point: a and b could trade against each other freely.
MIN_ENTROPY_RANGE = 0.05
MAX_ENTROPY = 20.0
ENTROPY_FLOOR = 0.05
RECENT_POINTS = 10
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class EntropyFit:
    """The fitted curve of one run.

    a, b: of `R = -a e^H + b`; a > 0 where reward is bought with entropy. ceiling: `b - a`, the reward at H = 0.
    a_se, b_se, ceiling_se: standard errors. residual_std: of the points about the curve (n - 2 degrees of freedom).
    r_squared: share of the reward's variance that the curve explains.
    n: points. entropy_low, entropy_high: the range of H they cover; outside of it the curve is extrapolation.
    rate: change of H per step over the last points (at most 10), by a straight line.
    step_at_floor: the step at which H would reach `floor` at that rate, the step where it did, or None where H does
        not fall.
    """

    a: float
    b: float
    ceiling: float
    a_se: float
    b_se: float
    ceiling_se: float
    residual_std: float
    r_squared: float
    n: int
    entropy_low: float
    entropy_high: float
    rate: float
    step_at_floor: float | None
    floor: float = ENTROPY_FLOOR

    def values(self) -> dict[str, float]:
        """The numbers by metric name."""
        names = ("a", "b", "ceiling", "a_se", "b_se", "ceiling_se", "r_squared")
        values = {f"entropy_fit/{name}": float(getattr(self, name)) for name in names}
        if self.step_at_floor is not None:
            values["entropy_fit/step_at_floor"] = self.step_at_floor
        return values


def fit_reward_entropy(
    step_S: ArrayLike, entropy_S: ArrayLike, reward_S: ArrayLike, *, floor: float = ENTROPY_FLOOR
) -> EntropyFit:
    """Fit `R = -a e^H + b` by least squares.

    step_S, entropy_S, reward_S: [S] one value per logged step: step number, mean token entropy (nats), mean reward.

    Raises MetricError where the data cannot carry the fit: fewer than 5 points, a NaN or infinity, a negative entropy,
    an entropy that hardly moved (less than 0.05 nats in all), or a reward that does not depend on it (the 95% interval
    of a holds 0).

    >>> import numpy as np
    >>> h = np.linspace(1.0, 0.2, 9)
    >>> fit = fit_reward_entropy(np.arange(9), h, 1.0 - 0.2 * np.exp(h))
    >>> round(fit.a, 6), round(fit.b, 6), round(fit.ceiling, 6), round(fit.step_at_floor, 6)
    (0.2, 1.0, 0.8, 9.5)
    """
    step, entropy, reward = _checked(step_S, entropy_S, reward_S)
    n = step.size
    x = np.exp(entropy)
    dx = x - x.mean()
    spread = float(dx @ dx)
    slope = float(dx @ (reward - reward.mean())) / spread
    intercept = float(reward.mean() - slope * x.mean())
    residual = reward - intercept - slope * x
    variance = float(residual @ residual) / (n - 2)
    slope_se = math.sqrt(variance / spread)
    _refuse_no_dependence(-slope, slope_se, n)
    total = float(np.sum((reward - reward.mean()) ** 2))
    rate, at_floor = _step_at_floor(step, entropy, floor)
    return EntropyFit(
        a=-slope,
        b=intercept,
        ceiling=intercept + slope,
        a_se=slope_se,
        b_se=_line_se(variance, spread, n, float(x.mean()), at=0.0),
        ceiling_se=_line_se(variance, spread, n, float(x.mean()), at=1.0),  # e^0 = 1
        residual_std=math.sqrt(variance),
        r_squared=1 - float(residual @ residual) / total,
        n=n,
        entropy_low=float(entropy.min()),
        entropy_high=float(entropy.max()),
        rate=rate,
        step_at_floor=at_floor,
        floor=floor,
    )


def _line_se(variance: float, spread: float, n: int, mean_x: float, *, at: float) -> float:
    """Standard error of the line's height at `at`."""
    return math.sqrt(variance * (1 / n + (at - mean_x) ** 2 / spread))


def _checked(step_S: ArrayLike, entropy_S: ArrayLike, reward_S: ArrayLike) -> tuple[FloatArray, FloatArray, FloatArray]:
    step, entropy, reward = (np.asarray(v, dtype=np.float64) for v in (step_S, entropy_S, reward_S))
    if not (step.ndim == 1 and step.shape == entropy.shape == reward.shape):
        raise MetricError(
            f"step, entropy and reward must be equally long vectors, found shapes {step.shape}, {entropy.shape} and "
            f"{reward.shape}."
        )
    for name, values in (("step", step), ("entropy", entropy), ("reward", reward)):
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise MetricError(f"{name}[{at}] is {values[at]}; leave out steps where a quantity is unknown.")
    if step.size < MIN_POINTS:
        raise MetricError(f"{step.size} points cannot carry a fit of two parameters; at least {MIN_POINTS} are needed.")
    if entropy.min() < 0 or entropy.max() > MAX_ENTROPY:
        at = int(np.flatnonzero((entropy < 0) | (entropy > MAX_ENTROPY))[0])
        raise MetricError(
            f"entropy[{at}] is {entropy[at]:.6g}; a mean token entropy lies between 0 and log V, about 12 nats. Was it "
            "negated, or summed over tokens?"
        )
    if np.ptp(entropy) < MIN_ENTROPY_RANGE:
        raise MetricError(
            f"the entropy moved by {np.ptp(entropy):.3g} nats in all ({entropy.min():.4g} to {entropy.max():.4g}); a "
            f"curve needs a spread of at least {MIN_ENTROPY_RANGE}. Wait for more steps."
        )
    if np.ptp(reward) == 0:
        raise MetricError(f"the reward is {reward[0]:.6g} at every step; there is no curve to fit.")
    order = np.argsort(step, kind="stable")
    return step[order], entropy[order], reward[order]


def _refuse_no_dependence(a: float, a_se: float, n: int) -> None:
    margin = float(special.stdtrit(n - 2, 0.5 + CONFIDENCE / 2)) * a_se
    if abs(a) <= margin or a == 0:
        raise MetricError(
            f"the reward does not depend on e^H in these {n} points: a = {a:.3g} +- {margin:.3g} (95%). A ceiling read "
            "from such a curve would be noise."
        )


def _step_at_floor(step: FloatArray, entropy: FloatArray, floor: float) -> tuple[float, float | None]:
    """Rate of H per step over the last points, and the step at which H is at the floor."""
    recent_step, recent = step[-RECENT_POINTS:], entropy[-RECENT_POINTS:]
    centred = recent_step - recent_step.mean()
    spread = float(centred @ centred)
    rate = float(centred @ recent) / spread if spread else 0.0
    below = np.flatnonzero(entropy <= floor)
    if below.size:
        return rate, float(step[below[0]])
    if rate >= 0:
        return rate, None
    # From the line's own height at the last step, not from the last point, which is noisy.
    height = float(recent.mean()) + rate * float(recent_step[-1] - recent_step.mean())
    return rate, float(recent_step[-1]) + max(0.0, height - floor) / -rate


_NEEDS = "token entropy and reward at 5 or more steps over which the entropy moved"
_SOURCE = "Cui et al., arXiv 2505.22617, Eq. 1"

register(
    *(
        MetricInfo(
            name=f"entropy_fit/{name}",
            title=title,
            unit=unit,
            bad="none",
            description=description,
            source=_SOURCE,
            family="entropy fit",
            bounds=bounds,
            needs=_NEEDS,
        )
        for name, title, unit, bounds, description in (
            ("a", "Reward bought per e^H", "reward", (None, None), "a in the least-squares fit R = -a e^H + b."),
            ("b", "Fit intercept", "reward", (None, None), "b in the least-squares fit R = -a e^H + b."),
            ("ceiling", "Reward ceiling", "reward", (None, None), "b - a: the reward of the fitted curve at H = 0."),
            ("a_se", "Standard error of a", "reward", (0.0, None), "Standard error of a, residuals independent."),
            ("b_se", "Standard error of b", "reward", (0.0, None), "Standard error of b, residuals independent."),
            ("ceiling_se", "Standard error of the ceiling", "reward", (0.0, None), "Standard error of b - a."),
            (
                "r_squared",
                "Share explained",
                "fraction",
                (0.0, 1.0),
                "Share of the reward's variance that is explained.",
            ),
            (
                "step_at_floor",
                "Step at which entropy is spent",
                "step",
                (None, None),
                "Step at which H reaches 0.05 nats at the rate of the last 10 points, or the step at which it did.",
            ),
        )
    )
)
