"""How long a log-likelihood matrix takes, against the naive way and against what the arithmetic allows.

    python benchmarks/scoring.py --workloads W1,W2,W3,W4 --json scoring.json
    python benchmarks/scoring.py --quick
    python benchmarks/scoring.py --workloads W1,real --gguf path/to/SmolLM2-135M-Instruct.gguf
    python benchmarks/scoring.py --growth

Everything runs interleaved in one process. *naive* forwards `[X | Z]` for every pair in padded batches of 16 with all
logits; it is measured on some traces under one context and scaled by tokens. *floor* is the number of distinct
(context, token) evaluations times the time of a dense forward of the same model at its best batch shape, and likewise
for the head's rows, measured in the same run. *budget* is `BudgetScorer` with four other contexts a trace. With
`--gguf`, lm-evaluation-harness and minicons run as well where they are installed: the former needs a tokenizer's
padding, the latter takes text and so only the workload `real`.

Times are CPU seconds of this process on one thread by default, so that other programs on the machine disturb the
ratios little; `--clock wall --threads 2` measures what a user waits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.scoring.budget import BudgetScorer
from collapsediag.scoring.cost import floor_of
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.load import load_policy
from collapsediag.scoring.plan import Unique
from collapsediag.scoring.short import pairs_of

IntArray = NDArray[np.int64]
NAIVE_BATCH = 16
BUDGET_K = 4
FLOOR_SHAPES = ((4, 64), (16, 64), (4, 128), (2, 256), (1, 512))
FLOOR_ROWS = (128, 256, 512)
# What the project promises: at least, at least, at most.
TARGETS = {
    "W1": {"naive_over_ours": 4.6, "ours_over_floor": 1.10, "naive_over_budget": 12.0},
    "W2": {"naive_over_ours": 18.0, "ours_over_floor": 1.35, "peak_mb": 120.0},
    "W3": {"naive_over_ours": 10.5, "ours_over_floor": 1.10},
    "W4": {"naive_over_ours": 2.5, "ours_over_floor": 1.15},
}


@dataclass(frozen=True)
class Workload:
    """contexts, traces: token ids. own: each trace's context. sample: traces that the naive way is measured on."""

    name: str
    contexts: list[IntArray]
    traces: list[IntArray]
    own: list[int]
    sample: int


