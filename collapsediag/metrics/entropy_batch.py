"""The entropy of one step's tokens: level, quantiles, forking positions, and covariance with the advantages.

Legend: T tokens of a turn, V vocabulary, M positions of the batch. Everything is in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from collapsediag.errors import MetricError
from collapsediag.metrics.entropy import covariance
from collapsediag.metrics.grouped import BoolArray, FloatArray, group_numbers
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.rollouts import RolloutBatch, Turn
from collapsediag.statistics import bootstrap_groups, bootstrap_interval

# Trainers' float noise. More than this is an error: a flipped sign, a missing mask, a wrong vocabulary.
TOLERANCE = 1e-4
FORKING_SHARE = 0.2


@dataclass
class _Positions:
    """Per-token quantities of a batch, turn by turn, with the row of each turn's rollout."""

    entropies: list[tuple[int, FloatArray]]
    logprobs: list[tuple[int, FloatArray]]


def entropy_metrics(
    batch: RolloutBatch,
    *,
    positions: Callable[[Turn], ArrayLike | None] | None = None,
    eta: float | None = None,
    vocabulary_size: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Every `entropy/` number of one step, from `Turn.entropies`, `Turn.logprobs` and `Rollout.advantage`.

    positions: gives the mask [T] of a turn's output tokens that count, such as its reasoning; None for all of them.
        Without it all output tokens of all turns count.
    eta: the step size of the update, for `entropy/predicted_delta`.
    vocabulary_size: V; entropies above log V are refused where it is given.
    seed: of the bootstrap over groups behind the intervals of the two means.

    A number whose ingredients are missing is absent. Rollouts without an advantage (None, NaN) are in no covariance;
    `entropy/n_covariance` says how many positions are. Raises MetricError, saying where, for a log-probability above
    1e-4, a negative entropy, an entropy above log V, a NaN or infinity, or a mask of another shape.
    """
    found = _collect(batch, positions, vocabulary_size)
    values: dict[str, float] = {}
    if found.entropies:
        entropy_M = np.concatenate([v for _, v in found.entropies])
        values |= _distribution(entropy_M) | {"entropy/n_positions": float(entropy_M.size)}
        values |= _mean_with_interval("entropy/token_mean", batch, found.entropies, 1.0, seed)
    if found.logprobs:
        values |= _mean_with_interval("entropy/sampled_mean", batch, found.logprobs, -1.0, seed)
        values |= _covariances(batch, found.logprobs, eta)
        values["entropy/n_sampled"] = float(sum(v.size for _, v in found.logprobs))
    return values


def _collect(
    batch: RolloutBatch, positions: Callable[[Turn], ArrayLike | None] | None, vocabulary_size: int | None
) -> _Positions:
    found = _Positions([], [])
    highest = math.inf if vocabulary_size is None else math.log(vocabulary_size)
    for row, rollout in enumerate(batch):
        for number, turn in enumerate(rollout.turns):
            if turn.entropies is None and turn.logprobs is None:
                continue
            where = f"rollout {row}{f' ({rollout.id})' if rollout.id is not None else ''}, turn {number}"
            mask = None if positions is None else positions(turn)
            if turn.entropies is not None:
                kept = _kept(turn.entropies, mask, where, "entropies")
                _refuse(kept, -TOLERANCE, highest + TOLERANCE, f"{where}: an entropy", _entropy_hint(vocabulary_size))
                found.entropies += [(row, kept)] if kept.size else []
            if turn.logprobs is not None:
                kept = _kept(turn.logprobs, mask, where, "logprobs")
                _refuse(kept, -math.inf, TOLERANCE, f"{where}: a log-probability", _LOGPROB_HINT)
                found.logprobs += [(row, kept)] if kept.size else []
    return found


_LOGPROB_HINT = "It must be finite and at most 0: was a probability, a loss (sign flipped) or a log-ratio passed?"


def _entropy_hint(vocabulary_size: int | None) -> str:
    bound = "" if vocabulary_size is None else f", at most log {vocabulary_size} = {math.log(vocabulary_size):.4g}"
    return f"It must be finite, at least 0{bound}: was it in bits, negated, or summed over tokens?"


def _kept(values: FloatArray, mask: ArrayLike | None, where: str, name: str) -> FloatArray:
    if mask is None:
        return values
    keep: BoolArray = np.asarray(mask, dtype=np.bool_)
    if keep.shape != values.shape:
        raise MetricError(
            f"{where}: the mask of positions has shape {keep.shape} but {name} has {values.shape}; one entry per "
            "output token is needed."
        )
    return values[keep]


def _refuse(values: FloatArray, low: float, high: float, what: str, hint: str) -> None:
    bad = ~((values >= low) & (values <= high) & np.isfinite(values))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise MetricError(f"{what} is {values[at]:.6g} (position {at} of those that count). {hint}")


def _distribution(entropy_M: FloatArray) -> dict[str, float]:
    """Quantiles, and the mean of the highest fifth of positions and of the rest."""
    p50, p80, p95 = np.quantile(entropy_M, [0.5, 0.8, 0.95])
    n_forking = math.ceil(FORKING_SHARE * entropy_M.size)
    split = entropy_M.size - n_forking
    ordered = np.partition(entropy_M, split) if split else entropy_M
    values = {
        "entropy/token_p50": float(p50),
        "entropy/token_p80": float(p80),
        "entropy/token_p95": float(p95),
        "entropy/forking_mean": float(ordered[split:].mean()),
    }
    return values | ({"entropy/rest_mean": float(ordered[:split].mean())} if split else {})


def _mean_with_interval(
    name: str, batch: RolloutBatch, parts: list[tuple[int, FloatArray]], sign: float, seed: int
) -> dict[str, float]:
    """Mean over positions; its 95% interval resamples prompts, for the tokens of one prompt are not independent."""
    sums: dict[int, list[float]] = {}
    for row, values in parts:
        entry = sums.setdefault(row, [0.0, 0.0])
        entry[0] += sign * float(values.sum())
        entry[1] += values.size
    moments = np.array(list(sums.values()))
    group_N = group_numbers(batch.rollouts[row].group for row in sums)
    mean = {name: float(moments[:, 0].sum() / moments[:, 1].sum())}
    n_groups = int(group_N.max()) + 1
    if n_groups < 2:
        return mean
    samples = bootstrap_groups(moments, group_N, seed=seed)
    low, high = bootstrap_interval(samples[:, 0] / samples[:, 1], n_groups)
    return mean | {f"{name}/ci_low": low, f"{name}/ci_high": high}


def _covariances(batch: RolloutBatch, parts: list[tuple[int, FloatArray]], eta: float | None) -> dict[str, float]:
    logp: list[FloatArray] = []
    advantage: list[FloatArray] = []
    for row, part in parts:
        given = batch.rollouts[row].advantage
        if given is None:
            continue
        if not isinstance(given, (int, float)) or math.isinf(given):
            raise MetricError(f"the advantage of rollout {row} is {given!r:.80}; pass None where it is unknown.")
        if math.isnan(given):
            continue
        logp.append(part)
        advantage.append(np.full(part.size, float(given)))
    if not logp:
        return {}
    logp_M, advantage_M = np.concatenate(logp), np.concatenate(advantage)
    policy = covariance(logp_M, np.exp(logp_M) * advantage_M)
    values = {
        "entropy/covariance": covariance(logp_M, advantage_M),
        "entropy/covariance_policy": policy,
        "entropy/n_covariance": float(logp_M.size),
    }
    return values | ({} if eta is None else {"entropy/predicted_delta": -eta * policy})


_ENTROPIES = "the exact entropy of every output token, from the trainer or the scorer"
_LOGPROBS = "the log-probability of every output token under the sampling policy"
_DEFINITION = "H = -sum_v p(v) log p(v)"
_CUI = "Cui et al., arXiv 2505.22617"
_WANG = "Wang et al., arXiv 2506.01939"


def _info(name: str, title: str, description: str, source: str, needs: str, **fields: Any) -> MetricInfo:
    given = {"unit": "nats/token", "bad": "down", "bounds": (0.0, None), **fields}
    return MetricInfo(
        name=name, title=title, description=description, source=source, needs=needs, family="entropy", **given
    )


register(
    _info(
        "entropy/token_mean",
        "Token entropy",
        "Mean over output positions of the exact entropy over the whole vocabulary.",
        _DEFINITION,
        _ENTROPIES,
    ),
    _info(
        "entropy/sampled_mean",
        "Token entropy, sampled",
        "Mean over output positions of -log p of the token that was drawn: an unbiased, noisier estimate of the mean "
        "entropy.",
        "Monte Carlo estimate of E[-log p]",
        _LOGPROBS,
    ),
    *(
        _info(
            f"entropy/token_p{q}",
            f"Token entropy, {q}th percentile",
            f"The {q}th percentile over output positions of the exact entropy.",
            _DEFINITION,
            _ENTROPIES,
        )
        for q in (50, 80, 95)
    ),
    _info(
        "entropy/forking_mean",
        "Entropy of forking tokens",
        "Mean entropy of the 20% of positions with the highest entropy, where the policy chooses between ways on.",
        _WANG,
        _ENTROPIES,
    ),
    _info(
        "entropy/rest_mean",
        "Entropy of the other tokens",
        "Mean entropy of the 80% of positions with the lowest entropy.",
        _WANG,
        _ENTROPIES,
    ),
    _info(
        "entropy/covariance",
        "Covariance of log-probability and advantage",
        "Population covariance over positions of log pi(a) and the advantage A: positive where likely tokens are "
        "rewarded, which lowers entropy.",
        f"{_CUI}, Theorem 2 (natural policy gradient)",
        f"{_LOGPROBS}, and advantages",
        bad="up",
        bounds=(None, None),
        unit="nats x advantage",
    ),
    _info(
        "entropy/covariance_policy",
        "Covariance of log-probability and pi A",
        "Population covariance over positions of log pi(a) and pi(a) A(a).",
        f"{_CUI}, Theorem 1 (policy gradient)",
        f"{_LOGPROBS}, and advantages",
        bad="up",
        bounds=(None, None),
        unit="nats x advantage",
    ),
    _info(
        "entropy/predicted_delta",
        "Predicted entropy change",
        "-eta times covariance_policy: the first-order change of the entropy by the next update of step size eta.",
        f"{_CUI}, Theorem 1",
        f"{_LOGPROBS}, advantages, and eta",
        bounds=(None, None),
    ),
    *(
        _info(name, title, description, "count", needs, unit="count", bad="none")
        for name, title, description, needs in (
            ("entropy/n_positions", "Positions with entropy", "Positions behind the exact entropies.", _ENTROPIES),
            ("entropy/n_sampled", "Positions with log-probability", "Positions behind sampled_mean.", _LOGPROBS),
            (
                "entropy/n_covariance",
                "Positions with advantage",
                "Positions behind the covariances: those of rollouts with a known advantage.",
                f"{_LOGPROBS}, and advantages",
            ),
        )
    ),
)
