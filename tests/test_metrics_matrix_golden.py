"""Numbers that other code computed: RAGEN's own functions, and a real model's log-likelihoods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag import EmaStd, LogLikelihoodMatrix, matrix_metrics
from collapsediag.metrics.from_matrix import RAGEN
from collapsediag.metrics.registry import unknown_names

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = json.loads((GOLDEN / "ragen_parity.json").read_text())

RELATIVE = 1e-4
# RAGEN computed in float32, on inputs printed to 7 digits: a difference of means near 0.5 is good to about 1e-7, which
# is more than 1e-4 of a value that happens to be near 0. A z-score carries that over its scale of about 0.2.
ABSOLUTE = 1e-6


def merged_matrix(step: dict[str, Any]) -> LogLikelihoodMatrix:
    """Equal prompts as one column with a multiplicity, summed log-likelihoods."""
    prompts = [tuple(ids) for ids in step["prompt_ids"]]
    distinct = list(dict.fromkeys(prompts))
    mean_logp = np.array(step["mean_logp"])[:, [prompts.index(ids) for ids in distinct]]
    tokens = np.array(step["tokens"])
    return LogLikelihoodMatrix(
        logp_NP=mean_logp * tokens[:, None],
        length_N=tokens,
        own_N=np.array([distinct.index(prompts[own]) for own in step["own"]]),
        group_N=np.array(step["own"]),
        multiplicity_P=np.array([prompts.count(ids) for ids in distinct]),
    )


def asked(step: dict[str, Any]) -> dict[str, float]:
    """RAGEN's keys and values; it also logs `@k` with k clamped to the number of prompts, which says nothing."""
    n_prompts = len(step["prompt_ids"])
    return {
        name: value
        for name, value in step["expected"].items()
        if "@" not in name or int(name.split("@")[1]) < n_prompts
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['regime']}-P{case['P']}-dup{case['dup']}")
@pytest.mark.parametrize("settings", [{"definition": "ragen"}, {"naming": "ragen"}], ids=["definition", "naming"])
def test_every_key_of_ragen_over_all_steps(case: dict[str, Any], settings: dict[str, Any]) -> None:
    ema = EmaStd(decay=case["ema_decay"])
    assert case["std_eps"] == 1e-3
    for step in case["steps"]:
        found = matrix_metrics(merged_matrix(step), ema=ema, n_resamples=20, **settings)
        expected = asked(step)
        assert len(expected) >= 20
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=RELATIVE, abs=ABSOLUTE), name


def test_naming_ragen_gives_its_keys_and_no_other() -> None:
    for case in CASES:
        for step in case["steps"]:
            found = matrix_metrics(merged_matrix(step), ema=EmaStd(), naming="ragen")
            assert set(found) == set(asked(step))


def test_the_golden_steps_can_tell_the_two_definitions_apart() -> None:
    """A parity test that the paper's definition passed as well would prove nothing."""
    differing: set[str] = set()
    for case in CASES:
        for step in case["steps"]:
            found = matrix_metrics(merged_matrix(step), ema=EmaStd(), intervals=False)
            differing |= {n for n, v in asked(step).items() if found.get(n) != pytest.approx(v, rel=1e-2, abs=1e-3)}
    assert {
        "mi_estimate",
        "mi_seq_estimate",
        "mi_upper_bound",
        "marginal_std",
        "mi_zscore",
        "mi_zscore_ema",
    } <= differing
    assert {"retrieval_accuracy@2", "retrieval_chance_level", "retrieval_chance_level@2"} <= differing


def test_unlike_ragen_a_single_definition_serves_all_names() -> None:
    values = matrix_metrics(merged_matrix(CASES[1]["steps"][0]), ema=EmaStd(), definition="ragen")
    assert RAGEN.scale == "marginal"
    assert values["mi_zscore"] == values["mi_zscore_marginal"]
    assert unknown_names(values) == []


def real_matrix() -> LogLikelihoodMatrix:
    stored = json.loads((GOLDEN / "smollm2_matrix.json").read_text())
    return LogLikelihoodMatrix(
        logp_NP=np.array(stored["logp_NP"]),
        length_N=np.array([len(ids) for ids in stored["traces"]]),
        own_N=np.array(stored["own"]),
    )


def test_real_traces_are_retrieved_and_shuffled_owners_are_not() -> None:
    matrix = real_matrix()
    values = matrix_metrics(matrix)
    assert values["retrieval_accuracy"] > 0.9
    assert values["retrieval_p_value"] == 1 / 1000
    assert values["mi_seq_estimate"] > 1.5
    shuffled = []
    for seed in range(20):
        own = np.random.default_rng(seed).permutation(matrix.own_N)
        wrong = LogLikelihoodMatrix(logp_NP=matrix.logp_NP, length_N=matrix.length_N, own_N=own)
        shuffled.append(matrix_metrics(wrong, intervals=False))
    # 640 shuffled owners: chance 1/8 with a standard error of 0.013.
    assert np.mean([s["retrieval_accuracy"] for s in shuffled]) == pytest.approx(1 / 8, abs=0.05)
    assert max(s["mi_seq_estimate"] for s in shuffled) < -5.0
    assert min(s["retrieval_p_value"] for s in shuffled) > 0.01
