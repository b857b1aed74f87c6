"""Where a matrix says nothing, and how that is said; the moving averages; the names; the public fakes."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from collapsediag import EmaStd, LogLikelihoodMatrix, Record, ScoringPairs, matrix_metrics
from collapsediag.errors import MetricError, ScoringError, SettingsError
from collapsediag.metrics import information, retrieval
from collapsediag.metrics.registry import find, unknown_names
from collapsediag.scoring.protocol import Scorer
from collapsediag.testing import EnumerablePolicy, TableScorer, planted, random_policy


def matrix_of(logp: object, length: object, own: object, **fields: object) -> LogLikelihoodMatrix:
    return LogLikelihoodMatrix(logp_NP=logp, length_N=length, own_N=own, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (matrix_of([[-1.0], [-2.0]], [3, 3], [0, 0]), "at least 2 distinct ones, found 1"),
        (matrix_of(np.zeros((0, 3)), np.zeros(0, int), np.zeros(0, int)), "no rows"),
        (matrix_of([[-1.0, -2.0]], [0], [0]), "no usable row among 1: 1 empty traces, 0 with a non-finite"),
        (matrix_of([[-1.0, math.nan]] * 2, [2, 2], [0, 0]), "column 1 is non-finite in every one"),
        (matrix_of([[math.nan, math.nan]] * 2, [2, 0], [0, 0]), "1 empty traces, 1 with a non-finite"),
    ],
)
def test_nothing_is_invented_where_no_metric_is_defined(matrix: LogLikelihoodMatrix, message: str) -> None:
    ema = EmaStd()
    with pytest.raises(MetricError, match=message):
        matrix_metrics(matrix, ema=ema)
    assert dict(ema.values) == {}
    for function in (retrieval.retrieval_accuracy, information.mutual_information, retrieval.retrieval_p_value):
        with pytest.raises(MetricError, match=message):
            function(matrix)


@pytest.mark.parametrize("k", [0, -1, 3, 4])
def test_k_outside_the_contexts_is_refused_one_by_one_and_left_out_together(k: int) -> None:
    logp = np.zeros((2, 3)) - 1.0
    for function in (retrieval.retrieval_accuracy, retrieval.retrieval_chance_level, retrieval.retrieval_above_chance):
        with pytest.raises(MetricError, match=f"k is {k} but there are 3 contexts"):
            function(logp, [0, 1], k=k)
    values = matrix_metrics(matrix_of(logp, [1, 1], [0, 1]), intervals=False)
    assert {name for name in values if "@" in name} == {
        "retrieval_accuracy@2",
        "retrieval_chance_level@2",
        "retrieval_above_chance@2",
    }


def test_settings_that_do_not_exist() -> None:
    matrix = planted("healthy").matrix
    with pytest.raises(SettingsError, match="definition is 'Paper'"):
        matrix_metrics(matrix, definition="Paper")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="naming is 'wandb'"):
        matrix_metrics(matrix, naming="wandb")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="normalization is 'tokens'"):
        information.mutual_information(matrix, normalization="tokens")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="mixture is 'flat'"):
        information.mutual_information(matrix, mixture="flat")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="scale is 'std'"):
        information.mi_zscore(matrix, scale="std")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="confidence"):
        matrix_metrics(matrix, confidence=95)


def test_plain_arrays_need_what_they_need() -> None:
    with pytest.raises(MetricError, match="own_N"):
        retrieval.retrieval_accuracy(np.zeros((2, 2)))
    with pytest.raises(MetricError, match="length_N"):
        information.mutual_information(np.zeros((2, 2)), [0, 1])
    with pytest.raises(MetricError, match="already holds"):
        retrieval.retrieval_accuracy(planted("healthy").matrix, [0])


def test_a_zscore_without_a_scale_is_not_five_hundred() -> None:
    """Two equal gaps have no spread. The formula would give mean/eps; a record then says that it was not measured."""
    matrix = matrix_of([[-1.0, -9.0], [-9.0, -1.0]], [2, 2], [0, 1])
    values = matrix_metrics(matrix, ema=EmaStd())
    assert values["gap_std"] == pytest.approx(0.0, abs=1e-12)
    for name in ("mi_zscore", "mi_zscore_seq", "mi_zscore_ema", "mi_zscore_ema/ci_low", "mi_zscore_ema/ci_high"):
        assert math.isnan(values[name]), name
    record = Record(step=1, values=values)
    assert "mi_zscore_ema" in record.not_measured
    assert "mi_estimate" in record.values
    assert math.isnan(information.mi_zscore(matrix))
    # RAGEN's own number is what a RAGEN dashboard expects, whatever it means.
    ragen = matrix_metrics(matrix, naming="ragen")
    assert ragen["mi_zscore"] == pytest.approx(ragen["mi_estimate"] / (ragen["marginal_std"] + 1e-3))


def test_without_memory_there_is_no_moving_average() -> None:
    matrix = planted("healthy").matrix
    bare, with_memory = matrix_metrics(matrix), matrix_metrics(matrix, ema=EmaStd())
    assert not [name for name in bare if "_ema" in name]
    extra = set(with_memory) - set(bare)
    assert extra == {name for name in with_memory if "_ema" in name}
    assert len(extra) == 10
    for name in ("gap_std", "marginal_std", "mi_zscore", "mi_zscore_marginal"):
        for seq in ("", "_seq"):
            assert with_memory[f"{name}_ema{seq}"] == bare[f"{name}{seq}"]


def test_one_call_takes_the_memory_forward_by_one_step() -> None:
    first, second = planted("healthy", seed=1).matrix, planted("healthy", seed=2).matrix
    ema = EmaStd(decay=0.5)
    before = matrix_metrics(first, ema=ema)
    after = matrix_metrics(second, ema=ema)
    names = {"gap_std", "gap_std_seq", "marginal_std", "marginal_std_seq"}
    assert set(ema.values) == names
    for name in names:
        logged = name.replace("_std", "_std_ema")
        assert after[logged] == pytest.approx(0.5 * before[name] + 0.5 * after[name], rel=1e-12)
        assert ema.values[name] == after[logged]
    resumed = EmaStd(decay=0.5)
    resumed.load_state_dict(ema.state_dict())
    third = planted("template", seed=3).matrix
    assert matrix_metrics(third, ema=resumed) == matrix_metrics(third, ema=ema)


def test_one_group_has_no_interval() -> None:
    matrix = matrix_of(-1.0 - np.random.default_rng(0).random((5, 3)), [4] * 5, [0, 1, 2, 0, 1], group_N=[7] * 5)
    values = matrix_metrics(matrix)
    assert math.isnan(values["mi_estimate/ci_low"])
    assert math.isfinite(values["mi_estimate"])


def test_same_seed_same_values_and_no_global_random_state() -> None:
    matrix = random_policy(n_contexts=10, dependence=0.1, sharpness=1.0).matrix(
        *random_policy(n_contexts=10, dependence=0.1, sharpness=1.0).sample(4, seed=1)
    )
    state = np.random.get_state()
    first, again, other = (matrix_metrics(matrix, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(state[1], np.random.get_state()[1])
    assert first == again
    assert first["mi_estimate/ci_low"] != other["mi_estimate/ci_low"]
    assert first["retrieval_p_value"] != other["retrieval_p_value"]


def test_every_name_is_explained() -> None:
    values = matrix_metrics(planted("healthy", n_contexts=16).matrix, ema=EmaStd())
    assert unknown_names(values) == []
    assert {n.split("@")[1] for n in values if n.startswith("retrieval_accuracy@")} == {"2", "4", "8"}
    intervals = {n.removesuffix("/ci_low") for n in values if n.endswith("/ci_low")}
    assert intervals == {
        "retrieval_accuracy",
        "mi_estimate",
        "mi_seq_estimate",
        "conditional_entropy_est",
        "mi_zscore_ema",
    }
    bad = {name: find(name).bad for name in values}  # type: ignore[union-attr]
    assert bad["mi_estimate"] == bad["retrieval_accuracy@4"] == bad["conditional_entropy_seq_est"] == "down"
    assert bad["retrieval_p_value"] == bad["n_nonfinite"] == "up"
    for name, value in values.items():
        low, high = find(name).bounds  # type: ignore[union-attr]
        assert (low is None or value >= low) and (high is None or value <= high + 1e-9), name  # noqa: PT018
    units = {name: find(name).unit for name in values}  # type: ignore[union-attr]
    assert (units["mi_estimate"], units["mi_seq_estimate"]) == ("nats/token", "nats/trace")


def test_a_large_matrix_takes_less_than_a_second() -> None:
    rng = np.random.default_rng(0)
    own = np.repeat(np.arange(128), 8)
    matrix = matrix_of(-50 + rng.normal(size=(1024, 128)) + np.eye(128)[own], np.full(1024, 40), own)
    begun = time.process_time()
    matrix_metrics(matrix, ema=EmaStd())
    assert time.process_time() - begun < 1.0


# -- the public fakes --------------------------------------------------------------------------------------------------


def test_a_table_scorer_scores_planted_rollouts_as_the_policy_does() -> None:
    step = planted("healthy", n_contexts=4, group_size=3, length=3)
    scorer = step.scorer()
    assert isinstance(scorer, Scorer)
    matrix = scorer.score(step.pairs())
    np.testing.assert_allclose(matrix.logp_NP, step.matrix.logp_NP, atol=1e-12)
    for i, j in ((0, 0), (5, 2), (11, 3)):
        tokens = [int(v) - 8 for v in step.pairs().traces[i]]
        assert matrix.logp_NP[i, j] == pytest.approx(step.policy.log_prob(j, tokens))
    np.testing.assert_array_equal(matrix.own_N, step.matrix.own_N)
    assert (scorer.n_calls, scorer.n_lookups) == (1, 48)


def test_tags_and_answers_of_planted_rollouts_say_nothing_of_the_prompt() -> None:
    """With the whole completion as the trace, each row moves by log 1/2 for the answer and the information stays."""
    step = planted("healthy", n_contexts=4, group_size=3, length=3)
    pairs = step.pairs()
    whole = ScoringPairs(
        contexts=pairs.contexts,
        traces=tuple(r.turns[0].output_ids for r in step.batch.rollouts),  # type: ignore[misc]
        own_N=pairs.own_N,
        group_N=pairs.group_N,
        multiplicity_P=pairs.multiplicity_P,
        rollout_N=pairs.rollout_N,
        turn_N=pairs.turn_N,
    )
    np.testing.assert_allclose(step.scorer().score(whole).logp_NP, step.matrix.logp_NP + math.log(0.5), atol=1e-12)


def test_a_table_scorer_says_what_it_lacks() -> None:
    step = planted("healthy", n_contexts=2, group_size=1, length=3)
    contexts = [tuple(int(v) for v in c) for c in step.pairs().contexts]
    traces = [tuple(int(v) for v in z) for z in step.pairs().traces]
    table = {(c, z): -1.0 for c in contexts for z in traces}
    assert TableScorer(table).score(step.pairs()).logp_NP.tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    del table[contexts[1], traces[0]]
    with pytest.raises(ScoringError, match="no entry for context"):
        TableScorer(table).score(step.pairs())


def test_planted_text_and_ids_agree() -> None:
    step = planted("template", n_contexts=3, group_size=2, length=4)
    for rollout in step.batch.rollouts:
        turn = rollout.turns[0]
        assert turn.output_ids is not None
        assert turn.context_ids is not None
        assert step.decode(turn.output_ids) == f"{turn.output} <eos>"
        assert step.decode(turn.context_ids) == f"<bos> {turn.context}"
    assert step.batch.groups().keys() == {"prompt0", "prompt1", "prompt2"}
    assert planted("template", seed=5).batch.rollouts[3].reward == planted("template", seed=5).batch.rollouts[3].reward


def test_policies_that_are_none_are_refused() -> None:
    with pytest.raises(SettingsError, match="regime"):
        planted("fine")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="sum to 1"):
        EnumerablePolicy((np.ones((2, 1, 4)),))
    with pytest.raises(SettingsError, match="too many"):
        random_policy(n_contexts=2, dependence=0.5, sharpness=1.0, length=9)
