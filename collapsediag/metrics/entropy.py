"""Entropy of the policy's tokens, and what the advantages are about to do to it.

Two quantities that share a name elsewhere are kept apart here: the **exact** entropy of a position,
`H_t = -sum_v p(v) log p(v)` over the whole vocabulary, and the **sampled** one, `-log p(z_t)` of the token that was
drawn, whose mean estimates the same thing with more noise (and is what some trainers log as `entropy`).

Here are the functions of arrays; `entropy_batch` applies them to a batch.

Legend: T tokens, V vocabulary, M positions of a batch. Everything is in nats.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collapsediag.errors import MetricError
from collapsediag.metrics.grouped import FloatArray

DEFAULT_CHUNK = 256


def token_entropy(logits: Any, *, chunk: int = DEFAULT_CHUNK) -> FloatArray:
    """Exact entropy of each position from its logits: `log sum_v e^x_v - sum_v p_v x_v`.

    logits: [..., V], numpy or torch, any float type; -inf for tokens that may not be sampled (they add nothing: no
        0 * inf). Divide by the sampling temperature first where the sampling policy is meant.
    chunk: rows turned to float32 at a time, so that a [T, V] of half floats is never held twice.

    Returns [...], nats, between 0 and log V. Raises MetricError for NaN, +inf, or a row without any allowed token.

    >>> token_entropy(np.log([[0.5, 0.3, 0.2], [1.0, 1.0, 1.0]])).round(4).tolist()
    [1.0297, 1.0986]
    """
    values = logits if hasattr(logits, "detach") else np.asarray(logits)
    shape = tuple(int(size) for size in values.shape)
    if not shape or shape[-1] == 0:
        raise MetricError(f"logits have shape {shape}; the last axis must be the vocabulary.")
    rows = values.reshape(-1, shape[-1])
    parts = [_chunk_entropy(rows[start : start + chunk], start) for start in range(0, rows.shape[0], chunk)]
    return np.concatenate(parts).reshape(shape[:-1]) if parts else np.zeros(shape[:-1])


def _chunk_entropy(rows: Any, start: int) -> FloatArray:
    if hasattr(rows, "detach"):
        rows = rows.detach().float().cpu().numpy()
    x: NDArray[np.float32] = np.array(rows, dtype=np.float32)
    bad = np.argwhere(np.isnan(x) | (x == np.inf))
    if bad.size:
        row, column = (int(i) for i in bad[0])
        raise MetricError(
            f"logits of position {start + row} hold {x[row, column]} at token {column}: the model overflowed or has "
            "NaN weights. Nothing can be said about the entropy of this position."
        )
    top = x.max(axis=1, keepdims=True)
    if np.isneginf(top).any():
        row = int(np.flatnonzero(np.isneginf(top))[0])
        raise MetricError(f"every logit of position {start + row} is -inf: the mask allows no token there.")
    x -= top
    p = np.exp(x)
    x[p == 0] = 0  # of a masked token: 0 * -inf is no number, its limit is 0
    total = p.sum(axis=1, dtype=np.float64)
    p *= x
    entropy: FloatArray = np.log(total) - p.sum(axis=1, dtype=np.float64) / total
    return np.maximum(entropy, 0.0)


def covariance(x_M: ArrayLike, y_M: ArrayLike) -> float:
    """Population covariance `mean(x y) - mean(x) mean(y)`, from deviations.

    >>> covariance([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    1.3333333333333333
    """
    x, y = np.asarray(x_M, dtype=np.float64), np.asarray(y_M, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or not x.size:
        raise MetricError(f"a covariance needs two equally long vectors, found shapes {x.shape} and {y.shape}.")
    return float(np.mean((x - x.mean()) * (y - y.mean())))


def predicted_entropy_change(probabilities_V: ArrayLike, advantage_V: ArrayLike, eta: float) -> float:
    """First-order change of the entropy of one position when its logits move by `eta * pi(a) * A(a)`.

    `-eta * Cov_{a ~ pi}(log pi(a), pi(a) A(a))`. Rewarding likely actions lowers the entropy, rewarding unlikely ones
    raises it. Exact to second order in eta. Tokens of probability 0 stay at 0 and add nothing.
    Source: Cui et al., arXiv 2505.22617, Theorem 1.

    >>> round(predicted_entropy_change([0.6, 0.3, 0.1], [1.0, 0.0, 0.0], eta=0.5), 4)
    -0.0697
    """
    pi = np.asarray(probabilities_V, dtype=np.float64)
    advantage = np.asarray(advantage_V, dtype=np.float64)
    if pi.shape != advantage.shape or pi.ndim != 1:
        raise MetricError(f"one advantage per action is needed: pi has shape {pi.shape}, A has {advantage.shape}.")
    if not (pi.size and (pi >= 0).all() and math.isclose(float(pi.sum()), 1.0, abs_tol=1e-6)):
        raise MetricError(f"probabilities must be >= 0 and sum to 1, found a sum of {float(pi.sum()):.6g}.")
    held = pi > 0
    pi, pull = pi[held], (pi * advantage)[held]
    log_pi = np.log(pi)
    return float(-eta * (pi @ (log_pi * pull) - (pi @ log_pi) * (pi @ pull)))
