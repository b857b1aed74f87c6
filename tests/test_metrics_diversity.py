"""Surface diversity against pairwise loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from collapsediag.metrics.answers import final_answer, normalize_answer
from collapsediag.metrics.diversity import (
    distinct_bigrams,
    distinct_per_group,
    identical_across_fraction,
    identical_fraction,
    mean_of_known,
)

DATA = Path(__file__).parent / "data" / "rollouts"


@pytest.mark.parametrize("seed", range(20))
def test_identical_completions_by_comparing_every_pair(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 25))
    completions = [str(c) for c in rng.integers(0, 6, n)]
    group = rng.integers(0, 5, n)
    prompts = [f"prompt {g // 2}" for g in group]  # two groups share a prompt
    within = [
        any(i != j and completions[i] == completions[j] and group[i] == group[j] for j in range(n)) for i in range(n)
    ]
    across = [any(completions[i] == completions[j] and prompts[i] != prompts[j] for j in range(n)) for i in range(n)]
    plural = [i for i in range(n) if sum(group == group[i]) > 1]
    assert identical_fraction(completions, group) == (sum(within) / len(plural) if plural else None)
    assert identical_across_fraction(completions, prompts) == sum(across) / n


@pytest.mark.parametrize("seed", range(20))
def test_distinct_labels_and_bigrams_by_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = [None if x == 0 else f"answer {x}" for x in rng.integers(0, 4, 12)]
    group = np.sort(rng.integers(0, 4, 12))
    found = distinct_per_group(labels, group)
    for g in range(int(group.max()) + 1):
        distinct: list[str] = []
        n_labels = 0
        for label, own in zip(labels, group, strict=True):
            if own == g and label is not None:
                n_labels += 1
                distinct += [label] if label not in distinct else []
        np.testing.assert_equal(found[g], len(distinct) if n_labels > 1 else np.nan)

    sequences = [rng.integers(0, 5, int(rng.integers(0, 9))) for _ in range(4)]
    pairs = [(s[i], s[i + 1]) for s in sequences for i in range(len(s) - 1)]
    assert distinct_bigrams(sequences) == (len(set(pairs)), len(pairs))
    words = [[f"word{t}" for t in s] for s in sequences]
    assert distinct_bigrams(words) == (len(set(pairs)), len(pairs))


def test_token_bigrams_of_large_ids_do_not_run_into_each_other() -> None:
    top = 2**31 - 1
    ids = [np.array([0, top, 0, 1]), np.array([top, 0, top, 1])]
    assert distinct_bigrams(ids) == (4, 6)  # (0, top) and (top, 0) twice, (0, 1) and (top, 1) once


def test_means_skip_what_is_not_known() -> None:
    assert mean_of_known(np.array([1.0, np.nan, 3.0])) == 2.0
    assert mean_of_known(np.array([np.nan])) is None
    assert mean_of_known([]) is None


def test_distinct_answers_of_a_healthy_saturated_math_batch() -> None:
    rows = [json.loads(line) for line in (DATA / "simplerl_math_100x8_endings.jsonl").read_text().splitlines()]
    answers = [normalize_answer(final_answer(ending) or "") for row in rows for ending in row["ending"]]
    mean = mean_of_known(distinct_per_group(answers, np.repeat(np.arange(100), 8)))
    assert mean is not None
    assert round(mean, 2) == 1.32
