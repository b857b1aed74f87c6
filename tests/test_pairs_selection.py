"""Which rows and columns stay when not all can be scored: limits, evenness, and a brute-force oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapsediag.pair_selection import Selection, fitting_lengths, select_rows

LIMIT = st.one_of(st.none(), st.integers(1, 60))


def choose(
    strata: list[int],
    columns: list[int],
    seed: int = 0,
    max_columns: int | None = None,
    max_rows: int | None = None,
    max_cells: int | None = None,
) -> Selection:
    return select_rows(
        np.array(strata, dtype=np.int64),
        np.array(columns, dtype=np.int64),
        max_columns=max_columns,
        max_rows=max_rows,
        max_cells=max_cells,
        rng=np.random.default_rng(seed),
    )


# --- lengths ------------------------------------------------------------------------------------------------------


def kept_at(cut: int, context: list[int], trace: list[int], limit: int) -> list[int]:
    return [i for i, (x, z) in enumerate(zip(context, trace, strict=True)) if x <= cut and z <= limit - cut]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 20),
)
@settings(max_examples=300, deadline=None)
def test_lengths_agree_with_trying_every_cut(lengths: list[int], rows: list[tuple[int, int]], limit: int) -> None:
    column = [c % len(lengths) for c, _ in rows]
    context, trace = [lengths[c] for c in column], [z for _, z in rows]
    longest_context, longest_trace = fitting_lengths(np.array(context), np.array(trace), np.array(column), limit)
    assert longest_context + longest_trace == limit
    kept = kept_at(longest_context, context, trace, limit)

    def worth(cut: int) -> tuple[int, int]:
        rows_kept = kept_at(cut, context, trace, limit)
        return min(2, len({column[i] for i in rows_kept})), len(rows_kept)

    assert (min(2, len({column[i] for i in kept})), len(kept)) == max(worth(cut) for cut in range(limit + 1))


def test_one_long_context_or_one_long_trace_does_not_cost_the_rest() -> None:
    context, column = np.array([10, 10, 20, 20, 900]), np.array([0, 0, 1, 1, 2])
    assert fitting_lengths(context, np.array([50, 60, 50, 60, 50]), column, 1000) == (900, 100)
    assert fitting_lengths(context, np.array([50, 60, 50, 980, 90]), column, 980) == (20, 960)
    # The rows of the longest context that is kept count as well.
    assert fitting_lengths(np.array([10, 10, 50]), np.array([90, 90, 5]), np.array([0, 1, 2]), 100) == (10, 90)
    # A column that is kept is worth more than rows: without two, nothing can be measured.
    context, column = np.array([10, 10, 10, 50]), np.array([0, 0, 0, 1])
    assert fitting_lengths(context, np.array([90, 90, 5, 5]), column, 100) == (50, 50)


# --- rows and columns ---------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=40), LIMIT, LIMIT, LIMIT, st.integers(0, 2**32)
)
@settings(max_examples=300, deadline=None)
def test_limits_hold_and_the_choice_is_sound(
    rows: list[tuple[int, int]], max_columns: int | None, max_rows: int | None, max_cells: int | None, seed: int
) -> None:
    strata, columns = [s for s, _ in rows], [c for _, c in rows]
    chosen = choose(strata, columns, seed, max_columns, max_rows, max_cells)
    assert np.all(np.diff(chosen.rows) > 0)
    assert np.all(np.diff(chosen.columns) > 0)
    assert {columns[i] for i in chosen.rows} <= set(chosen.columns.tolist()) <= set(columns)
    n, p = chosen.rows.size, chosen.columns.size
    assert max_columns is None or p <= max_columns
    assert max_rows is None or n <= max_rows
    assert max_cells is None or n * p <= max_cells
    assert (n > 0) == (len(rows) > 0)
    # Two columns wherever two can be had.
    can_have_two = len(set(columns)) > 1 and max_columns != 1 and max_cells != 1
    assert (p >= 2) == can_have_two
    if max_columns is None and max_rows is None and max_cells is None:
        assert n == len(rows)
        assert p == len(set(columns))
    again = choose(strata, columns, seed, max_columns, max_rows, max_cells)
    np.testing.assert_array_equal(chosen.rows, again.rows)
    np.testing.assert_array_equal(chosen.columns, again.columns)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(1, 40), st.integers(0, 2**32))
def test_groups_give_as_evenly_as_they_can(sizes: list[int], max_rows: int, seed: int) -> None:
    strata = [g for g, size in enumerate(sizes) for _ in range(size)]
    chosen = choose(strata, strata, seed, max_rows=max_rows)
    assert chosen.rows.size == max(1, min(max_rows, len(strata)))
    given_ = np.bincount([strata[i] for i in chosen.rows], minlength=len(sizes))
    for g, size in enumerate(sizes):
        if given_[g] < size and given_[g] > 0:  # it could have given more, so nobody gave two more than it
            assert given_.max() <= given_[g] + 1


@given(st.integers(2, 12), st.integers(1, 6), st.integers(4, 300), st.integers(0, 2**32))
def test_rows_are_given_up_before_columns(groups: int, size: int, max_cells: int, seed: int) -> None:
    strata = [g for g in range(groups) for _ in range(size)]
    chosen = choose(strata, strata, seed, max_cells=max_cells)
    p = min(groups, int(np.sqrt(max_cells)))
    assert chosen.columns.size == p
    assert chosen.rows.size == min(p * size, max_cells // p)
    # Every column that stayed has a trace of its own.
    assert {strata[i] for i in chosen.rows} == set(chosen.columns.tolist())


def test_two_columns_are_kept_even_for_a_single_row() -> None:
    chosen = choose([0, 0, 1], [0, 0, 1], max_rows=1)
    assert (chosen.rows.size, chosen.columns.size) == (1, 2)
    chosen = choose([0, 0, 1], [0, 0, 1], max_cells=3)
    assert (chosen.rows.size, chosen.columns.size) == (1, 2)
    chosen = choose([0, 0, 1], [0, 0, 1], max_cells=1)
    assert (chosen.rows.size, chosen.columns.size) == (1, 1)


def test_a_group_with_many_contexts_does_not_crowd_out_the_others() -> None:
    strata = [0] * 20 + [1, 1, 2, 2, 3, 3]
    columns = [*range(20), 20, 20, 21, 21, 22, 22]
    for seed in range(20):
        chosen = choose(strata, columns, seed, max_columns=4)
        assert sorted({strata[i] for i in chosen.rows}) == [0, 1, 2, 3]


def test_groups_that_share_a_context_all_stay_with_it() -> None:
    chosen = choose([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], max_columns=2)
    assert chosen.rows.size == 6
    # With two rows left, each column keeps one of its own.
    for seed in range(20):
        rows = choose([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], seed, max_rows=2).rows
        assert sorted(int(r) // 4 for r in rows) == [0, 1]


@pytest.mark.parametrize("own_stratum", [False, True])
def test_every_row_is_as_likely_as_another(own_stratum: bool) -> None:
    # 4 groups of 3; 6 rows are kept in each of 2,000 draws: each row should stay in half of them.
    strata = list(range(12)) if own_stratum else [g for g in range(4) for _ in range(3)]
    columns = [g for g in range(4) for _ in range(3)]
    draws = 2_000
    kept = np.zeros(12)
    for seed in range(draws):
        kept[choose(strata, columns, seed, max_rows=6).rows] += 1
    # 5 standard deviations of a binomial count; fixed seeds, so this either always holds or never.
    assert np.abs(kept - draws / 2).max() < 5 * np.sqrt(draws) / 2
