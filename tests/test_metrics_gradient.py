"""Buckets of prompts by reward variance, and the gradient probe against analytic gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import MetricError, ScoringError, SettingsError
from collapsediag.metrics.gradient import variance_buckets
from collapsediag.metrics.registry import find
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

torch = pytest.importorskip("torch")

from collapsediag.probe import gradient_probe  # noqa: E402

# --- buckets -------------------------------------------------------------------------------------------------------


def test_buckets_against_sorting_by_hand() -> None:
    rng = np.random.default_rng(0)
    group = rng.permutation(np.concatenate([np.repeat(np.arange(40), 2), rng.integers(0, 40, size=220)]))
    reward = rng.normal(size=300) * rng.random(40)[group % 40]
    buckets, left_out = variance_buckets(reward, group)
    variances = {g: np.var(reward[group == g], ddof=1) for g in range(group.max() + 1)}
    by_hand = sorted(variances, key=lambda g: variances[g])
    size = len(by_hand) // 6
    assert left_out == 0
    assert [b.name for b in buckets] == [f"bucket_{k}" for k in range(1, 7)]
    for k, bucket in enumerate(buckets):
        prompts = by_hand[k * size :] if k == 5 else by_hand[k * size : (k + 1) * size]
        assert bucket.rows == tuple(i for i in range(300) if group[i] in prompts)
        assert bucket.n_prompts == len(prompts)
        np.testing.assert_allclose(bucket.reward_variance, np.mean([variances[g] for g in prompts]))
        np.testing.assert_allclose([bucket.low, bucket.high], [variances[prompts[0]], variances[prompts[-1]]])


def test_prompts_without_a_variance_are_left_out_and_counted() -> None:
    reward = np.array([0.0, 1.0, 0.0, 2.0, 5.0, np.nan, 3.0, np.nan, np.nan])
    group = np.array([0, 0, 1, 1, 2, 2, 3, 4, 4])
    buckets, left_out = variance_buckets(reward, group, n_buckets=2)
    assert left_out == 3
    assert [b.rows for b in buckets] == [(0, 1), (2, 3)]


def test_the_remainder_goes_to_the_last_bucket_and_ties_keep_their_order() -> None:
    reward, group = np.zeros(16), np.repeat(np.arange(8), 2)
    buckets, _ = variance_buckets(reward, group, n_buckets=3)
    assert [b.n_prompts for b in buckets] == [2, 2, 4]
    assert buckets[0].rows == (0, 1, 2, 3)


@pytest.mark.parametrize(("n_buckets", "error"), [(1, SettingsError), (7, SettingsError), (6, MetricError)])
def test_impossible_bucketings_are_refused(n_buckets: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        variance_buckets(np.arange(10.0), np.repeat(np.arange(5), 2), n_buckets=n_buckets)
    with pytest.raises(error):
        variance_buckets(np.zeros(0), np.zeros(0, dtype=np.int64), n_buckets=n_buckets)


# --- the probe -----------------------------------------------------------------------------------------------------

P, G, A = 13, 4, 5


def softmax_policy(seed: int = 0) -> tuple[Any, Any, Any, np.ndarray]:
    """A softmax policy with a bias: logits theta[prompt] + bias over A actions, sampled actions, and rewards."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(P, A, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(A, generator=generator, dtype=torch.float64).requires_grad_()
    actions = torch.randint(0, A, (P, G), generator=generator)
    rewards = np.random.default_rng(seed).normal(size=(P, G)) * np.linspace(0.1, 3, P)[:, None]
    return theta, bias, actions, rewards


