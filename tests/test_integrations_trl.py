"""The TRL callback inside real trainers: what it sees, where its numbers go, and that training never notices."""

from __future__ import annotations

import gc
import json
import logging
import math
import re
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
trl = import_or_skip("trl")
import_or_skip("datasets")
peft = import_or_skip("peft")

from collapsediag.errors import ScoringError, SettingsError  # noqa: E402
from collapsediag.integrations.trl_callback import CollapseCallback, attach  # noqa: E402
from collapsediag.record import Record  # noqa: E402
from collapsediag.scoring.hf import HFScorer  # noqa: E402
from collapsediag.training.log_window import is_charted  # noqa: E402

from . import trl_tiny as tiny  # noqa: E402

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


class Keep:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


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


# -- bit-identical ---------------------------------------------------------------------------------------------------

LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"]}
# Frequencies that follow the length of the sequence: what is scored must not leave its own behind.
LONG_ROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 22,
    }
}
QUICK: dict[str, dict[str, Any]] = {
    "dropout, accumulation, eval, conversational": {
        "model": "qwen2",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "eval_steps": 2,
        "conversational": True,
    },
    "LoRA with dropout, checkpointing": {"model": "qwen2", "peft": True, "gradient_checkpointing": True},
    "RLOO, GPT-2 dropout, beta": {"kind": "rloo", "model": "gpt2", "beta": 0.05},
}
BROAD: dict[str, dict[str, Any]] = {
    "plain": {"model": "qwen2"},
    "eval": {"model": "qwen2", "eval_steps": 2, "conversational": True},
    "reentrant checkpointing": {
        "model": "qwen2",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "GPT-2": {"model": "gpt2", "eval_steps": 2},
    "GPT-2, checkpointing": {"model": "gpt2", "gradient_checkpointing": True},
    "steps_per_generation": {"model": "gpt2", "steps_per_generation": 4, "max_steps": 6},
    "num_iterations": {"model": "gpt2", "num_iterations": 2, "max_steps": 5, "eval_steps": 2},
    "bf16": {"model": "qwen2", "bf16": True},
    "RoPE by length": {"model": "qwen2", "config": LONG_ROPE, "eval_steps": 2},
    "mask truncated, dr_grpo": {"model": "qwen2", "mask_truncated_completions": True, "loss_type": "dr_grpo"},
    "temperature, top_k": {"model": "gpt2", "temperature": 0.7, "top_k": 10},
    "beta with reference": {"model": "gpt2", "beta": 0.05},
    "LoRA, beta, eval": {"model": "qwen2", "peft": True, "beta": 0.05, "eval_steps": 2},
    "entropy bonus": {"model": "gpt2", "top_entropy_quantile": 0.5},
    "batch scale": {"model": "gpt2", "scale_rewards": "batch"},
    "pad to multiple": {"model": "gpt2", "pad_to_multiple_of": 8},
    **{
        f"loss {loss}": {"model": "gpt2", "loss_type": loss}
        for loss in ("grpo", "bnpo", "dapo", "cispo", "sapo", "luspo")
    },
    "RLOO, eval": {"kind": "rloo", "model": "qwen2", "eval_steps": 2, "conversational": True},
    "RLOO, steps_per_generation": {"kind": "rloo", "model": "gpt2", "steps_per_generation": 4, "max_steps": 6},
}


def fingerprint(out: Path, callback: CollapseCallback | None, setting: dict[str, Any]) -> dict[str, Any]:
    changes = {"report_to": [], **setting}
    make = tiny.gpt2 if changes.pop("model") == "gpt2" else tiny.qwen2
    if changes.pop("peft", False):
        changes["peft_config"] = peft.LoraConfig(**LORA)
    config = changes.pop("config", {})
    trainer = tiny.trainer(
        changes.pop("kind", "grpo"),
        out,
        [] if callback is None else [callback],
        model=make(tiny.tokenizer(), dropout=0.1, **config),
        **changes,
    )
    watched = tiny.Fingerprint(trainer)
    trainer.train()
    return watched.read()


def assert_unnoticed(out: Path, setting: dict[str, Any]) -> None:
    callback, keep = observer()
    without, observed = fingerprint(out, None, setting), fingerprint(out, callback, setting)
    assert observed == without
    assert keep.records
    assert all(record.status == "ok" for record in keep.records)
    assert any(KEY + "retrieval_accuracy" in record.values for record in keep.records)


@pytest.mark.bit_identical
@pytest.mark.parametrize("name", QUICK)
def test_training_is_bit_identical_with_the_callback(tmp_path: Path, name: str) -> None:
    assert_unnoticed(tmp_path, QUICK[name])


@pytest.mark.slow
@pytest.mark.bit_identical
@pytest.mark.parametrize("name", BROAD)
def test_training_is_bit_identical_in_every_configuration(tmp_path: Path, name: str) -> None:
    try:
        assert_unnoticed(tmp_path, BROAD[name])
    except (TypeError, ValueError) as error:
        if not re.search("unexpected keyword argument|Unknown loss type", str(error)):
            raise
        pytest.skip(f"TRL {trl.__version__}: {error}")


@pytest.mark.bit_identical
@pytest.mark.faults
def test_training_is_bit_identical_when_every_diagnostic_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setting = {"model": "gpt2", "eval_steps": 2}
    without = fingerprint(tmp_path, None, setting)

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(3)  # a scorer that dies half-way has drawn and moved things
        raise RuntimeError("on purpose")

    monkeypatch.setattr(HFScorer, "_fast", broken)
    monkeypatch.setattr(HFScorer, "_plain", broken)
    callback, keep = observer()
    assert fingerprint(tmp_path, callback, setting) == without
    assert [r.status for r in keep.records] == ["failed"] * 3
    assert "on purpose" in str(keep.records[0].reason)

    for place in ("_observe", "_capture", "_merge"):
        callback, _ = observer()
        monkeypatch.setattr(callback.session, place, broken)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="collapsediag"):
            # Nothing protects the random state here, so this one must not draw: a failure outside of scoring does not.
            monkeypatch.setattr(torch, "rand", lambda *a: None)
            assert fingerprint(tmp_path, callback, setting) == without
            monkeypatch.undo()
            monkeypatch.setattr(HFScorer, "_fast", broken)
            monkeypatch.setattr(HFScorer, "_plain", broken)
        assert "training goes on: RuntimeError: on purpose" in caplog.text


