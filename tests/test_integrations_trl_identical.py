"""Training with the TRL callback is bit-identical to training without it."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
trl = import_or_skip("trl")
import_or_skip("datasets")
peft = import_or_skip("peft")

from collapsediag.integrations.trl_callback import CollapseCallback  # noqa: E402
from collapsediag.scoring.hf import HFScorer  # noqa: E402

from . import trl_tiny as tiny  # noqa: E402
from .test_integrations_trl import KEY, _one_thread, observer  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore")

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
