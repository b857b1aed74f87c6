"""A policy over a vocabulary of 4 and traces of 3 tokens: the truth is a sum over all 64 strings.

The estimate of I(X; Z) is a mean over N = P * G independent traces, G of each context, so it is unbiased with the
variance `sum_x Var(g | x) / (P^2 G)`, which the enumeration gives exactly: the error falls as 1/sqrt(N).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from collapsediag import LogLikelihoodMatrix, matrix_metrics, mutual_information
from collapsediag.testing import EnumerablePolicy, planted, random_policy

STRINGS = list(itertools.product(range(4), repeat=3))


def policy_of(seed: int, dependence: float = 0.6) -> EnumerablePolicy:
    return random_policy(n_contexts=5, dependence=dependence, sharpness=1.5, seed=seed)


def truth_by_loops(policy: EnumerablePolicy) -> dict[str, float]:
    """I, H(Z|X), H(Z) and the retrieval accuracy from the tables alone, string by string."""
    p = policy.n_contexts
    information = given = total = retrieved = variance = 0.0
    probability = {}
    for j in range(p):
        for s in STRINGS:
            q = 1.0
            for t, token in enumerate(s):
                prefix = int("".join(map(str, s[:t])) or "0", 4)
                q *= float(policy.tables[t][j, prefix, token])
            probability[j, s] = q
    for j in range(p):
        first = second = 0.0
        for s in STRINGS:
            q = probability[j, s]
            mixture = sum(probability[i, s] for i in range(p)) / p
            best = max(probability[i, s] for i in range(p))
            ties = sum(probability[i, s] == best for i in range(p))
            information += q * math.log(q / mixture) / p
            given -= q * math.log(q) / p
            total -= q * math.log(mixture) / p
            retrieved += q * (probability[j, s] == best) / ties / p
            first += q * math.log(q / mixture)
            second += q * math.log(q / mixture) ** 2
        variance += (second - first**2) / p**2
    return {"I": information, "H(Z|X)": given, "H(Z)": total, "accuracy": retrieved, "variance_times_G": variance}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dependence", [0.0, 0.3, 1.0])
def test_the_policys_own_sums_are_right(seed: int, dependence: float) -> None:
    policy = policy_of(seed, dependence)
    truth = truth_by_loops(policy)
    assert sum(math.exp(policy.log_prob(2, s)) for s in STRINGS) == pytest.approx(1.0)
    assert policy.mutual_information() == pytest.approx(truth["I"], abs=1e-12)
    assert policy.conditional_entropy() == pytest.approx(truth["H(Z|X)"], abs=1e-12)
    assert policy.reasoning_entropy() == pytest.approx(truth["H(Z)"], abs=1e-12)
    assert policy.retrieval_accuracy() == pytest.approx(truth["accuracy"], abs=1e-12)
    if dependence == 0.0:
        assert truth["I"] == pytest.approx(0.0, abs=1e-12)
        assert policy.retrieval_accuracy() == pytest.approx(1 / 5, abs=1e-12)


def test_samples_follow_the_tables() -> None:
    policy = policy_of(1)
    tokens_NT, own_N = policy.sample(20_000, seed=4)
    assert own_N.tolist() == sorted(own_N.tolist())
    for context in (0, 4):
        rows = tokens_NT[own_N == context]
        for s in STRINGS[::7]:
            q = math.exp(policy.log_prob(context, s))
            found = (rows == np.array(s)).all(axis=1).mean()
            assert found == pytest.approx(q, abs=4.5 * math.sqrt(q * (1 - q) / 20_000))


def test_every_string_weighted_by_its_probability_gives_the_truth_exactly() -> None:
    """No sampling at all: rows repeated in proportion to a policy whose probabilities are multiples of 1/16."""
    half, eighth = np.array([0.5, 0.25, 0.125, 0.125]), np.array([0.125, 0.125, 0.5, 0.25])
    first = np.stack([half, eighth])[:, None, :]
    flat = np.full((2, 4, 4), 0.25)
    policy = EnumerablePolicy((first, flat))
    rows = [(s, j) for j in range(2) for s in itertools.product(range(4), repeat=2)]
    times = [round(math.exp(policy.log_prob(j, s)) * 32) for s, j in rows]
    tokens = np.repeat(np.array([s for s, _ in rows]), times, axis=0)
    own = np.repeat([j for _, j in rows], times)
    assert len(own) == 64
    values = matrix_metrics(policy.matrix(tokens, own), intervals=False)
    assert values["mi_seq_estimate"] == pytest.approx(policy.mutual_information(), abs=1e-12)
    assert values["conditional_entropy_seq_est"] == pytest.approx(policy.conditional_entropy(), abs=1e-12)
    assert values["reasoning_entropy_seq_est"] == pytest.approx(policy.reasoning_entropy(), abs=1e-12)
    assert values["retrieval_accuracy"] == pytest.approx(policy.retrieval_accuracy(), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_estimates_reach_the_truth_within_their_standard_error(seed: int) -> None:
    policy = policy_of(seed)
    truth = truth_by_loops(policy)
    for group_size in (16, 256, 4096):
        tokens, own = policy.sample(group_size, seed=1000 + seed)
        values = matrix_metrics(policy.matrix(tokens, own), intervals=False)
        bound = 4 * math.sqrt(truth["variance_times_G"] / group_size)
        assert values["mi_seq_estimate"] == pytest.approx(truth["I"], abs=bound)
        assert values["mi_estimate"] == pytest.approx(truth["I"] / 3, abs=bound / 3)
        n = own.size
        # A log-probability of this policy has a standard deviation below 2; an accuracy one below 1/2.
        assert values["conditional_entropy_seq_est"] == pytest.approx(truth["H(Z|X)"], abs=4 * 2 / math.sqrt(n))
        assert values["reasoning_entropy_seq_est"] == pytest.approx(truth["H(Z)"], abs=4 * 2 / math.sqrt(n))
        assert values["retrieval_accuracy"] == pytest.approx(truth["accuracy"], abs=4 * 0.5 / math.sqrt(n))


def test_the_error_falls_as_one_over_the_root_of_n() -> None:
    """Root mean square error over 300 runs: the exact standard error at each N, so halved by four times the traces."""
    policy = policy_of(2)
    truth = truth_by_loops(policy)
    runs, measured = 300, []
    for group_size in (8, 32, 128):
        errors = []
        for run in range(runs):
            tokens, own = policy.sample(group_size, seed=10_000 + run)
            errors.append(mutual_information(policy.matrix(tokens, own), normalization="sequence") - truth["I"])
        exact = math.sqrt(truth["variance_times_G"] / group_size)
        rms = math.sqrt(float(np.mean(np.square(errors))))
        # An RMS of 300 runs is good to 1/sqrt(600) = 4%.
        assert rms == pytest.approx(exact, rel=0.16)
        assert abs(np.mean(errors)) < 4 * exact / math.sqrt(runs)  # unbiased
        measured.append(rms)
    assert measured[0] / measured[1] == pytest.approx(2.0, rel=0.2)
    assert measured[1] / measured[2] == pytest.approx(2.0, rel=0.2)


@pytest.mark.calibration
@pytest.mark.parametrize("regime", ["healthy", "compressed", "template", "low_entropy"])
def test_planted_regimes_are_what_they_are_called(regime: str) -> None:
    step = planted(regime, n_contexts=8, group_size=64, seed=3)  # type: ignore[arg-type]
    values = matrix_metrics(step.matrix)
    informative = regime in ("healthy", "compressed")
    diverse = regime in ("healthy", "template")
    assert (values["mi_saturation"] > 0.8) == informative
    assert (values["mi_saturation"] < 0.01) == (not informative)
    assert (values["conditional_entropy_est"] > 0.7) == diverse
    assert (values["retrieval_p_value"] <= 0.001) == informative
    for name in ("retrieval_accuracy", "mi_estimate", "mi_seq_estimate", "conditional_entropy_est"):
        # Where every group is retrieved in full the bootstrap has no width: allow what one trace in 500 would change.
        assert values[f"{name}/ci_low"] - 0.002 <= step.truth[name] <= values[f"{name}/ci_high"] + 0.002, name


@pytest.mark.slow
@pytest.mark.calibration
def test_intervals_of_matrix_metrics_cover_the_enumerated_truth() -> None:
    """Sixteen contexts held fixed, 500 batches: intervals over groups are careful, because contexts differ too."""
    policy = random_policy(n_contexts=16, dependence=0.5, sharpness=1.5, seed=5)
    truth = {"retrieval_accuracy": policy.retrieval_accuracy(), "mi_seq_estimate": policy.mutual_information()}
    truth["mi_estimate"] = truth["mi_seq_estimate"] / 3
    truth["conditional_entropy_est"] = policy.conditional_entropy() / 3
    covered = dict.fromkeys(truth, 0)
    for run in range(500):
        values = matrix_metrics(policy.matrix(*policy.sample(8, seed=run)), n_resamples=300, seed=run)
        for name, exact in truth.items():
            covered[name] += values[f"{name}/ci_low"] <= exact <= values[f"{name}/ci_high"]
    for name, count in covered.items():
        assert count / 500 >= 0.92, name


@pytest.mark.slow
@pytest.mark.calibration
def test_p_value_of_a_collapsed_policy_is_not_small_too_often() -> None:
    """2,000 batches of a policy that ignores its prompt, seen through noise that differs by prompt and trace."""
    policy = random_policy(n_contexts=8, dependence=0.0, sharpness=1.0, seed=6)
    rng = np.random.default_rng(8)
    small = 0
    for run in range(2000):
        clean = policy.matrix(*policy.sample(4, seed=run))
        logp = clean.logp_NP - 1.0 - 0.1 * rng.random(8) - 0.1 * rng.random((32, 8))
        noisy = LogLikelihoodMatrix(logp_NP=logp, length_N=clean.length_N, own_N=clean.own_N)
        small += matrix_metrics(noisy, intervals=False, seed=run)["retrieval_p_value"] <= 0.05
    assert small / 2000 <= 0.05 + 3.5 * math.sqrt(0.05 * 0.95 / 2000)
    assert small > 0
