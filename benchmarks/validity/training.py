"""One run of the study: train, score, and let the policy answer fixed prompts, all into one run folder.

Legend: S scored steps, E evaluation prompts with one output each, T output tokens.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import collapsediag as cd
from benchmarks.validity.runs import SCORED_EVERY, StudyRun
from collapsediag.demo import DemoTraining, task
from collapsediag.demo.policy import new_policy, sample, warm_up
from collapsediag.record import Provenance
from collapsediag.sinks import JsonlSink
from collapsediag.whole_files import replacing

IntArray = NDArray[np.int64]
N_EVALUATION = 96
ANSWERS_FILE = "answers.npz"


def train(run: StudyRun, out: Path) -> None:
    """Train one run into `out/NAME`; nothing is done where it is finished, and begun anew where it is not."""
    folder = out / run.name
    if (folder / ANSWERS_FILE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    training = DemoTraining(run.settings, policy=_warmed_up(run.settings.seed, run.settings.warm_up_steps, out))
    prompts = evaluation_prompts(run.settings.seed)
    monitor = cd.Monitor(
        cd.HFScorer(training.policy),
        every=SCORED_EVERY,
        tokenizer=training.tokenizer,
        reasoning="think",
        sinks=[JsonlSink(folder, provenance=Provenance.collect(settings=dataclasses.asdict(run.settings)))],
        seed=run.settings.seed,
        traces_kept=0,
        on_error="raise",
    )
    steps, outputs = [], []
    with monitor:
        for step, batch in training.steps(every=SCORED_EVERY):
            monitor.observe(step, batch)
            steps.append(step)
            outputs.append(_answers(training.policy, prompts, run.settings.seed, step))
    _save(folder / ANSWERS_FILE, np.array(steps), np.array([prompt.shown for prompt in prompts]), outputs)


def evaluation_prompts(seed: int) -> list[task.Prompt]:
    """Prompts that no update is made from, the same at every step of a run."""
    return task.draw_prompts(np.random.default_rng([seed, 11]), N_EVALUATION)


def _answers(policy: Any, prompts: list[task.Prompt], seed: int, step: int) -> IntArray:
    """One output for each prompt, [E, T], padded with the end token."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    found = sample(policy, torch.tensor([prompt.ids for prompt in prompts]), generator).numpy()
    padded = np.full((len(prompts), task.MAX_OUTPUT), task.IDS[task.EOS])
    padded[:, : found.shape[1]] = found
    return padded


def _save(file: Path, steps_S: IntArray, shown_E3: IntArray, outputs_SET: list[IntArray]) -> None:
    """Last of all files of a run, and in one piece: a run that has it is finished."""
    with replacing(file) as part, part.open("wb") as stream:
        np.savez_compressed(stream, steps=steps_S, shown=shown_E3, outputs=np.array(outputs_SET, dtype=np.int16))


def _warmed_up(seed: int, steps: int, out: Path) -> Any:
    """The start that all runs of a seed share, kept as a file: warming up takes as long as thirty steps."""
    file = out / "starts" / f"{seed}-{steps}.pt"
    policy = new_policy(seed)
    if file.exists():
        policy.load_state_dict(torch.load(file, weights_only=True))
        return policy
    warm_up(policy, steps=steps, seed=seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as part:  # two workers may make the same start at once
        torch.save(policy.state_dict(), part)
    return policy
