"""Budget mode: the draw is uniform and balanced (by enumeration and chi-square), the reweighted mixture unbiased."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import chisquare

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.information import mutual_information
from collapsediag.metrics.retrieval import retrieval_accuracy_subset
from collapsediag.pairs import ScoringPairs
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
from collapsediag.scoring.budget import BudgetScorer, choose_columns, columns_of_circles, trainer_own_logp
from collapsediag.scoring.function import FunctionScorer
from collapsediag.scoring.protocol import Scorer

SMALLEST_P_VALUE = 1e-4  # of the chi-square tests; their seeds are fixed, so they pass or fail for good


def pairs_of(contexts: list[list[int]], traces: list[list[int]], own: list[int]) -> ScoringPairs:
    n = np.arange(len(traces))
    return ScoringPairs(
        contexts=tuple(np.array(c, dtype=np.int64) for c in contexts),
        traces=tuple(np.array(t, dtype=np.int64) for t in traces),
        own_N=np.array(own), group_N=np.array(own), multiplicity_P=np.ones(len(contexts), dtype=np.int64),
        rollout_N=n, turn_N=0 * n,
    )  # fmt: skip


# --- the draw -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_contexts", "k"), [(4, 1), (4, 2), (5, 2), (5, 3), (6, 2)])
def test_over_all_circles_every_set_of_others_is_equally_likely(n_contexts: int, k: int) -> None:
    """The whole probability space: P! circles. Each row's set of K others must come up equally often."""
    own = np.repeat(np.arange(n_contexts), 2)
    layer = np.tile([0, 1], n_contexts) % max(1, (n_contexts - 1) // k)
    seen: list[Counter[tuple[int, ...]]] = [Counter() for _ in own]
    for circle in itertools.permutations(range(n_contexts)):
        scored = columns_of_circles(own, layer, np.array([circle]), k)
        for row, chosen in enumerate(scored):
            assert chosen[own[row]]
            seen[row][tuple(np.flatnonzero(chosen).tolist())] += 1
    sets = math.comb(n_contexts - 1, k)
    for counts in seen:
        assert len(counts) == sets
        assert set(counts.values()) == {math.factorial(n_contexts) // sets}


def test_the_seeded_draw_is_uniform_by_chi_square() -> None:
    own = np.array([0, 1, 2, 3, 4, 0, 1, 1, 1])  # unequal groups, more layers than one circle holds
    counts = np.zeros((own.size, 5, 5))
    pairs_of_others: list[Counter[tuple[int, ...]]] = [Counter() for _ in own]
    for step in range(4000):
        scored = choose_columns(own, 5, 2, seed=11, step=step)
        for row in range(own.size):
            others = [j for j in np.flatnonzero(scored[row]) if j != own[row]]
            assert len(others) == 2
            counts[row, others[0], others[1]] += 1
            pairs_of_others[row][tuple(others)] += 1
    for row in range(own.size):
        found = np.array([pairs_of_others[row][pair] for pair in sorted(pairs_of_others[row])])
        assert found.size == 6
        assert chisquare(found).pvalue > SMALLEST_P_VALUE


@pytest.mark.parametrize(("n_contexts", "k", "group_size"), [(16, 4, 4), (16, 1, 8), (7, 2, 5), (9, 5, 3), (8, 3, 2)])
def test_each_context_gets_equally_many_traces(n_contexts: int, k: int, group_size: int) -> None:
    own = np.repeat(np.arange(n_contexts), group_size)
    scored = choose_columns(own, n_contexts, k, seed=1, step=2)
    np.testing.assert_array_equal(scored.sum(axis=1), k + 1)
    np.testing.assert_array_equal(scored.sum(axis=0), group_size * (k + 1))


def test_traces_of_one_prompt_cover_different_contexts() -> None:
    own = np.repeat(np.arange(16), 3)
    scored = choose_columns(own, 16, 5, seed=0)
    for context in range(16):
        np.testing.assert_array_equal(scored[own == context].sum(axis=0) - 2 * (np.arange(16) == context), 1)


def test_more_traces_than_a_circle_holds_get_a_new_one() -> None:
    own = np.zeros(4, dtype=int)  # 4 others and 2 a trace: the third trace begins the second circle
    repeats = [
        (scored[2] == scored[0]).all()
        for scored in (choose_columns(own, 5, 2, seed=3, step=step) for step in range(60))
    ]
    assert 0 < np.mean(repeats) < 0.4  # 1/6 by chance


def test_the_same_seed_and_step_choose_the_same_and_others_do_not() -> None:
    own = np.repeat(np.arange(8), 2)
    first = choose_columns(own, 8, 3, seed=4, step=7)
    np.testing.assert_array_equal(first, choose_columns(own, 8, 3, seed=4, step=7))
    assert (first != choose_columns(own, 8, 3, seed=4, step=8)).any()
    assert (first != choose_columns(own, 8, 3, seed=5, step=7)).any()


def test_units_share_their_columns() -> None:
    own, unit = np.array([0, 0, 1, 0, 1]), np.array([0, 1, 0, 0, 2])
    scored = choose_columns(own, 9, 2, seed=0, unit_N=unit)
    np.testing.assert_array_equal(scored[0], scored[3])
    assert (scored[0] != scored[1]).any()
    np.testing.assert_array_equal(scored.sum(axis=1), 3)


def test_a_budget_of_everything_is_everything() -> None:
    assert choose_columns([0, 1, 2], 3, 2).all()
    assert choose_columns([0, 1, 2], 3, 99).all()
    assert choose_columns([0], 1, 1).all()
    assert choose_columns([], 5, 2).shape == (0, 5)
    with pytest.raises(SettingsError, match="k is 0"):
        choose_columns([0, 1], 2, 0)


# --- what the metrics make of it ------------------------------------------------------------------------------------


def planted(n_contexts: int, group_size: int, shift: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums near -100 nats; the own column stands out by `shift`, every cell varies by `noise`."""
    rng = np.random.default_rng(0)
    own = np.repeat(np.arange(n_contexts), group_size)
    logp = -100.0 + rng.normal(0.0, 1.0, (own.size, 1)) + noise * rng.normal(0.0, 1.0, (own.size, n_contexts))
    logp[np.arange(own.size), own] += shift
    return logp, own


def test_the_reweighted_mixture_is_unbiased_exactly() -> None:
    """Mean over all P! circles of p(own) + (P-1)/K * sum of the others = the sum over all columns."""
    n_contexts, k = 5, 2
    logp, own = planted(n_contexts, 2, 1.0, 1.0)
    likelihood = np.exp(logp - logp.max())
    layer = np.tile([0, 1], n_contexts)
    rows = np.arange(own.size)
    total = np.zeros(own.size)
    circles = list(itertools.permutations(range(n_contexts)))
    for circle in circles:
        scored = columns_of_circles(own, layer, np.array([circle]), k)
        weight = np.where(scored, (n_contexts - 1) / k, 0.0)
        weight[rows, own] = 1.0
        total += (weight * likelihood).sum(axis=1)
    np.testing.assert_allclose(total / len(circles), likelihood.sum(axis=1), rtol=1e-12)


def mi_of_draws(logp: np.ndarray, own: np.ndarray, k: int, draws: int) -> np.ndarray:
    """mutual_information of the library's metric, over seeded draws."""
    values = []
    for step in range(draws):
        matrix = LogLikelihoodMatrix(
            logp_NP=logp, length_N=np.full(own.size, 10), own_N=own,
            scored_NP=choose_columns(own, logp.shape[1], k, seed=5, step=step),
        )  # fmt: skip
        values.append(mutual_information(matrix, normalization="sequence"))
    return np.array(values)


def test_mi_under_a_budget_matches_the_expectation_over_all_draws() -> None:
    """One row at a time the draw is uniform, so E[MI] is a mean over C(P-1, K) sets, computed here in a loop."""
    logp, own = planted(6, 2, 0.7, 0.7)
    expected = []
    for row, column in enumerate(own):
        others = [j for j in range(6) if j != column]
        for chosen in itertools.combinations(others, 2):
            terms = [logp[row, column], *(logp[row, j] + math.log(5 / 2) for j in chosen)]
            expected.append(logp[row, column] - (logsumexp(terms) - math.log(6)))
    draws = mi_of_draws(logp, own, 2, 1500)
    standard_error = draws.std() / math.sqrt(draws.size)
    assert standard_error < 0.01
    assert abs(draws.mean() - np.mean(expected)) < 4 * standard_error


@pytest.mark.parametrize(
    ("shift", "noise", "largest_bias", "largest_sd"),
    [(0.0, 0.0, 1e-9, 1e-9), (0.3, 0.3, 0.012, 0.018), (1.0, 1.0, 0.1, 0.06), (40.0, 1.0, 1e-9, 1e-9)],
)
def test_mi_is_exact_at_both_ends_and_close_between(
    shift: float, noise: float, largest_bias: float, largest_sd: float
) -> None:
    """K = 4 of 15. The bias is positive: minus the logarithm of a mean is too large on average (Jensen)."""
    logp, own = planted(16, 4, shift, noise)
    exact = mutual_information(
        LogLikelihoodMatrix(logp_NP=logp, length_N=np.full(64, 10), own_N=own), normalization="sequence"
    )
    draws = mi_of_draws(logp, own, 4, 300)
    assert -1e-9 < draws.mean() - exact < largest_bias
    assert draws.std() < largest_sd


def test_retrieval_under_a_budget_has_chance_one_in_k_plus_one() -> None:
    rng = np.random.default_rng(0)
    own = np.repeat(np.arange(12), 2)
    hits = []
    for step in range(400):
        logp = -50.0 + rng.normal(size=(24, 12))
        matrix = LogLikelihoodMatrix(
            logp_NP=logp, length_N=np.ones(24, dtype=int), own_N=own,
            scored_NP=choose_columns(own, 12, 3, seed=0, step=step),
        )  # fmt: skip
        hits.append(retrieval_accuracy_subset(matrix))
    assert abs(np.mean(hits) - 1 / 4) < 4 * np.std(hits) / math.sqrt(len(hits))


# --- the scorer -----------------------------------------------------------------------------------------------------


class Table:
    """A log-prob function with known answers, which counts what it is asked."""

    def __init__(self, offset: float = 0.0) -> None:
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.offset = offset

    def __call__(self, batch: list[tuple[list[int], list[int]]]) -> list[float]:
        self.asked += [(tuple(c), tuple(t)) for c, t in batch]
        return [table_logp(c, t) + self.offset * len(t) for c, t in batch]


def table_logp(context: Any, trace: Any) -> float:
    return -1.0 - 0.01 * float(sum(context)) - 0.1 * len(trace) - 0.001 * float(sum(trace))


def some_pairs() -> ScoringPairs:
    contexts = [[j, j + 1] for j in range(6)]
    traces = [[10 + i, 3] for i in range(12)]
    traces[1] = traces[0]  # equal traces of one prompt
    traces[2] = traces[0]  # and of another
    return pairs_of(contexts, traces, np.repeat(np.arange(6), 2).tolist())


def test_only_the_chosen_cells_are_asked_for_and_right() -> None:
    table, pairs = Table(), some_pairs()
    scorer = BudgetScorer(FunctionScorer(table), k=2, seed=9)
    matrix = scorer.score(pairs)
    assert isinstance(scorer, Scorer)
    np.testing.assert_array_equal(matrix.scored_NP.sum(axis=1), 3)
    for i in range(12):
        for j in range(6):
            expected = table_logp(pairs.contexts[j], pairs.traces[i]) if matrix.scored_NP[i, j] else np.nan
            np.testing.assert_allclose(matrix.logp_NP[i, j], expected)
    np.testing.assert_array_equal(matrix.scored_NP[0], matrix.scored_NP[1])
    wanted = {(j, tuple(pairs.traces[i].tolist())) for i, j in np.argwhere(matrix.scored_NP)}
    assert len(table.asked) == len(set(table.asked)) == len(wanted) < 36


def test_the_draw_follows_step_or_content_and_never_the_call() -> None:
    scorer, pairs = BudgetScorer(FunctionScorer(Table()), k=2), some_pairs()
    np.testing.assert_array_equal(scorer.columns(pairs), scorer.columns(some_pairs()))
    np.testing.assert_array_equal(scorer.score(pairs, step=3).scored_NP, scorer.columns(pairs, step=3))
    assert (scorer.columns(pairs, step=3) != scorer.columns(pairs, step=4)).any()
    other = pairs_of([[j, j + 1] for j in range(6)], [[50 + i] for i in range(12)], np.repeat(range(6), 2).tolist())
    assert (scorer.columns(pairs) != scorer.columns(other)).any()


def test_settings_that_cannot_be() -> None:
    with pytest.raises(SettingsError, match="k is 0"):
        BudgetScorer(FunctionScorer(Table()), k=0)
    with pytest.raises(SettingsError, match="cannot score single cells"):
        BudgetScorer(object(), k=2)  # type: ignore[arg-type]


# --- the own column from the trainer --------------------------------------------------------------------------------


def own_values(pairs: ScoringPairs) -> np.ndarray:
    return np.array([table_logp(pairs.contexts[j], z) for j, z in zip(pairs.own_N, pairs.traces, strict=True)])


def test_known_own_values_are_not_asked_for_but_for_a_few() -> None:
    table, pairs = Table(), some_pairs()
    scorer = BudgetScorer(FunctionScorer(table), k=2)
    known = own_values(pairs)
    known[7] = np.nan  # one the trainer does not know
    matrix = scorer.score(pairs, own_logp_N=known + 1e-4)
    reference = scorer.score(pairs)
    np.testing.assert_allclose(matrix.logp_NP, reference.logp_NP, atol=2e-4)
    own_asked = [(c, t) for c, t in table.asked if c in {tuple(pairs.contexts[j].tolist()) for j in pairs.own_N}]
    assert own_asked
    np.testing.assert_array_equal(matrix.scored_NP, reference.scored_NP)
    from_trainer = np.isclose(matrix.logp_NP[np.arange(12), pairs.own_N], own_values(pairs) + 1e-4, rtol=0, atol=1e-9)
    assert from_trainer.sum() == 12 - 1 - 4
    assert not from_trainer[7]


def test_fewer_cells_are_asked_with_known_own_values() -> None:
    pairs = pairs_of([[j, 99] for j in range(6)], [[10 + i, i] for i in range(12)], np.repeat(range(6), 2).tolist())
    with_own, without = Table(), Table()
    BudgetScorer(FunctionScorer(with_own), k=2).score(pairs, own_logp_N=own_values(pairs))
    BudgetScorer(FunctionScorer(without), k=2).score(pairs)
    assert len(without.asked) == 36
    assert len(with_own.asked) == 36 - 12 + 4


@pytest.mark.parametrize("offset", [0.05, float("nan")])
def test_another_policys_own_values_are_dropped_with_a_warning(offset: float, caplog: pytest.LogCaptureFixture) -> None:
    pairs = some_pairs()
    scorer = BudgetScorer(FunctionScorer(Table()), k=2)
    given = own_values(pairs) + 2 * 0.05 if offset == offset else own_values(pairs)
    if offset != offset:  # the model itself gives NaN
        scorer = BudgetScorer(FunctionScorer(Table(offset=float("nan"))), k=2)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        matrix = scorer.score(pairs, own_logp_N=given)
    assert "the own column is scored instead" in caplog.text
    expected = own_values(pairs) if offset == offset else np.full(12, np.nan)
    np.testing.assert_allclose(matrix.logp_NP[np.arange(12), pairs.own_N], expected)
    assert matrix.scored_NP.sum() == 36


def test_own_values_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ScoringError, match="own_logp_N has shape"):
        BudgetScorer(FunctionScorer(Table()), k=2).score(some_pairs(), own_logp_N=np.zeros(3))


def test_own_values_are_found_by_token_ids() -> None:
    """Context 1 2, output 7 8 9 5: the trace 8 9 follows the opening tag 7."""
    turn = Turn(context_ids=[1, 2], output_ids=[7, 8, 9, 5], logprobs=[-1.0, -2.0, -4.0, -8.0])
    unknown = Turn(context_ids=[1, 2], output_ids=[7, 8, 9, 5])
    batch = RolloutBatch(step=1, rollouts=tuple(Rollout(turns=(t,), group=0) for t in (turn, turn, turn, unknown)))
    pairs = pairs_of([[1, 2, 7], [1, 2, 6], [1, 2]], [[8, 9], [8, 9], [7, 8, 9, 5], [8, 9]], [0, 1, 2, 0])
    np.testing.assert_allclose(trainer_own_logp(pairs, batch), [-6.0, np.nan, -15.0, np.nan])
    hot = RolloutBatch(step=1, rollouts=batch.rollouts, temperature=0.7)
    with pytest.raises(SettingsError, match=r"temperature 0\.7"):
        trainer_own_logp(pairs, hot)
