from __future__ import annotations

import dataclasses
import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest

from collapsediag.cadence import Cadence
from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.monitor import Monitor
from collapsediag.pairs import PairSettings, ScoringPairs
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
from collapsediag.run_folder import read_matrix, read_records, read_traces
from collapsediag.sinks import JsonlSink

from .keep import Keep

KEY = "collapse_first_turn_sample/"


class PlantedScorer:
    """Own context scores higher by `gain` nats a token, with seeded noise; raises where told to."""

    def __init__(self, gain: float = 2.0, fail_calls: set[int] | None = None) -> None:
        self.gain, self.calls, self.fail_calls = gain, 0, fail_calls or set()

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        self.calls += 1
        if self.calls in self.fail_calls:
            raise ScoringError(f"call {self.calls} failed on purpose")
        rng = np.random.default_rng([self.calls, pairs.n_traces])
        length = np.array([len(trace) for trace in pairs.traces])
        logp = -length[:, None] * (3.0 + rng.random((pairs.n_traces, pairs.n_contexts)))
        logp[np.arange(pairs.n_traces), pairs.own_N] += self.gain * length
        return LogLikelihoodMatrix(
            logp_NP=np.minimum(logp, 0.0), length_N=length, own_N=pairs.own_N, group_N=pairs.group_N
        )


def batch(step: int, prompts: int = 4, group: int = 3, turns: int = 1) -> RolloutBatch:
    rng = np.random.default_rng(step)
    rollouts = []
    for p in range(prompts):
        for _ in range(group):
            made: list[Turn] = []
            context = [1, 10 + p]
            for _ in range(turns):
                output = rng.integers(20, 60, size=5).tolist()
                made.append(Turn(context_ids=context, output_ids=output))  # type: ignore[arg-type]
                context = [*context, *output, 5]
            rollouts.append(Rollout(turns=tuple(made), group=p, reward=float(rng.random())))
    return RolloutBatch(step=step, rollouts=tuple(rollouts))


def monitor(scorer: object | None = None, **options: object) -> tuple[Monitor, Keep]:
    keep = Keep()
    settings: dict[str, object] = {"every": 1, "reasoning": "completion", "sinks": [keep], **options}
    return Monitor(scorer, **settings), keep  # type: ignore[arg-type]


def test_a_record_per_step_scored_at_the_cadence() -> None:
    m, keep = monitor(PlantedScorer(), every=3)
    for step in range(7):
        m.observe(step, batch(step))
    assert [r.step for r in keep.records] == list(range(7))
    assert [KEY + "retrieval_accuracy" in r.values for r in keep.records] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert all("reward/mean" in r.values for r in keep.records)
    assert keep.records[0].values[KEY + "retrieval_accuracy"] == 1.0
    assert keep.records[0].values["timing_s/collapse_score"] >= 0


def test_the_first_step_seen_and_asked_for_steps_are_scored() -> None:
    m, keep = monitor(PlantedScorer(), every=10)
    m.observe(7, batch(7))
    m.observe(8, batch(8))
    m.observe(9, batch(9), score=True)
    m.observe(10, batch(10), score=False)
    assert [bool(r.matrices) for r in keep.records] == [True, False, True, False]


def test_cadence_needs_a_positive_number() -> None:
    for every in (0, 2.5, "3", None):
        with pytest.raises(SettingsError, match=f"every={every!r}: the cadence is a whole number"):
            Cadence(every=every)  # type: ignore[arg-type]
    assert Cadence(every=np.int64(2)).is_due(4)  # type: ignore[arg-type]


def test_multi_turn_batches_have_all_three_draws() -> None:
    m, _ = monitor(PlantedScorer())
    record = m.observe(0, batch(0, turns=2))
    assert set(record.matrices) == {"first_turn", "trajectory", "turn"}
    single = m.observe(1, batch(1))
    assert set(single.matrices) == {"first_turn"}


