"""What veRL's workers are compared with: one unpadded forward a pair, in transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from collapsediag.pairs import ScoringPairs


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


def crossed(pairs, expected):
    """(ScoringPairs of all contexts and traces of some pairs, their log-likelihoods [traces][contexts])."""
    contexts, traces = ([list(ids) for ids in dict.fromkeys(tuple(pair[part]) for pair in pairs)] for part in (0, 1))
    of_pair = [sum(row) for row in expected]
    n = len(traces)
    made = ScoringPairs(
        contexts=tuple(np.array(x) for x in contexts),
        traces=tuple(np.array(z) for z in traces),
        own_N=np.arange(n),
        group_N=np.arange(n),
        multiplicity_P=np.ones(len(contexts), dtype=int),
        rollout_N=np.arange(n),
        turn_N=np.zeros(n, dtype=int),
    )
    return made, np.array([[of_pair[pairs.index((x, z))] for x in contexts] for z in traces])
