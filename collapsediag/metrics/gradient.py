"""Prompts by how much their rewards vary, and the numbers of the gradient probe.

What needs torch is in `collapsediag.probe`.

A prompt whose rewards are all equal gives no task gradient, but the KL and entropy terms push on it as on every other.
Where prompts of low variance fill the batch, the regularisers steer.

Legend: N rollouts, P prompts (groups).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from collapsediag.errors import MetricError, SettingsError
from collapsediag.metrics.grouped import FloatArray, IntArray, group_variance
from collapsediag.metrics.registry import MetricInfo, register

N_BUCKETS = 6


@dataclass(frozen=True, kw_only=True)
class VarianceBucket:
    """Some prompts of similar reward variance.

    name: "bucket_1" (lowest variance) to "bucket_6". rows: row numbers of their rollouts, in order.
    n_prompts: how many prompts. reward_variance: their mean within-prompt sample variance; low, high: its range.
    """

    name: str
    rows: tuple[int, ...]
    n_prompts: int
    reward_variance: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class BucketGradient:
    """Gradient norms on one bucket.

    task: norm of the gradient of the task loss. regularizer: of the sum of all regularisers, None where none was given.
    regularizers: of each regulariser by name.
    """

    bucket: VarianceBucket
    task: float
    regularizer: float | None = None
    regularizers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GradientProbe:
    """Gradient norms on every bucket, lowest reward variance first.

    n_left_out: prompts with fewer than two scored rollouts, which have no variance.
    """

    buckets: tuple[BucketGradient, ...]
    n_left_out: int

    def values(self) -> dict[str, float]:
        """The numbers by metric name."""
        values = {}
        for entry in self.buckets:
            values[f"gradient/{entry.bucket.name}/task_norm"] = entry.task
            if entry.regularizer is not None:
                values[f"gradient/{entry.bucket.name}/regularizer_norm"] = entry.regularizer
            values[f"gradient/{entry.bucket.name}/reward_variance"] = entry.bucket.reward_variance
        return values


def variance_buckets(
    reward_N: FloatArray, group_N: IntArray, *, n_buckets: int = N_BUCKETS
) -> tuple[tuple[VarianceBucket, ...], int]:
    """Prompts in order of reward variance, cut into buckets of equally many; and how many prompts have no variance.

    reward_N: [N], NaN where unscored. group_N: [N] group numbers 0 to P-1. A prompt with fewer than two scored rollouts
    is left out and counted. What does not divide goes to the last bucket, so that the low ones stay comparable; equal
    variances keep the order of their prompts. Same cut as in the RAGEN code.
    Raises MetricError for fewer prompts than buckets, SettingsError for a number of buckets outside 2 to 6.

    >>> buckets, _ = variance_buckets(np.array([1.0, 1.0, 0.0, 2.0]), np.array([0, 0, 1, 1]), n_buckets=2)
    >>> [(b.name, b.rows, b.reward_variance) for b in buckets]
    [('bucket_1', (0, 1), 0.0), ('bucket_2', (2, 3), 2.0)]
    """
    if not 2 <= n_buckets <= N_BUCKETS:
        raise SettingsError(f"n_buckets is {n_buckets}; it must be from 2 to {N_BUCKETS}.")
    n_groups = int(group_N.max()) + 1 if group_N.size else 0
    scored = ~np.isnan(reward_N)
    variance_P = (
        group_variance(reward_N[scored], group_N[scored], n_groups) if scored.any() else np.full(n_groups, np.nan)
    )
    order = np.argsort(variance_P, kind="stable")  # NaN last
    order = order[: int((~np.isnan(variance_P)).sum())]
    if order.size < n_buckets:
        raise MetricError(
            f"{n_buckets} buckets need as many prompts with two scored rollouts each; found {order.size} of {n_groups} "
            "prompts. Probe a larger batch, or pass fewer n_buckets."
        )
    size = order.size // n_buckets
    buckets = []
    for k in range(n_buckets):
        prompts = order[k * size : (k + 1) * size if k < n_buckets - 1 else None]
        variance = variance_P[prompts]
        buckets.append(
            VarianceBucket(
                name=f"bucket_{k + 1}",
                rows=tuple(np.flatnonzero(np.isin(group_N, prompts)).tolist()),
                n_prompts=int(prompts.size),
                reward_variance=float(variance.mean()),
                low=float(variance[0]),
                high=float(variance[-1]),
            )
        )
    return tuple(buckets), n_groups - order.size


_NEEDS = "the trainer's losses as closures (cd.gradient_probe), and rewards of at least 6 prompts"
_SOURCE = "RAGEN-2, arXiv 2604.06268, and its code's gradient analysis"

register(
    *(
        MetricInfo(
            name=f"gradient/bucket_{k}/{name}",
            title=f"{title}, bucket {k}",
            unit=unit,
            bad="none",
            bounds=(0.0, None),
            description=f"{description} on bucket {k} of 6 of the prompts by reward variance, 1 the lowest.",
            source=_SOURCE,
            family="gradient",
            needs=_NEEDS,
        )
        for k in range(1, N_BUCKETS + 1)
        for name, title, unit, description in (
            ("task_norm", "Task gradient", "gradient norm", "Euclidean norm of the task loss's gradient"),
            (
                "regularizer_norm",
                "Regulariser gradient",
                "gradient norm",
                "Euclidean norm of the gradient of all regularisers together (KL, entropy)",
            ),
            ("reward_variance", "Reward variance", "reward^2", "Mean sample variance of rewards within a prompt"),
        )
    )
)