@pytest.mark.bit_identical
def test_the_comparison_would_see_a_scorer_that_disturbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: without the guard around scoring each of these is seen."""
    import collapsediag.scoring.hf as hf

    @contextmanager
    def draws(model: Any) -> Any:
        with torch.no_grad():
            yield

    @contextmanager
    def stays_in_eval(model: Any) -> Any:
        model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            yield

    @contextmanager
    def goes_back_to_train(model: Any) -> Any:
        model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            yield
        model.train()  # whatever it was before; an evaluation then goes on with dropout

    evaluated = {"model": "gpt2", "max_steps": 2, "eval_steps": 1}
    for guard, changed, setting in (
        (draws, "random", {"model": "gpt2", "max_steps": 2}),
        (stays_in_eval, "modes", {"model": "gpt2", "max_steps": 2}),
        (goes_back_to_train, "log", evaluated),
    ):
        monkeypatch.undo()
        without = fingerprint(tmp_path, None, setting)
        monkeypatch.setattr(hf, "undisturbed", guard)
        callback, keep = observer()
        observed = fingerprint(tmp_path, callback, setting)
        assert any(record.matrices for record in keep.records)
        assert observed[changed] != without[changed]


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


# -- state -----------------------------------------------------------------------------------------------------------


def numbers(records: list[Record]) -> list[tuple[int, dict[str, float]]]:
    return [(r.step, {k: v for k, v in r.values.items() if "timing" not in k}) for r in records]


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, restore: bool) -> None:
    setting = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3, "eval_steps": 2}
    whole, keep = observer(every=3, context_bank=4)
    trainer = tiny.trainer("grpo", tmp_path, [whole], **setting)
    trainer.train()
    stored = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert stored["stateful_callbacks"]["collapsediag"]["args"] == {}

    second, keep_second = observer(every=3, context_bank=4)
    resumed = tiny.trainer("grpo", tmp_path, [second], **setting, restore_callback_states_from_checkpoint=restore)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert numbers(keep_second.records) == numbers(keep.records)[2:]
    assert second.session.state_dict()["eval"] == whole.session.state_dict()["eval"]
    assert second.monitor.state_dict() == whole.monitor.state_dict()

    def ours(run: Any) -> list[Any]:
        entries = [(i, *item) for i, row in enumerate(run.state.log_history) for item in row.items()]
        return sorted(e for e in entries if "collapse" in e[1] and "timing" not in e[1])

    assert ours(resumed) == ours(trainer)


def test_observed_and_unobserved_runs_continue_each_other(tmp_path: Path) -> None:
    setting = {"save_strategy": "steps", "save_steps": 1}
    tiny.trainer("grpo", tmp_path / "a", [], max_steps=1, **setting).train()
    callback, keep = observer()
    trainer = tiny.trainer("grpo", tmp_path / "a", [callback], max_steps=2, **setting)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert [(r.step, KEY + "n_traces" in r.values) for r in keep.records] == [(1, True)]
    unobserved = tiny.trainer("grpo", tmp_path / "a", [], max_steps=3, **setting)
    unobserved.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert unobserved.state.global_step == 3


@pytest.mark.fault("a checkpoint holds a state that cannot be read", "said, and the run goes on with fresh averages")
@pytest.mark.faults
def test_a_state_that_cannot_be_read_is_said_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, _ = observer()
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=1)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        saved = {"collapsediag": {"attributes": {"train": {"version": 9}}}}
        callback.session.begin(SimpleNamespace(stateful_callbacks=saved))
    assert "moving averages begin anew" in caplog.text
    trainer.train()


# -- attaching -------------------------------------------------------------------------------------------------------


def test_attach_refuses_a_second_and_detach_leaves_nothing(tmp_path: Path) -> None:
    trainer = tiny.trainer("grpo", tmp_path, [], max_steps=1)
    before, callbacks = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    callback = attach(trainer, every=1, reasoning="completion")
    with pytest.raises(SettingsError, match="attached already"):
        attach(trainer)
    with pytest.raises(SettingsError, match="attached already"):
        tiny.trainer("grpo", tmp_path, [CollapseCallback(), CollapseCallback()])
    trainer.train()
    assert callback.monitor.last_step == 0
    callback.detach()
    assert set(vars(trainer)) - before <= {"_memory_tracker", "optimizer", "lr_scheduler"} | set(vars(trainer)) - {
        "log", "_calculate_rewards", "_generate_and_score_completions", "collapsediag",
    }  # fmt: skip
    assert not {"log", "_calculate_rewards", "_generate_and_score_completions", "collapsediag"} & set(vars(trainer))
    assert trainer.callback_handler.callbacks == callbacks
    attach(trainer).detach()


def test_the_trainer_and_its_model_can_be_freed(tmp_path: Path) -> None:
    callback, _ = observer()
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=1)
    trainer.train()
    alive, model = weakref.ref(trainer), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert alive() is None
    assert model() is None


def test_no_tensor_is_kept_and_nothing_grows(tmp_path: Path) -> None:
    callback, _ = observer(eval_sinks=[])
    counts: list[int] = []
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=4)
    inner = callback.session._observe

    def counted(inputs: Any, output: Any) -> None:
        gc.collect()
        before = sum(torch.is_tensor(o) for o in gc.get_objects())
        inner(inputs, output)
        gc.collect()
        counts.append(sum(torch.is_tensor(o) for o in gc.get_objects()) - before)

    callback.session._observe = counted  # type: ignore[method-assign]
    trainer.train()
    assert counts[1:] == [0, 0, 0]


def test_training_twice_goes_on(tmp_path: Path) -> None:
    callback, keep = observer()
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=1)
    trainer.train()
    trainer.train()
    assert [r.step for r in keep.records] == [0, 0]


def test_a_trainer_without_these_methods_is_refused_with_what_to_do(tmp_path: Path) -> None:
    import transformers

    tok = tiny.tokenizer()
    with pytest.raises(
        SettingsError, match=r"Trainer has no _generate_and_score_completions.*RolloutCallback.*observe"
    ):
        transformers.Trainer(
            model=tiny.gpt2(tok),
            args=transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True),
            callbacks=[CollapseCallback()],
        )
    with pytest.raises(SettingsError, match=r"no transformers\.Trainer"):
        CollapseCallback().on_init_end(None, None, None)
    with pytest.raises(TypeError, match="evry"):
        CollapseCallback(evry=3)


@pytest.mark.faults
def test_on_error_raise_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ScoringError("on purpose")

    monkeypatch.setattr(HFScorer, "_fast", broken)
    monkeypatch.setattr(HFScorer, "_plain", broken)
    callback, _ = observer(on_error="raise")
    with pytest.raises(ScoringError, match="on purpose"):
        tiny.trainer("grpo", tmp_path, [callback], max_steps=1).train()
