"""The scoring engine on a GPU: long prompts, bf16, a random Qwen2 of 0.5B to 3B, against the rate of its dense forward.

    python -m benchmarks.scoring_gpu --json gpu.json
    python -m benchmarks.scoring_gpu --model 3B --workloads long
    python -m benchmarks.scoring_gpu --device cpu --quick

*dense* forwards whole sequences of the workload's length at the best of several batch sizes, without logits; its FLOP
rate is what the machine gives this model. *useful* are the FLOPs that the matrix needs when every distinct (prompt,
token) runs once: parameters, attention to the keys that a token may see, and the head's rows. *rate* is useful FLOPs a
second over the dense rate: what is lost to masks, packing, launches and the head. *naive* is RAGEN's way, measured on
some traces of one prompt. Kernels are compiled in the first call, which is timed by itself. Everything runs interleaved
in one process; times are of the wall, with the device synchronised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from benchmarks.scoring import NAIVE_BATCH, IntArray, Workload, naive
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.packing import adjacent_common, unique_sequences
from collapsediag.scoring.plan import Unique
from collapsediag.scoring.short import pairs_of

# Published sizes of Qwen2.5: width, intermediate width, layers, heads, key heads. The weights are random.
MODELS = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
    "tiny": (64, 128, 2, 4, 2),
}
# Prompts, tokens of a prompt, of these shared by all, traces a prompt, tokens of a trace; quick ones in the second row.
WORKLOADS = {
    "chat": ((32, 400, 200, 8, 300), (3, 40, 20, 2, 12)),
    "long": ((16, 4000, 1000, 8, 500), (3, 60, 20, 2, 20)),
    "agent": ((8, 8000, 500, 16, 250), (2, 90, 10, 3, 9)),
}
# What the project aims at: useful FLOPs over the dense rate.
TARGET_RATE = 0.6
DENSE_TOKENS = (8192, 16384, 32768)


def make_model(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A random Qwen2 of this size."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, intermediate, layers, heads, kv_heads = MODELS[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512 if size == "tiny" else 151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_workload(name: str, vocabulary: int, *, quick: bool) -> Workload:
    """Prompts with a common beginning; traces of random tokens, a quarter of which share half of another one."""
    prompts, length, shared, per_prompt, trace = WORKLOADS[name][quick]
    rng = np.random.default_rng(0)

    def draw(n: int) -> IntArray:
        return rng.integers(0, vocabulary, n)

    stem = draw(shared)
    spread = (length - shared) // 8
    contexts = [
        np.concatenate([stem, draw(length - shared + int(rng.integers(-spread, spread + 1)))]) for _ in range(prompts)
    ]
    traces = [draw(int(rng.integers(trace * 2 // 3, trace * 4 // 3 + 1))) for _ in range(prompts * per_prompt)]
    for n in range(1, len(traces), 4):
        traces[n] = np.concatenate([traces[n - 1][: trace // 2], draw(trace // 2)])
    return Workload(
        name, contexts, traces, [i // per_prompt for i in range(len(traces))], min(NAIVE_BATCH, len(traces))
    )


@dataclass(frozen=True)
class Flops:
    """Of a model's forward. body: a token in the layers; key: a (token, key) pair; row: one of the head's."""

    body: float
    key: float
    row: float

    @classmethod
    def of(cls, model: Any) -> Flops:
        """Two for each parameter that a token meets, four times the width for each key."""
        config = model.config
        embeddings = model.get_input_embeddings().weight.numel()
        body = sum(p.numel() for p in model.parameters()) - embeddings  # tied: the head is no parameter of its own
        return cls(2.0 * body, 4.0 * config.num_hidden_layers * config.hidden_size, 2.0 * embeddings)

    def dense(self, rows: int, length: int) -> float:
        """Of sequences that run by themselves, without the head."""
        return rows * (length * self.body + length * (length + 1) / 2 * self.key)

    def useful(self, work: Workload) -> float:
        """Of every distinct (prompt, token), once."""
        unique = Unique.of(work.contexts, work.traces)
        nodes_x, keys_x = _trie(unique.contexts)
        nodes_z, keys_z = _trie([t[:-1] for t in unique.traces])
        count, before = len(unique.contexts), sum(c.size for c in unique.contexts)
        tokens = nodes_x + count * nodes_z
        pairs = keys_x + count * keys_z + nodes_z * before
        return tokens * self.body + pairs * self.key + count * (nodes_z + 1) * self.row


def _trie(sequences: Sequence[IntArray]) -> tuple[int, int]:
    """(nodes, nodes above and including each, summed) of the trie of these sequences."""
    unique, _ = unique_sequences(sequences)
    size_U, common_U = np.array([s.size for s in unique]), adjacent_common(unique)
    keys = (size_U * (size_U + 1) - common_U * (common_U + 1)).sum() // 2
    return int((size_U - common_U).sum()), int(keys)


def measure(run: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    """(seconds, peak extra MB; None on a CPU)."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, start = torch.cuda.memory_allocated(device), time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated(device) - before) / 2**20


