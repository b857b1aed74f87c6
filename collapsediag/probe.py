"""The gradient probe: does the task or do the regularisers steer the policy, and on which prompts?

Nothing of the training is touched: gradients are taken with `torch.autograd.grad`, which fills no `.grad`; random
states and the buffers of a module are put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.metrics.gradient import N_BUCKETS, BucketGradient, GradientProbe, VarianceBucket, variance_buckets
from collapsediag.metrics.grouped import FloatArray, IntArray, group_numbers
from collapsediag.metrics.reward_input import checked_rewards, flatten_groups
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.guard import _random_states

# Row numbers of a bucket's rollouts in, a scalar loss out.
Closure = Callable[[Sequence[int]], torch.Tensor]
_Gradients = list[torch.Tensor | None]


def gradient_probe(
    parameters: nn.Module | Iterable[torch.Tensor],
    rewards: RolloutBatch | Any,
    *,
    task_loss: Closure,
    regularizer_loss: Closure | Mapping[str, Closure] | None = None,
    n_buckets: int = N_BUCKETS,
) -> GradientProbe:
    """Gradient norms of the task loss and of the regularisers on six buckets of prompts, by reward variance.

    Where the task gradient vanishes with the variance and the regularisers' does not, prompts of low variance move the
    policy towards its prior and away from the prompt.

    parameters: a module, or its parameters; those that require gradients are probed. Only with a module are buffers
        (running statistics) put back.
    rewards: a RolloutBatch, or a [P, G] matrix (or ragged lists), whose rollouts are numbered row by row.
    task_loss, regularizer_loss: called with the row numbers of a bucket's rollouts; must return the scalar that
        training would minimise on them, with the coefficients training uses. `regularizer_loss` may be several by
        name, such as {"kl": ..., "entropy": ...}. Each call meets the same random state, so dropout is the same.
    n_buckets: 2 to 6.

    Under DistributedDataParallel the closures must call the wrapped module (`model.module`); with sharded parameters
    each process sees the norm of its own share.
    Raises MetricError for too few prompts, ScoringError for a loss that is no finite scalar, that does not depend on
    the parameters, or whose closure changed a parameter or a gradient.
    """
    module = parameters if isinstance(parameters, nn.Module) else None
    candidates = list(module.parameters()) if module is not None else list(parameters)
    probed = [p for p in candidates if p.requires_grad]
    if not probed:
        raise SettingsError(f"none of the {len(candidates)} parameters requires a gradient; there is nothing to probe.")
    reward_N, group_N = _rows(rewards)
    buckets, n_left_out = variance_buckets(reward_N, group_N, n_buckets=n_buckets)
    regularizers = _named(regularizer_loss)
    found = []
    with _buffers_kept(module), torch.enable_grad():
        for bucket in buckets:
            found.append(_probe_bucket(bucket, probed, task_loss, regularizers))
    return GradientProbe(buckets=tuple(found), n_left_out=n_left_out)


def _rows(rewards: Any) -> tuple[FloatArray, IntArray]:
    if isinstance(rewards, RolloutBatch):
        reward_N = checked_rewards([rollout.reward for rollout in rewards], lambda row: f"rollout {row}")
        return reward_N, group_numbers(rollout.group for rollout in rewards)
    reward_N, group_N, _ = flatten_groups(rewards)
    return reward_N, group_N


def _named(regularizer_loss: Closure | Mapping[str, Closure] | None) -> dict[str, Closure]:
    if regularizer_loss is None:
        return {}
    return dict(regularizer_loss) if isinstance(regularizer_loss, Mapping) else {"regularizer": regularizer_loss}


def _probe_bucket(
    bucket: VarianceBucket, parameters: list[torch.Tensor], task_loss: Closure, regularizers: Mapping[str, Closure]
) -> BucketGradient:
    task = _norm(_gradients(task_loss, bucket, parameters, "task_loss"))
    norms: dict[str, float] = {}
    total: _Gradients | None = None
    for name, closure in regularizers.items():
        gradients = _gradients(closure, bucket, parameters, f"regularizer {name!r}")
        norms[name] = _norm(gradients)
        total = gradients if total is None else [_sum(a, b) for a, b in zip(total, gradients, strict=True)]
    together = None if total is None else _norm(total)
    return BucketGradient(bucket=bucket, task=task, regularizer=together, regularizers=norms)


def _gradients(closure: Closure, bucket: VarianceBucket, parameters: list[torch.Tensor], what: str) -> _Gradients:
    where = f"{what} on {bucket.name} ({len(bucket.rows)} rollouts)"
    before = [_fingerprint(p) for p in parameters]
    with _random_states():
        loss = closure(bucket.rows)
        _check_loss(loss, where)
        gradients = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    if [_fingerprint(p) for p in parameters] != before:
        raise ScoringError(
            f"{where} changed a parameter or its gradient. The closure must compute a loss and nothing else: no "
            "backward, no optimizer step, no zero_grad."
        )
    if all(g is None for g in gradients):
        raise ScoringError(f"{where} depends on none of the {len(parameters)} parameters; pass those that it trains.")
    if not math.isfinite(_norm(gradients)):
        raise ScoringError(f"{where}: its gradient is not finite, though the loss is {loss.item():.6g}.")
    return gradients


def _check_loss(loss: object, where: str) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ScoringError(f"{where} returned {shape}; it must return one scalar tensor, the loss.")
    if not loss.requires_grad:
        raise ScoringError(f"{where} returned a loss without gradients: was it computed under no_grad, or detached?")
    if not torch.isfinite(loss).item():
        raise ScoringError(f"{where} is {loss.item()}; a loss must be finite.")


def _fingerprint(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Versions of a parameter and its gradient: torch counts every change in place, so nothing has to be copied."""
    gradient = parameter.grad
    return parameter._version, id(gradient), -1 if gradient is None else gradient._version


def _norm(gradients: _Gradients) -> float:
    """Euclidean norm over all parameters, summed in float64."""
    squares = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients if g is not None]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


@contextmanager
def _buffers_kept(module: nn.Module | None) -> Iterator[None]:
    """Put back what a forward pass in training mode writes into buffers (running means, counters)."""
    saved = [] if module is None else [(b, b.detach().clone()) for b in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
