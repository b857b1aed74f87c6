"""What veRL's workers are compared with: one unpadded forward a pair, in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def plain_forward(folder: Path, pairs, temperature: float):
    """The oracle: one unpadded forward a pair, in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    found = []
    for context, trace in pairs:
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *trace]])).logits[0].float() / temperature
        logp = logits.log_softmax(-1)
        found.append([float(logp[len(context) + t - 1, token]) for t, token in enumerate(trace)])
    return found


def some_pairs(folder: Path, n_contexts: int = 3):
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    contexts = ["what is 12+35?<think>", "go up<think>", "add the numbers, then reply<think>"][:n_contexts]
    traces = ["i need 12+35", "up", "step by step i think of"]
    return [(tokenizer.encode(x), tokenizer.encode(z)) for x in contexts for z in traces]


def furthest(found, expected) -> float:
    assert [len(row) for row in found] == [len(row) for row in expected]
    return max(float(np.abs(np.array(a) - np.array(b)).max()) for a, b in zip(found, expected, strict=True))
