"""Token entropy and its covariance with advantages, against loops in float64 and exact updates."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from collapsediag.errors import MetricError
from collapsediag.metrics.entropy import covariance, predicted_entropy_change, token_entropy
from collapsediag.metrics.entropy_batch import entropy_metrics
from collapsediag.metrics.registry import find
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

# Float32 exponentials under float64 sums: about 1e-7 of the largest term of the sum.
FLOAT32 = 2e-6


def entropy_by_loop(logits: np.ndarray) -> float:
    weights = [math.exp(float(x) - float(logits.max())) for x in logits]
    total = math.fsum(weights)
    return -math.fsum(w / total * math.log(w / total) for w in weights if w > 0)


# --- exact entropy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "nats"), [((0.5, 0.3, 0.2), 1.0297), ((0.97, 0.02, 0.01), 0.1538), ((0.6, 0.3, 0.1), 0.8979)]
)
def test_known_entropies(p: tuple[float, ...], nats: float) -> None:
    np.testing.assert_allclose(token_entropy(np.log([p]))[0], nats, atol=5e-5)
    np.testing.assert_allclose(token_entropy(np.log([p]) + 123.0)[0], nats, atol=5e-5)


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0, 300.0])
def test_against_a_float64_loop_and_scipy(scale: float) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(17, 211)) * scale
    logits = logits.astype(np.float32)
    expected = [entropy_by_loop(row) for row in logits]
    np.testing.assert_allclose(token_entropy(logits), expected, atol=FLOAT32)
    p = scipy.special.softmax(logits.astype(np.float64), axis=1)
    np.testing.assert_allclose(token_entropy(logits), scipy.stats.entropy(p, axis=1), atol=FLOAT32)


def test_uniform_is_log_v_even_for_a_real_vocabulary() -> None:
    v = 151_936
    np.testing.assert_allclose(token_entropy(np.full((3, v), -7.25, dtype=np.float32)), math.log(v), rtol=1e-9)


def test_masked_tokens_add_nothing() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 50))
    masked = np.full((5, 80), -np.inf)
    masked[:, 10:60] = logits
    np.testing.assert_allclose(token_entropy(masked), token_entropy(logits), atol=1e-12)
    only_one = np.full((1, 9), -np.inf)
    only_one[0, 4] = 3.0
    assert token_entropy(only_one).tolist() == [0.0]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_chunks_do_not_show(chunk: int) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 7, 31))
    np.testing.assert_array_equal(token_entropy(logits, chunk=chunk), token_entropy(logits))
    assert token_entropy(logits).shape == (3, 7)
    assert token_entropy(np.zeros((0, 4))).shape == (0,)


def test_memory_is_that_of_a_chunk() -> None:
    logits = np.zeros((2048, 4096), dtype=np.float16)
    tracemalloc.start()
    token_entropy(logits, chunk=64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 64 * 4096 * 4  # a few float32 arrays of one chunk; the whole would be 33 MB each


def test_torch_of_any_float_type() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    expected = torch.distributions.Categorical(logits=logits.double()).entropy().numpy()
    np.testing.assert_allclose(token_entropy(logits.requires_grad_()), expected, atol=FLOAT32)
    half = logits.detach().bfloat16()
    expected = torch.distributions.Categorical(logits=half.double()).entropy().numpy()
    np.testing.assert_allclose(token_entropy(half), expected, atol=FLOAT32)


def test_the_input_is_left_alone() -> None:
    logits = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    before = logits.copy()
    token_entropy(logits)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "position 2 hold nan at token 1"), (np.inf, "position 2 hold inf at token 1")]
)
def test_broken_logits_are_refused_with_their_place(value: float, message: str) -> None:
    logits = np.zeros((4, 3))
    logits[2, 1] = value
    with pytest.raises(MetricError, match=message):
        token_entropy(logits, chunk=2)


def test_a_position_without_any_token_is_refused() -> None:
    logits = np.zeros((4, 3))
    logits[3] = -np.inf
    with pytest.raises(MetricError, match="every logit of position 3 is -inf"):
        token_entropy(logits, chunk=2)
    with pytest.raises(MetricError, match="vocabulary"):
        token_entropy(np.zeros((4, 0)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(-80, 80), min_size=1, max_size=40), st.floats(-50, 50), st.randoms(use_true_random=False))
def test_between_zero_and_log_v_and_blind_to_shift_and_order(values: list[float], shift: float, random: object) -> None:
    logits = np.array([values])
    entropy = token_entropy(logits)[0]
    assert 0 <= entropy <= math.log(len(values)) + 1e-6
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    np.testing.assert_allclose(token_entropy(np.array([shuffled]))[0], entropy, atol=1e-6)
    np.testing.assert_allclose(token_entropy(logits + shift)[0], entropy, atol=1e-4)


# --- predicted change ----------------------------------------------------------------------------------------------


def exact_change(pi: np.ndarray, advantage: np.ndarray, eta: float) -> float:
    moved = np.log(pi) + eta * pi * advantage
    after = np.exp(moved - scipy.special.logsumexp(moved))
    return float(scipy.stats.entropy(after) - scipy.stats.entropy(pi))


@pytest.mark.parametrize("action", [0, 1, 2])
def test_predicted_against_exact_change(action: int) -> None:
    """The error is of second order: halving eta quarters it."""
    pi, advantage = np.array([0.6, 0.3, 0.1]), np.eye(3)[action]
    predicted, exact = predicted_entropy_change(pi, advantage, 0.5), exact_change(pi, advantage, 0.5)
    assert np.sign(predicted) == np.sign(exact) != 0
    errors = [
        abs(predicted_entropy_change(pi, advantage, eta) - exact_change(pi, advantage, eta))
        for eta in (0.5, 0.25, 0.125, 0.0625)
    ]
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    np.testing.assert_allclose(ratios, 4.0, rtol=0.15)
    np.testing.assert_allclose(ratios[-1], 4.0, rtol=0.04)


def test_predicted_change_is_the_covariance_written_out() -> None:
    rng = np.random.default_rng(5)
    pi, advantage = rng.dirichlet(np.ones(6)), rng.normal(size=6)
    mean_log, mean_pull = sum(pi * np.log(pi)), sum(pi * pi * advantage)
    loop = sum(p * (math.log(p) - mean_log) * (p * a - mean_pull) for p, a in zip(pi, advantage, strict=True))
    np.testing.assert_allclose(predicted_entropy_change(pi, advantage, 0.3), -0.3 * loop, rtol=1e-12)
    with_impossible = predicted_entropy_change([*pi, 0.0], [*advantage, 9.0], 0.3)
    np.testing.assert_allclose(with_impossible, -0.3 * loop, rtol=1e-12)


@pytest.mark.parametrize(
    ("pi", "advantage", "message"),
    [([0.5, 0.5], [1.0], "one advantage per action"), ([0.5, 0.4], [1.0, 0.0], "sum to 1"), ([-1, 2], [0, 0], ">= 0")],
)
def test_what_is_no_distribution_is_refused(pi: list[float], advantage: list[float], message: str) -> None:
    with pytest.raises(MetricError, match=message):
        predicted_entropy_change(pi, advantage, 0.1)


def test_covariance_is_the_population_one() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 40)) + 1e6
    np.testing.assert_allclose(covariance(x, y), np.cov(x, y, ddof=0)[0, 1], rtol=1e-9)
    with pytest.raises(MetricError, match="equally long"):
        covariance([1.0], [1.0, 2.0])


# --- a batch -------------------------------------------------------------------------------------------------------


def turn(entropies: object = None, logprobs: object = None) -> Turn:
    n = len(entropies if entropies is not None else logprobs)  # type: ignore[arg-type]
    return Turn(output_ids=list(range(n)), entropies=entropies, logprobs=logprobs)  # type: ignore[arg-type]


def one_turn(group: int = 0, advantage: float | None = None, **per_token: object) -> Rollout:
    return Rollout(turns=(turn(**per_token),), group=group, advantage=advantage)


def metrics(*rollouts: Rollout, **settings: object) -> dict[str, float]:
    return entropy_metrics(RolloutBatch(step=1, rollouts=rollouts), **settings)  # type: ignore[arg-type]


def random_batch(seed: int = 0) -> tuple[list[Rollout], np.ndarray, np.ndarray, np.ndarray]:
    """Rollouts of two turns each, and their entropies, log-probabilities and advantages end to end."""
    rng = np.random.default_rng(seed)
    rollouts, h, logp, advantage = [], [], [], []
    for i in range(7):
        a = float(rng.normal())
        turns = []
        for _ in range(2):
            n = int(rng.integers(1, 9))
            h.append(rng.gamma(1.0, size=n))
            logp.append(-rng.gamma(1.0, size=n))
            advantage.append(np.full(n, a))
            turns.append(turn(h[-1], logp[-1]))
        rollouts.append(Rollout(turns=tuple(turns), group=i // 2, advantage=a))
    return rollouts, np.concatenate(h), np.concatenate(logp), np.concatenate(advantage)


def test_every_number_against_plain_formulas() -> None:
    rollouts, h, logp, advantage = random_batch()
    values = metrics(*rollouts, eta=0.1)
    ordered = sorted(h, reverse=True)
    n_forking = -(-len(h) // 5)
    pulled = [math.exp(lp) * a for lp, a in zip(logp, advantage, strict=True)]
    expected = {
        "entropy/token_mean": math.fsum(h) / len(h),
        "entropy/token_p50": np.percentile(h, 50),
        "entropy/token_p80": np.percentile(h, 80),
        "entropy/token_p95": np.percentile(h, 95),
        "entropy/forking_mean": math.fsum(ordered[:n_forking]) / n_forking,
        "entropy/rest_mean": math.fsum(ordered[n_forking:]) / (len(h) - n_forking),
        "entropy/sampled_mean": -math.fsum(logp) / len(logp),
        "entropy/covariance": np.cov(logp, advantage, ddof=0)[0, 1],
        "entropy/covariance_policy": np.cov(logp, pulled, ddof=0)[0, 1],
        "entropy/predicted_delta": -0.1 * np.cov(logp, pulled, ddof=0)[0, 1],
        "entropy/n_positions": len(h),
        "entropy/n_sampled": len(logp),
        "entropy/n_covariance": len(logp),
    }
    plain = {name: value for name, value in values.items() if "/ci_" not in name}
    assert plain.keys() == expected.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, err_msg=name)
    for name in values:
        assert find(name) is not None, name


def test_the_sampled_mean_estimates_the_exact_one() -> None:
    rng = np.random.default_rng(4)
    p = rng.dirichlet(np.ones(5), size=4000)
    drawn = (rng.random((4000, 1)) > p.cumsum(axis=1)).sum(axis=1)
    logp = np.log(p[np.arange(4000), drawn])
    values = metrics(one_turn(entropies=scipy.stats.entropy(p, axis=1), logprobs=logp))
    standard_error = logp.std() / math.sqrt(4000)
    np.testing.assert_allclose(values["entropy/sampled_mean"], values["entropy/token_mean"], atol=4 * standard_error)


def test_rewarding_likely_tokens_predicts_a_fall() -> None:
    likely, unlikely = one_turn(0, 1.0, logprobs=[-0.1, -0.2]), one_turn(0, -1.0, logprobs=[-3.0, -4.0])
    values = metrics(likely, unlikely, eta=1.0)
    assert values["entropy/covariance"] > 0
    assert values["entropy/covariance_policy"] > 0
    assert values["entropy/predicted_delta"] < 0


def test_the_mean_weighs_tokens_not_rollouts() -> None:
    values = metrics(one_turn(entropies=[1.0]), one_turn(entropies=[0.0, 0.0, 0.0]))
    assert values["entropy/token_mean"] == 0.25


def test_what_is_missing_is_absent() -> None:
    assert metrics(Rollout(turns=(Turn(output="text"),), group=0)) == {}
    exact_only = metrics(one_turn(entropies=[0.5, 0.1], advantage=1.0), eta=1.0)
    assert not any("sampled" in name or "covariance" in name or "predicted" in name for name in exact_only)
    sampled_only = metrics(one_turn(logprobs=[-0.5]), eta=1.0)
    assert set(sampled_only) == {"entropy/sampled_mean", "entropy/n_sampled"}
    assert "entropy/predicted_delta" not in metrics(one_turn(logprobs=[-0.5], advantage=1.0))
    assert "entropy/rest_mean" not in metrics(one_turn(entropies=[0.5]))
    assert metrics(one_turn(entropies=[])) == {}


def test_rollouts_without_an_advantage_are_counted_out_of_the_covariance() -> None:
    known = [one_turn(0, 1.0, logprobs=[-1.0, -2.0]), one_turn(0, 0.0, logprobs=[-3.0])]
    unknown = [one_turn(0, None, logprobs=[-9.0]), one_turn(0, float("nan"), logprobs=[-9.0])]
    values, without = metrics(*known, *unknown), metrics(*known)
    assert values["entropy/n_covariance"] == 3.0
    assert values["entropy/n_sampled"] == 5.0
    assert values["entropy/covariance"] == without["entropy/covariance"]


def test_only_the_positions_that_count() -> None:
    def second_half(t: Turn) -> np.ndarray:
        assert t.output_ids is not None
        return np.arange(t.output_ids.size) >= 2

    values = metrics(one_turn(entropies=[9.0, 9.0, 1.0, 3.0], logprobs=[-9.0, -9.0, -1.0, -2.0]), positions=second_half)
    assert (values["entropy/token_mean"], values["entropy/sampled_mean"]) == (2.0, 1.5)
    assert metrics(one_turn(entropies=[1.0]), positions=second_half) == {}
    whole = metrics(one_turn(entropies=[9.0, 1.0]), positions=lambda t: None)
    assert whole["entropy/token_mean"] == 5.0


@pytest.mark.parametrize(
    ("per_token", "settings", "message"),
    [
        ({"logprobs": [-1.0, 2e-4]}, {}, r"rollout 1, turn 0: a log-probability is 0.0002 \(position 1"),
        ({"logprobs": [-np.inf]}, {}, "log-probability is -inf"),
        ({"logprobs": [np.nan]}, {}, "log-probability is nan"),
        ({"entropies": [0.5, -0.2]}, {}, r"rollout 1, turn 0: an entropy is -0.2 \(position 1"),
        ({"entropies": [np.nan]}, {}, "an entropy is nan"),
        ({"entropies": [np.inf]}, {}, "an entropy is inf"),
        ({"entropies": [1.2]}, {"vocabulary_size": 3}, "at most log 3 = 1.099"),
        ({"entropies": [0.5, 0.5]}, {"positions": lambda t: [True]}, r"shape \(1,\) but entropies has \(2,\)"),
        ({"logprobs": [-0.5]}, {"positions": lambda t: [[True]]}, r"shape \(1, 1\) but logprobs has \(1,\)"),
    ],
)
def test_impossible_values_are_refused_with_their_place(
    per_token: dict[str, list[float]], settings: dict[str, object], message: str
) -> None:
    fine: Callable[[], Rollout] = lambda: Rollout(turns=(Turn(output="text"),), group=0)  # noqa: E731
    with pytest.raises(MetricError, match=message):
        metrics(fine(), one_turn(**per_token), **settings)


@pytest.mark.parametrize("advantage", [float("inf"), "x", [1.0]])
def test_an_advantage_that_is_no_finite_number_is_refused(advantage: object) -> None:
    with pytest.raises(MetricError, match=re.escape(f"advantage of rollout 0 is {advantage!r}")):
        metrics(one_turn(advantage=advantage, logprobs=[-1.0]))


def test_float_noise_is_no_error() -> None:
    values = metrics(one_turn(entropies=[-5e-5, math.log(3) + 5e-5], logprobs=[5e-5, -1.0]), vocabulary_size=3)
    assert values["entropy/n_positions"] == 2.0


def test_intervals_are_over_prompts() -> None:
    """Each prompt has its own entropy: the interval is that of 4 values, however many tokens there are."""
    rollouts = [one_turn(g, entropies=np.full(500, float(g))) for g in range(4) for _ in range(5)]
    values = metrics(*rollouts)
    low, high = values["entropy/token_mean/ci_low"], values["entropy/token_mean/ci_high"]
    assert low < 0.6
    assert high > 2.4
    assert metrics(*rollouts) == values  # seeded
    assert "entropy/token_mean/ci_low" not in metrics(*rollouts[:5])
