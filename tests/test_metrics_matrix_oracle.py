"""Every number of a matrix against plain float64 loops that share no code with it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from collapsediag import EmaStd, LogLikelihoodMatrix, matrix_metrics
from collapsediag.metrics import information, retrieval
from collapsediag.metrics.ragen import ragen_own_scores
from collapsediag.statistics import bootstrap_interval

TIGHT = 1e-10


def random_matrix(seed: int, *, n_contexts: int = 5, group_size: int = 4, signal: float = 1.0) -> LogLikelihoodMatrix:
    """Traces of unequal length, groups of unequal size, repeated prompts, an empty and a broken row."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, group_size + 1, size=n_contexts)
    sizes[0] = group_size
    own = np.repeat(np.arange(n_contexts), sizes)
    length = rng.integers(3, 40, size=own.size)
    logp = -1.5 * length[:, None] + rng.normal(size=(own.size, n_contexts)) + signal * np.eye(n_contexts)[own]
    length[1] = 0
    logp[2, 0] = np.nan
    return LogLikelihoodMatrix(
        logp_NP=logp,
        length_N=length,
        own_N=own,
        group_N=own * 10 + np.arange(own.size) % 2,
        multiplicity_P=rng.integers(1, 4, size=n_contexts),
    )


def retrieved_by_enumeration(row: list[float], own: int, k: int) -> float:
    """Share of all ways to break ties in which own is among the k best."""
    hits = [
        own in sorted(range(len(row)), key=lambda j: (-row[j], order[j]))[:k]
        for order in itertools.permutations(range(len(row)))
    ]
    return sum(hits) / len(hits)


def by_loops(matrix: LogLikelihoodMatrix, mixture: str, token: str, ema: dict[str, float]) -> dict[str, float]:
    """The definitions written out; `ema` holds the averages before this step and is taken forward."""
    p = matrix.n_contexts
    weights = [1.0] * p if mixture == "uniform" else [float(w) for w in matrix.multiplicity_P]
    pi = [w / sum(weights) for w in weights]
    rows = []
    for i in range(matrix.n_traces):
        row, t = [float(v) for v in matrix.logp_NP[i]], int(matrix.length_N[i])
        if t == 0 or not all(math.isfinite(v) for v in row):
            continue
        own = int(matrix.own_N[i])
        # Plain sums of exponentials around the row's maximum.
        top = max(row)
        marginal = top + math.log(sum(pi[j] * math.exp(row[j] - top) for j in range(p)))
        mixed = math.log(sum(pi[j] * math.exp(row[j] / t) for j in range(p)))
        rows.append((row, own, t, row[own], marginal, marginal / t if token == "token" else mixed))
    n = len(rows)

    def mean(values: list[float]) -> float:
        return sum(values) / n

    def std(values: list[float]) -> float:
        return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / n)

    out: dict[str, float] = {}
    for k in (1, 2, 4):
        at = "" if k == 1 else f"@{k}"
        out[f"retrieval_accuracy{at}"] = mean([retrieved_by_enumeration(r[0], r[1], k) for r in rows])
        out[f"retrieval_chance_level{at}"] = k / p
        out[f"retrieval_above_chance{at}"] = out[f"retrieval_accuracy{at}"] - k / p
    values = {
        "": ([r[3] / r[2] for r in rows], [r[5] for r in rows]),
        "_seq": ([r[3] for r in rows], [r[4] for r in rows]),
    }
    for seq, (matched, marginal_values) in values.items():
        gap = [a - b for a, b in zip(matched, marginal_values, strict=True)]
        out[f"mi{seq}_estimate"] = mean(gap)
        out[f"conditional_entropy{seq}_est"] = -mean(matched)
        out[f"reasoning_entropy{seq}_est"] = -mean(marginal_values)
        for kind, spread_of in (("gap", gap), ("marginal", marginal_values)):
            name, value = f"{kind}_std", std(spread_of)
            out[f"{name}{seq}"] = value
            key = f"{name}{seq}"
            ema[key] = 0.9 * ema[key] + 0.1 * value if key in ema else value
            out[f"{name}_ema{seq}"] = ema[key]
            z = "mi_zscore" if kind == "gap" else "mi_zscore_marginal"
            out[f"{z}{seq}"] = mean(gap) / (value + 1e-3)
            out[f"{z}_ema{seq}"] = mean(gap) / (ema[key] + 1e-3)
    out["matched_log_prob_mean"] = mean(values[""][0])
    out["marginal_log_prob_mean"] = mean(values[""][1])
    out["mi_upper_bound"] = -sum(q * math.log(q) for q in pi)
    out["mi_saturation"] = out["mi_seq_estimate"] / out["mi_upper_bound"]
    out["n_traces"], out["n_contexts"], out["n_empty"], out["n_nonfinite"] = n, p, 1, 1
    return out


