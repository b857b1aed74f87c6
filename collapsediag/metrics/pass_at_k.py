"""pass@k: the chance that at least one of k samples solves the prompt.

Legend: P prompts, n samples of a prompt of which c are solved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from collapsediag.errors import MetricError
from collapsediag.metrics.grouped import FloatArray, IntArray
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.statistics import DEFAULT_RESAMPLES, bootstrap_groups, bootstrap_interval


def pass_at_k(n_P: ArrayLike, c_P: ArrayLike, k: int) -> FloatArray:
    """[P] unbiased estimate of pass@k from n samples with c solved: `1 - C(n-c, k) / C(n, k)`.

    The ratio is the product of the k factors `(n-c-j) / (n-j)`, j = 0 ... k-1: nothing overflows, and the relative
    error stays near k rounding errors at any n. With fewer than k unsolved samples one factor is 0.

    n_P, c_P: [P] integers, 0 <= c <= n. k: 1 to the smallest n. Low is bad.
    Raises MetricError for k outside that range or counts that contradict themselves.
    Source: Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1.

    >>> pass_at_k([4], [1], k=2).tolist()
    [0.5]
    """
    n, c = _counts(n_P, "n_P"), _counts(c_P, "c_P")
    if n.shape != c.shape:
        raise MetricError(f"n_P has shape {n.shape} but c_P has {c.shape}; give both for every prompt.")
    if (c > n).any():
        p = int(np.flatnonzero(c > n)[0])
        raise MetricError(f"prompt {p} has {int(c[p])} solved of {int(n[p])} samples.")
    if n.size and not 1 <= k <= n.min():
        raise MetricError(
            f"pass@{k} needs at least {max(k, 1)} samples of every prompt, and k >= 1; prompt {int(n.argmin())} has "
            f"{int(n.min())}."
        )
    pairs, prompt_P = np.unique(np.stack([n, c], axis=1), axis=0, return_inverse=True)
    j = np.arange(k)
    factors = (pairs[:, :1] - pairs[:, 1:] - j) / (pairs[:, :1] - j)
    return np.asarray((1.0 - factors.prod(axis=1))[prompt_P.reshape(-1)], dtype=np.float64)


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `largest`.

    >>> powers_of_two(10)
    (1, 2, 4, 8)
    """
    return tuple(2**i for i in range(largest.bit_length())) if largest >= 1 else ()


def pass_at_k_metrics(
    n_P: ArrayLike,
    c_P: ArrayLike,
    *,
    ks: Sequence[int] | None = None,
    n_resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> dict[str, float]:
    """`pass@k` with its bootstrap interval over prompts, for k = 1, 2, 4, ... up to the smallest number of samples.

    Prompts with unequal numbers of samples: every prompt counts the same in the mean, and k stops at the smallest, so
    that all pass@k are over the same prompts. Prompts without a labelled sample are left out.
    ks: these k instead; one above the smallest n is an error, not a silent omission.
    One prompt has no interval.

    >>> values = pass_at_k_metrics([4, 4], [1, 4])
    >>> [values[f"pass@{k}"] for k in (1, 2, 4)]
    [0.625, 0.75, 1.0]
    """
    n, c = _counts(n_P, "n_P"), _counts(c_P, "c_P")
    n, c = (n[n > 0], c[n > 0]) if n.shape == c.shape else (n, c)
    if n.size == 0:
        return {}
    wanted = powers_of_two(int(n.min())) if ks is None else tuple(ks)
    passed_PK = np.stack([pass_at_k(n, c, k) for k in wanted], axis=1)
    samples_RK = bootstrap_groups(passed_PK, np.arange(n.size), n_resamples=n_resamples, seed=seed)
    values: dict[str, float] = {}
    for column, k in enumerate(wanted):
        values[f"pass@{k}"] = float(passed_PK[:, column].mean())
        if n.size > 1:
            low, high = bootstrap_interval(samples_RK[:, column], n.size, bounds=(0.0, 1.0))
            values |= {f"pass@{k}/ci_low": low, f"pass@{k}/ci_high": high}
    return values


def _counts(values: ArrayLike, name: str) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array.size and array.min() < 0):
        raise MetricError(f"{name} must be a flat list of counts >= 0, found {array.dtype} of shape {array.shape}.")
    return array.astype(np.int64)


register(
    MetricInfo(
        name="pass@k",
        title="pass@k",
        unit="fraction",
        bad="down",
        bounds=(0.0, 1.0),
        description="Chance that at least one of k samples solves the prompt, mean over prompts: 1 - C(n-c,k)/C(n,k), "
        "unbiased, with a bootstrap interval over prompts. k = 1, 2, 4, ... up to the smallest group.",
        source="Chen et al., arXiv 2107.03374, equation 1",
        family="pass@k",
        needs="success labels or success_threshold",
    ),
    MetricInfo(
        name="n_unlabelled",
        title="Rollouts without a success label",
        unit="count",
        bad="up",
        bounds=(0.0, None),
        description="Rollouts for which neither a success label nor a reward to compare with the threshold is known: "
        "left out of pass@k.",
        source="this library",
        family="pass@k",
    ),
)
