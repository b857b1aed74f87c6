"""What must not change, or must change in a known way, when the matrix is rewritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from collapsediag import EmaStd, LogLikelihoodMatrix, matrix_metrics
from collapsediag.metrics import information, retrieval

# Sums in another order differ in the last digits.
REORDERED = 1e-9


def parts(seed: int, *, n_contexts: int = 6, group_size: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    own = np.repeat(np.arange(n_contexts), group_size)
    length = rng.integers(2, 30, size=own.size)
    logp = -2.0 * length[:, None] + rng.normal(size=(own.size, n_contexts)) + 1.5 * np.eye(n_contexts)[own]
    # A few ties: their handling must not depend on any order either.
    logp[::4] = np.round(logp[::4])
    return {
        "logp_NP": logp,
        "length_N": length,
        "own_N": own,
        "group_N": own.copy(),
        "multiplicity_P": rng.integers(1, 3, size=n_contexts),
    }


def measured(fields: dict[str, Any], **options: Any) -> dict[str, float]:
    ema = EmaStd()
    for name in ("gap_std", "gap_std_seq", "marginal_std", "marginal_std_seq"):
        ema.update(name, 1.0)
    return matrix_metrics(LogLikelihoodMatrix(**fields), ema=ema, n_resamples=100, **options)


def assert_same(found: dict[str, float], expected: dict[str, float], *, but: tuple[str, ...] = ()) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if not name.startswith(but) or not but:
            assert found[name] == pytest.approx(value, rel=REORDERED, abs=REORDERED), name


@pytest.mark.parametrize("definition", ["paper", "ragen"])
@pytest.mark.parametrize("seed", range(5))
def test_order_of_prompts_is_nothing(seed: int, definition: Any) -> None:
    before = parts(seed)
    order = np.random.default_rng(seed + 50).permutation(6)
    place = np.argsort(order)
    after = {
        **before,
        "logp_NP": before["logp_NP"][:, order],
        "own_N": place[before["own_N"]],
        "multiplicity_P": before["multiplicity_P"][order],
    }
    assert_same(measured(after, definition=definition), measured(before, definition=definition))


@pytest.mark.parametrize("definition", ["paper", "ragen"])
@pytest.mark.parametrize("seed", range(5))
def test_order_of_traces_is_nothing(seed: int, definition: Any) -> None:
    before = parts(seed)
    order = np.random.default_rng(seed + 50).permutation(before["own_N"].size)
    after = {name: value if name == "multiplicity_P" else value[order] for name, value in before.items()}
    assert_same(measured(after, definition=definition), measured(before, definition=definition))


@pytest.mark.parametrize("seed", range(5))
def test_a_constant_per_trace_moves_the_entropies_and_nothing_else(seed: int) -> None:
    """A tag that every context makes equally likely says nothing about the context."""
    before = parts(seed)
    constant_N = -np.random.default_rng(seed).integers(1, 9, size=before["own_N"].size).astype(float)
    found = measured({**before, "logp_NP": before["logp_NP"] + constant_N[:, None]})
    expected = measured(before)
    shift = {"_seq": constant_N.mean(), "": (constant_N / before["length_N"]).mean()}
    for seq, moved in shift.items():
        for name in ("conditional_entropy", "reasoning_entropy"):
            assert found[f"{name}{seq}_est"] == pytest.approx(expected[f"{name}{seq}_est"] - moved)
    assert found["matched_log_prob_mean"] == pytest.approx(expected["matched_log_prob_mean"] + shift[""])
    moving = ("conditional_", "reasoning_", "matched_", "marginal_", "mi_zscore_marginal")
    assert_same(found, expected, but=moving)


@pytest.mark.parametrize("seed", range(5))
def test_a_repeated_prompt_is_a_column_with_multiplicity(seed: int) -> None:
    """The mixture over columns written out as often as they repeat, without any weights."""
    fields = parts(seed)
    matrix = LogLikelihoodMatrix(**fields)
    written_out = np.repeat(fields["logp_NP"], fields["multiplicity_P"], axis=1)
    matched = fields["logp_NP"][np.arange(fields["own_N"].size), fields["own_N"]]
    gap = matched - (logsumexp(written_out, axis=1) - np.log(written_out.shape[1]))
    found = information.row_values(matrix, normalization="sequence", mixture="multiplicity")
    np.testing.assert_allclose(found.gap_N, gap, atol=1e-10)
    # The uniform mixture does not see how often a prompt was repeated.
    once = LogLikelihoodMatrix(**{**fields, "multiplicity_P": np.ones(6, dtype=int)})
    assert information.mutual_information(matrix) == information.mutual_information(once)
    assert measured(fields)["mi_upper_bound"] == pytest.approx(np.log(6))


@pytest.mark.parametrize("seed", range(5))
def test_traces_counted_twice_change_no_value(seed: int) -> None:
    before = parts(seed)
    twice = {name: value if name == "multiplicity_P" else np.repeat(value, 2, axis=0) for name, value in before.items()}
    assert_same(measured(twice), measured(before), but=("n_traces",))
    assert measured(twice)["n_traces"] == 2 * measured(before)["n_traces"]


@pytest.mark.parametrize("seed", range(5))
def test_splitting_a_group_changes_the_uncertainty_only(seed: int) -> None:
    before = parts(seed, n_contexts=6, group_size=4)
    split = {**before, "group_N": 2 * before["group_N"] + np.arange(before["own_N"].size) % 2}
    found, expected = measured(split), measured(before)
    for name, value in expected.items():
        if "/ci_" not in name and name != "retrieval_p_value":
            assert found[name] == value, name
    assert found["mi_estimate/ci_low"] != expected["mi_estimate/ci_low"]


def test_splitting_groups_of_equal_traces_narrows_the_interval_that_should_not_be_narrow() -> None:
    """Why groups are resampled: eight copies of one trace are one observation, not eight."""
    fields = parts(3, n_contexts=6, group_size=1)
    copies = {
        name: value if name == "multiplicity_P" else np.repeat(value, 8, axis=0) for name, value in fields.items()
    }
    grouped = measured(copies)
    lone = measured({**copies, "group_N": np.arange(48)})
    width = {n: v["mi_estimate/ci_high"] - v["mi_estimate/ci_low"] for n, v in (("grouped", grouped), ("lone", lone))}
    assert width["grouped"] > 2 * width["lone"]


def test_rows_left_out_leave_no_trace() -> None:
    before = parts(1)
    n = before["own_N"].size
    broken = np.vstack([before["logp_NP"], np.full((1, 6), -3.0), np.full((1, 6), np.nan), np.full((1, 6), -np.inf)])
    after = {
        "logp_NP": broken,
        "length_N": np.append(before["length_N"], [0, 5, 5]),
        "own_N": np.append(before["own_N"], [0, 1, 2]),
        "group_N": np.append(before["group_N"], [0, 1, 2]),
        "multiplicity_P": before["multiplicity_P"],
    }
    found = measured(after)
    assert_same(found, measured(before), but=("n_empty", "n_nonfinite"))
    assert (found["n_traces"], found["n_empty"], found["n_nonfinite"]) == (n, 1, 2)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_contexts=st.integers(2, 12),
    group_size=st.integers(1, 5),
    definition=st.sampled_from(["paper", "ragen"]),
)
def test_total_collapse_is_exactly_chance(seed: int, n_contexts: int, group_size: int, definition: Any) -> None:
    """Every trace as likely under every prompt: no order of columns may say otherwise."""
    rng = np.random.default_rng(seed)
    own = np.repeat(np.arange(n_contexts), group_size)
    length = rng.integers(1, 50, size=own.size)
    fields = {
        "logp_NP": np.repeat(-rng.exponential(50, size=(own.size, 1)), n_contexts, axis=1),
        "length_N": length,
        "own_N": own,
    }
    values = measured(fields, definition=definition, intervals=False)
    for k in (1, 2, 4, 8):
        at = "" if k == 1 else f"@{k}"
        if k < n_contexts:
            assert values[f"retrieval_accuracy{at}"] == pytest.approx(k / n_contexts, abs=1e-12)
            assert values[f"retrieval_above_chance{at}"] == pytest.approx(0.0, abs=1e-12)
        else:
            assert f"retrieval_accuracy{at}" not in values
    assert values["retrieval_p_value"] == 1.0
    for name in ("mi_estimate", "mi_seq_estimate", "mi_saturation", "mi_zscore", "mi_zscore_seq", "mi_zscore_ema"):
        assert values[name] == pytest.approx(0.0, abs=1e-9), name


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0.0, 500.0), n_contexts=st.integers(2, 9))
def test_entropy_splits_and_bounds_hold(seed: int, spread: float, n_contexts: int) -> None:
    """H(Z) = H(Z|X) + I in every normalization and mixture; no trace can say more than log P."""
    rng = np.random.default_rng(seed)
    n = 7
    matrix = LogLikelihoodMatrix(
        logp_NP=-spread * rng.exponential(size=(n, n_contexts)),
        length_N=rng.integers(1, 30, size=n),
        own_N=rng.integers(0, n_contexts, size=n),
        multiplicity_P=rng.integers(1, 5, size=n_contexts),
    )
    for normalization in ("token", "sequence", "token_mixture"):
        for mixture in ("uniform", "multiplicity"):
            setting: Any = {"normalization": normalization, "mixture": mixture}
            given_x = information.conditional_entropy(matrix, normalization=normalization)
            total = information.reasoning_entropy(matrix, **setting)
            assert total == pytest.approx(given_x + information.mutual_information(matrix, **setting), abs=1e-9)
            assert given_x >= 0
    gap_N = information.row_values(matrix, normalization="sequence").gap_N
    assert (gap_N <= np.log(n_contexts) + 1e-9).all()
    assert information.mutual_information(matrix, normalization="sequence") <= information.mi_upper_bound(matrix) + 1e-9
    accuracies = [retrieval.retrieval_accuracy(matrix, k=k) for k in range(1, n_contexts)]
    assert all(0 <= a <= 1 for a in accuracies)
    assert accuracies == sorted(accuracies)


def test_far_apart_log_likelihoods_neither_overflow_nor_vanish() -> None:
    logp = np.array([[-1e6, -2e6], [-3e6, -1e5]])
    values = matrix_metrics(LogLikelihoodMatrix(logp_NP=logp, length_N=[1000, 1000], own_N=[0, 1]), intervals=False)
    assert values["mi_seq_estimate"] == pytest.approx(np.log(2), abs=1e-9)
    wrong = matrix_metrics(LogLikelihoodMatrix(logp_NP=logp, length_N=[1000, 1000], own_N=[1, 0]), intervals=False)
    assert wrong["mi_seq_estimate"] == pytest.approx((-1e6 - 2.9e6) / 2 + np.log(2), rel=1e-12)
