"""Uncertainty, tests and the one numerical memory: Wilson, bootstrap over groups, permutation, EMA, Spearman.

Everything is float64 and seeded by an argument; nothing reads or moves a global random state.

Legend: N rows (traces, rollouts), G groups (prompts), K quantities, P columns (contexts), U units that a permutation
moves, R resamples, D draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from collapsediag.errors import MetricError, SettingsError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

DEFAULT_CONFIDENCE = 0.95
DEFAULT_RESAMPLES = 1000
DEFAULT_DRAWS = 999
MAX_EXACT_PERMUTATIONS = 5040  # 7!: up to seven units every permutation is looked at
DEFAULT_EMA_DECAY = 0.9
# From so many groups on, percentiles of the bootstrap reach far enough; below, Student's t takes their place.
MIN_PERCENTILE_GROUPS = 8
MIN_STUDENT_GROUPS = 4
UNBOUNDED = (-math.inf, math.inf)

# A batch of resamples or draws holds at most this many numbers, so that memory does not grow with N times R.
_CHUNK_NUMBERS = 4_000_000


def generator(*seeds: int) -> np.random.Generator:
    """A generator seeded by all of `seeds` together. Negative ones are taken too: a step of -1 is before training.

    >>> bool(generator(1, -1).random() == generator(1, -1).random() != generator(1, 1).random())
    True
    """
    # numpy takes no negative number.
    return np.random.default_rng([int(seed) % 2**64 for seed in seeds])


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise SettingsError(f"confidence is {confidence!r}; it must lie between 0 and 1, for example 0.95.")


def wilson_interval(successes: float, n: float, confidence: float = DEFAULT_CONFIDENCE) -> tuple[float, float]:
    """Interval of a share, sound also at 0, at 1 and for few trials.

    The shares p with `|successes/n - p| <= z * sqrt(p (1 - p) / n)`. n = 0 says nothing: (0, 1).
    Raises MetricError unless 0 <= successes <= n. Source: Wilson (1927), as in Brown, Cai, DasGupta (2001).

    >>> low, high = wilson_interval(0, 10)
    >>> round(low, 4), round(high, 4)
    (0.0, 0.2775)
    """
    _check_confidence(confidence)
    if not (math.isfinite(n) and 0 <= successes <= n):
        raise MetricError(f"a share needs 0 <= successes <= n, found successes={successes!r} of n={n!r}.")
    if n == 0:
        return 0.0, 1.0
    z = float(special.ndtri(0.5 + confidence / 2))
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends the closed form is exact in real numbers and off by a rounding in floats.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def bootstrap_groups(
    values: ArrayLike, group_N: ArrayLike, *, n_resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> FloatArray:
    """Means over resamples that draw whole groups with replacement.

    values: [N] or [N, K], one row per trace; a statistic that is a function of means (a std, a ratio) is computed
        from the returned means of its moments, so that all its parts see the same resample.
    group_N: [N] ints or strings. All rows of a group are drawn together, because the traces of one prompt are not
        independent; a larger group weighs more, as it does in the plain mean.

    Returns [R] or [R, K]. Raises MetricError where values are not finite or lengths differ.

    >>> means = bootstrap_groups([0.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"], n_resamples=200, seed=1)
    >>> sorted(set(means.tolist()))
    [0.0, 0.5, 1.0]
    """
    array = np.asarray(values, dtype=np.float64)
    labels = np.asarray(group_N)
    if array.ndim not in (1, 2) or labels.shape != array.shape[:1] or array.shape[0] == 0:
        raise MetricError(
            f"values have shape {array.shape} and group_N {labels.shape}; give one group per row, at least one row."
        )
    if not np.isfinite(array).all():
        raise MetricError("values to resample hold a NaN or an infinity; leave those rows out and count them first.")
    if n_resamples < 1:
        raise SettingsError(f"n_resamples is {n_resamples}; at least 1 is needed, 1000 is usual.")
    _, index_N = np.unique(labels, return_inverse=True)
    index_N = index_N.reshape(-1)
    n_groups = int(index_N.max()) + 1
    # Group sums first: a resample is then a weighting of G rows, whatever N is.
    parts = np.column_stack([array, np.ones(array.shape[0])])
    sums_GK = np.zeros((n_groups, parts.shape[1]))
    np.add.at(sums_GK, index_N, parts)
    totals_RK = np.concatenate(
        [weights_RG @ sums_GK for weights_RG in _group_weights(n_groups, n_resamples, generator(seed))]
    )
    means_RK: FloatArray = totals_RK[:, :-1] / totals_RK[:, -1:]
    return means_RK[:, 0] if array.ndim == 1 else means_RK


def _group_weights(n_groups: int, n_resamples: int, rng: np.random.Generator) -> Any:
    """Yield [chunk, G] counts of how often each group was drawn."""
    chunk = max(1, _CHUNK_NUMBERS // n_groups)
    for start in range(0, n_resamples, chunk):
        rows = min(chunk, n_resamples - start)
        drawn = rng.integers(0, n_groups, size=(rows, n_groups)) + n_groups * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * n_groups).reshape(rows, n_groups).astype(np.float64)


def bootstrap_interval(
    samples_R: ArrayLike,
    n_groups: int,
    confidence: float = DEFAULT_CONFIDENCE,
    *,
    bounds: tuple[float, float] = UNBOUNDED,
) -> tuple[float, float]:
    """Percentile interval of bootstrap samples, widened for few groups; Student's t where there are very few.

    bounds: what the quantity cannot leave, (0, 1) for a share. Percentiles never do; Student's t may.

    A plain percentile interval is too narrow by the factor sqrt((G-1)/G) and by the normal quantile standing in for
    Student's: of means over 8 groups it covers 89% where it says 95%. The percentiles taken here are
    `Phi(-/+ sqrt(G/(G-1)) * t_{G-1})`, which tend to the plain ones as G grows; they cover 95% from 8 groups on, but
    91% of 5 and 87% of 4, where no resample reaches far enough (simulated, normal groups). From 4 to 7 groups the
    interval is `mean +/- t_{G-1} * sqrt(G/(G-1)) * std` of the samples. Of 2 or 3 groups t would span everything (12.7
    standard errors for 2): there the percentiles stay, which is the range of the groups, and covers less.
    One group says nothing about the spread between groups: (nan, nan).
    Source: Hesterberg (2015), What Teachers Should Know About the Bootstrap, "expanded percentile interval" and
    "t interval with bootstrap standard error".

    >>> bootstrap_interval([1.0, 2.0, 3.0], n_groups=1)
    (nan, nan)
    """
    _check_confidence(confidence)
    samples = np.asarray(samples_R, dtype=np.float64)
    if n_groups < 2 or samples.size == 0:
        return math.nan, math.nan
    t = float(special.stdtrit(n_groups - 1, 0.5 + confidence / 2))
    widening = math.sqrt(n_groups / (n_groups - 1))
    if MIN_STUDENT_GROUPS <= n_groups < MIN_PERCENTILE_GROUPS:
        half = t * widening * samples.std()
        low, high = samples.mean() - half, samples.mean() + half
    else:
        tail = float(special.ndtr(-widening * t))
        low, high = np.quantile(samples, [tail, 1 - tail])
    return float(np.clip(low, *bounds)), float(np.clip(high, *bounds))


def group_mean_interval(
    values_N: ArrayLike,
    group_N: ArrayLike,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    n_resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    bounds: tuple[float, float] = UNBOUNDED,
) -> tuple[float, float]:
    """Bootstrap interval, over groups, of the plain mean of `values_N`; `bounds` as in `bootstrap_interval`.

    >>> low, high = group_mean_interval([0.0, 1.0, 0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2])
    >>> low < 4 / 6 < high
    True
    """
    samples = bootstrap_groups(values_N, group_N, n_resamples=n_resamples, seed=seed)
    return bootstrap_interval(samples, len(np.unique(np.asarray(group_N))), confidence, bounds=bounds)


def permutation_p_value(
    score_NP: ArrayLike,
    own_N: ArrayLike,
    group_N: ArrayLike | None = None,
    *,
    seed: int = 0,
    n_draws: int = DEFAULT_DRAWS,
) -> float:
    """One-sided p-value of "rows carry no information about their column": is `mean score[i, own[i]]` large by chance?

    score_NP: [N, P] what row i would score if column j were its own.
    own_N: [N] column of each row; group_N: [N] group of each row, `own_N` where not given.

    What is permuted is the assignment of groups to columns. All rows that share group and column are one unit and
    move together, since they are not independent. Groups that share a column are separate units: the multiset of
    assigned columns stays, so a column that attracts every row attracts as many rows as before. A column without rows
    is assigned to nobody, before or after.
    Exact (`#>= / U!`, identity included) when U! <= 5040, U the number of units (P when every column has one group);
    else `(1 + #>=) / (1 + n_draws)` over seeded draws. One unit cannot be permuted: 1.
    The smallest possible value is 1/U!: with 2 or 3 contexts no result can be significant at 0.05.

    >>> permutation_p_value(np.eye(4), np.arange(4)) == 1 / 24
    True
    """
    score = np.asarray(score_NP, dtype=np.float64)
    own = np.asarray(own_N, dtype=np.int64)
    group = own if group_N is None else np.asarray(group_N)
    if score.ndim != 2 or own.shape != score.shape[:1] or group.shape != own.shape or own.size == 0:
        raise MetricError(f"shapes do not fit: score_NP {score.shape}, own_N {own.shape}, group_N {group.shape}.")
    score_UP, column_U = _permutation_units(score, own, group)
    n_units = column_U.size
    exact = math.factorial(n_units) <= MAX_EXACT_PERMUTATIONS if n_units < 20 else False
    observed = float(score_UP[np.arange(n_units), column_U].sum())
    # Sums of fractions such as 1/3 differ in the last bits between orders; equal statistics must count as equal.
    threshold = observed - 1e-9 * max(1.0, float(np.abs(score_UP).sum(axis=0).max()))
    if exact:
        orders = np.array(list(itertools.permutations(range(n_units))), dtype=np.int64)
        return float((_statistics(score_UP, column_U[orders]) >= threshold).mean())
    rng = generator(seed)
    chunk = max(1, _CHUNK_NUMBERS // n_units)
    reached = 0
    for start in range(0, n_draws, chunk):
        labels = rng.permuted(np.tile(column_U, (min(chunk, n_draws - start), 1)), axis=1)
        reached += int((_statistics(score_UP, labels) >= threshold).sum())
    return (1 + reached) / (1 + n_draws)


def _permutation_units(score: FloatArray, own: IntArray, group: NDArray[Any]) -> tuple[FloatArray, IntArray]:
    """Sums of score over the rows of each (group, column) unit, [U, P], and the unit's column, [U]."""
    _, group_index = np.unique(group, return_inverse=True)
    key = group_index.reshape(-1).astype(np.int64) * score.shape[1] + own
    units, unit_N = np.unique(key, return_inverse=True)
    score_UP = np.zeros((units.size, score.shape[1]))
    np.add.at(score_UP, unit_N.reshape(-1), score)
    return score_UP, units % score.shape[1]


def _statistics(score_UP: FloatArray, labels_DU: IntArray) -> FloatArray:
    total: FloatArray = score_UP[np.arange(score_UP.shape[0]), labels_DU].sum(axis=1)
    return total


class EmaStd:
    """Exponential moving averages of standard deviations by name: the library's one numerical memory.

    `ema = decay * ema + (1 - decay) * value`, the first value as start. Keep one per namespace, and save its
    `state_dict()` with the training checkpoint, or z-scores jump at every restart.

    >>> ema = EmaStd(decay=0.9)
    >>> ema.update("gap_std", 1.0), round(ema.update("gap_std", 2.0), 6)
    (1.0, 1.1)
    """

    def __init__(self, decay: float = DEFAULT_EMA_DECAY) -> None:
        self.decay = _checked_decay(decay)
        self._values: dict[str, float] = {}

    @property
    def values(self) -> Mapping[str, float]:
        """A copy of the averages by name."""
        return dict(self._values)

    @overload
    def preview(self, name: str, value: float) -> float: ...
    @overload
    def preview(self, name: str, value: FloatArray) -> FloatArray: ...
    def preview(self, name: str, value: float | FloatArray) -> float | FloatArray:
        """What `update` would return; nothing is stored. An array gives the answer for each of its entries."""
        if name not in self._values:
            return value
        return self.decay * self._values[name] + (1 - self.decay) * value

    def update(self, name: str, value: float) -> float:
        """Take `value` in under `name` and return the new average. Raises MetricError unless finite and >= 0."""
        new = self.preview(name, _checked_std(name, value))
        self._values[name] = new
        return new

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: {"decay": ..., "values": {name: ...}}."""
        return {"decay": self.decay, "values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; checked whole before anything changes. Raises SettingsError."""
        if not isinstance(state, Mapping) or set(state) != {"decay", "values"}:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise SettingsError(f"an EmaStd state has the keys 'decay' and 'values', found {found}.")
        decay = _checked_decay(state["decay"])
        if decay != self.decay:
            raise SettingsError(
                f"the saved state has decay {decay}, this EmaStd has {self.decay}: averages of different memory must "
                f"not be mixed. Construct EmaStd(decay={decay}) to continue that run."
            )
        if not isinstance(state["values"], Mapping):
            raise SettingsError(f"'values' must map names to numbers, found {type(state['values']).__name__}.")
        try:
            self._values = {str(name): _checked_std(str(name), value) for name, value in state["values"].items()}
        except MetricError as error:
            raise SettingsError(f"the saved state is damaged: {error}") from error


def _checked_decay(decay: Any) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0.0 <= decay < 1.0:
        raise SettingsError(f"decay is {decay!r}; it must be a number with 0 <= decay < 1, for example 0.9.")
    return float(decay)


def _checked_std(name: str, value: Any) -> float:
    # One NaN would stay in the average for ever.
    if isinstance(value, (bool, str)) or not np.isscalar(value) or not (math.isfinite(value) and value >= 0):  # type: ignore[arg-type,operator]
        raise MetricError(f"{name} is {value!r}; a standard deviation is a finite number >= 0.")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SpearmanResult:
    """Rank correlation with its interval; n pairs."""

    rho: float
    low: float
    high: float
    n: int
    confidence: float


def spearman(x: ArrayLike, y: ArrayLike, *, confidence: float = DEFAULT_CONFIDENCE) -> SpearmanResult:
    """Spearman's rank correlation (ties get mean ranks), with an interval through Fisher's z.

    `atanh(rho) +/- z * sqrt((1 + rho^2/2) / (n - 3))`. At |rho| = 1 half a rank step stands in for the infinite
    atanh, so that four points in order are not certainty; with n < 4 the interval is (-1, 1).
    The interval takes the pairs as independent. Steps of one training run are not: read it as a lower limit of the
    uncertainty there. Raises MetricError for lengths that differ, fewer than 2 pairs, non-finite or constant values.
    Source: Bonett and Wright (2000), Psychometrika 65.

    >>> spearman([1, 2, 3, 4, 5], [1, 2, 3, 5, 4]).rho
    0.9
    """
    _check_confidence(confidence)
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or a.size < 2:
        raise MetricError(f"a rank correlation needs two vectors of equal length >= 2, found {a.shape} and {b.shape}.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise MetricError("a rank correlation needs finite values; leave incomplete pairs out first.")
    rank_a, rank_b = _centred_ranks(a), _centred_ranks(b)
    scale = math.sqrt(float(rank_a @ rank_a) * float(rank_b @ rank_b))
    if scale == 0.0:
        raise MetricError("one of the two series is constant: it has no order, so no rank correlation.")
    n = int(a.size)
    rho = max(-1.0, min(1.0, float(rank_a @ rank_b) / scale))
    if n < 4:
        return SpearmanResult(rho=rho, low=-1.0, high=1.0, n=n, confidence=confidence)
    limit = 1 - 6 / (n * (n * n - 1))
    centre = math.atanh(max(-limit, min(limit, rho)))
    half = float(special.ndtri(0.5 + confidence / 2)) * math.sqrt((1 + rho * rho / 2) / (n - 3))
    low = -1.0 if rho <= -limit else math.tanh(centre - half)
    high = 1.0 if rho >= limit else math.tanh(centre + half)
    return SpearmanResult(rho=rho, low=low, high=high, n=n, confidence=confidence)


def _centred_ranks(values: FloatArray) -> FloatArray:
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: FloatArray = (last - (counts - 1) / 2)[index.reshape(-1)]
    centred: FloatArray = ranks - ranks.mean()
    return centred
