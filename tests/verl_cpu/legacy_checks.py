# ruff: noqa: E402  (veRL must find a device when it is imported)
"""Workers of veRL before 0.9, in one process on a CPU: do they score what a plain forward scores?

    python legacy_checks.py FOLDER engine|padded STRATEGY [TEMPERATURE]

Run with PYTHONPATH at an unpacked release. "engine": TensorDict workers (0.8, and 0.7 where told to); "padded":
DataProto workers (0.6, and 0.7 by default), which take the temperature from their own config.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"MASTER_PORT": "29519", "RAY_LOCAL_WORLD_SIZE": "1", "RAY_LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}

import torch
import torch.distributed as dist
import torch.distributed.fsdp._init_utils as fsdp_init

dist.init_process_group("gloo", rank=0, world_size=1)
fsdp_init._check_module_states_for_sync_module_states = lambda states: None
for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cpu, name, lambda *a, **k: 0)
torch.cpu.empty_cache = lambda *a, **k: None
torch.cpu.mem_get_info = lambda *a, **k: (0, 1)
torch.cpu.get_rng_state = lambda *a, **k: torch.get_rng_state()
torch.cpu.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
torch.cpu.manual_seed = torch.manual_seed

import verl
import verl.utils.device as device

device.get_nccl_backend = lambda: "gloo"
device.get_device_id = lambda: torch.device("cpu")
device.set_expandable_segments = lambda on: None

from types import SimpleNamespace

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from oracle import crossed, furthest, plain_forward, some_pairs
from transformers import AutoTokenizer

from collapsediag.integrations.verl.facts import contract_of
from collapsediag.integrations.verl.inside import InsideScorer
from collapsediag.integrations.verl.scorer import Limits, WorkerScorer


def config_of(folder: Path, strategy: str, temperature: float, implementation: str):
    directory = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    with initialize_config_dir(config_dir=directory, version_base=None):
        config = compose("ppo_trainer")
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    with open_dict(config):
        model, actor, rollout = (config.actor_rollout_ref[part] for part in ("model", "actor", "rollout"))
        model.path = str(folder / "policy")
        model.use_remove_padding = model.enable_gradient_checkpointing = False
        model.override_config = {"attn_implementation": "sdpa"}
        actor.strategy, actor.ppo_micro_batch_size_per_gpu, actor.use_torch_compile = strategy, 4, False
        actor.fsdp_config.use_torch_compile, actor.fsdp_config.model_dtype = False, "fp32"
        actor.fsdp_config.mixed_precision = fp32
        rollout.log_prob_micro_batch_size_per_gpu, rollout.temperature, rollout.n = 4, temperature, 4
        config.trainer.use_legacy_worker_impl = implementation
    return config


def main(folder: Path, kind: str, strategy: str, temperature: str = "0.7") -> dict:
    config = config_of(folder, strategy, float(temperature), "disable" if kind == "engine" else "auto")
    if kind == "engine":
        from verl.workers.engine.base import EngineRegistry
        from verl.workers.engine_workers import ActorRolloutRefWorker

        for backends in EngineRegistry._engines.values():
            for backend, devices in backends.items():
                if backend in ("fsdp", "fsdp2") and "cuda" in devices:
                    devices.setdefault("cpu", devices["cuda"])
    else:
        from verl.workers.fsdp_workers import ActorRolloutRefWorker
    # bfloat16 autocast is hard-coded before 0.8; without it float32 can be compared.
    torch.autocast = lambda *a, **k: contextlib.nullcontext()
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    contract = contract_of(SimpleNamespace(config=config, tokenizer=tokenizer))
    group = SimpleNamespace(world_size=1, _dispatch_info={"actor": [0]}, compute_log_prob=worker.compute_log_prob)
    limits = Limits(temperature=float(temperature), row_tokens=64, micro_batch_tokens=64)
    pairs = some_pairs(folder)
    found = WorkerScorer(group, contract, limits, call_tokens=4096)._log_probs(pairs)
    expected = plain_forward(folder, pairs, float(temperature))
    difference, inside = furthest(found, expected), None
    assert difference <= 1e-5, difference
    if kind == "engine":
        group.execute_with_func_generator = worker.execute_with_func_generator
        cross, sums = crossed(pairs, expected)
        inside = float(np.abs(InsideScorer(group, limits).score(cross).logp_NP - sums).max())
        assert inside <= 1e-4, inside
    return {
        "inside, of whole traces": inside,
        "verl": verl.__version__,
        "worker": ActorRolloutRefWorker.__module__,
        "contract": getattr(contract, "__name__", type(contract).__name__),
        "largest difference": difference,
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