def policy_losses(theta: Any, bias: Any, actions: Any, rewards: np.ndarray) -> tuple[Any, Any]:
    advantage = torch.tensor(rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
    prompt = torch.arange(P).repeat_interleave(G)

    def task(rows: Sequence[int]) -> Any:
        at = torch.tensor(rows)
        logp = torch.log_softmax(theta[prompt[at]] + bias, dim=-1)
        return -(advantage[at] * logp.gather(1, actions.reshape(-1)[at, None])[:, 0]).mean()

    def pull(rows: Sequence[int]) -> Any:
        at = prompt[torch.tensor(rows)].unique()
        return 0.05 * (theta[at] ** 2).sum() + 0.3 * (bias**2).sum()

    return task, pull


def test_norms_against_analytic_gradients() -> None:
    """Task: d/d logits of -mean A log pi(a) is -mean A (onehot(a) - pi). Regulariser: c |x|^2 has gradient 2 c x."""
    theta, bias, actions, rewards = softmax_policy()
    task, pull = policy_losses(theta, bias, actions, rewards)
    probe = gradient_probe([theta, bias], rewards, task_loss=task, regularizer_loss=pull)
    assert (len(probe.buckets), probe.n_left_out) == (6, 0)
    t, b, act = theta.detach().numpy(), bias.detach().numpy(), actions.numpy()
    advantage = rewards - rewards.mean(axis=1, keepdims=True)
    for entry in probe.buckets:
        rows = entry.bucket.rows
        d_theta = np.zeros((P, A))
        for row in rows:
            p, g = divmod(row, G)
            weights = np.exp(t[p] + b)
            d_theta[p] -= advantage[p, g] * (np.eye(A)[act[p, g]] - weights / weights.sum()) / len(rows)
        expected = np.sqrt((d_theta**2).sum() + (d_theta.sum(axis=0) ** 2).sum())
        np.testing.assert_allclose(entry.task, expected, rtol=1e-10)
        prompts = sorted({row // G for row in rows})
        expected = np.sqrt(((0.1 * t[prompts]) ** 2).sum() + ((0.6 * b) ** 2).sum())
        np.testing.assert_allclose(entry.regularizer, expected, rtol=1e-10)
    assert all(x.task < y.task for x, y in zip(probe.buckets[:2], probe.buckets[-2:], strict=True))


def test_several_regularisers_add_up_as_vectors_not_as_norms() -> None:
    theta, bias, actions, rewards = softmax_policy()
    task, _ = policy_losses(theta, bias, actions, rewards)
    both = gradient_probe(
        [theta, bias],
        rewards,
        task_loss=task,
        regularizer_loss={"kl": lambda rows: 3 * theta[0, 0], "entropy": lambda rows: 4 * bias[0] - 3 * theta[0, 0]},
        n_buckets=2,
    )
    for entry in both.buckets:
        assert dict(entry.regularizers) == {"kl": 3.0, "entropy": 5.0}
        np.testing.assert_allclose(entry.regularizer, 4.0)


def test_names_and_the_case_without_regulariser() -> None:
    theta, bias, actions, rewards = softmax_policy()
    task, pull = policy_losses(theta, bias, actions, rewards)
    without = gradient_probe([theta, bias], rewards, task_loss=task).values()
    assert not any("regularizer" in name for name in without)
    values = gradient_probe([theta, bias], rewards, task_loss=task, regularizer_loss=pull).values()
    assert len(values) == 18
    for name in values:
        assert find(name) is not None, name


def test_a_batch_of_rollouts_is_numbered_by_row() -> None:
    theta, bias, actions, rewards = softmax_policy()
    task, _ = policy_losses(theta, bias, actions, rewards)
    rollouts = [
        Rollout(turns=(Turn(output="x"),), group=f"prompt {p}", reward=float(rewards[p, g]))
        for p in range(P)
        for g in range(G)
    ]
    batch = RolloutBatch(step=1, rollouts=tuple(rollouts))
    assert gradient_probe([theta, bias], batch, task_loss=task) == gradient_probe(
        [theta, bias], rewards, task_loss=task
    )


def test_prompts_whose_rewards_are_all_equal_get_no_task_gradient() -> None:
    theta, bias, actions, rewards = softmax_policy()
    rewards[:3] = 1.0
    task, pull = policy_losses(theta, bias, actions, rewards)
    first = gradient_probe([theta, bias], rewards, task_loss=task, regularizer_loss=pull).buckets[0]
    assert first.bucket.reward_variance == 0.0
    assert first.task == 0.0
    assert first.regularizer is not None
    assert first.regularizer > 0.1


# --- nothing is touched --------------------------------------------------------------------------------------------


class Noisy(torch.nn.Module):  # type: ignore[misc]
    """Dropout draws random numbers; batch norm writes running statistics; one parameter is frozen, one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.3)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return self.dropout(self.norm(self.layer(x)))


def snapshot(model: Any, optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "parameters": dict(model.state_dict()),
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "modes": [m.training for m in model.modules()],
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }
    )


def assert_same(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b, err_msg=path)
    else:
        assert a == b, path


def noisy_training(probe: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Noisy()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    rewards = np.random.default_rng(0).random((8, 3))
    inputs = torch.randn(24, 6)

    def task(rows: Sequence[int]) -> Any:
        random.random()
        np.random.random()
        return model(inputs[torch.tensor(rows)]).pow(2).mean()

    for _ in range(3):
        optimizer.zero_grad()
        task(range(24)).backward()
        before = snapshot(model, optimizer)
        if probe:
            with torch.no_grad():  # as a logging callback would
                gradient_probe(model, rewards, task_loss=task, regularizer_loss={"kl": task, "entropy": task})
            assert_same(snapshot(model, optimizer), before)
        optimizer.step()
    return snapshot(model, optimizer)


def test_training_goes_on_bit_by_bit_as_without_the_probe() -> None:
    state_numpy, state_python = np.random.get_state(), random.getstate()
    try:
        assert_same(noisy_training(probe=True), noisy_training(probe=False))
    finally:
        np.random.set_state(state_numpy)
        random.setstate(state_python)


def test_every_closure_meets_the_same_random_numbers() -> None:
    theta = torch.ones(3, requires_grad=True)
    drawn: list[float] = []

    def loss(rows: Sequence[int]) -> Any:
        drawn.append(float(torch.rand(())))
        return theta.sum()

    gradient_probe([theta], np.eye(6), task_loss=loss, regularizer_loss=loss)
    assert len(drawn) == 12
    assert len(set(drawn)) == 1


# --- bad closures --------------------------------------------------------------------------------------------------


def _step_inside(theta: Any) -> Any:
    loss = theta.sum()
    loss.backward()
    return theta.sum()


def _write_inside(theta: Any) -> Any:
    with torch.no_grad():
        theta.add_(1.0)
    return theta.sum()


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda theta: 3.0, "returned float"),
        (lambda theta: theta, r"returned \(3,\)"),
        (lambda theta: theta.sum().detach(), "without gradients"),
        (lambda theta: theta.sum() * float("nan"), "is nan"),
        (lambda theta: (theta - 1).abs().sqrt().sum(), "gradient is not finite"),
        (lambda theta: torch.ones(1, requires_grad=True).sum(), "depends on none"),
        (_step_inside, "changed a parameter"),
        (_write_inside, "changed a parameter"),
    ],
)
def test_closures_that_misbehave_are_refused(closure: Callable[[Any], Any], message: str) -> None:
    theta = torch.ones(3, requires_grad=True)
    with pytest.raises(ScoringError, match=message) as caught:
        gradient_probe([theta], np.eye(6), task_loss=lambda rows: closure(theta))
    assert "task_loss on bucket_1 (6 rollouts)" in str(caught.value)


def test_frozen_parameters_are_not_probed() -> None:
    frozen, free = torch.ones(2), torch.ones(2, requires_grad=True)
    with pytest.raises(SettingsError, match="none of the 1 parameters"):
        gradient_probe([frozen], np.eye(6), task_loss=lambda rows: free.sum())
    probe = gradient_probe([frozen, free], np.eye(6), task_loss=lambda rows: (frozen * free).sum())
    np.testing.assert_allclose([entry.task for entry in probe.buckets], np.sqrt(2))
