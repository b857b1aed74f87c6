"""Whole GRPO runs: one whose policy collapses, which the callback must see, and one of a pretrained model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
trl = import_or_skip("trl")
datasets = import_or_skip("datasets")

import collapsediag as cd  # noqa: E402
from collapsediag.cli.demo_show import one_thread  # noqa: E402
from collapsediag.demo import task  # noqa: E402
from collapsediag.demo.policy import new_policy, warm_up  # noqa: E402
from collapsediag.integrations.trl_callback import CollapseCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "collapse_first_turn_sample/"


def word_tokenizer() -> Any:
    """The demo's words as a tokenizer that trainers take."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(dict(task.IDS), unk_token=task.EOS))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.Metaspace(" ")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=task.EOS, eos_token=task.EOS, unk_token=task.EOS, padding_side="left"
    )


def door_reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The demo's: almost all for a door that is hardly ever found, a little for the format."""
    found = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        parsed = task.parse(ids)
        known = task.Prompt((0, 0, 0), tuple(task.IDS[word] for word in prompt.split()))
        found.append(0.9 * task.solves_hard(parsed, known) + 0.1 * parsed.valid)
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def collapsing_trainer(out: Path, callback: Any, steps: int) -> Any:
    """16 prompts of 16 completions a step, and four times the demo's entropy bonus, which is quicker and surer.

    At the demo's own bonus, TRL needs 100 steps and may end with one trace for all prompts.
    """
    rng = np.random.default_rng(2)
    prompts = [" ".join(task.WORDS[i] for i in p.ids) for _ in range(steps) for p in task.draw_prompts(rng, 16)]
    policy = new_policy(0)
    warm_up(policy, steps=400, seed=0)
    settings = {
        "output_dir": str(out), "max_steps": steps, "num_generations": 16, "per_device_train_batch_size": 256,
        "max_completion_length": task.MAX_OUTPUT, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "entropy_coef": 0.02, "beta": 0.0, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 5, "log_level": "error",
    }  # fmt: skip
    return trl.GRPOTrainer(
        model=policy,
        reward_funcs=door_reward,
        args=trl.GRPOConfig(**settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=word_tokenizer(),
        callbacks=[callback],
    )


@pytest.mark.slow
def test_the_callback_sees_a_policy_collapse_that_trl_trains(tmp_path: Path) -> None:
    if not hasattr(trl.GRPOConfig, "entropy_coef"):
        pytest.skip("this TRL pays no entropy bonus")
    callback = CollapseCallback(every=5, sinks=[cd.JsonlSink(tmp_path / "run")], pairs=cd.PairSettings(max_traces=64))
    trainer = collapsing_trainer(tmp_path, callback, steps=60)
    trainer.train()
    callback.close()
    records = list(cd.read_records(tmp_path / "run"))
    assert [r.status for r in records] == ["ok"] * 60
    accuracy = [r.values[KEY + "retrieval_accuracy"] for r in records if KEY + "retrieval_accuracy" in r.values]
    chance = records[-5].values[KEY + "retrieval_chance_level"]
    assert len(accuracy) == 12
    assert accuracy[0] > 0.9
    # Four times 64 traces, none better than drawn at random: more than this are right once in 10,000 times.
    assert np.mean(accuracy[-4:]) <= chance + 3.7 * np.sqrt(chance * (1 - chance) / 256), accuracy
    verdict = cd.judge(records)
    assert verdict.regime == "template collapse", str(verdict)
    # What is watched without us looks healthy.
    assert records[-1].values["format/valid_fraction"] > 0.9
    assert records[-1].values["reward/mean"] > 0.9 * records[0].values["reward/mean"]
    entropy = [row["entropy"] for row in trainer.state.log_history if "entropy" in row]
    assert entropy[-1] > 0.7 * entropy[0]
    logged = [row[KEY + "retrieval_accuracy"] for row in trainer.state.log_history if KEY + "retrieval_accuracy" in row]
    np.testing.assert_allclose(logged, accuracy)


@pytest.mark.slow
@pytest.mark.pretrained
def test_a_pretrained_model_is_observed_while_trl_trains_it(tmp_path: Path, smollm2_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(smollm2_gguf.parent), "gguf_file": smollm2_gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Unpacked on loading, but the model goes on calling itself quantized, and trainers refuse it.
    model.is_quantized, model.hf_quantizer = False, None
    model.config.__dict__.pop("quantization_config", None)
    callback = CollapseCallback(every=1, reasoning="completion", sinks=[cd.JsonlSink(tmp_path / "run")])
    things = ("a lighthouse", "the number seven", "sourdough bread", "a chess opening", "the sea", "a violin")
    rows = [[{"role": "user", "content": f"Write one {size} sentence about {thing}."}] for thing in things
            for size in ("short", "long")]  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(done[0]["content"]))) for done in completions],
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), max_steps=3, num_generations=4, per_device_train_batch_size=8,
            steps_per_generation=2, max_completion_length=24, learning_rate=1e-6, report_to=[], save_strategy="no",
            use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, logging_steps=1,
            log_level="error",
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": rows}),
        processing_class=AutoTokenizer.from_pretrained(**source),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    callback.close()
    records = list(cd.read_records(tmp_path / "run"))
    # One generation batch serves two steps.
    assert [(r.step, r.status) for r in records] == [(0, "ok"), (2, "ok")]
    for record in records:
        assert record.values[KEY + "n_traces"] == 16.0
        assert record.values[KEY + "n_contexts"] == 4.0
        # A sentence about bread fits the prompt about bread; chance is a quarter.
        assert record.values[KEY + "retrieval_accuracy"] > 0.6
        assert record.values["collapse/own_logp_difference"] < 1e-5
