"""A long run, seen from outside: does memory stay flat, how large do the files get, what does an unscored step cost?

    python benchmarks/endurance.py [--steps 20000] [--every 100] [--keep 100] [--out FOLDER] [--json FILE]

A tiny model and rollouts of random tokens with rewards; `Monitor` with a run folder that keeps the matrices and traces
of so many scored steps. Memory is the resident set of the process; its slope is a least-squares line over the second
half of the run. The cost of an unscored step is `observe` without the rollout metrics, the run folder included, in wall
time and in CPU time of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

import collapsediag as cd
from collapsediag.run_folder import read_records

PAGE = resource.getpagesize()
SAMPLED = 200  # steps between two looks at the memory


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def batch_of(step: int, rng: np.random.Generator) -> cd.RolloutBatch:
    rollouts = []
    for group in range(4):
        context = [1, *rng.integers(3, 99, 12).tolist()]
        for _ in range(4):
            turn = cd.Turn(context_ids=context, output_ids=rng.integers(3, 99, 24).tolist())
            rollouts.append(cd.Rollout(turns=(turn,), group=f"{step}-{group}", reward=float(rng.random())))
    return cd.RolloutBatch(step=step, rollouts=tuple(rollouts))


def tiny_model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def measure(steps: int, every: int, keep: int, out: Path) -> dict[str, float]:
    rng = np.random.default_rng(0)
    looks, wall, cpu = [], [], []
    sink = cd.JsonlSink(out / "run", keep=keep)
    with cd.Monitor(cd.HFScorer(tiny_model()), every=every, reasoning="completion", sinks=[sink]) as monitor:
        for step in range(steps):
            batch = batch_of(step, rng)
            began, began_cpu = time.perf_counter(), time.process_time()
            record = monitor.observe(step, batch)
            took, took_cpu = time.perf_counter() - began, time.process_time() - began_cpu
            assert record.status == "ok", record.reason
            if not record.matrices:
                metrics = record.values["timing_s/collapse_rollout_metrics"]
                wall.append(took - metrics)
                cpu.append(took_cpu - min(metrics, took_cpu))
            if step % SAMPLED == 0:
                looks.append((step, resident_mb()))
    return {"steps": steps, "scored": steps - len(wall), **memory(looks), **cost(wall, cpu), **sizes(out, steps)}


def memory(looks: list[tuple[int, float]]) -> dict[str, float]:
    late = np.array(looks[len(looks) // 2 :])
    return {
        "rss_start_mb": looks[min(5, len(looks) - 1)][1],
        "rss_end_mb": looks[-1][1],
        "rss_slope_mb_per_1000_steps": float(np.polyfit(late[:, 0], late[:, 1], 1)[0] * 1000),
    }


def cost(wall: list[float], cpu: list[float]) -> dict[str, float]:
    return {
        "unscored_ms_median": 1000 * float(np.median(wall)),
        "unscored_ms_p90": 1000 * float(np.quantile(wall, 0.9)),
        "unscored_cpu_ms_mean": 1000 * float(np.mean(cpu)),
    }


def sizes(out: Path, steps: int) -> dict[str, float]:
    run = out / "run"
    assert len(read_records(run)) == steps
    matrices, traces = ([file.stat().st_size for file in (run / name).iterdir()] for name in ("matrices", "traces"))
    return {
        "metrics_bytes_per_step": (run / "metrics.jsonl").stat().st_size / steps,
        "matrices": len(matrices),
        "matrix_bytes": float(np.mean(matrices)),
        "traces_bytes_per_scored_step": float(np.mean(traces)),
        "run_folder_mb": sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--keep", type=int, default=100)
    parser.add_argument("--out", type=Path, help="an empty folder that stays; a temporary one where not given")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(args.steps, args.every, args.keep, args.out or Path(temporary))
    for name, value in found.items():
        print(f"{name:<30} {value:,.4g}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
