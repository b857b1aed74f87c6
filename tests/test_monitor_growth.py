"""A monitor in a long run: what it holds after a thousand steps is what it held after a few."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import import_or_skip

torch = import_or_skip("torch")
transformers = import_or_skip("transformers")

import collapsediag as cd  # noqa: E402
from collapsediag.cli.demo_show import one_thread  # noqa: E402

EVERY = 5


def policy() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def rollouts(step: int, model: Any) -> tuple[cd.RolloutBatch, list[weakref.ref[Any]]]:
    """A batch as a training loop makes it, out of tensors, and weak references to these."""
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(1, 40, (3, 4), generator=generator).repeat_interleave(2, dim=0)
    outputs = torch.randint(1, 40, (6, 5), generator=generator)
    logits = model(torch.cat([prompts, outputs], dim=1)).logits  # with a graph behind it
    logprobs = logits[:, 3:-1].log_softmax(-1).gather(-1, outputs[..., None])[..., 0]
    rewards = torch.rand(6, generator=generator)
    made = [
        cd.Rollout(
            turns=(
                cd.Turn(
                    context_ids=prompts[i].numpy(),
                    output_ids=outputs[i].numpy(),
                    logprobs=logprobs[i].detach().numpy(),
                    finish_reason="length",
                ),
            ),
            group=i // 2,
            reward=float(rewards[i]),
        )
        for i in range(6)
    ]
    batch = cd.RolloutBatch(step=step, rollouts=tuple(made), max_output_tokens=5, eos_token_ids=(0,))
    return batch, [weakref.ref(t) for t in (prompts, outputs, logits, logprobs, rewards)]


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def live_tensors() -> int:
    gc.collect()
    return sum(torch.is_tensor(thing) for thing in gc.get_objects())


class Run:
    """Observes step after step; counts tensors and memory every fifty steps."""

    def __init__(self, folder: Path) -> None:
        self.model = policy()
        self.monitor = cd.Monitor(
            cd.HFScorer(self.model),
            every=EVERY,
            reasoning="completion",
            context_bank=2,
            sinks=[cd.JsonlSink(folder)],
            on_error="raise",
        )
        self.tensors: list[int] = []
        self.resident: list[int] = []

    def go(self, first: int, n: int) -> None:
        for step in range(first, first + n):
            batch, alive = rollouts(step, self.model)
            record = self.monitor.observe(step, batch)
            assert bool(record.matrices) == (step % EVERY == 0)
            del batch, record
            if step % 50 == 49:
                gc.collect()
                assert [reference() for reference in alive] == [None] * 5
                self.tensors.append(live_tensors())
                self.resident.append(resident_bytes())

    def object_counts(self) -> dict[str, int]:
        gc.collect()
        counts: dict[str, int] = {}
        for thing in gc.get_objects():
            name = f"{type(thing).__module__}.{type(thing).__qualname__}"
            counts[name] = counts.get(name, 0) + 1
        return counts


def test_nothing_is_kept_from_step_to_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with one_thread(), run.monitor:
        run.go(0, 100)
        before = run.object_counts()
        run.go(100, 100)
        after = run.object_counts()
    assert len(set(run.tensors)) == 1
    # Objects of our own, arrays, and what containers hold them: as many after 200 steps as after 100.
    ours = {name for name in {*before, *after} if name.startswith(("collapsediag.", "numpy.", "torch."))}
    assert {n: after.get(n, 0) - before.get(n, 0) for n in ours if after.get(n, 0) > before.get(n, 0)} == {}
    assert after["builtins.dict"] - before["builtins.dict"] < 50
    assert after["builtins.list"] - before["builtins.list"] < 50


@pytest.mark.slow
def test_memory_does_not_grow_over_a_thousand_steps(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with one_thread(), run.monitor:
        run.go(0, 1000)
    assert len(set(run.tensors)) == 1
    # The first steps fill caches; from then on, the slope of a straight line through the rest.
    steps, resident = np.arange(len(run.resident))[4:] * 50, np.array(run.resident[4:])
    slope = np.polyfit(steps, resident, 1)[0]
    assert slope < 1024, f"{slope:.0f} bytes a step"
