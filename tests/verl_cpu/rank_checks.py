"""A real RayWorkerGroup of two ranks: odd numbers of pairs, and a call that must not be sent.

python rank_checks.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import ray

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.init(
        num_gpus=2,
        num_cpus=8,
        include_dashboard=False,
        _temp_dir=str(folder / "ray"),
        object_store_memory=100_000_000,
        log_to_driver=False,
    )
    from engine_checks import config_of
    from oracle import crossed, furthest, plain_forward, some_pairs
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from collapsediag.errors import ScoringError
    from collapsediag.integrations.verl.inside import InsideScorer
    from collapsediag.integrations.verl.scorer import Limits, WorkerScorer, ranks_of, score_tensordict

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    config = config_of(folder, "fsdp2")
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=True, max_colocate_count=1, name_prefix="cd"),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor"
        ),
        device_name="cpu",
    )
    group.init_model()
    pairs = some_pairs(folder)
    limits = Limits(temperature=0.7, row_tokens=64, micro_batch_tokens=64)
    scorer = WorkerScorer(group, score_tensordict, limits, call_tokens=4096)
    expected = plain_forward(folder, pairs, 0.7)
    said = {"ranks": ranks_of(group), "pairs": len(pairs)}
    said["largest difference"] = furthest(scorer._log_probs(pairs), expected)
    try:
        WorkerScorer(group, score_tensordict, dataclasses.replace(limits, row_tokens=16), call_tokens=4096)._log_probs(
            pairs
        )
    except ScoringError as error:
        said["refused"] = str(error)
    said["after it"] = furthest(scorer._log_probs(pairs), expected)
    cross, sums = crossed(pairs, expected)
    try:
        InsideScorer(group, dataclasses.replace(limits, temperature=-1.0)).score(cross)
    except ScoringError as error:
        said["failed inside"] = str(error)
    inside = InsideScorer(group, limits).score(cross).logp_NP
    said["inside"] = float(np.abs(inside - sums).max())
    said["after all"] = furthest(scorer._log_probs(pairs), expected)
    print("RESULT " + json.dumps(said))
