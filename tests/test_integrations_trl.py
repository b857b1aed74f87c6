"""The TRL callback inside real trainers: what it sees, and where its numbers go."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
trl = import_or_skip("trl")
import_or_skip("datasets")

from collapsediag.errors import SettingsError  # noqa: E402
from collapsediag.integrations.trl_callback import CollapseCallback  # noqa: E402
from collapsediag.training.log_window import is_charted  # noqa: E402

from . import trl_tiny as tiny  # noqa: E402
from .keep import Keep  # noqa: E402

# What TRL and transformers warn about while they train is theirs to settle.
pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "collapse_first_turn_sample/"
FLOAT32_TOLERANCE = 1e-5  # nats per token


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def observer(**settings: Any) -> tuple[CollapseCallback, Keep]:
    keep = Keep()
    return CollapseCallback(**{"every": 1, "reasoning": "completion", "sinks": [keep], **settings}), keep


def batches_of(callback: CollapseCallback, mode: str = "train") -> list[Any]:
    """The rollouts that the monitor is given, as they come."""
    seen: list[Any] = []
    monitor = callback.session.monitor(mode)
    observe = monitor.observe
    monitor.observe = lambda step, batch, **kw: (seen.append(batch), observe(step, batch, **kw))[1]  # type: ignore[method-assign, func-returns-value]
    return seen


# -- what it sees ----------------------------------------------------------------------------------------------------


def test_rollouts_are_those_of_the_trainer(tmp_path: Path) -> None:
    """Against the trainer's own text log, which is in generation order."""
    callback, keep = observer(environment="family")
    batches = batches_of(callback)
    trainer = tiny.trainer(
        "grpo", tmp_path, [callback], reward_funcs=[tiny.reward_vowels, tiny.reward_some], reward_weights=[1.0, 0.5],
        temperature=0.7, max_steps=1, mask_truncated_completions=True, max_completion_length=12,
    )  # fmt: skip
    trainer.train()
    (batch,) = batches
    tok = trainer.processing_class
    assert batch.temperature == 0.7
    assert [tok.decode(r.turns[0].context_ids) for r in batch] == list(trainer._logs["prompt"])
    texts = [tok.decode(r.turns[0].output_ids, skip_special_tokens=True) for r in batch]
    assert texts == list(trainer._logs["completion"])
    assert [r.group for r in batch] == [0, 0, 0, 0, 1, 1, 1, 1]
    vowels, some = trainer._logs["rewards"]["reward_vowels"], trainer._logs["rewards"]["reward_some"]
    for i, rollout in enumerate(batch):
        missing = some[i] is None or math.isnan(some[i])
        assert missing == (i % 3 == 0)
        np.testing.assert_allclose(rollout.rewards["reward_vowels"], vowels[i], rtol=1e-6)
        assert (rollout.rewards["reward_some"] is None) == missing
        np.testing.assert_allclose(rollout.reward, vowels[i] + (0 if missing else 0.5 * some[i]), rtol=1e-6)
    np.testing.assert_allclose([r.advantage for r in batch], list(trainer._logs["advantages"]), rtol=1e-6)
    lengths = [r.turns[0].output_ids.size for r in batch]
    cut = [n == 12 and r.turns[0].output_ids[-1] != tok.eos_token_id for n, r in zip(lengths, batch, strict=True)]
    assert any(cut)
    assert [r.turns[0].finish_reason for r in batch] == ["length" if c else "stop" for c in cut]
    assert {r.environment for r in batch} <= {"sum0", "sum1"}
    assert keep.records[0].values["reward/reward_some/n_unscored"] == 3.0


def test_rows_without_any_reward_have_none(tmp_path: Path) -> None:
    callback, keep = observer()
    batches = batches_of(callback)
    tiny.trainer("grpo", tmp_path, [callback], reward_funcs=[tiny.reward_some], max_steps=1).train()
    assert [i for i, r in enumerate(batches[0]) if r.reward is None] == [0, 3, 6]
    assert keep.records[0].values["reward/n_unscored"] == 3.0


def canned_rollouts(prompts: Any, trainer: Any) -> dict[str, Any]:
    """Two turns with the environment's answer between them; the last row writes one turn only."""
    tok = trainer.processing_class
    prompt_ids = [tok(prompt)["input_ids"] for prompt in prompts]
    first, answer, second = (tok(text)["input_ids"] for text in ("ab</think>c", ": 7 ", "de</think>"))
    completions = [[*first, *answer, 20 + i, *second] for i in range(len(prompts))]
    masks = [[1] * len(first) + [0] * len(answer) + [1] * (1 + len(second)) for _ in prompts]
    completions[-1], masks[-1] = list(first), [1] * len(first)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completions,
        "logprobs": [[-1.0] * len(ids) for ids in completions],
        "env_mask": masks,
    }