def dense_rates(model: Any, length: int, flops: Flops, device: torch.device, *, quick: bool) -> dict[int, float]:
    """FLOPs a second of the dense forward, by number of sequences."""
    rates = {}
    for rows in sorted({max(1, tokens // length) for tokens in ((256,) if quick else DENSE_TOKENS)}):
        ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)
        with torch.no_grad():
            seconds, _ = measure(lambda ids=ids: model.model(input_ids=ids, use_cache=False), device)
        rates[rows] = flops.dense(rows, length) / seconds
    return rates


def run_workload(work: Workload, model: Any, ways: Sequence[str], *, repeats: int, quick: bool) -> dict[str, Any]:
    """Measure one workload; ratios are of medians."""
    device, flops = model.device, Flops.of(model)
    pairs, sample = pairs_of(work.contexts, work.traces, work.own), work.traces[: work.sample]
    longest = max(t.size for t in work.traces)
    length = int(np.mean([c.size for c in work.contexts])) + longest
    scorers = {way: HFScorer(model, attention=way) for way in ways}
    result: dict[str, Any] = {"useful_tflop": flops.useful(work) / 1e12}
    for way, scorer in scorers.items():
        graphs = counters["stats"]["unique_graphs"]
        first, _ = measure(lambda scorer=scorer: scorer.score(pairs), device)
        info = scorer.info
        used = info.attention or info.path if info else None
        made = counters["stats"]["unique_graphs"] - graphs
        result[way] = {"first_s": first, "graphs": made, "used": used, "check": info.check if info else None}

    def run_naive() -> int:
        return naive(model, work.contexts[0], sample, longest)

    run_naive()
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "naive")}
    peak: dict[str, list[float]] = {name: [] for name in seconds}
    rates: dict[int, list[float]] = {}
    for _ in range(repeats):
        for name in seconds:
            for rows, rate in dense_rates(model, length, flops, device, quick=quick).items():
                rates.setdefault(rows, []).append(rate)
            run = run_naive if name == "naive" else lambda name=name: scorers[name].score(pairs)
            spent, extra = measure(run, device)
            seconds[name].append(spent)
            peak[name].append(extra or 0.0)
    dense = max(statistics.median(values) for values in rates.values())
    whole = sum((c.size + longest) * len(work.traces) for c in work.contexts)
    naive_s = statistics.median(seconds["naive"]) * whole / ((work.contexts[0].size + longest) * len(sample))
    result |= {"dense_tflops": dense / 1e12, "naive_s": naive_s, "naive_peak_mb": max(peak["naive"])}
    for way in ways:
        spent = statistics.median(seconds[way])
        result[way] |= {
            "seconds": spent,
            "naive_over_ours": naive_s / spent,
            "rate": result["useful_tflop"] * 1e12 / spent / dense,
            "peak_mb": max(peak[way]),
            "spread": (max(seconds[way]) - min(seconds[way])) / spent,
        }
    return result


def show(results: dict[str, dict[str, Any]], ways: Sequence[str]) -> None:
    print(
        f"\n{'workload':<10}{'way':<10}{'used':<10}{'naive/ours':>11}{'rate':>7}{'dense TFLOP/s':>15}{'s':>9}"
        f"{'first s':>9}{'graphs':>8}{'peak MB':>9}{'naive MB':>10}{'check':>10}{'spread':>8}"
    )
    for name, r in results.items():
        for way in ways:
            o = r[way]
            check = "none" if o["check"] is None else f"{o['check']:.1e}"
            print(
                f"{name:<10}{way:<10}{o['used']!s:<10}{o['naive_over_ours']:>11.2f}{o['rate']:>7.2f}{r['dense_tflops']:>15.2f}"
                f"{o['seconds']:>9.2f}{o['first_s']:>9.2f}{o['graphs']:>8}{o['peak_mb']:>9.0f}{r['naive_peak_mb']:>10.0f}"
                f"{check:>10}{o['spread']:>8.1%}"
            )
        if max(r[way]["rate"] for way in ways) < TARGET_RATE:
            print(f"{name}: no way reaches {TARGET_RATE} of the dense rate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="chat,long,agent", help=f"comma-separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--model", choices=tuple(MODELS), default="0.5B")
    parser.add_argument("--ways", default="masked,flex", help="comma-separated: masked, flex, cascade")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small workloads, one repeat: a smoke test")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    args = parser.parse_args()
    device, ways = torch.device(args.device), args.ways.split(",")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is visible; --device cpu --quick --model tiny is a smoke test")
    model = make_model(args.model, device, getattr(torch, args.dtype))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, Qwen2 {args.model}, {args.dtype}")
    results = {}
    for workload in args.workloads.split(","):
        work = make_workload(workload, model.config.vocab_size, quick=args.quick)
        repeats = 1 if args.quick else args.repeats
        results[workload] = run_workload(work, model, ways, repeats=repeats, quick=args.quick)
    show(results, ways)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
