"""Lengths and truncation against loops, and the cases in which nobody can tell."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from collapsediag.errors import MetricError
from collapsediag.metrics.length import length_metrics, truncated, truncation_metrics

NAN = math.nan


@pytest.mark.parametrize("seed", range(15))
def test_every_number_equals_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 20))
    turns = rng.integers(1, 4, n)
    rollout_T = np.repeat(np.arange(n), turns)
    length = rng.integers(0, 50, rollout_T.size).astype(float)
    group = rng.integers(0, 4, n)
    group[:2] = 0
    _, group = np.unique(group, return_inverse=True)
    values = length_metrics(length, rollout_T, group)
    ordered = sorted(length.tolist())

    def quantile(q: float) -> float:
        at = q * (len(ordered) - 1)
        low = math.floor(at)
        return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    totals = [sum(length[rollout_T == row].tolist()) for row in range(n)]
    by_group = [[totals[row] for row in range(n) if group[row] == g] for g in range(int(group.max()) + 1)]
    expected = {
        "length/mean": statistics.fmean(ordered),
        "length/std": statistics.pstdev(ordered),
        "length/min": ordered[0],
        "length/max": ordered[-1],
        "length/p10": quantile(0.1),
        "length/p50": statistics.median(ordered),
        "length/p90": quantile(0.9),
        "length/within_group_std": statistics.fmean(statistics.stdev(g) for g in by_group if len(g) > 1),
    }
    assert set(values) == set(expected)
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, abs=1e-9), name


def test_words_have_their_own_name_and_single_groups_no_spread() -> None:
    values = length_metrics(np.array([3.0, 5.0]), np.array([0, 1]), np.array([0, 1]), prefix="length_words")
    assert values["length_words/mean"] == 4.0
    assert "length_words/within_group_std" not in values
    assert not any(name.startswith("length/") for name in values)
    assert length_metrics(np.array([]), np.array([], dtype=np.int64), np.array([], dtype=np.int64)) == {}


EOS = 2


@pytest.mark.parametrize(
    ("reason", "n_tokens", "last", "limit", "expected"),
    [
        ("length", 5.0, EOS, None, 1.0),  # the reason decides, whatever the tokens say
        ("LENGTH", NAN, -1, 8, 1.0),
        ("max_tokens", 3.0, 7, 8, 1.0),
        ("stop", 8.0, 7, 8, 0.0),
        ("tool_calls", 8.0, 7, 8, 0.0),
        (None, 8.0, 7, 8, 1.0),
        (None, 9.0, 7, 8, 1.0),
        (None, 8.0, EOS, 8, 0.0),  # it ended by itself on the very last token
        (None, 7.0, 7, 8, 0.0),  # stopped early, for example by a stop string
        (None, NAN, -1, 8, NAN),
        (None, 8.0, 7, None, NAN),  # no limit known: a missing end token proves nothing
        (None, 8.0, EOS, None, NAN),
    ],
)
def test_truncation_of_one_turn(
    reason: str | None, n_tokens: float, last: int, limit: int | None, expected: float
) -> None:
    found = truncated([reason], np.array([n_tokens]), np.array([last]), max_output_tokens=limit, eos_token_ids=[EOS])
    np.testing.assert_array_equal(found, [expected])


def test_the_longest_row_of_a_batch_is_not_truncated_for_being_the_longest() -> None:
    lengths, last = np.array([20.0, 20.0, 11.0]), np.array([7, 7, 7])
    assert np.isnan(truncated([None] * 3, lengths, last)).all()
    np.testing.assert_array_equal(truncated([None] * 3, lengths, last, max_output_tokens=64), np.zeros(3))


def test_unknown_turns_are_counted_and_left_out_of_the_share() -> None:
    assert truncation_metrics(np.array([1.0, NAN, 0.0, 0.0])) == {
        "length/n_truncation_unknown": 1.0,
        "length/truncated_fraction": 1 / 3,
    }
    assert truncation_metrics(np.array([NAN])) == {"length/n_truncation_unknown": 1.0}


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(MetricError, match="max_output_tokens is 0"):
        truncated([None], np.array([1.0]), np.array([1]), max_output_tokens=0)


@pytest.mark.parametrize("reason", [1, {"type": "length"}, b"stop"], ids=repr)
def test_a_finish_reason_that_is_no_text_is_refused_by_its_turn(reason: object) -> None:
    with pytest.raises(MetricError, match=r"the finish reason of turn 1 is .*; give text such as 'stop' or 'length'"):
        truncated([None, reason], np.array([3.0, 3.0]), np.array([1, 1]))  # type: ignore[list-item]
