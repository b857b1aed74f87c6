"""Matrices scored on a budget: the own column exact, K others standing for all P - 1."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from collapsediag import EmaStd, LogLikelihoodMatrix, matrix_metrics
from collapsediag.errors import MetricError
from collapsediag.metrics import information, retrieval
from collapsediag.metrics.registry import unknown_names


def full(seed: int = 0, *, n_contexts: int = 6, n_traces: int = 12, signal: float = 1.0) -> LogLikelihoodMatrix:
    rng = np.random.default_rng(seed)
    own = np.arange(n_traces) % n_contexts
    logp = -20 + rng.normal(size=(n_traces, n_contexts)) + signal * np.eye(n_contexts)[own]
    return LogLikelihoodMatrix(logp_NP=logp, length_N=rng.integers(3, 9, size=n_traces), own_N=own)


def budgeted(matrix: LogLikelihoodMatrix, k: int, seed: int = 0) -> LogLikelihoodMatrix:
    rng = np.random.default_rng(seed)
    scored = np.zeros(matrix.logp_NP.shape, dtype=bool)
    for i, own in enumerate(matrix.own_N):
        others = [j for j in range(matrix.n_contexts) if j != own]
        scored[i, [own, *rng.choice(others, size=k, replace=False)]] = True
    return LogLikelihoodMatrix(logp_NP=matrix.logp_NP, length_N=matrix.length_N, own_N=matrix.own_N, scored_NP=scored)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_marginal_by_loops(k: int) -> None:
    matrix = budgeted(full(), k)
    expected = []
    for i in range(matrix.n_traces):
        own = int(matrix.own_N[i])
        others = [float(v) for j, v in enumerate(matrix.logp_NP[i]) if j != own and matrix.scored_NP[i, j]]
        assert len(others) == k
        mixture = (np.exp(matrix.logp_NP[i, own]) + 5 / k * sum(np.exp(v) for v in others)) / 6
        expected.append(np.log(mixture))
    found = information.row_values(matrix, normalization="sequence")
    np.testing.assert_allclose(found.marginal_N, expected, atol=1e-10)
    np.testing.assert_allclose(found.matched_N, full().logp_NP[np.arange(12), matrix.own_N])
    values = matrix_metrics(matrix)
    assert values["mi_seq_estimate"] == pytest.approx(float(np.mean(found.matched_N - np.array(expected))), abs=1e-10)


def test_the_likelihood_of_the_mixture_is_unbiased_over_all_draws() -> None:
    """Mean over every choice of K of the 5 others: exactly the full mixture. Its log is then biased low, MI high."""
    matrix = full(3, n_traces=6)
    complete = information.row_values(matrix, normalization="sequence")
    for k in (1, 2, 3):
        likelihoods, gaps = [], []
        for chosen in itertools.combinations(range(5), k):
            scored = np.eye(6, dtype=bool)
            for i in range(6):
                others = [j for j in range(6) if j != i]
                scored[i, [others[c] for c in chosen]] = True
            part = LogLikelihoodMatrix(
                logp_NP=matrix.logp_NP, length_N=matrix.length_N, own_N=matrix.own_N, scored_NP=scored
            )
            row = information.row_values(part, normalization="sequence")
            likelihoods.append(np.exp(row.marginal_N))
            gaps.append(row.gap_N)
        np.testing.assert_allclose(np.mean(likelihoods, axis=0), np.exp(complete.marginal_N), rtol=1e-10)
        assert (np.mean(gaps, axis=0) >= complete.gap_N).all()


def test_all_others_scored_is_the_full_matrix() -> None:
    whole, same = full(), budgeted(full(), 5)
    assert same.is_complete
    assert matrix_metrics(whole) == matrix_metrics(same)


def test_rows_may_have_different_budgets() -> None:
    whole = full(1)
    scored = budgeted(whole, 2).scored_NP.copy()
    scored[0] = True
    part = LogLikelihoodMatrix(logp_NP=whole.logp_NP, length_N=whole.length_N, own_N=whole.own_N, scored_NP=scored)
    expected = information.row_values(whole).gap_N[0]
    assert information.row_values(part).gap_N[0] == pytest.approx(expected, abs=1e-12)
    assert retrieval.retrieval_subset_chance_level(part) == pytest.approx((1 / 6 + 11 / 3) / 12)


def test_retrieval_has_another_name_another_chance_and_an_interval() -> None:
    matrix = budgeted(full(2, n_traces=36, signal=0.5), 2)
    values = matrix_metrics(matrix, ema=EmaStd())
    expected = []
    for i in range(36):
        scored = [float(v) for j, v in enumerate(matrix.logp_NP[i]) if matrix.scored_NP[i, j]]
        expected.append(float(matrix.logp_NP[i, matrix.own_N[i]] == max(scored)))
    assert values["retrieval_accuracy_subset"] == pytest.approx(np.mean(expected))
    assert retrieval.retrieval_accuracy_subset(matrix) == values["retrieval_accuracy_subset"]
    assert values["retrieval_subset_chance_level"] == pytest.approx(1 / 3)
    assert values["retrieval_accuracy_subset/ci_low"] < np.mean(expected) < values["retrieval_accuracy_subset/ci_high"]
    full_names = {"retrieval_accuracy", "retrieval_chance_level", "retrieval_above_chance", "retrieval_p_value"}
    assert not {name for name in values if name.split("@")[0].split("/")[0] in full_names}
    assert unknown_names(values) == []
    assert all(np.isfinite(v) for v in values.values())


def test_total_collapse_is_chance_among_the_scored() -> None:
    flat = LogLikelihoodMatrix(logp_NP=np.full((12, 6), -3.0), length_N=np.ones(12, dtype=int), own_N=np.arange(12) % 6)
    values = matrix_metrics(budgeted(flat, 3))
    assert values["retrieval_accuracy_subset"] == pytest.approx(1 / 4)
    assert values["mi_seq_estimate"] == pytest.approx(0.0, abs=1e-12)


def test_a_broken_cell_counts_only_where_it_was_scored() -> None:
    whole = full()
    logp = whole.logp_NP.copy()
    scored = budgeted(whole, 2).scored_NP.copy()
    hidden = int(np.flatnonzero(~scored[0])[0])
    logp[0, hidden] = np.nan
    part = LogLikelihoodMatrix(logp_NP=logp, length_N=whole.length_N, own_N=whole.own_N, scored_NP=scored)
    assert matrix_metrics(part)["n_nonfinite"] == 0
    logp[1, whole.own_N[1]] = np.nan
    part = LogLikelihoodMatrix(logp_NP=logp, length_N=whole.length_N, own_N=whole.own_N, scored_NP=scored)
    assert matrix_metrics(part)["n_nonfinite"] == 1


def test_what_a_budget_cannot_answer_is_refused() -> None:
    matrix = budgeted(full(), 2)
    with pytest.raises(MetricError, match="mixture='multiplicity' needs every cell"):
        information.mutual_information(matrix, mixture="multiplicity")
    for function in (retrieval.retrieval_accuracy, retrieval.retrieval_above_chance, retrieval.retrieval_p_value):
        with pytest.raises(MetricError, match="retrieval_accuracy_subset"):
            function(matrix)
    for settings in ({"definition": "ragen"}, {"naming": "ragen"}):
        with pytest.raises(MetricError, match="RAGEN's definitions need every cell"):
            matrix_metrics(matrix, **settings)  # type: ignore[arg-type]


def test_a_row_with_its_own_context_only_is_refused() -> None:
    whole = full()
    scored = budgeted(whole, 2).scored_NP.copy()
    scored[4] = False
    scored[4, whole.own_N[4]] = True
    part = LogLikelihoodMatrix(logp_NP=whole.logp_NP, length_N=whole.length_N, own_N=whole.own_N, scored_NP=scored)
    with pytest.raises(MetricError, match="row 4"):
        information.mutual_information(part)
