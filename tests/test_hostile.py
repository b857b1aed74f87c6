"""What users hand over by mistake: odd types, odd shapes, nothing at all. A clear error, or the right number."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collapsediag as cd
from collapsediag.errors import (
    CollapsediagError,
    MatrixError,
    MetricError,
    PairError,
    RolloutError,
    RunFolderError,
    ScoringError,
    SettingsError,
)
from collapsediag.run_folder import RunStore, check_writable, iter_records, read_records, read_traces
from collapsediag.testing import TableScorer

from .conftest import import_or_skip

torch = import_or_skip("torch")
import_or_skip("transformers")

KEY = "collapse_first_turn_sample/"
PROMPTS = [[1, 2], [1, 2], [1, 3], [1, 3]]
OUTPUTS = [[5, 6], [6, 7], [8, 9], [9, 9]]


def matrix(logp_NP: Any, **fields: Any) -> cd.LogLikelihoodMatrix:
    n = len(logp_NP)
    return cd.LogLikelihoodMatrix(**{"logp_NP": logp_NP, "length_N": [2] * n, "own_N": [0] * n, **fields})


# -- matrices --------------------------------------------------------------------------------------------------------


def test_one_trace_under_two_contexts() -> None:
    values = cd.matrix_metrics(matrix([[-1.0, -2.0]]))
    assert values["retrieval_accuracy"] == 1.0
    # log p(own) - log mean p, by hand.
    assert values["mi_seq_estimate"] == pytest.approx(-1.0 - np.log((np.exp(-1.0) + np.exp(-2.0)) / 2), rel=1e-12)
    assert values["mi_estimate"] == pytest.approx(values["mi_seq_estimate"] / 2, rel=1e-12)


def test_two_contexts_and_nothing_but_ties() -> None:
    values = cd.matrix_metrics(matrix(-np.ones((4, 2)), own_N=[0, 0, 1, 1]))
    assert values["retrieval_accuracy"] == 0.5
    assert values["mi_estimate"] == 0.0
    assert values["retrieval_p_value"] == 1.0


def test_rows_without_a_finite_number_are_left_out_and_counted() -> None:
    values = cd.matrix_metrics(matrix([[-np.inf] * 2, [np.nan, -1.0], [-3.0, -1.0]], own_N=[0, 0, 1]))
    assert (values["n_traces"], values["n_nonfinite"]) == (1.0, 2.0)
    assert values["retrieval_accuracy"] == 1.0
    with pytest.raises(MetricError, match="2 with a non-finite log-likelihood"):
        cd.matrix_metrics(matrix([[-np.inf] * 2] * 2))


def test_matrices_without_anything() -> None:
    empty = cd.LogLikelihoodMatrix(logp_NP=np.zeros((0, 3)), length_N=[], own_N=[])
    assert (empty.n_traces, empty.n_contexts) == (0, 3)
    for odd in (empty, cd.LogLikelihoodMatrix(logp_NP=np.zeros((0, 0)), length_N=[], own_N=[])):
        with pytest.raises(MetricError):
            cd.matrix_metrics(odd)
    with pytest.raises(MetricError, match="at least 2 distinct"):
        cd.matrix_metrics(matrix([[-1.0]]))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_torch_of_every_precision_and_integers_of_every_width(kind: str) -> None:
    logp = torch.tensor([[-1.5, -2.0], [-4.0, -3.0]], requires_grad=True).to(getattr(torch, kind))
    made = matrix(logp, length_N=torch.tensor([2, 2], dtype=torch.int32), own_N=np.array([0, 1], dtype=np.uint16))
    assert made.logp_NP.tolist() == [[-1.5, -2.0], [-4.0, -3.0]]
    assert matrix(list(logp)).logp_NP.tolist() == made.logp_NP.tolist()  # a list of rows
    assert matrix(logp, own_N=[torch.tensor(0), torch.tensor(1)]).own_N.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logp_NP": [[-1], [-1, -2]]}, "logp_NP is not an array of numbers"),
        ({"logp_NP": None}, "must be a matrix"),
        ({"logp_NP": [[np.inf, -1.0]] * 2}, "cannot be positive"),
        ({"logp_NP": np.zeros((2, 0))}, "no context was scored"),
        ({"own_N": [[0], [1, 2]]}, "own_N is not an array of numbers"),
        ({"own_N": [0.0, 1.0]}, "must be a flat vector of integers"),
        ({"own_N": np.array([0, 2**63], dtype=np.uint64)}, "own_N holds 9223372036854775808"),
        ({"length_N": np.array([1, 2**63 + 1], dtype=np.uint64)}, "length_N holds 9223372036854775809"),
    ],
)
def test_matrices_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MatrixError, match=message):
        cd.LogLikelihoodMatrix(**{"logp_NP": -np.ones((2, 2)), "length_N": [1, 1], "own_N": [0, 1], **fields})


def test_a_seed_below_zero_is_a_seed() -> None:
    m = matrix([[-1.0, -2.0], [-2.0, -1.0], [-1.0, -3.0]], own_N=[0, 1, 0])
    low = "mi_estimate/ci_low"
    assert cd.matrix_metrics(m, seed=-1)[low] == cd.matrix_metrics(m, seed=-1)[low]


# -- rollouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: np.array(ids, dtype=np.int32),
        lambda ids: np.array(ids, dtype=np.uint16),
        lambda ids: torch.tensor(ids),
        lambda ids: torch.tensor(ids, dtype=torch.uint8),
        lambda ids: [torch.tensor(i) for i in ids],
        tuple,
    ],
)
def test_token_ids_of_every_make(make: Callable[[list[int]], Any]) -> None:
    turn = cd.Turn(context_ids=make([1, 2]), output_ids=make([3]))
    assert turn.context_ids is not None
    assert (turn.context_ids.dtype, turn.context_ids.tolist()) == (np.int64, [1, 2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_ids": [[1], [2, 3]]}, "context_ids is not one flat sequence"),
        ({"context_ids": [[1, 2]]}, "flat list of token ids"),
        ({"context_ids": "abc"}, "flat list of token ids"),
        ({"context_ids": [True]}, "flat list of token ids"),
        ({"context_ids": [1, -100]}, "negative token id -100 at position 1"),
        ({"context_ids": np.array([1, 2**63 + 1], dtype=np.uint64)}, "9223372036854775809 at position 1"),
        ({"logprobs": ["a", "b"]}, "logprobs must be one number a token"),
        ({"logprobs": [-1.0]}, "one value per output token"),
        ({"context": b"bytes"}, "context must be text"),
    ],
)
def test_turns_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        cd.Turn(**{"context_ids": [1], "output_ids": [1, 2], **fields})


def test_log_probs_of_torch_in_low_precision_and_with_gradients() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True).bfloat16()
    turn = cd.Turn(context_ids=[1], output_ids=[1, 2], logprobs=logprobs)
    assert turn.logprobs is not None
    assert turn.logprobs.tolist() == [-0.5, -2.0]
    rollout = cd.Rollout.from_trajectory(
        token_ids=torch.tensor([7, 8]), model_mask=torch.tensor([0, 1]), logprobs=logprobs, group=0
    )
    assert rollout.turns[0].logprobs is not None
    assert rollout.turns[0].logprobs.tolist() == [-2.0]
    with pytest.raises(RolloutError, match="token_ids is None"):
        cd.Rollout.from_trajectory(token_ids=None, model_mask=[], group=0)  # type: ignore[arg-type]


def test_half_characters_become_replacement_characters() -> None:
    turn = cd.Turn(context="a\ud800b", output="\udfff\U0001f600é")
    assert (turn.context, turn.output) == ("a\ufffdb", "\ufffd\U0001f600é")
    pair = cd.Turn(context="a", output="\ud83d\ude00")  # two halves that belong together
    assert pair.output == "\U0001f600"


def test_groups_and_rewards_come_out_as_plain_values() -> None:
    batch = cd.RolloutBatch.from_lists(
        step=torch.tensor(3),
        prompts=torch.tensor(PROMPTS),
        completions=np.array(OUTPUTS, dtype=np.uint16),  # type: ignore[arg-type]
        groups=torch.tensor([0, 0, 1, 1]),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.5], requires_grad=True).bfloat16(),
        successes=np.array([True, False, True, False]),  # type: ignore[arg-type]
        dropped={"padding": np.int64(2)},
    )
    assert batch.groups() == {0: [0, 1], 1: [2, 3]}
    assert [type(r.reward) for r in batch] == [float] * 4
    assert [r.success for r in batch] == [True, False, True, False]
    assert json.dumps([batch.step, dict(batch.dropped)]) == '[3, {"padding": 2}]'


@pytest.mark.parametrize("step", ["x", None, 1.5, float("nan"), float("inf"), True])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(RolloutError, match="whole number"):
        cd.RolloutBatch(step=step, rollouts=())


def test_a_group_that_cannot_be_a_key() -> None:
    with pytest.raises(RolloutError, match="found list"):
        cd.RolloutBatch.from_lists(step=0, prompts=["a"], completions=["b"], groups=[[1]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("reward", "said"),
    [("1", r"rewards\[1\] is '1' \(str\)"), (True, "success label goes to successes"), ({"a": 1.0}, "give a number")],
)
def test_what_is_no_reward_is_refused_where_it_is_given(reward: Any, said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        cd.RolloutBatch.from_lists(step=0, prompts=["a", "a"], completions=["b", "c"], rewards=[1, reward])


# -- Monitor and run folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", ["gpt2", object(), lambda pairs: None, cd.HFScorer])
def test_what_is_no_scorer_is_refused_before_training(scorer: Any) -> None:
    with pytest.raises(SettingsError, match=r"is no scorer: that is an object with score\(pairs\), such as HFScorer"):
        cd.Monitor(scorer)


def test_a_model_in_place_of_a_scorer_is_told_to_be_wrapped() -> None:
    with pytest.raises(SettingsError) as told:
        cd.Monitor(scorer=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    assert str(told.value) == "scorer: a Sequential is no scorer; wrap it: scorer=HFScorer(model)."


@pytest.mark.parametrize("batch", [{"a": 1}, None])
def test_what_is_no_batch_is_recorded_with_the_way_to_make_one(batch: Any) -> None:
    record = cd.Monitor().observe(0, batch)
    assert record.status == "failed"
    assert str(record.reason).startswith(f"found {type(batch).__name__} where a RolloutBatch is needed. Make one: ")
    assert "RolloutBatch.from_lists(step=step, prompts=[...]" in str(record.reason)


def observed(folder: Path, *, scorer: Any = None, step: Any = None, tokenizer: Any = None, **fields: Any) -> cd.Record:
    """One step through a monitor; the record that the folder then holds."""
    batch = cd.RolloutBatch.from_lists(**{"step": 1, "prompts": PROMPTS, "completions": OUTPUTS, **fields})
    scorer = scorer or TableScorer(lambda context, trace: -float(len(trace)) - 0.1 * context[-1])
    sinks = [cd.JsonlSink(folder)]
    with cd.Monitor(scorer, every=1, reasoning="completion", sinks=sinks, tokenizer=tokenizer) as monitor:
        monitor.observe(batch.step if step is None else step, batch)
    (record,) = read_records(folder)
    return record


@pytest.mark.parametrize(
    "fields",
    [
        {"rewards": np.array([1, 0, 1, 0], dtype=np.float32)},
        {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0])},
        {"rewards": [float("nan")] * 4},
        {"step": np.int64(3)},
        {"step": torch.tensor(3)},
        {"step": 3.0},
        {"step": -3},
        {"dropped": {"padding": np.int64(2)}},
        {"groups": torch.tensor([0, 0, 1, 1])},
    ],
    ids=str,
)
def test_no_record_is_lost_for_the_type_of_a_number(tmp_path: Path, fields: dict[str, Any]) -> None:
    record = observed(tmp_path, **fields)
    assert record.status == "ok"
    assert record.values[KEY + "n_traces"] == 4
    assert isinstance(record.step, int)
    assert len(read_traces(tmp_path, record.step)) == 4


@pytest.mark.parametrize("step", [np.int32(4), torch.tensor(4), 4.0])
def test_the_step_given_to_observe_may_be_of_any_make(tmp_path: Path, step: Any) -> None:
    assert observed(tmp_path, step=step).step == 4


class Returns:
    def __init__(self, value: Any) -> None:
        self.value = value

    def score(self, pairs: cd.ScoringPairs) -> Any:
        return self.value


@pytest.mark.faults
@pytest.mark.parametrize(
    "value", [None, np.zeros((4, 2)), matrix([[-1.0, -2.0]]), matrix(-np.ones((4, 3)), own_N=[0, 0, 1, 1])], ids=str
)
def test_a_scorer_that_returns_something_else_is_a_failed_record(tmp_path: Path, value: Any) -> None:
    record = observed(tmp_path, scorer=Returns(value))
    assert record.status == "failed"
    assert dict(record.values) == {"collapse/failures": 1.0}


class UnshowableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.fault("an error whose message cannot be shown", "recorded by its type")
@pytest.mark.faults
def test_an_error_without_a_text_does_not_end_training(tmp_path: Path) -> None:
    def fail(context: Any, trace: Any) -> float:
        raise UnshowableError

    record = observed(tmp_path, scorer=TableScorer(fail))
    assert record.reason == "UnshowableError: (its message cannot be shown)"


@pytest.mark.faults
@pytest.mark.parametrize("batch", [None, 5, "x", [1]])
def test_something_else_in_place_of_a_batch(batch: Any) -> None:
    monitor = cd.Monitor(None, every=1)
    assert monitor.observe(1, batch).status == "failed"


class NamespaceFails(TableScorer):
    def score(self, pairs: cd.ScoringPairs) -> cd.LogLikelihoodMatrix:
        made = super().score(pairs)
        if pairs.namespace != "trajectory":
            return made
        return cd.LogLikelihoodMatrix(
            logp_NP=np.full(made.logp_NP.shape, np.nan), length_N=made.length_N, own_N=made.own_N
        )


def test_one_namespace_without_numbers_leaves_the_others() -> None:
    turns = [
        (cd.Turn(context_ids=[1, p], output_ids=[5, 6]), cd.Turn(context_ids=[1, p, 5, 6, 2], output_ids=[7]))
        for p in (3, 4)
    ]
    batch = cd.RolloutBatch(step=0, rollouts=tuple(cd.Rollout(turns=t, group=i) for i, t in enumerate(turns)))
    scorer = NamespaceFails(lambda context, trace: -float(len(trace)))
    record = cd.Monitor(scorer, every=1, reasoning="completion").observe(0, batch)
    assert record.status == "ok"
    assert "non-finite" in record.not_measured["collapse_trajectory_sample"]
    assert record.values[KEY + "n_traces"] == 2
    assert record.values["collapse_turn_sample/n_traces"] == 4


def test_a_trace_too_long_for_the_model_does_not_cost_the_step() -> None:
    scorer = TableScorer(lambda context, trace: -float(len(trace)))
    scorer.max_tokens = 20  # type: ignore[attr-defined]
    batch = cd.RolloutBatch.from_lists(step=0, prompts=PROMPTS, completions=[[5] * 50, [6], [7], [8]])
    record = cd.Monitor(scorer, every=1, reasoning="completion").observe(0, batch)
    assert record.values[KEY + "n_traces"] == 3
    assert record.dropped["first_turn/trace_too_long"] == 1


BAD_LINES = (
    b'{"step":2,"val',
    b"5",
    b"[1]",
    b'{"step":3,"values":[1]}',
    b'{"step":"x","values":{}}',
    b'{"step":null,"values":{}}',
    b'{"step":3,"values":{"a":1' + b"0" * 400 + b"}}",
    b'{"step":3,"values":{"a":null}}',
    b'{"step":9007199254740993,"values":{}}',
    b'{"step":3,"values":{},"notes":5}',
    b'{"step":3,"values":{},"dropped":[1]}',
    b"[" * 100_000,
    b'{"\xff":1}',
    b"\x00" * 50,
)


@pytest.mark.fault(
    "damaged lines in metrics.jsonl",
    "skipped and counted in one warning; the records around them are read",
)
def test_lines_of_every_kind_of_damage_are_passed_over(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        store.append(cd.Record(step=1, values={"a": 1.0}))
    with open(tmp_path / "metrics.jsonl", "ab") as stream:
        stream.write(b"\n".join(BAD_LINES) + b"\n")
    with RunStore(tmp_path, resume=True) as store:
        store.append(cd.Record(step=2, values={"a": 2.0}))
    assert [record.step for record in iter_records(tmp_path)] == [1, 2]


def test_traces_that_are_damaged_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "000000001.jsonl").write_text("{")
    with pytest.raises(RunFolderError, match=r"000000001\.jsonl: cannot be read"):
        read_traces(tmp_path, 1)


def test_asking_whether_a_run_can_be_written_makes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    (tmp_path / "loose").symlink_to(tmp_path / "gone")
    with pytest.raises(RunFolderError, match="neither a file nor a folder"):
        check_writable(tmp_path / "loose")
    assert [path.name for path in tmp_path.iterdir()] == ["loose"]


# -- scoring ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)


def test_score_takes_ids_of_every_make_and_empty_traces(model: Any) -> None:
    made = cd.score(
        model,
        [np.array([1], np.int32), torch.tensor([2], dtype=torch.uint8)],
        [torch.tensor([3], dtype=torch.int16), []],
        np.array([0, 1], np.uint8),
    )
    plain = cd.score(model, [[1], [2]], [[3], []], [0, 1])
    np.testing.assert_array_equal(made.logp_NP, plain.logp_NP)
    assert made.logp_NP[1].tolist() == [0.0, 0.0]
    assert made.length_N.tolist() == [1, 0]
    assert cd.score(model, [], [], []).logp_NP.shape == (0, 0)
    assert cd.score(model, [[1], [2]], [], []).logp_NP.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[], [2]], [[1]], [0]), ScoringError, "context 0 is empty"),
        (([[1] * 40, [2]], [[1]], [0]), ScoringError, "the model's limit is 32"),
        (([[1], [2]], [[99]], [0]), ScoringError, "token id 99"),
        (([[1], [2]], [[1], [3]], [0]), PairError, "own must hold one context number"),
        (([[1], [2]], [[1], [3]], [0.7, 1.2]), PairError, "own must be a flat list of whole numbers"),
        (([[1], [2]], [[1], [3]], ["0", "1"]), PairError, "own must be a flat list of whole numbers"),
        (([[1], [2]], [[1], [3]], [float("nan"), 0]), PairError, "own must be a flat list of whole numbers"),
        (([[1], [2]], [[1], [-1]], [0, 1]), PairError, "negative id -1"),
        (([[[1], [2, 3]], [2]], [[1]], [0]), PairError, r"contexts\[0\] must be a flat list"),
        ((["a", "b"], [[1]], [0]), PairError, r"contexts\[0\] must be a flat list"),
        (([np.array([2**63 + 1], np.uint64), [2]], [[1]], [0]), PairError, "9223372036854775809"),
    ],
)
def test_what_cannot_be_scored(model: Any, arguments: Any, error: type[CollapsediagError], message: str) -> None:
    with pytest.raises(error, match=message):
        cd.score(model, *arguments)


def test_a_group_for_each_trace(model: Any) -> None:
    with pytest.raises(PairError, match="group has 1 entries"):
        cd.score(model, [[1], [2]], [[1], [3]], [0, 1], group=[1])


def test_what_is_no_causal_language_model() -> None:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    for odd, message in (
        (transformers.BertLMHeadModel(config), "reads text in both directions"),
        ("gpt2", "must be a torch module, found str"),
        (None, "must be a torch module, found NoneType"),
        (torch.nn.Linear(2, 2), "Linear cannot be run"),
    ):
        with pytest.raises(ScoringError, match=message):
            cd.score(odd, [[1], [2]], [[3]], [0])
    for temperature in (0, -1, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match="temperature"):
            cd.HFScorer(torch.nn.Linear(2, 2), temperature=temperature)
