"""Real veRL workers in one process: do they score what a plain forward scores, and does measuring change training?

    python engine_checks.py FOLDER CHECK STRATEGY [OVERRIDE ...]

prints one JSON object. The folder is made by tiny_verl.make; the environment is tiny_verl.environment.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

import numpy as np
import tiny_verl
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from oracle import furthest, plain_forward, some_pairs
from transformers import AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.tracking import Tracking
from verl.workers.engine_workers import ActorRolloutRefWorker

import collapsediag.integrations.verl.hook as hook_module
import collapsediag.integrations.verl.scorer as scorer_module
import collapsediag.monitor as monitor_module
from collapsediag.errors import SettingsError
from collapsediag.integrations.verl import attach
from collapsediag.integrations.verl.scorer import Limits, WorkerScorer, score_tensordict
from collapsediag.run_folder import read_records
from collapsediag.training.log_window import LogWindow


def config_of(folder: Path, strategy: str, *overrides: str):
    directory = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    with initialize_config_dir(config_dir=directory, version_base=None):
        return compose("ppo_trainer", overrides=tiny_verl.worker_overrides(folder, strategy, *overrides))


class Group:
    """What RayWorkerGroup does for one worker."""

    world_size = 1

    def __init__(self, worker) -> None:
        self.worker = worker
        self._dispatch_info = {"actor": [0]}
        self.calls = 0

    def compute_log_prob(self, data):
        self.calls += 1
        return self.worker.compute_log_prob(data)

    def execute_with_func_generator(self, function, data):
        self.calls += 1
        return self.worker.execute_with_func_generator(function, data)

    def update_actor(self, data):
        return self.worker.update_actor(data)


def worker_of(config):
    torch.manual_seed(0)
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def agreement(folder: Path, strategy: str, *overrides: str) -> dict:
    """Largest difference to the plain forward, over temperatures and micro-batches; LoRA with a perturbed adapter."""
    worker = worker_of(config_of(folder, strategy, *overrides))
    group, pairs = Group(worker), some_pairs(folder)
    said = {"engine": type(worker.actor.engine).__name__}
    for temperature in (1.0, 0.7):
        expected = plain_forward(folder, pairs, temperature)
        for micro in (64, 4096):
            limits = Limits(temperature=temperature, row_tokens=64, micro_batch_tokens=micro)
            scorer = WorkerScorer(group, score_tensordict, limits, call_tokens=4096)
            said[f"T={temperature} micro={micro}"] = furthest(scorer._log_probs(pairs), expected)
    if any("lora_rank" in override for override in overrides):
        with torch.no_grad():
            for name, parameter in worker.actor.engine.module.named_parameters():
                if "lora_B" in name:
                    (parameter.to_local() if hasattr(parameter, "to_local") else parameter).normal_(0, 0.3)
        said["moved by the adapter"] = furthest(scorer._log_probs(pairs), expected)
    return said


def training_batch(trainer, step: int, draw):
    prompt_length, response_length, n, tokenizer = 64, 24, 16, trainer.tokenizer
    temperature = trainer.config.actor_rollout_ref.rollout.temperature
    ids = torch.full((n, prompt_length + response_length), tokenizer.pad_token_id)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(n, response_length, dtype=torch.long)
    for i in range(n):
        prompt = torch.tensor(tokenizer.encode(f"what is {step * 10 + i // 4}+{i // 4}?<think>"))
        length = 6 + int(torch.randint(0, response_length - 6, (1,), generator=draw))
        ids[i, prompt_length - len(prompt) : prompt_length] = prompt
        ids[i, prompt_length : prompt_length + length] = torch.randint(4, len(tokenizer), (length,), generator=draw)
        attention[i, prompt_length - len(prompt) : prompt_length + length] = 1
        mask[i, :length] = 1
        if i % 3 == 0:
            mask[i, 2:4] = 0  # what a tool said
    scores = torch.zeros(n, response_length)
    scores[:, 0] = torch.rand(n, generator=draw)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "prompts": ids[:, :prompt_length].clone(),
            "responses": ids[:, prompt_length:].clone(),
            "response_mask": mask,
            "token_level_scores": scores,
            "advantages": (scores.sum(-1, keepdim=True) - 0.5) * mask,
        },
        non_tensors={"uid": np.array([f"u{step}_{i // 4}" for i in range(n)], dtype=object)},
        meta_info={"temperature": temperature, "global_token_num": attention.sum(-1).tolist()},
    )


def snapshot(batch):
    tensors = {name: value.clone() for name, value in batch.batch.items()}
    return torch.get_rng_state().clone(), tensors, dict(batch.meta_info), sorted(batch.non_tensor_batch)


def unchanged(before, batch) -> bool:
    state, tensors, meta, names = before
    return (
        torch.equal(state, torch.get_rng_state())
        and set(tensors) == set(batch.batch.keys())
        and all(torch.equal(value, batch.batch[name]) for name, value in tensors.items())
        and meta == dict(batch.meta_info)
        and names == sorted(batch.non_tensor_batch)
    )


def digest(worker) -> str:
    state = hashlib.sha256()

    def add(value) -> None:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        state.update(value.detach().contiguous().numpy().tobytes() if torch.is_tensor(value) else repr(value).encode())

    for name, parameter in sorted(worker.actor.engine.module.named_parameters()):
        state.update(name.encode())
        add(parameter.detach())
    for moments in worker.actor.engine.optimizer.state.values():
        for name in sorted(moments):
            add(moments[name])
    return state.hexdigest()


def boom(*args, **kwargs):
    raise RuntimeError("injected")


class BrokenSink:
    write = close = boom


# Where a failure is injected, one a step: (object and attribute that fail, the metric that counts it).
FAULTS = {
    "reading": (hook_module, "read_rows", "collapse/failed_reading_the_batch"),
    "rollouts": (hook_module, "batch_of", "collapse/failed_reading_the_batch"),
    "workers": (WorkerScorer, "contract", "collapse/failed_measuring"),
    "plan": (scorer_module, "check_rows", "collapse/failed_measuring"),
    "metrics": (monitor_module, "matrix_metrics", "collapse/failed_measuring"),
    "rollout metrics": (monitor_module, "rollout_report", "collapse/failed_measuring"),
    "dump": (hook_module, "dump", "collapse/failed_dumping_rollouts"),
    "around": (hook_module, "response_limit", "collapse/failed_reading_the_batch"),
    "logging": (LogWindow, "merge_into", "collapse/failed_logging"),
}


def faults(folder: Path, strategy: str, *overrides: str) -> dict:
    """One injected failure a step, in every stage; then the same updates without diagnostics."""
    config = config_of(folder, strategy, *overrides)
    said: dict = {"named": {}}
    for hooked in (True, False):
        worker = worker_of(config)
        trainer = trainer_of(folder, config, worker)
        if hooked:
            sink = BrokenSink()
            hook = attach(trainer, every=1, reasoning="completion", out=str(folder / "faulty"), dump=True, sinks=[sink])
        draw = torch.Generator().manual_seed(1)
        for step, (stage, (where, name, metric)) in enumerate(FAULTS.items()):
            batch = with_old_log_probs(trainer, training_batch(trainer, step, draw))
            trainer.global_steps = step + 1
            sane = vars(where).get(name)
            if hooked:
                calls = trainer.actor_rollout_wg.calls
                setattr(where, name, boom)
                if stage == "workers":
                    hook.monitor.scorer.contract = boom
            trainer._update_actor(batch)
            if hooked:
                hook.monitor._failures_in_a_row = 0  # three in a row would switch scoring off, and hide the next stage
                line = {"training/global_step": step + 1}
                hook.merge_into(line)
                if stage == "workers":
                    hook.monitor.scorer.contract = score_tensordict
                    del WorkerScorer.contract
                else:
                    setattr(where, name, sane)
                said["named"][stage] = line.get(metric)
                if stage == "plan":
                    said["calls of an invalid plan"] = trainer.actor_rollout_wg.calls - calls
        said["on" if hooked else "off"] = digest(worker)
    return said


def refusals(folder: Path, strategy: str, *overrides: str) -> dict:
    """What is logged, and how often the workers were asked, where scoring is refused: one update each."""
    config = config_of(folder, strategy, *overrides)
    worker = worker_of(config)
    said = {}
    for case in ("images", "router_replay", "switched_off"):
        trainer = trainer_of(folder, copy.deepcopy(config), worker)
        with open_dict(trainer.config):
            if case == "router_replay":
                trainer.config.actor_rollout_ref.actor.megatron = {"router_replay": {"mode": "R3"}}
        hook = attach(trainer, every=1, reasoning="completion", score=case != "switched_off")
        batch = training_batch(trainer, 0, torch.Generator().manual_seed(1))
        if case == "images":
            images = [{"pixel_values": torch.zeros(1)} if i == 3 else {} for i in range(len(batch))]
            batch.non_tensor_batch["multi_modal_inputs"] = np.array(images, dtype=object)
        trainer.global_steps = 1
        hook._observe(batch)
        line: dict = {}
        hook.merge_into(line)
        said[case] = {
            "refused": line.get(f"collapse/not_scored_{case}"),
            "reward": line.get("collapse/reward/mean"),
            "scored": [name for name in line if name.startswith("collapse_")],
            "calls": trainer.actor_rollout_wg.calls,
        }
        hook.detach()
        said[case]["detached"] = not {"_update_actor", "collapsediag"} & set(vars(trainer))
    said["log restored"] = not hasattr(Tracking.log, "collapsediag_wrapper")
    return said


def resume(folder: Path, strategy: str, *overrides: str) -> dict:
    """Moving averages of a run that was stopped after two of three steps, and of one that was not."""
    config = config_of(folder, strategy, *overrides)
    worker = worker_of(config)
    said = {}
    with open_dict(config):
        config.trainer.resume_mode = "auto"
    for case, parts in (("whole", [[1, 2, 3]]), ("stopped", [[1, 2], [3]])):
        for steps in parts:
            trainer = trainer_of(folder, config, worker)
            hook = attach(trainer, every=1, reasoning="completion", out=str(folder / case))
            for step in steps:
                draw = torch.Generator().manual_seed(step)
                trainer.global_steps = step
                hook._observe(with_old_log_probs(trainer, training_batch(trainer, step, draw)))
            hook.close()
        said[case] = [
            {name: v for name, v in record.values.items() if "timing" not in name}
            for record in read_records(folder / case)
        ]
    with open_dict(config):
        config.trainer.resume_mode = "disable"
    try:
        attach(trainer_of(folder, config, worker), out=str(folder / "whole"))
    except SettingsError as error:
        said["refused"] = str(error)
    return said


def trainer_of(folder: Path, config, worker):
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config, trainer.actor_rollout_wg, trainer.global_steps = config, Group(worker), 0
    trainer.tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    return trainer


def with_old_log_probs(trainer, batch):
    old, _ = RayPPOTrainer._compute_old_log_prob(trainer, batch)
    old.batch.pop("entropys")
    return batch.union(old)


def train(folder: Path, strategy: str, overrides, hooked: bool, share_prefixes: bool = False) -> dict:
    """Three updates of the real trainer's methods and the real engine."""
    config = config_of(folder, strategy, *overrides)
    worker = worker_of(config)
    trainer = trainer_of(folder, config, worker)
    said: dict = {"own": [], "untouched": True}
    if hooked:
        hook = attach(trainer, every=1, reasoning="completion", max_contexts=4, share_prefixes=share_prefixes)
        observe = hook._observe

        def watched(batch):
            before = snapshot(batch)
            observe(batch)
            said["untouched"] &= unchanged(before, batch)

        hook._observe = watched
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    for step in range(3):
        batch = with_old_log_probs(trainer, training_batch(trainer, step, draw))
        trainer.global_steps = step + 1
        metrics = trainer._update_actor(batch).meta_info["metrics"]
        if hooked:
            line: dict = {"training/global_step": step + 1}
            hook.merge_into(line)
            said["own"].append(line.get("collapse/own_logp_difference"))
            said["mi"] = line.get("collapse_first_turn_sample/mi_seq_estimate")
            said["failed"] = [name for name in line if "failed" in name or "failures" in name]
    grad_norm = metrics["actor/grad_norm"]
    return said | {"digest": digest(worker), "grad_norm": repr(grad_norm), "calls": trainer.actor_rollout_wg.calls}


def bitwise(folder: Path, strategy: str, *overrides: str) -> dict:
    on, off = train(folder, strategy, overrides, True), train(folder, strategy, overrides, False)
    return {"on": on, "off": off, "inside": train(folder, strategy, overrides, True, share_prefixes=True)}


if __name__ == "__main__":
    where, check, *rest = sys.argv[1:]
    os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29517")
    checks = {"agreement": agreement, "bitwise": bitwise, "faults": faults, "refusals": refusals, "resume": resume}
    print("RESULT " + json.dumps(checks[check](Path(where), *rest)))
