"""The filter preview against the published rules, written once more from their text, on 10,000 random batches."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import MetricError, SettingsError
from collapsediag.metrics.snr_filter import snr_filter_preview

RHOS = ("0.1", "0.25", "0.5", "0.9", "0.99", "1")


def exact_variance(rewards: list[int]) -> Fraction:
    n = len(rewards)
    return Fraction(n * sum(r * r for r in rewards) - sum(rewards) ** 2, n * (n - 1)) if n > 1 else Fraction(0)


def published_rule(rewards: list[list[int]], rho: str) -> list[int]:
    """Rank by within-prompt variance, keep the smallest set that holds a share rho of all of it. Exact fractions."""
    variance = [exact_variance(group) for group in rewards]
    total = sum(variance)
    if total == 0:
        return []
    kept: list[int] = []
    mass = Fraction(0)
    for prompt in sorted(range(len(rewards)), key=lambda p: (-variance[p], p)):
        if mass / total >= Fraction(rho):
            break
        kept.append(prompt)
        mass += variance[prompt]
    return sorted(kept)


def rule_of_the_code(rewards: list[list[int]], rho: str, eps: float) -> list[int]:
    """RAGEN's top_p with linear scores, `largest`, include_zero=False, as its loop goes."""
    score = [math.sqrt(exact_variance(group)) for group in rewards]
    left = [p for p, s in enumerate(score) if abs(s) > 1e-10]
    if float(rho) >= 1.0:
        return left
    threshold = float(rho) * sum(score[p] for p in left) - eps
    cumulative, selected = 0.0, []
    for p in sorted(left, key=lambda p: (-score[p], p)):
        if cumulative >= threshold:
            break
        cumulative += score[p]
        selected.append(p)
    return sorted(selected)


def random_rewards(rng: np.random.Generator) -> list[list[int]]:
    prompts, size = int(rng.integers(1, 13)), int(rng.integers(1, 9))
    kind = rng.integers(4)
    if kind == 0:  # success or failure, many ties
        return [[int(r) for r in rng.random(size) < p] for p in rng.random(prompts)]
    if kind == 1:  # nothing to learn from
        return [[int(rng.integers(3))] * size for _ in range(prompts)]
    if kind == 2:  # the same prompt again and again: all variances tie
        return [[int(r) for r in rng.integers(0, 3, size)]] * prompts
    return [[int(r) for r in rng.integers(0, 50, size)] for _ in range(prompts)]


def test_both_forms_keep_what_the_rules_keep_on_ten_thousand_batches() -> None:
    rng = np.random.default_rng(20260407)
    seen = {"one prompt": 0, "all zero": 0, "ties": 0, "rho 1": 0, "nothing kept": 0}
    for _ in range(10_000):
        rewards = random_rewards(rng)
        rho = str(rng.choice(RHOS))
        mass = snr_filter_preview(np.array(rewards), float(rho))
        code = snr_filter_preview(rewards, float(rho), form="std")
        expected = published_rule(rewards, rho)
        assert mass.kept.tolist() == expected, (rewards, rho)
        assert code.kept.tolist() == rule_of_the_code(rewards, rho, 0.01), (rewards, rho)
        assert mass.keep_fraction == len(expected) / len(rewards)
        variances = [exact_variance(group) for group in rewards]
        seen["one prompt"] += len(rewards) == 1
        seen["all zero"] += not any(variances)
        seen["ties"] += len(set(variances)) < len(variances)
        seen["rho 1"] += rho == "1"
        seen["nothing kept"] += not expected
    assert min(seen.values()) > 300, seen


def test_no_smaller_set_holds_the_share() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        rewards = [[int(r) for r in rng.integers(0, 4, 4)] for _ in range(5)]
        variance = [exact_variance(group) for group in rewards]
        if not any(variance):
            continue
        kept = snr_filter_preview(rewards, 0.75).kept.tolist()
        needed = Fraction(3, 4) * sum(variance)
        assert sum(variance[p] for p in kept) >= needed
        for smaller in itertools.combinations(range(5), len(kept) - 1):
            assert sum(variance[p] for p in smaller) < needed


def test_ten_equal_prompts_keep_nine_at_nine_tenths() -> None:
    # 0.9 of ten equal shares is met by nine; in floats the ninth sum is just below.
    assert snr_filter_preview([[0.1, 0.7]] * 10, 0.9).kept.tolist() == list(range(9))


def test_rho_one_keeps_every_prompt_with_variance_and_no_other() -> None:
    rewards = [[0.0, 1e-4], [1.0, 1.0], [0.0, 100.0], [0.3, 0.3]]
    assert snr_filter_preview(rewards, 1.0).kept.tolist() == [0, 2]
    assert snr_filter_preview(rewards, 1.0, form="std").kept.tolist() == [0, 2]


def test_equal_rewards_have_no_variance_whatever_their_rounding() -> None:
    assert snr_filter_preview([[0.1] * 7, [1e12 + 0.1] * 3], 0.9).kept.size == 0
    assert snr_filter_preview([[0.1] * 7], 1.0, form="std").kept.size == 0


def test_the_epsilon_of_the_code_can_reject_a_nearly_flat_batch() -> None:
    flat = [[0.0, 0.002], [0.0, 0.003]]
    assert snr_filter_preview(flat, 0.9, form="std").kept.size == 0
    assert snr_filter_preview(flat, 0.9, form="std", selection_eps=0.0).kept.tolist() == [0, 1]
    assert snr_filter_preview(flat, 0.5).kept.tolist() == [1]


def test_a_sum_that_meets_the_threshold_exactly_is_enough() -> None:
    assert snr_filter_preview([[0, 1], [0, 1]], 0.5, form="std", selection_eps=0.0).kept.tolist() == [0]
    assert snr_filter_preview([[0, 1], [0, 1]], 0.5).kept.tolist() == [0]


def test_prompts_of_unequal_size_and_unscored_rollouts() -> None:
    preview = snr_filter_preview([[1.0], [1.0, None, 0.0], [None, None], [1.0, 1.0, 0.0, 0.0]], 1.0)
    assert preview.kept.tolist() == [1, 3]
    np.testing.assert_allclose(preview.score_P, [0.0, 0.5, 0.0, 1 / 3])
    empty = snr_filter_preview([], 0.9)
    assert (empty.kept.tolist(), empty.keep_fraction) == ([], 0.0)


@pytest.mark.parametrize("form", ["mass", "std"])
def test_a_preview_changes_nothing(form: Any) -> None:
    array = np.random.default_rng(0).random((6, 4))
    before = array.copy()
    array.flags.writeable = False
    lists = before.tolist()
    preview = snr_filter_preview(array, 0.5, form)
    again = snr_filter_preview(lists, 0.5, form)
    np.testing.assert_array_equal(array, before)
    assert lists == copy.deepcopy(before.tolist())
    np.testing.assert_array_equal(preview.kept, again.kept)
    assert not np.shares_memory(preview.score_P, array)


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.1, math.nan])
def test_a_share_outside_its_range_is_refused(rho: float) -> None:
    with pytest.raises(SettingsError, match="rho is"):
        snr_filter_preview([[0.0, 1.0]], rho)


def test_unknown_forms_and_bad_rewards_are_refused() -> None:
    with pytest.raises(SettingsError, match="form is 'variance'"):
        snr_filter_preview([[0.0, 1.0]], 0.9, "variance")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="boolean"):
        snr_filter_preview([[True, False]])