def make_workload(name: str, vocabulary: int, *, quick: bool, seed: int = 0) -> Workload:
    """W1: short contexts, mostly shared. W2: long contexts. W3: W1 collapsed. W4: many short ones, tiny model."""
    rng = random.Random(seed)

    def draw(low: int, high: int) -> IntArray:
        return np.array([rng.randrange(vocabulary) for _ in range(rng.randint(low, high))], dtype=np.int64)

    groups = {"W1": (4, 16), "W2": (2, 8), "W3": (8, 16), "W4": (8, 32)}[name][0 if quick else 1]
    per_group = {"W1": 4, "W2": 16, "W3": 4, "W4": 8}[name]
    n = groups * per_group
    shared = draw(150, 150)
    if name in ("W1", "W3"):
        contexts = [np.concatenate([shared, draw(40, 60)]) for _ in range(groups)]
    else:
        contexts = [draw(950, 1050) if name == "W2" else draw(90, 110) for _ in range(groups)]
    if name == "W3":
        templates = [draw(60, 60) for _ in range(3)]
        traces = []
        for _ in range(n):
            kind = rng.random()
            if kind < 0.35:
                traces.append(rng.choice(templates))
            elif kind < 0.70:
                traces.append(np.concatenate([rng.choice(templates)[:48], draw(6, 18)]))
            else:
                traces.append(draw(40, 80))
    else:
        traces = [draw(80, 120) if name == "W4" else draw(40, 80) for _ in range(n)]
    return Workload(name, contexts, traces, [i // per_group for i in range(n)], min(n, 64 if name == "W4" else 16))


def make_model(name: str) -> Any:
    """Four layers in SmolLM2-135M's shape with a small vocabulary; for W4 a tiny model."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    if name == "W4":
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
        )
    else:
        config = LlamaConfig(
            vocab_size=6144,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=4,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_real(model: Any, tokenizer: Any, contexts: int, per_context: int) -> Workload:
    """The pretrained SmolLM2-135M on traces that it samples itself."""
    names = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
    torch.manual_seed(0)
    context_ids, traces, own = [], [], []
    for j, name in enumerate(names[:contexts]):
        question = f"{name} has {3 + j} apples and buys {2 * j + 5} more. Explain how many {name} has."
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        out = model.generate(
            torch.tensor([ids] * per_context),
            do_sample=True,
            max_new_tokens=60,
            attention_mask=torch.ones(per_context, len(ids), dtype=torch.long),
            pad_token_id=0,
        )
        context_ids.append(np.array(ids))
        traces += [row[len(ids) :].numpy() for row in out]
        own += [j] * per_context
    return Workload("real", context_ids, traces, own, min(16, len(traces)))


@torch.no_grad()
def naive(model: Any, context: IntArray, traces: list[IntArray], pad_to: int) -> int:
    """RAGEN's way for one context: whole sequences, whole logits. Returns the tokens forwarded, padding included."""
    tokens = 0
    for start in range(0, len(traces), NAIVE_BATCH):
        batch = traces[start : start + NAIVE_BATCH]
        ids = torch.zeros(len(batch), context.size + pad_to, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, trace in enumerate(batch):
            sequence = np.concatenate([context, trace])
            ids[row, : sequence.size], mask[row, : sequence.size] = torch.from_numpy(sequence), 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logp = torch.log_softmax(logits[:, context.size - 1 : -1].float(), -1)
        logp.gather(-1, ids[:, context.size :, None]).sum()
        tokens += ids.numel()
    return tokens


def _status(key: str) -> float:
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) / 1024 for line in stream if line.startswith(key))


def measure(run: Callable[[], Any], clock: str) -> tuple[float, float, Any]:
    """(seconds, peak extra MB, result)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    before = _status("VmRSS")
    now = time.process_time if clock == "cpu" else time.perf_counter
    start = now()
    result = run()
    return now() - start, _status("VmHWM") - before, result


@torch.no_grad()
def floor_rates(model: Any, clock: str, into: dict[tuple[str, Any], list[float]]) -> None:
    """Append seconds per token of a dense forward, and per row of the head, at several shapes."""
    head, body = model.get_output_embeddings(), model.base_model
    width, vocabulary = head.weight.shape[1], head.weight.shape[0]
    for shape in FLOOR_SHAPES:
        ids = torch.randint(0, vocabulary, shape)
        seconds, _, _ = measure(lambda ids=ids: body(input_ids=ids, use_cache=False), clock)
        into.setdefault(("body", shape), []).append(seconds / ids.numel())
    for rows in FLOOR_ROWS:
        hidden, target = torch.randn(rows, width), torch.arange(rows)

        def read(hidden: torch.Tensor = hidden, target: torch.Tensor = target) -> torch.Tensor:
            logits = head(hidden)
            return logits[target, target] - torch.logsumexp(logits, -1)

        seconds, _, _ = measure(read, clock)
        into.setdefault(("head", rows), []).append(seconds / rows)


def best(rates: dict[tuple[str, Any], list[float]], part: str) -> float:
    return min(statistics.median(values) for (kind, _), values in rates.items() if kind == part)


def competitors(model: Any, work: Workload, tokenizer: Any) -> dict[str, Callable[[], Any]]:
    """Other people's tools on the sampled traces under the first context, where they are installed."""
    found: dict[str, Callable[[], Any]] = {}
    sample = work.traces[: work.sample]
    if tokenizer is not None and find_spec("lm_eval"):
        from lm_eval.models.huggingface import HFLM

        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=NAIVE_BATCH, device="cpu")
        requests = [(("", ""), work.contexts[0].tolist(), t.tolist()) for t in sample]
        found["lm_eval"] = lambda: harness._loglikelihood_tokens(requests, disable_tqdm=True)
    if work.name == "real" and find_spec("minicons"):
        from minicons import scorer

        incremental = scorer.IncrementalLMScorer(model, "cpu", tokenizer=tokenizer)
        prefix = [tokenizer.decode(work.contexts[0])] * len(sample)
        texts = [tokenizer.decode(t) for t in sample]
        found["minicons"] = lambda: incremental.conditional_score(prefix, texts, separator="")
    return found


