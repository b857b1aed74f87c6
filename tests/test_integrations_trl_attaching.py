"""The TRL callback over checkpoints, twice, late, detached, and on trainers that it cannot observe."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
trl = import_or_skip("trl")
import_or_skip("datasets")

from collapsediag.errors import ScoringError, SettingsError  # noqa: E402
from collapsediag.integrations.trl_callback import CollapseCallback, attach  # noqa: E402
from collapsediag.record import Record  # noqa: E402
from collapsediag.scoring.hf import HFScorer  # noqa: E402

from . import trl_tiny as tiny  # noqa: E402
from .test_integrations_trl import KEY, _one_thread, observer  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore")

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
    with pytest.raises(TypeError, match=r"CollapseCallback\(\) has no argument 'evry'; did you mean every="):
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