def test_tool_answers_split_a_rollout_into_turns(tmp_path: Path) -> None:
    tiny.skip_unless_taken("rollout_func")
    callback, keep = observer(reasoning="think")
    batches = batches_of(callback)
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=1, max_completion_length=40,
                           rollout_func=canned_rollouts)  # fmt: skip
    trainer.train()
    tok = trainer.processing_class
    rollouts = batches[0].rollouts
    assert [len(r.turns) for r in rollouts] == [2] * 7 + [1]
    one, two = rollouts[0].turns
    prompt = tok.decode(one.context_ids)
    assert tok.decode(one.output_ids) == "ab</think>c"
    assert one.observation == ": 7 "
    assert tok.decode(two.context_ids) == prompt + "ab</think>c: 7 "
    assert two.output_ids[0] == 20
    assert tok.decode(two.output_ids)[1:] == "de</think>"
    assert (one.finish_reason, two.finish_reason) == (None, None)
    assert batches[0].max_output_tokens is None
    record = keep.records[0]
    assert set(record.matrices) == {"first_turn", "trajectory", "turn"}
    # The prompt opened the block, the tool's tokens are in no trace.
    assert {t.trace for t in record.traces if t.namespace == "first_turn"} == {"ab"}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def test_tool_calls_of_trl_are_turns_with_what_the_tool_answered(tmp_path: Path) -> None:
    """TRL's own tool loop around canned generations, in Qwen3's template."""
    tok = tiny.qwen3_tokenizer()
    callback, keep = observer(reasoning="think")
    batches = batches_of(callback)
    trainer = tiny.trainer("grpo", tmp_path, [callback], tok=tok, tools=[add], conversational=True, max_steps=1,
                           max_completion_length=400)  # fmt: skip
    first = (
        "<think>\nadd {i}</think>\n\n<tool_call>\n"
        '{{"name": "add", "arguments": {{"a": 1, "b": {i}}}}}\n</tool_call><|im_end|>'
    )
    texts = iter([first, "<think>\nso {i}</think>\n\nit is {i}<|im_end|>"])

    def canned(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        text = next(texts)
        return [tok(text.format(i=i))["input_ids"] for i in range(len(prompt_ids))], None

    trainer._generate_single_turn = canned
    trainer.train()
    assert [len(r.turns) for r in batches[0]] == [2] * 8
    one, two = batches[0].rollouts[3].turns
    assert tok.decode(one.output_ids) == first.format(i=3)
    assert "<tool_response>\n4\n</tool_response>" in one.observation
    assert tok.decode(two.output_ids) == "<think>\nso 3</think>\n\nit is 3<|im_end|>"
    record = keep.records[0]
    assert record.values["tools/calls_per_rollout"] == 1.0
    turns = {t.trace for t in record.traces if t.namespace == "turn"}
    assert turns == {f"{word} {i}" for word in ("\nadd", "\nso") for i in range(8)}


def test_one_prompt_per_batch_is_not_measured_and_says_how_to_get_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, keep = observer()
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        tiny.trainer("grpo", tmp_path, [callback], num_generations=8, max_steps=2).train()
    record = keep.records[0]
    assert record.status == "ok"
    assert "only one distinct context" in record.not_measured["collapse_first_turn_sample"]
    assert any("context_bank=8" in note for note in record.notes)
    assert not any(name.startswith(KEY) for name in record.values)
    assert caplog.text.count("context_bank=8") == 1


def test_the_context_bank_lends_earlier_prompts(tmp_path: Path) -> None:
    callback, keep = observer(context_bank=3)
    tiny.trainer("grpo", tmp_path, [callback], num_generations=8, max_steps=4).train()
    assert [r.values.get(KEY + "n_contexts") for r in keep.records] == [None, 2.0, 3.0, 4.0]
    np.testing.assert_allclose(keep.records[3].values[KEY + "retrieval_chance_level"], 0.25)
    assert any("3 of 4 contexts come from the context bank" in note for note in keep.records[3].notes)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_own_scores_agree_with_the_log_probs_that_trl_computes(tmp_path: Path, temperature: float) -> None:
    callback, keep = observer(every=2)
    batches = batches_of(callback)
    trainer = tiny.trainer(
        "grpo", tmp_path, [callback], steps_per_generation=2, per_device_train_batch_size=4, temperature=temperature,
        max_steps=2,
    )  # fmt: skip
    trainer.train()
    assert all(rollout.turns[0].logprobs is not None for rollout in batches[0])
    values = keep.records[0].values
    assert values["collapse/own_logp_difference"] < FLOAT32_TOLERANCE
    assert trainer.state.log_history[0]["collapse/own_logp_difference"] < FLOAT32_TOLERANCE


def test_the_own_score_check_can_fail(tmp_path: Path) -> None:
    callback, keep = observer()
    trainer = tiny.trainer("grpo", tmp_path, [callback], steps_per_generation=2, per_device_train_batch_size=4,
                           max_steps=1)  # fmt: skip
    logps = trainer._get_per_token_logps_and_entropies

    def shifted(*args: Any, **kwargs: Any) -> Any:
        found = logps(*args, **kwargs)
        return (found[0] - 0.1, *found[1:])

    trainer._get_per_token_logps_and_entropies = shifted
    trainer.train()
    np.testing.assert_allclose(keep.records[0].values["collapse/own_logp_difference"], 0.1, atol=1e-4)


# -- where the numbers go --------------------------------------------------------------------------------------------


def test_numbers_are_in_the_log_once_at_the_right_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    callback, keep = observer(every=2)
    eval_keep = Keep()
    callback.session.monitor("eval")._sinks._sinks.append(eval_keep)
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=5, logging_steps=2, eval_steps=4,
                           report_to=["tensorboard"])  # fmt: skip
    trainer.train()
    log = trainer.state.log_history
    rewards = {r.step: r.values["reward/mean"] for r in keep.records}
    rows = {row["step"]: row["collapse/reward/mean"] for row in log if "collapse/reward/mean" in row}
    assert list(rewards) == [0, 1, 2, 3, 4]
    # Step 5 is the tail: TRL itself never logs it.
    expected = {2: (rewards[0] + rewards[1]) / 2, 4: (rewards[2] + rewards[3]) / 2, 5: rewards[4]}
    assert list(rows) == [2, 4, 5]
    np.testing.assert_allclose([rows[s] for s in (2, 4, 5)], [expected[s] for s in (2, 4, 5)], rtol=1e-12)
    # Up to the tail, which some releases of TRL log and others lose.
    own = [row["reward"] for row in log if "reward" in row]
    np.testing.assert_allclose(own[:2], [expected[2], expected[4]], rtol=1e-6)
    scored = {r.step: r.values[KEY + "mi_seq_estimate"] for r in keep.records if KEY + "mi_seq_estimate" in r.values}
    assert list(scored) == [0, 2, 4]
    logged = [(row["step"], row[KEY + "mi_seq_estimate"]) for row in log if KEY + "mi_seq_estimate" in row]
    assert logged == [(2, scored[0]), (4, scored[2]), (5, scored[4])]
    evaluations = [row for row in log if "eval_" + KEY + "mi_seq_estimate" in row]
    # Newer releases of transformers evaluate once more at the end.
    steps = [row["step"] for row in log if "eval_loss" in row]
    assert steps[0] == 4
    assert [row["step"] for row in evaluations] == steps == [r.step for r in eval_keep.records]
    assert evaluations[0]["eval_" + KEY + "n_traces"] == 12.0  # 3 prompts x 4, in three batches
    assert all(isinstance(v, float) and math.isfinite(v) for row in log for k, v in row.items() if "collapse" in k)
    assert not any("loss" not in row for row in log if row["step"] in (2,))
    assert {k for k in rows_of(log) if not is_charted(plain(k))} == set()
    assert tensorboard_steps(tmp_path, "train/collapse/reward/mean") == [2, 4, 5]
    assert tensorboard_steps(tmp_path, "eval/" + KEY + "mi_seq_estimate") == steps