def test_the_moving_average_is_the_recurrence_and_survives_a_checkpoint() -> None:
    whole, keep_whole = monitor(PlantedScorer())
    for step in range(6):
        whole.observe(step, batch(step))

    first, keep_first = monitor(PlantedScorer())
    for step in range(3):
        first.observe(step, batch(step))
    state = json.loads(json.dumps(first.state_dict()))
    scorer = PlantedScorer()
    scorer.calls = 3
    second, keep_second = monitor(scorer)
    second.load_state_dict(state)
    for step in range(3, 6):
        second.observe(step, batch(step))

    resumed = [*keep_first.records, *keep_second.records]
    ema = None
    for a, b in zip(keep_whole.records, resumed, strict=True):
        value = a.values[KEY + "gap_std"]
        ema = value if ema is None else 0.9 * ema + 0.1 * value
        np.testing.assert_allclose(a.values[KEY + "gap_std_ema"], ema, rtol=1e-12)
        for name in a.values:
            if not name.startswith("timing_s/"):
                assert a.values[name] == b.values[name], name


def test_continuing_from_the_records_equals_never_having_stopped(tmp_path: Path) -> None:
    whole, keep = monitor(PlantedScorer())
    for step in range(4):
        whole.observe(step, batch(step))
    first = Monitor(PlantedScorer(), every=1, reasoning="completion", sinks=[JsonlSink(tmp_path)])
    with first:
        for step in range(2):
            first.observe(step, batch(step))
    scorer = PlantedScorer()
    scorer.calls = 2
    second = Monitor(scorer, every=1, reasoning="completion", sinks=[JsonlSink(tmp_path, resume=True)])
    second.continue_from(read_records(tmp_path))
    with second:
        for step in range(2, 4):
            second.observe(step, batch(step))
    for a, b in zip(keep.records, read_records(tmp_path), strict=True):
        assert a.values[KEY + "mi_zscore_ema"] == b.values[KEY + "mi_zscore_ema"]


def test_a_state_of_another_version_is_refused() -> None:
    m, _ = monitor()
    with pytest.raises(SettingsError, match="version 99"):
        m.load_state_dict({"version": 99})


@pytest.mark.fault(
    "the scorer raises",
    "the step is recorded as failed, with the reason and no number; training goes on",
)
@pytest.mark.faults
def test_a_failure_is_a_record_with_the_reason_and_no_values(caplog: pytest.LogCaptureFixture) -> None:
    m, keep = monitor(PlantedScorer(fail_calls={2}))
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        for step in range(3):
            m.observe(step, batch(step))
    failed = keep.records[1]
    assert failed.status == "failed"
    assert failed.reason == "call 2 failed on purpose"
    assert dict(failed.values) == {"collapse/failures": 1.0}
    assert [r.status for r in keep.records] == ["ok", "failed", "ok"]
    assert keep.records[2].values["collapse/failures"] == 1.0
    assert caplog.text.count("training goes on") == 1


@pytest.mark.fault("scoring fails half-way", "the moving averages are as before the step")
@pytest.mark.faults
def test_a_failed_step_does_not_move_the_average() -> None:
    class SecondNamespaceFails(PlantedScorer):
        def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
            if pairs.namespace == "trajectory":
                raise ScoringError("on purpose")
            return super().score(pairs)

    m, _ = monitor(SecondNamespaceFails())
    before = m.state_dict()["ema"]
    m.observe(0, batch(0, turns=2))
    assert m.state_dict()["ema"] == before == {}


def test_a_trace_that_cannot_be_scored_is_said_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    m, keep = monitor(PlantedScorer(), pairs=PairSettings(max_traces=4, max_trace_tokens=8))
    for step in range(2):
        first, *others = batch(step).rollouts
        turn = dataclasses.replace(first.turns[0], output_ids=list(range(20, 29)))
        with caplog.at_level(logging.WARNING, logger="collapsediag"):
            m.observe(step, RolloutBatch(step=step, rollouts=(dataclasses.replace(first, turns=(turn,)), *others)))
    assert [record.dropped["first_turn/trace_too_long"] for record in keep.records] == [1, 1]
    assert caplog.messages == [
        "step 0: 1 of 12 traces cannot be scored (1 trace too long); 4 were, limited by max_traces=4 "
        "(--max-traces). Said once, every record counts them."
    ]


def test_text_that_cannot_be_scored_is_said_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    texts = RolloutBatch.from_lists(step=0, prompts=["a", "b"], completions=["<think>x</think>y"] * 2)
    m, _ = monitor(PlantedScorer())
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        m.observe(0, texts)
    assert caplog.messages == [
        "step 0: 2 of 2 traces cannot be scored (2 no token ids); 0 were; tokenize_batch(batch, tokenizer) makes ids "
        "of text. Said once, every record counts them."
    ]