@pytest.mark.parametrize("seed", range(8))
def test_every_value_over_three_steps(seed: int) -> None:
    ema, state = EmaStd(), dict[str, float]()
    for step in range(3):
        matrix = random_matrix(100 * seed + step)
        found = matrix_metrics(matrix, ema=ema, n_resamples=20)
        expected = by_loops(matrix, "uniform", "token", state)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=TIGHT, abs=TIGHT), name
        named = {name for name in found if "/ci_" not in name and name != "retrieval_p_value"}
        assert named == set(expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mixture", ["uniform", "multiplicity"])
@pytest.mark.parametrize("normalization", ["token", "sequence", "token_mixture"])
def test_functions_one_by_one(seed: int, mixture: Any, normalization: Any) -> None:
    matrix = random_matrix(seed)
    expected = by_loops(matrix, mixture, normalization, {})
    seq = "_seq" if normalization == "sequence" else ""
    setting = {"normalization": normalization, "mixture": mixture}
    found = {
        f"mi{seq}_estimate": information.mutual_information(matrix, **setting),
        f"conditional_entropy{seq}_est": information.conditional_entropy(matrix, normalization=normalization),
        f"reasoning_entropy{seq}_est": information.reasoning_entropy(matrix, **setting),
        f"mi_zscore{seq}": information.mi_zscore(matrix, **setting),
        f"mi_zscore_marginal{seq}": information.mi_zscore(matrix, scale="marginal", **setting),
        "mi_upper_bound": information.mi_upper_bound(matrix, mixture=mixture),
        "mi_saturation": information.mi_saturation(matrix, mixture=mixture),
    }
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=TIGHT, abs=TIGHT), name


@pytest.mark.parametrize("seed", range(4))
def test_plain_arrays_are_as_good_as_a_matrix(seed: int) -> None:
    matrix = random_matrix(seed)
    logp, own, length = matrix.logp_NP, matrix.own_N, matrix.length_N
    arrays, whole = (logp, own, length), LogLikelihoodMatrix(logp_NP=logp, own_N=own, length_N=length)
    for function in (information.mutual_information, information.conditional_entropy, information.reasoning_entropy):
        assert function(*arrays) == function(whole)
    assert information.mi_zscore(*arrays) == information.mi_zscore(whole)
    keep = length > 0  # without lengths nothing says that a row is empty
    for function in (retrieval.retrieval_accuracy, retrieval.retrieval_above_chance, retrieval.retrieval_p_value):
        assert function(logp[keep], own[keep]) == function(whole)
    assert retrieval.retrieval_chance_level(logp, own) == 1 / 5


