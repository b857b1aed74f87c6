"""Every metric that the library promises is registered, whole, and no logged name is unknown."""

from __future__ import annotations

import pytest

import collapsediag as cd
from collapsediag.errors import MetricError
from collapsediag.metrics.registry import canonical_name, find, register, registered, unknown_names
from collapsediag.testing import planted

NAMES = """
format/valid_fraction format/no_think_fraction format/unclosed_think_fraction format/empty_think_fraction
length/mean length/std length/min length/p10 length/p50 length/p90 length/max length/within_group_std
length/truncated_fraction length_words/mean
reward/mean reward/std reward/within_group_std reward/between_group_std reward/all_equal_fraction
reward/all_success_fraction reward/all_fail_fraction reward/expected_all_equal_fraction reward/variance_spread
reward/filter_kept_prompts reward/filter_keep_fraction reward/modal_share pass@1 pass@64
diversity/distinct_answers_per_group diversity/distinct_tool_sequences_per_group
diversity/identical_completion_fraction diversity/distinct_2
tools/call_rate tools/calls_per_rollout tools/error_rate tools/malformed_rate tools/duplicate_call_fraction
tools/result_use_rate tools/reward_with_call tools/reward_without_call
entropy/token_mean entropy/sampled_mean entropy/token_p50 entropy/token_p80 entropy/token_p95 entropy/forking_mean
entropy/rest_mean entropy/covariance entropy/covariance_policy entropy/predicted_delta
retrieval_accuracy retrieval_accuracy@4 retrieval_chance_level retrieval_chance_level@8 retrieval_above_chance
retrieval_above_chance@2 retrieval_p_value mi_estimate mi_seq_estimate mi_upper_bound mi_saturation
conditional_entropy_est conditional_entropy_seq_est reasoning_entropy_est reasoning_entropy_seq_est
matched_log_prob_mean marginal_log_prob_mean gap_std gap_std_seq gap_std_ema gap_std_ema_seq mi_zscore_ema
mi_zscore_ema_seq mi_zscore mi_zscore_seq marginal_std marginal_std_ema mi_zscore_marginal mi_zscore_marginal_ema
n_traces n_contexts n_empty n_nonfinite
"""
PROMISED = NAMES.split()


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_metric_is_registered(name: str) -> None:
    assert find(name) is not None


@pytest.mark.parametrize("name", sorted(registered()))
def test_its_entry_is_whole(name: str) -> None:
    info = registered()[name]
    for text in (info.title, info.unit, info.description, info.source, info.family):
        assert text.strip(), name
    low, high = info.bounds
    assert low is None or high is None or low < high


def test_no_number_leaves_without_a_name() -> None:
    truth = planted("healthy")
    monitor = cd.Monitor(truth.scorer(), every=1, reasoning="completion", on_error="raise")
    record = monitor.observe(truth.batch.step, truth.batch)
    assert len(record.values) > 60
    assert unknown_names(record.values) == []
    for name, value in record.values.items():
        info = find(name)
        assert info is not None
        low, high = info.bounds
        assert low is None or value >= low - 1e-9, name
        assert high is None or value <= high + 1e-9, name


def test_foreign_names_are_unknown() -> None:
    assert unknown_names(["actor/entropy", "mi_estimate", "collapse/nonsense"]) == [
        "actor/entropy",
        "collapse/nonsense",
    ]


def test_one_name_has_one_meaning() -> None:
    info = registered()["mi_estimate"]
    register(info)
    with pytest.raises(MetricError, match="registered twice"):
        register(cd.MetricInfo(**{**vars(info), "unit": "bits"}))


def test_prefixes_and_suffixes_are_not_part_of_the_name() -> None:
    assert canonical_name("env/maze/pass@8/ci_low") == "pass@k"