def test_rewards_that_overflow_are_said_once_and_noted_always(caplog: pytest.LogCaptureFixture) -> None:
    m, keep = monitor(None)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        for step in range(3):
            first, *others = batch(step).rollouts
            first = dataclasses.replace(first, reward=float("inf"))
            m.observe(step, RolloutBatch(step=step, rollouts=(first, *others)))
    (said,) = caplog.messages
    assert said.startswith("step 0: left out as unscored: reward inf of rollout 0")
    assert said.endswith("Look for an overflow in the reward function. Said once, every record notes it.")
    assert [any("reward inf" in note for note in record.notes) for record in keep.records] == [True] * 3


@pytest.mark.fault("the scorer raises three times in a row", "scoring stops and says so once; rollout metrics go on")
@pytest.mark.faults
def test_after_three_failures_in_a_row_scoring_stops_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    scorer = PlantedScorer(fail_calls=set(range(1, 99)))
    m, keep = monitor(scorer, every=2)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        for step in range(12):
            m.observe(step, batch(step))
    assert scorer.calls == 3  # unscored steps in between do not start the count anew
    assert caplog.text.count("not scored any more") == 1
    last = keep.records[10]
    assert last.status == "ok"
    assert "reward/mean" in last.values
    assert last.not_measured["scoring"] == "switched off after 3 failures in a row"


@pytest.mark.faults
def test_two_failures_then_a_success_start_the_count_anew() -> None:
    scorer = PlantedScorer(fail_calls={1, 2, 4, 5, 7, 8})
    m, keep = monitor(scorer)
    for step in range(9):
        m.observe(step, batch(step))
    assert scorer.calls == 9
    assert [r.status for r in keep.records] == ["failed", "failed", "ok"] * 3
    assert keep.records[-1].values["collapse/failures"] == 6.0


def test_on_error_raise_raises() -> None:
    m, _ = monitor(PlantedScorer(fail_calls={1}), on_error="raise")
    with pytest.raises(ScoringError, match="on purpose"):
        m.observe(0, batch(0))
    with pytest.raises(SettingsError, match="on_error='ignore'"):
        monitor(on_error="ignore")


def test_one_prompt_is_not_measured_with_the_reason() -> None:
    m, _ = monitor(PlantedScorer())
    record = m.observe(0, batch(0, prompts=1))
    assert record.status == "ok"
    assert "at least two prompts are needed" in record.not_measured["collapse_first_turn_sample"]
    assert not any(name.startswith(KEY) for name in record.values)


def test_without_a_scorer_the_cheap_metrics_remain() -> None:
    m, _ = monitor(None)
    record = m.observe(0, batch(0))
    assert "reward/mean" in record.values
    assert not record.matrices


def test_run_folder_holds_matrix_and_traces(tmp_path: Path) -> None:
    class Words:
        def decode(self, ids: list[int], **_: object) -> str:
            return " ".join(f"w{i}" for i in ids)

    sink = JsonlSink(tmp_path)
    m = Monitor(PlantedScorer(), every=1, reasoning="completion", sinks=[sink], tokenizer=Words(), traces_kept=5)
    with m:
        record = m.observe(0, batch(0))
    stored = read_matrix(tmp_path, 0, "first_turn")
    np.testing.assert_array_equal(stored.logp_NP, record.matrices["first_turn"].logp_NP)
    traces = read_traces(tmp_path, 0)
    assert len(traces) == 5
    assert traces[0]["context"] == "w1 w10"
    assert all(t["own"] == t["best"] and t["context_best"] is None for t in traces)


def test_the_same_seed_gives_the_same_numbers_and_global_generators_are_untouched() -> None:
    states = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    settings = PairSettings(max_contexts=3, max_traces=6)
    runs = []
    for _ in range(2):
        m, keep = monitor(PlantedScorer(), pairs=settings, seed=5)
        for step in range(3):
            m.observe(step, batch(step, prompts=6, turns=2))
        runs.append([{k: v for k, v in r.values.items() if not k.startswith("timing_s/")} for r in keep.records])
    assert runs[0] == runs[1]
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]


