"""The TRL callback against what reasoning, rewards, evaluations and logs look like in the field."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
trl = import_or_skip("trl")
datasets = import_or_skip("datasets")

from collapsediag.integrations.trl_callback import attach  # noqa: E402

from . import trl_tiny as tiny  # noqa: E402
from .keep import Keep  # noqa: E402
from .test_integrations_trl import KEY, batches_of, observer  # noqa: E402
from .wandb_offline import wait_closed  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- what reasoning looks like ---------------------------------------------------------------------------------------

ONE_SHOT = "1+1? <think>two</think>2 "
# End of the prompt, completion, and the trace in it or why there is none.
SHAPES = [
    ("9?<think>", "opened by the prompt</think>3", "opened by the prompt"),
    ("8?", "<think>opened here</think>4", "opened here"),
    ("7?<think>", "one</think>and <think>two</think>5", "one"),
    ("6?<think>", "cut before its end", "unclosed_reasoning"),
    ("5?<think>", "</think>6", "empty_reasoning"),
    ("4?<think>\n\n</think>\n\n", "told not to think", "no_reasoning_tag"),
    ("3?", "does not think", "no_reasoning_tag"),
    ("2?<think>", "last</think>7", "last"),
]


def test_every_shape_of_reasoning_is_found_or_counted(tmp_path: Path) -> None:
    """Also behind an example in the prompt that holds a closed block, and with prompts that differ within a group."""
    tiny.skip_unless_taken("rollout_func")

    def canned(prompts: Any, trainer: Any) -> dict[str, Any]:
        tok = trainer.processing_class
        ids = [[tok(ONE_SHOT + end)["input_ids"], tok(done)["input_ids"]] for end, done, _ in SHAPES]
        return {
            "prompt_ids": [prompt for prompt, _ in ids],
            "completion_ids": [done for _, done in ids],
            "logprobs": [[-1.0] * len(done) for _, done in ids],
        }

    callback, keep = observer(reasoning="think", on_error="raise")
    batches = batches_of(callback)
    tiny.trainer("grpo", tmp_path, [callback], max_steps=1, max_completion_length=40, rollout_func=canned).train()
    record = keep.records[0]
    assert [r.group for r in batches[0]] == [0, 0, 0, 0, 1, 1, 1, 1]
    traces = {t.trace: t.own for t in record.traces}
    found = [shape for _, _, shape in SHAPES if "_" not in shape]
    assert sorted(traces) == sorted(found)
    # Contexts are the rows' own prompts: one column for each.
    assert len(set(traces.values())) == record.values[KEY + "n_contexts"] == len(found)
    counted = {f"first_turn/{why}": sum(shape == why for *_, shape in SHAPES) for *_, why in SHAPES if "_" in why}
    assert {k: v for k, v in record.dropped.items() if k in counted} == counted


def room(reset: int) -> str:
    return f" in room {reset}"


class Maze:
    """Each rollout of a group is put into another room, so that prompts differ within the group."""

    resets = 0

    def reset(self, **_: Any) -> str:
        type(self).resets += 1
        return room(self.resets)

    def look(self) -> str:
        """Looks around."""
        return "a wall"


def test_an_environment_gives_the_rows_of_a_group_prompts_of_their_own(tmp_path: Path) -> None:
    tiny.skip_unless_taken("environment_factory")
    tok = tiny.qwen3_tokenizer()
    callback, keep = observer(reasoning="think", on_error="raise")
    batches = batches_of(callback)
    trainer = tiny.trainer("grpo", tmp_path, [callback], tok=tok, environment_factory=Maze, conversational=True,
                           max_steps=1, max_completion_length=40)  # fmt: skip

    def canned(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return [tok(f"<think>\nso {i}</think>\n\n{i}<|im_end|>")["input_ids"] for i in range(len(prompt_ids))], None

    trainer._generate_single_turn = canned
    trainer.train()
    prompts = [tok.decode(r.turns[0].context_ids) for r in batches[0]]
    assert all(room(Maze.resets - 7 + i) in prompt for i, prompt in enumerate(prompts))
    assert [r.group for r in batches[0]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert keep.records[0].values[KEY + "n_contexts"] == 8.0
    assert sorted(t.own for t in keep.records[0].traces) == list(range(8))


def test_reasoning_that_trl_took_out_of_the_text_is_still_scored(tmp_path: Path) -> None:
    """With a response template, messages hold it apart from `content`; token ids hold everything."""
    tok = tiny.qwen3_tokenizer()
    from trl import chat_template_utils

    tok = chat_template_utils.add_response_schema(tok)
    seen: list[Any] = []

    def reward(completions: Any, **_: Any) -> list[float]:
        seen.extend(message for done in completions for message in done)
        return [float(i) for i in range(len(completions))]

    callback, keep = observer(reasoning="think", on_error="raise")
    trainer = tiny.trainer("grpo", tmp_path, [callback], tok=tok, reward_funcs=[reward], conversational=True,
                           max_steps=1, max_completion_length=40)  # fmt: skip

    def canned(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return [tok(f"<think>\nso {i}</think>\n\n{i}<|im_end|>")["input_ids"] for i in range(len(prompt_ids))], None

    trainer._generate_single_turn = canned
    trainer.train()
    if not any("reasoning_content" in message for message in seen):
        pytest.skip("this TRL does not parse reasoning")
    assert not any("so" in message["content"] for message in seen)
    assert {t.trace for t in keep.records[0].traces} == {f"\nso {i}" for i in range(8)}


def test_prompts_with_images_are_measured_but_not_scored(tmp_path: Path) -> None:
    trainer = tiny.trainer("grpo", tmp_path, [], max_steps=1)
    generate, keep = trainer._generate_and_score_completions, Keep()
    trainer._generate_and_score_completions = lambda inputs: {**generate(inputs), "num_images": [1] * 8}
    attach(trainer, every=1, reasoning="completion", sinks=[keep])
    observed = trainer._generate_and_score_completions

    def for_the_loss(inputs: Any) -> Any:
        output = observed(inputs)
        del output["num_images"]  # the tiny model takes none
        return output

    trainer._generate_and_score_completions = for_the_loss
    trainer.train()
    (record,) = keep.records
    assert record.status == "ok"
    assert "reward/mean" in record.values
    assert not any(name.startswith("collapse_") for name in record.values)
    assert any("prompts hold images" in note for note in record.notes)


# -- rewards and evaluations at their edges --------------------------------------------------------------------------


def reward_none(completions: Any, **_: Any) -> list[None]:
    return [None] * len(completions)


def test_a_run_without_a_single_reward_is_measured(tmp_path: Path) -> None:
    callback, keep = observer()
    batches = batches_of(callback)
    tiny.trainer("grpo", tmp_path, [callback], reward_funcs=[reward_none], max_steps=1).train()
    assert [r.reward for r in batches[0]] == [None] * 8
    (record,) = keep.records
    assert record.status == "ok"
    assert record.values["reward/n_unscored"] == 8.0
    assert "reward/mean" not in record.values
    assert record.values[KEY + "n_traces"] == 8.0


def test_evaluation_with_one_sample_a_prompt_and_a_prompt_twice(tmp_path: Path) -> None:
    if "num_generations_eval" not in inspect.signature(trl.GRPOConfig.__init__).parameters:
        pytest.skip("this TRL evaluates with as many generations as it trains with")
    keep = Keep()
    callback, _ = observer(eval_sinks=[keep])
    trainer = tiny.trainer("grpo", tmp_path, [callback], eval_steps=2, num_generations_eval=1)
    rows = trainer.eval_dataset
    trainer.eval_dataset = datasets.concatenate_datasets([rows, rows.select([1])])
    found = trainer.evaluate()
    (record,) = keep.records
    assert (record.status, record.values["n_rollouts"]) == ("ok", 4.0)
    assert found["eval_" + KEY + "n_traces"] == 4.0
    assert record.values[KEY + "n_contexts"] == 3.0
    np.testing.assert_allclose(found["eval_" + KEY + "retrieval_chance_level"], 1 / 3)


def test_a_callback_added_late_says_that_an_evaluation_went_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, _ = observer()
    trainer = tiny.trainer("grpo", tmp_path, [], eval_steps=2)
    trainer.add_callback(callback)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        first, second = trainer.evaluate(), trainer.evaluate()
    assert not any("collapse" in name for name in first)
    assert "eval_" + KEY + "n_traces" in second
    assert caplog.text.count("attach(trainer)") == 1


# -- where the numbers go --------------------------------------------------------------------------------------------


def test_the_last_steps_are_logged_without_an_evaluation_too(tmp_path: Path) -> None:
    callback, keep = observer()
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=3, logging_steps=2)
    trainer.train()
    rows = [
        (row["step"], row["collapse/reward/mean"]) for row in trainer.state.log_history if "collapse/reward/mean" in row
    ]
    first, second, last = (record.values["reward/mean"] for record in keep.records)
    assert [step for step, _ in rows] == [2, 3]
    np.testing.assert_allclose([value for _, value in rows], [(first + second) / 2, last], rtol=1e-12)


def test_wandb_has_every_number_once_in_the_trainers_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer reports to W&B itself: our numbers ride in its rows."""
    wandb = import_or_skip("wandb")
    for variable in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    for variable, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(variable, value)
    wandb.teardown()  # W&B reads the environment once a process
    callback, keep = observer(every=2)
    tiny.trainer("grpo", tmp_path, [callback], max_steps=4, eval_steps=4, report_to=["wandb"]).train()
    folder = Path(wandb.run.dir).parent
    wandb.run.finish()
    run = wait_closed(folder)
    rewards = run.column("train/global_step", "train/reward", "train/collapse/reward/mean")
    assert [step for step, *_ in rewards] == [1, 2, 3, 4]
    np.testing.assert_allclose([ours for *_, ours in rewards], [theirs for _, theirs, _ in rewards], rtol=1e-6)
    scored = [r.values[KEY + "mi_seq_estimate"] for r in keep.records if r.step % 2 == 0]
    assert run.column("train/global_step", "train/" + KEY + "mi_seq_estimate") == [(1, scored[0]), (3, scored[1])]
    assert [step for step, _ in run.column("train/global_step", "eval/" + KEY + "n_traces")] == [4]
    wandb.teardown()


