"""Estimates against truth on policies that can be summed over: bias and spread of MI, and coverage of intervals.

Legend: P prompts scored, G traces of each, T tokens of a trace, R repetitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collapsediag.findings.regime import regimes
from collapsediag.findings.settings import FindingSettings
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.from_matrix import matrix_metrics
from collapsediag.metrics.information import mutual_information
from collapsediag.record import Record
from collapsediag.testing import EnumerablePolicy, random_policy

# The prompts there are. A step scores a few of them, and what it sees is bounded by log P.
N_POPULATION = 256
NORMALIZATIONS = ("sequence", "token", "token_mixture")
INTERVALS = ("retrieval_accuracy", "mi_seq_estimate", "mi_estimate", "conditional_entropy_est")


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Mean and standard deviation of the estimates of one normalisation over repetitions, all in nats per trace.

    truth: I(X; Z) over all prompts. Numbers per token are multiplied by T, so that all three stand beside it.
    """

    length: int
    n_contexts: int
    group_size: int
    truth: float
    mean: dict[str, float]
    std: dict[str, float]


def biases(n_repetitions: int = 200) -> list[Bias]:
    """MI in each normalisation against P, G and T."""
    found = []
    for length in (2, 4, 6):
        policy = random_policy(n_contexts=N_POPULATION, dependence=0.6, sharpness=1.5, length=length, seed=1)
        for n_contexts, group_size in ((4, 8), (16, 2), (16, 8), (64, 8)):
            values = {name: [] for name in NORMALIZATIONS}  # type: dict[str, list[float]]
            for matrix in batches(policy, n_contexts, group_size, n_repetitions):
                for name in NORMALIZATIONS:
                    scale = 1 if name == "sequence" else length
                    values[name].append(scale * mutual_information(matrix, normalization=name))  # type: ignore[arg-type]
            found.append(
                Bias(
                    length=length,
                    n_contexts=n_contexts,
                    group_size=group_size,
                    truth=policy.mutual_information(),
                    mean={name: float(np.mean(v)) for name, v in values.items()},
                    std={name: float(np.std(v)) for name, v in values.items()},
                )
            )
    return found


def batches(
    policy: EnumerablePolicy, n_contexts: int, group_size: int, n_repetitions: int
) -> Iterator[LogLikelihoodMatrix]:
    """Scored steps of a policy: other prompts each time, G traces of each."""
    weights_PS = np.exp(policy.logp_PS)
    for seed in range(n_repetitions):
        rng = np.random.default_rng([7, seed])
        chosen = rng.choice(policy.n_contexts, n_contexts, replace=False)
        strings = np.concatenate(
            [rng.choice(weights_PS.shape[1], group_size, p=weights_PS[j] / weights_PS[j].sum()) for j in chosen]
        )
        yield LogLikelihoodMatrix(
            logp_NP=np.minimum(policy.logp_PS[np.ix_(chosen, strings)].T, 0.0),
            length_N=np.full(strings.size, policy.length),
            own_N=np.repeat(np.arange(n_contexts), group_size),
        )


@dataclass(frozen=True, kw_only=True)
class Stationary:
    """Runs of a policy that does not change, scored at P and G: what is seen of its dependence, and false alarms.

    accuracy, mi: means of `retrieval_accuracy` and `mi_seq_estimate`. at_chance: share of steps whose retrieval cannot
        be told from chance. false_runs: of `n_runs`, those said to be low at any step, for each `dependence_low`.
    """

    n_contexts: int
    group_size: int
    accuracy: float
    mi: float
    at_chance: float
    false_runs: dict[float, int]
    n_runs: int


STATIONARY_THRESHOLDS = (0.5, 0.7, 0.8, 0.9)
# (dependence, sharpness) of the policies, from faint to plain.
STRENGTHS = ((0.5, 1.0), (0.5, 1.5), (0.8, 1.5))


def stationary(n_runs: int = 40, n_steps: int = 20) -> list[Stationary]:
    """How often noise alone looks like a loss of dependence."""
    found = []
    for dependence, sharpness in STRENGTHS:
        policy = random_policy(n_contexts=N_POPULATION, dependence=dependence, sharpness=sharpness, length=4, seed=3)
        for n_contexts in (16, 8, 4):
            steps = list(batches(policy, n_contexts, 4, n_runs * n_steps))
            values = [matrix_metrics(matrix, n_resamples=200, seed=i) for i, matrix in enumerate(steps)]
            found.append(_stationary(values, n_contexts, n_steps))
    return found


def _stationary(values: Sequence[Mapping[str, float]], n_contexts: int, n_steps: int) -> Stationary:
    prefix = "collapse_first_turn_sample/"
    records = [
        Record(step=i % n_steps, values={prefix + k: v for k, v in one.items() if np.isfinite(v)})
        for i, one in enumerate(values)
    ]
    runs = [records[i : i + n_steps] for i in range(0, len(records), n_steps)]
    false_runs = {
        low: sum(any(s.mi_is_low for s in regimes(run, settings=FindingSettings(dependence_low=low))) for run in runs)
        for low in STATIONARY_THRESHOLDS
    }
    return Stationary(
        n_contexts=n_contexts,
        group_size=4,
        accuracy=float(np.mean([one["retrieval_accuracy"] for one in values])),
        mi=float(np.mean([one["mi_seq_estimate"] for one in values])),
        at_chance=float(np.mean([step.at_chance for run in runs for step in regimes(run)])),
        false_runs=false_runs,
        n_runs=len(runs),
    )


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Share of 95% intervals that hold the mean over all steps of this P and G, by metric."""

    n_contexts: int
    group_size: int
    share: dict[str, float]
    n: int


def coverages(n_repetitions: int = 400) -> list[Coverage]:
    """Coverage where each step draws other prompts, as training does; the truth is the mean of all estimates."""
    policy = random_policy(n_contexts=N_POPULATION, dependence=0.5, sharpness=1.5, length=3, seed=5)
    return [
        coverage(policy, n_contexts, group_size, n_repetitions)
        for n_contexts in (4, 8, 16, 64)
        for group_size in (2, 4, 16)
    ]


def coverage(policy: EnumerablePolicy, n_contexts: int, group_size: int, n_repetitions: int) -> Coverage:
    """One cell of `coverages`."""
    values = [
        matrix_metrics(matrix, n_resamples=300, seed=i)
        for i, matrix in enumerate(batches(policy, n_contexts, group_size, n_repetitions))
    ]
    share = {}
    for name in INTERVALS:
        truth = np.mean([v[name] for v in values])
        share[name] = float(np.mean([v[f"{name}/ci_low"] <= truth <= v[f"{name}/ci_high"] for v in values]))
    return Coverage(n_contexts=n_contexts, group_size=group_size, share=share, n=n_repetitions)