def test_closing_closes_the_sinks() -> None:
    m, keep = monitor()
    with m:
        pass
    assert keep.closed


def test_a_due_step_that_was_not_seen_is_made_up_for_at_the_next() -> None:
    m, keep = monitor(PlantedScorer(), every=5)
    for step in (0, 4, 8, 12, 16):  # a trainer that generates for four steps at once
        m.observe(step, batch(step))
    assert [r.step for r in keep.records if r.matrices] == [0, 8, 12, 16]


def test_context_bank_gives_one_prompt_batches_something_to_be_told_apart_from() -> None:
    m, keep = monitor(PlantedScorer(), every=1, context_bank=2)
    for step in range(4):
        one = batch(step, prompts=5).select([3 * step])  # one trace of prompt number `step`
        m.observe(step, one)
    assert "collapse_first_turn_sample" in keep.records[0].not_measured
    assert [r.values.get(KEY + "n_contexts") for r in keep.records] == [None, 2.0, 3.0, 3.0]
    last = keep.records[3]
    np.testing.assert_allclose(last.values[KEY + "retrieval_chance_level"], 1 / 3)
    np.testing.assert_allclose(last.values[KEY + "mi_upper_bound"], np.log(3))
    assert "first_turn: 2 of 3 contexts come from the context bank (prompts of earlier batches)" in last.notes
    assert last.matrices["first_turn"].own_N.tolist() == [0]


def test_context_bank_survives_a_checkpoint_and_fills_between_scored_steps() -> None:
    first, _ = monitor(PlantedScorer(), every=5, context_bank=3)
    for step in range(3):
        first.observe(step, batch(step, prompts=5).select([3 * step]))
    state = json.loads(json.dumps(first.state_dict()))
    assert state["context_bank"] == {"first_turn": [[1, 12], [1, 11], [1, 10]]}
    second, keep = monitor(PlantedScorer(), every=5, context_bank=3)
    second.load_state_dict(state)
    second.observe(5, batch(5, prompts=5).select([12]))
    assert keep.records[0].values[KEY + "n_contexts"] == 4.0


def test_context_bank_leaves_out_what_the_model_could_not_hold() -> None:
    settings = PairSettings(reasoning="completion", max_total_tokens=7)
    m, keep = monitor(PlantedScorer(), context_bank=4, pairs=settings)
    long, short = [1, 2, 3, 4], [1, 9]
    for step, context in enumerate((long, short)):
        outputs = [7] * (3 if step == 0 else 5)
        m.observe(step, RolloutBatch.from_lists(step=step, prompts=[context], completions=[outputs]))
    assert "only one distinct context" in keep.records[1].not_measured["collapse_first_turn_sample"]


def test_scores_are_held_against_the_log_probs_of_the_trainer() -> None:
    class Flat(PlantedScorer):
        def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
            length = np.array([len(trace) for trace in pairs.traces])
            logp = -2.0 * np.ones((pairs.n_traces, pairs.n_contexts)) * length[:, None]
            return LogLikelihoodMatrix(logp_NP=logp, length_N=length, own_N=pairs.own_N, group_N=pairs.group_N)

    turns = [Turn(context_ids=[1, p], output_ids=[5, 6, 7], logprobs=[-2.0, -2.0, -2.3]) for p in (3, 4)]  # type: ignore[arg-type]
    rollouts = tuple(Rollout(turns=(turn,), group=p) for p, turn in enumerate(turns))
    m, _ = monitor(Flat())
    record = m.observe(0, RolloutBatch(step=0, rollouts=rollouts))
    np.testing.assert_allclose(record.values["collapse/own_logp_difference"], 0.1, rtol=1e-12)
    scaled = m.observe(1, RolloutBatch(step=1, rollouts=rollouts, temperature=0.7))
    assert "collapse/own_logp_difference" not in scaled.values


@pytest.mark.faults
def test_an_adapter_can_record_that_the_rollouts_did_not_arrive() -> None:
    m, keep = monitor(PlantedScorer())
    m.record_failure(3, ValueError("no ids"))
    assert [(r.step, r.status, r.reason) for r in keep.records] == [(3, "failed", "ValueError: no ids")]
    strict, _ = monitor(on_error="raise")
    with pytest.raises(ValueError, match="no ids"):
        strict.record_failure(3, ValueError("no ids"))
