"""transformers.Trainer and Lightning, given a function that makes rollouts."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip
from .keep import Keep

torch = import_or_skip("torch")
transformers = import_or_skip("transformers")
import_or_skip("accelerate")

from collapsediag.errors import MissingExtraError, SettingsError  # noqa: E402
from collapsediag.integrations.trainer_callback import RolloutCallback, lightning_callback  # noqa: E402
from collapsediag.rollouts import RolloutBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "collapse_first_turn_sample/"


def tiny_model() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    )


def sampled(step: int, model: Any) -> RolloutBatch:
    """Samples from the policy, as a user would: draws random numbers, and would notice train mode."""
    assert not model.training
    assert not torch.is_grad_enabled()
    prompts = torch.tensor([[1, 10 + p] for p in range(3) for _ in range(2)])
    done = model.generate(prompts, do_sample=True, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
    return RolloutBatch.from_lists(
        step=step,
        prompts=prompts.tolist(),
        completions=done[:, 2:].tolist(),
        rewards=[random.random() for _ in prompts],
    )


def train(out: Path, callbacks: list[Any], **changes: Any) -> tuple[Any, str]:
    torch.manual_seed(1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 50, (16, 8)).tolist()]
    settings = {"max_steps": 4, "logging_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 2, **changes}
    trainer = transformers.Trainer(
        model=tiny_model(),
        args=transformers.TrainingArguments(
            output_dir=str(out), report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **settings
        ),
        train_dataset=rows,
        data_collator=transformers.default_data_collator,
        callbacks=callbacks,
    )
    resume = changes.get("resume")
    trainer.train(resume_from_checkpoint=resume)
    weights = [value.numpy().tobytes() for value in trainer.model.state_dict().values()]
    states = (torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes())
    losses = [row.get("loss") for row in trainer.state.log_history]
    return trainer, repr((weights, states, losses))


@pytest.mark.bit_identical
def test_a_transformers_trainer_is_measured_and_does_not_notice(tmp_path: Path) -> None:
    keep = Keep()
    random.seed(0)
    _, without = train(tmp_path, [])
    random.seed(0)
    callback = RolloutCallback(sampled, every=2, sinks=[keep], reasoning="completion")
    trainer, observed = train(tmp_path, [callback], gradient_accumulation_steps=1)
    assert observed == without
    assert [r.step for r in keep.records] == [0, 2]
    assert all(r.status == "ok" and r.values[KEY + "n_contexts"] == 3.0 for r in keep.records)
    rows = {row["step"]: row for row in trainer.state.log_history if KEY + "mi_seq_estimate" in row}
    assert list(rows) == [2, 4]
    assert rows[4][KEY + "mi_seq_estimate"] == keep.records[1].values[KEY + "mi_seq_estimate"]
    assert "log" not in vars(trainer)


def test_a_resumed_trainer_goes_on(tmp_path: Path) -> None:
    whole, keep = Keep(), Keep()
    setting = {"save_strategy": "steps", "save_steps": 2}
    first = RolloutCallback(sampled, every=1, sinks=[whole], reasoning="completion")
    train(tmp_path, [first], **setting)
    second = RolloutCallback(sampled, every=1, sinks=[keep], reasoning="completion")
    trainer, _ = train_resumed(tmp_path, second, setting)
    del trainer
    assert [r.step for r in keep.records] == [2, 3]
    assert second.hook.monitor.state_dict() == first.hook.monitor.state_dict()


def train_resumed(out: Path, callback: Any, setting: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 50, (16, 8)).tolist()]
    arguments = transformers.TrainingArguments(
        output_dir=str(out), report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, max_steps=4,
        logging_steps=2, per_device_train_batch_size=2, **setting,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=tiny_model(), args=arguments, train_dataset=rows, data_collator=transformers.default_data_collator,
        callbacks=[callback],
    )  # fmt: skip
    return trainer, trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))


@pytest.mark.faults
def test_a_checkpoint_whose_state_is_of_another_release_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path, [RolloutCallback(sampled, every=1, reasoning="completion")], **setting)
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    state["stateful_callbacks"]["collapsediag_rollouts"]["attributes"]["monitor"]["version"] = 9
    file.write_text(json.dumps(state))
    keep = Keep()
    train_resumed(tmp_path, RolloutCallback(sampled, every=1, sinks=[keep], reasoning="completion"), setting)
    assert [(r.step, r.status) for r in keep.records] == [(2, "ok"), (3, "ok")]
    assert "diagnostics state cannot be used (SettingsError: monitor state of version 9 cannot be loaded" in caplog.text


@pytest.mark.faults
def test_a_function_that_raises_is_a_failed_record(tmp_path: Path) -> None:
    def broken(step: int, model: Any) -> RolloutBatch:
        raise ValueError("no prompts left")

    keep = Keep()
    _, without = train(tmp_path, [])
    _, observed = train(tmp_path, [RolloutCallback(broken, every=1, sinks=[keep])])
    assert observed == without
    assert [(r.status, r.reason) for r in keep.records] == [("failed", "ValueError: no prompts left")] * 4


def test_nothing_this_time_is_no_record(tmp_path: Path) -> None:
    keep = Keep()
    train(tmp_path, [RolloutCallback(lambda step, model: None, every=1, sinks=[keep])])
    assert keep.records == []


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"function of \(step, model\), found list"):
        RolloutCallback([])  # type: ignore[arg-type]


def test_a_missing_lightning_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(__import__("sys").modules, "lightning.pytorch", raising=False)
    monkeypatch.delitem(__import__("sys").modules, "pytorch_lightning", raising=False)
    with pytest.raises(MissingExtraError, match="pip install lightning"):
        lightning_callback(sampled)


def lightning_run(out: Path, callbacks: list[Any], seen: list[Any]) -> str:
    pl = pytest.importorskip("pytorch_lightning")  # optional also in the full run: no extra of ours brings it
    loggers = importlib.import_module("pytorch_lightning.loggers.logger")

    class Tracker(loggers.DummyLogger):
        def log_metrics(self, metrics: Any, step: int) -> None:  # type: ignore[override]
            seen.append((step, copy.copy(metrics)))

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(1)
    module = Module()
    loader = torch.utils.data.DataLoader(torch.randint(1, 50, (16, 8)), batch_size=2)
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", devices=1, accumulate_grad_batches=2, callbacks=callbacks, logger=Tracker(),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(out),
    )  # fmt: skip
    trainer.fit(module, loader)
    weights = [value.numpy().tobytes() for value in module.state_dict().values()]
    return repr((weights, torch.get_rng_state().numpy().tobytes()))


@pytest.mark.bit_identical
def test_a_lightning_trainer_is_measured_and_does_not_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep, seen = Keep(), []  # type: ignore[var-annotated]
    without = lightning_run(tmp_path, [], [])
    callback = lightning_callback(sampled, every=2, sinks=[keep], reasoning="completion")
    assert lightning_run(tmp_path, [callback], seen) == without
    assert [r.step for r in keep.records] == [0, 2]
    logged = [(step, values[KEY + "mi_seq_estimate"]) for step, values in seen if KEY + "mi_seq_estimate" in values]
    assert logged == [(r.step, r.values[KEY + "mi_seq_estimate"]) for r in keep.records]
    other = lightning_callback(sampled, every=2)
    other.load_state_dict(callback.state_dict())
    assert other.state_dict() == callback.state_dict()
    other.load_state_dict({})  # of another release: said, and training begins
    assert other.state_dict() == callback.state_dict()
    assert "diagnostics state cannot be used (KeyError: 'monitor')" in caplog.text