@pytest.mark.parametrize("seed", range(6))
def test_ties_count_by_their_expected_value(seed: int) -> None:
    """Coarse values, so that most rows are tied; every way of breaking the ties is tried."""
    rng = np.random.default_rng(seed)
    logp = -rng.integers(1, 4, size=(12, 5)).astype(float)
    own = rng.integers(0, 5, size=12)
    for k in (1, 2, 3, 4):
        expected = np.mean([retrieved_by_enumeration(list(row), int(j), k) for row, j in zip(logp, own, strict=True)])
        assert retrieval.retrieval_accuracy(logp, own, k=k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_repeated_prompts_in_ragens_sense(seed: int) -> None:
    """Columns written out as often as they repeat; a trace is retrieved as soon as one of its copies is."""
    rng = np.random.default_rng(seed)
    logp = -rng.integers(1, 4, size=(10, 3)).astype(float)
    own, times = rng.integers(0, 3, size=10), np.array([2, 1, 3])
    copies = np.repeat(np.arange(3), times)
    matrix = LogLikelihoodMatrix(logp_NP=logp, own_N=own, length_N=np.ones(10, dtype=int), multiplicity_P=times)
    for k in (1, 2, 3):
        expected = []
        for row, j in zip(logp, own, strict=True):
            hits = [
                j in copies[sorted(range(6), key=lambda c: (-row[copies[c]], order[c]))[:k]]
                for order in itertools.permutations(range(6))
            ]
            expected.append(np.mean(hits))
        np.testing.assert_allclose(ragen_own_scores(matrix, k), expected, atol=1e-12)


def test_tie_tolerance_is_counted_from_the_best() -> None:
    logp, tolerance = np.array([[-1.0, -1.3, -1.6, -9.0]]), 0.4
    expected = [0.5, 0.5, 0.0, 0.0]
    for own, value in enumerate(expected):
        assert retrieval.retrieval_accuracy(logp, [own], tie_tolerance=tolerance) == pytest.approx(value)
    # The second best is -1.3 and all three lie within 0.4 of it: they share two places.
    for own, value in enumerate([2 / 3, 2 / 3, 2 / 3, 0.0]):
        assert retrieval.retrieval_accuracy(logp, [own], k=2, tie_tolerance=tolerance) == pytest.approx(value)
    for k in (1, 2, 3):
        total = sum(retrieval.retrieval_accuracy(logp, [own], k=k, tie_tolerance=tolerance) for own in range(4))
        assert total == pytest.approx(k)
    assert matrix_metrics(
        LogLikelihoodMatrix(logp_NP=logp, own_N=[1], length_N=[3]), tie_tolerance=tolerance, intervals=False
    )["retrieval_accuracy"] == pytest.approx(0.5)


def test_p_value_is_that_of_the_brute_force_over_columns() -> None:
    rng = np.random.default_rng(2)
    own = np.repeat(np.arange(5), 3)
    logp = -5 + rng.normal(size=(15, 5)) + 0.7 * np.eye(5)[own]
    best = np.argmax(logp, axis=1)
    accuracies = [np.mean(best == np.array(order)[own]) for order in itertools.permutations(range(5))]
    expected = np.mean(np.array(accuracies) >= np.mean(best == own) - 1e-12)
    assert retrieval.retrieval_p_value(logp, own) == pytest.approx(expected, abs=1e-12)
    matrix = LogLikelihoodMatrix(logp_NP=logp, own_N=own, length_N=np.ones(15, dtype=int))
    assert matrix_metrics(matrix)["retrieval_p_value"] == pytest.approx(expected, abs=1e-12)
    # Two groups that share a column are two units: the columns (0, 0, 1) can be dealt out in three ways.
    shared = LogLikelihoodMatrix(
        logp_NP=[[-1.0, -2.0], [-1.0, -2.0], [-2.0, -1.0]], own_N=[0, 0, 1], group_N=[7, 8, 9], length_N=[1, 1, 1]
    )
    assert retrieval.retrieval_p_value(shared) == pytest.approx(1 / 3)
    assert matrix_metrics(shared)["retrieval_p_value"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_chance_and_distance_from_it_one_by_one(k: int) -> None:
    matrix = random_matrix(3)
    accuracy = retrieval.retrieval_accuracy(matrix, k=k)
    assert retrieval.retrieval_chance_level(matrix, k=k) == pytest.approx(k / 5)
    assert retrieval.retrieval_above_chance(matrix, k=k) == pytest.approx(accuracy - k / 5, abs=1e-12)
    assert accuracy != pytest.approx(k / 5)


@pytest.mark.parametrize("definition", ["paper", "ragen"])
def test_intervals_are_those_of_a_bootstrap_by_loops(definition: Any) -> None:
    """An independent bootstrap that recomputes every statistic on the drawn rows, with its own random numbers."""
    matrix = random_matrix(5, n_contexts=8, group_size=6)
    ema = EmaStd()
    matrix_metrics(random_matrix(6, n_contexts=8, group_size=6), ema=ema, definition=definition)
    token = "token" if definition == "paper" else "token_mixture"
    mixture = "uniform" if definition == "paper" else "multiplicity"
    scale = "gap_std" if definition == "paper" else "marginal_std"
    old = ema.values[scale]
    found = matrix_metrics(matrix, ema=ema, definition=definition, n_resamples=4000, seed=9, confidence=0.8)
    rows = matrix.rows(matrix.usable_N)
    groups = sorted(set(rows.group_N.tolist()))
    rng = np.random.default_rng(1234)
    samples: dict[str, list[float]] = {}
    for _ in range(1500):
        drawn = rng.choice(groups, size=len(groups))
        index = np.concatenate([np.flatnonzero(rows.group_N == g) for g in drawn])
        m = information.row_values(rows.rows(index), normalization=token, mixture=mixture)
        s = information.row_values(rows.rows(index), normalization="sequence", mixture=mixture)
        spread = np.std(m.gap_N if definition == "paper" else m.marginal_N)
        own = ragen_own_scores if definition == "ragen" else retrieval.own_scores
        for name, value in {
            "retrieval_accuracy": own(rows.rows(index)).mean(),
            "mi_estimate": m.gap_N.mean(),
            "mi_seq_estimate": s.gap_N.mean(),
            "conditional_entropy_est": -m.matched_N.mean(),
            "mi_zscore_ema": m.gap_N.mean() / (0.9 * old + 0.1 * spread + 1e-3),
        }.items():
            samples.setdefault(name, []).append(float(value))
    assert {n.removesuffix("/ci_low") for n in found if n.endswith("/ci_low")} == set(samples)
    for name, values in samples.items():
        low, high = bootstrap_interval(values, len(groups), 0.8)
        # Quantiles near 10% of 1,500 resamples are good to 0.05 standard deviations; three of them, twice.
        assert found[f"{name}/ci_low"] == pytest.approx(low, abs=0.2 * np.std(values)), name
        assert found[f"{name}/ci_high"] == pytest.approx(high, abs=0.2 * np.std(values)), name
        assert found[f"{name}/ci_low"] <= found[name] <= found[f"{name}/ci_high"]


def test_the_spread_in_the_zscores_interval_is_that_of_the_resample() -> None:
    """Two groups with one gap each: a resample that draws one of them twice has no spread at all."""
    logp = np.array([[-1.0, -1.5], [-1.0, -1.5], [-9.0, -1.0], [-9.0, -1.0]])
    matrix = LogLikelihoodMatrix(logp_NP=logp, length_N=[1] * 4, own_N=[0, 0, 1, 1])
    values = matrix_metrics(matrix, ema=EmaStd())
    gap = [
        -1.0 - math.log((math.exp(-1.0) + math.exp(-1.5)) / 2),
        -1.0 - math.log((math.exp(-9.0) + math.exp(-1.0)) / 2),
    ]
    assert values["mi_zscore_ema/ci_high"] == pytest.approx(max(gap) / 1e-3, rel=1e-6)
    both = np.mean(gap) / (np.std(gap) + 1e-3)
    assert values["mi_zscore_ema/ci_low"] == pytest.approx(both, rel=1e-6)