def run_workload(
    work: Workload, model: Any, *, repeats: int, clock: str, tokenizer: Any = None, token_budget: int | None = None
) -> dict[str, Any]:
    """Measure one workload; ratios are of medians."""
    pairs = pairs_of(work.contexts, work.traces, work.own)
    scorer = HFScorer(model, token_budget=token_budget)
    plain = HFScorer(model, token_budget=token_budget, attention="plain")
    budget = BudgetScorer(scorer, k=BUDGET_K)
    matrix = scorer.score(pairs)  # warm, and with the self-check that 49 of 50 calls do not have
    longest = max(t.size for t in work.traces)
    part = pairs_of(work.contexts[:1], work.traces[: work.sample], [0] * work.sample)
    sample = work.traces[: work.sample]
    runs: dict[str, Callable[[], Any]] = {
        "naive": lambda: naive(model, work.contexts[0], sample, longest),
        "sliced": lambda: plain.score(part),
        "ours": lambda: scorer.score(pairs),
        "budget": lambda: budget.score(pairs),
        **competitors(model, work, tokenizer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peak: dict[str, list[float]] = {name: [] for name in runs}
    rates: dict[tuple[str, Any], list[float]] = {}
    order = random.Random(0)
    for _ in range(repeats):
        names = list(runs)
        order.shuffle(names)
        for name in names:
            floor_rates(model, clock, rates)
            spent, extra, _ = measure(runs[name], clock)
            seconds[name].append(spent)
            peak[name].append(extra)
    whole = sum((c.size + longest) * len(work.traces) for c in work.contexts)
    scale = whole / sum(work.contexts[0].size + longest for _ in sample)
    unique = Unique.of(work.contexts, work.traces)
    tokens, rows = floor_of(unique.contexts, unique.traces)
    floor = tokens * best(rates, "body") + rows * best(rates, "head")
    time_of = {name: statistics.median(values) for name, values in seconds.items()}
    ours = time_of["ours"]
    result: dict[str, Any] = {
        "naive_over_ours": time_of["naive"] * scale / ours,
        "ours_over_floor": ours / floor,
        "sliced_over_ours": time_of["sliced"] * scale / ours,
        "naive_over_budget": time_of["naive"] * scale / time_of["budget"],
        "peak_mb": max(peak["ours"]),
        "naive_peak_mb": max(peak["naive"]),
        "ours_seconds": ours,
        "ours_spread": (max(seconds["ours"]) - min(seconds["ours"])) / ours,
        "naive_seconds": time_of["naive"] * scale,
        "floor_seconds": floor,
        "floor_body_us": best(rates, "body") * 1e6,
        "floor_head_us": best(rates, "head") * 1e6,
        "floor_tokens": tokens,
        "plan": scorer.estimate(pairs).describe(),
        "path": scorer.info.path if scorer.info else None,
        "mean_logp_per_token": float(matrix.logp_NP.sum() / (matrix.length_N.sum() * matrix.n_contexts)),
    }
    for name in ("lm_eval", "minicons"):
        result[f"{name}_over_ours"] = time_of[name] * scale / ours if name in time_of else None
    return result


def show(results: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{'workload':<10}{'naive/ours':>12}{'ours/floor':>12}{'sliced/ours':>12}{'naive/budget':>14}{'lm_eval/ours':>14}"
        f"{'minicons/ours':>15}{'peak MB':>9}{'naive MB':>10}{'ours s':>9}{'spread':>8}"
    )
    for name, r in results.items():
        other = [f"{r[k]:.2f}" if r[k] is not None else "not run" for k in ("lm_eval_over_ours", "minicons_over_ours")]
        print(
            f"{name:<10}{r['naive_over_ours']:>12.2f}{r['ours_over_floor']:>12.3f}{r['sliced_over_ours']:>12.2f}"
            f"{r['naive_over_budget']:>14.2f}{other[0]:>14}{other[1]:>15}{r['peak_mb']:>9.0f}{r['naive_peak_mb']:>10.0f}{r['ours_seconds']:>9.2f}"
            f"{r['ours_spread']:>8.1%}"
        )
    for name, r in results.items():
        for key, target in TARGETS.get(name, {}).items():
            met = r[key] >= target if key.startswith("naive_over") else r[key] <= target
            if not met:
                print(f"{name}: {key} is {r[key]:.3f}, the target is {target}")


def growth(clock: str, repeats: int) -> dict[str, dict[str, Any]]:
    """How the time grows with N, P, |X| and |Z|: ours, and naive by its token count."""
    model, rng = make_model("W1"), random.Random(0)
    base = {"n": 32, "p": 8, "x": 200, "z": 60}
    results: dict[str, dict[str, Any]] = {}
    for key, factor in [(None, 1), *((k, f) for k in base for f in (2, 4))]:
        size = {**base, **({key: base[key] * factor} if key else {})}
        draw = lambda n: np.array([rng.randrange(6144) for _ in range(n)])  # noqa: E731
        contexts, traces = [draw(size["x"]) for _ in range(size["p"])], [draw(size["z"]) for _ in range(size["n"])]
        pairs = pairs_of(contexts, traces, [i % size["p"] for i in range(size["n"])])
        scorer = HFScorer(model)
        scorer.score(pairs)
        spent = [measure(lambda: scorer.score(pairs), clock) for _ in range(repeats)]  # noqa: B023
        cost = scorer.estimate(pairs)
        name = " ".join(f"{k}={v}" for k, v in size.items())
        results[name] = {
            "seconds": statistics.median(s for s, _, _ in spent),
            "peak_mb": max(m for _, m, _ in spent),
            "tokens": cost.tokens,
            "naive_tokens": cost.naive_tokens,
        }
        print(f"{name:<28}{results[name]['seconds']:>8.2f} s {results[name]['peak_mb']:>6.0f} MB  {cost.describe()}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="W1,W2,W3,W4", help="comma-separated: W1, W2, W3, W4, real")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="fewer contexts and repeats: a smoke test of the ratios")
    parser.add_argument("--growth", action="store_true", help="instead: how the time grows with each size")
    parser.add_argument("--repeats", type=int, help="interleaved repeats (default 5, quick 2)")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--token-budget", type=int, help="tokens of one forward pass (default: chosen)")
    parser.add_argument("--gguf", help="the pretrained SmolLM2-135M: for the workload 'real' and the peers")
    args = parser.parse_args()
    if "real" in args.workloads and not args.gguf:
        parser.error("the workload 'real' needs --gguf")
    torch.set_num_threads(args.threads)
    repeats = args.repeats or (2 if args.quick else 5)
    print(f"load {os.getloadavg()[0]:.2f}, {args.threads} thread(s), {args.clock} time, {repeats} repeats")
    if args.growth:
        results = growth(args.clock, repeats)
    else:
        results = {}
        pretrained, tokenizer = load_policy(args.gguf) if args.gguf else (None, None)
        for name in args.workloads.split(","):
            if name == "real":
                model = pretrained
                work = make_real(model, tokenizer, *((2, 2) if args.quick else (8, 4)))
            else:
                model = make_model(name)
                work = make_workload(name, model.config.vocab_size, quick=args.quick)
            results[name] = run_workload(
                work, model, repeats=repeats, clock=args.clock, tokenizer=tokenizer, token_budget=args.token_budget
            )
            print(f"{name}: {results[name]['plan']}", flush=True)
        show(results)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