# -- own scores against the trainer's --------------------------------------------------------------------------------


def test_rloo_scores_are_those_that_the_trainer_optimises(tmp_path: Path) -> None:
    """RLOO keeps the sum over a completion only, with the end token, which is no part of our traces: none ends here."""
    callback, keep = observer()
    trainer = tiny.trainer("rloo", tmp_path, [callback], max_steps=1, temperature=0.7,
                           max_completion_length=12, generation_kwargs={"min_new_tokens": 12})  # fmt: skip
    sums: list[Any] = []
    generate = trainer._generate_and_score_completions

    def watched(inputs: Any) -> Any:
        output = generate(inputs)
        sums.extend(output["old_logps"].tolist())
        return output

    trainer._generate_and_score_completions = watched
    trainer.train()
    matrix = keep.records[0].matrices["first_turn"]
    own_N = matrix.logp_NP[np.arange(matrix.n_traces), matrix.own_N]
    assert matrix.n_traces == 8
    np.testing.assert_allclose(np.sort(own_N), np.sort(sums), atol=12 * 1e-5)


def test_own_scores_under_bf16_autocast_are_the_trainers_up_to_its_noise(tmp_path: Path) -> None:
    callback, keep = observer()
    tiny.trainer("grpo", tmp_path, [callback], steps_per_generation=2, per_device_train_batch_size=4, bf16=True,
                 max_steps=1).train()  # fmt: skip
    assert 0 < keep.records[0].values["collapse/own_logp_difference"] < 1e-3


def test_what_was_learnt_of_the_model_is_kept_from_step_to_step(tmp_path: Path) -> None:
    """The model is lent for one measurement at a time, and its self-check is not due anew at each."""
    callback, keep = observer()
    checks: list[int] = []
    trainer = tiny.trainer("grpo", tmp_path, [callback], max_steps=3)
    observe = callback.monitor.observe

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = observe(*args, **kwargs)
        checks.append(len(callback.session._scorer._passed))
        return found

    callback.monitor.observe = watched  # type: ignore[method-assign]
    trainer.train()
    assert all(r.status == "ok" for r in keep.records)
    assert checks == [1, 1, 1]
    assert callback.session._scorer.model is None
    assert callback.session._scorer._passed