def rows_of(log: list[dict[str, Any]]) -> set[str]:
    return {key for row in log for key in row if "collapse" in key}


def plain(key: str) -> str:
    key = key.removeprefix("eval_")
    kept = ("collapse/failures", "collapse/own_logp_difference")
    return key if key in kept else key.removeprefix("collapse/")


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    accumulator = import_or_skip("tensorboard.backend.event_processing.event_accumulator")
    found = next(iter(folder.rglob("events.out.tfevents.*")))
    events = accumulator.EventAccumulator(str(found))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_evaluate_on_its_own_returns_the_numbers(tmp_path: Path) -> None:
    callback, _ = observer()
    trainer = tiny.trainer("grpo", tmp_path, [callback], eval_steps=2)
    found = trainer.evaluate()
    np.testing.assert_allclose(found["eval_" + KEY + "retrieval_chance_level"], 1 / 3)
    assert not any(key.startswith("collapse") for key in found)
    again = trainer.evaluate(metric_key_prefix="eval_other")
    assert again["eval_other_" + KEY + "n_traces"] == 12.0


def test_all_numbers_or_none_can_be_logged(tmp_path: Path) -> None:
    for logged, expected in (("all", True), ("none", False)):
        callback, keep = observer(logged=logged)
        trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=1)
        trainer.train()
        assert ("collapse/reward/modal_share" in trainer.state.log_history[0]) == expected
        assert "reward/modal_share" in keep.records[0].values
    with pytest.raises(SettingsError, match="logged='some'"):
        observer(logged="some")


def test_a_step_with_several_generation_batches_is_recorded_once(tmp_path: Path) -> None:
    callback, keep = observer()
    tiny.trainer(
        "grpo", tmp_path, [callback], max_steps=2, gradient_accumulation_steps=2, steps_per_generation=1
    ).train()
    assert [r.step for r in keep.records] == [0, 1]
    assert "measured on the first of 2 generation batches of this step" in keep.records[0].notes
