"""Tiny random policies, pairs with everything that packing could get wrong, and the loop that scores must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.short import pairs_of

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Sequences = Sequence[Sequence[int]]

VOCABULARY = 29
LIMIT = 1024
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": LIMIT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(model_type: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 1, **settings: Any) -> Any:
    """A tiny model with far from uniform distributions, in eval mode. Leaves the global generator as it was."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    if model_type == "gpt2":
        names = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LIMIT, "vocab_size": VOCABULARY}
        config = transformers.GPT2Config(**{**names, "bos_token_id": 1, "eos_token_id": 2, **settings})
    else:
        config = transformers.CONFIG_MAPPING[model_type](**{**TINY, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    torch.set_rng_state(state)
    return model


def draw(rng: np.random.Generator, n: int) -> list[int]:
    """`n` token ids that no special token has."""
    return [int(token) for token in rng.integers(3, VOCABULARY, n)]


def mixed_sequences(seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Contexts with a shared beginning, and traces: equal ones, one that begins another, one of a single token."""
    rng = np.random.default_rng(seed)
    shared = draw(rng, 30)
    contexts = [shared + draw(rng, n) for n in (4, 9, 1)] + [draw(rng, 6)]
    traces = [draw(rng, int(n)) for n in rng.integers(2, 14, 5)]
    traces += [list(traces[0]), traces[1] + draw(rng, 4), traces[2][:2] + draw(rng, 5), draw(rng, 1)]
    return contexts, traces


def mixed_pairs(seed: int = 0) -> ScoringPairs:
    contexts, traces = mixed_sequences(seed)
    return pairs_of(contexts, traces, [i % len(contexts) for i in range(len(traces))])


@torch.no_grad()
def token_loop(
    model: Any, context: Sequence[int] | IntArray, trace: Sequence[int] | IntArray, temperature: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """(log-prob [T], entropy [T]) of one trace: one forward of `[X | Z]`, softmax written out in float64."""
    ids = torch.tensor([[*map(int, context), *map(int, trace)]])
    z_TV = model(input_ids=ids, use_cache=False).logits[0].double().numpy() / temperature
    z_TV = z_TV[len(context) - 1 : len(context) - 1 + len(trace)]
    p_TV = np.exp(z_TV - z_TV.max(-1, keepdims=True))
    p_TV /= p_TV.sum(-1, keepdims=True)
    logp = np.array([np.log(p_TV[t, int(token)]) for t, token in enumerate(trace)])
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p_TV > 0, p_TV * np.log(p_TV), 0.0).sum(-1)
    return logp, entropy


def loop(model: Any, contexts: Any, traces: Any, temperature: float = 1.0) -> FloatArray:
    """[N, P] by one forward for every distinct pair: no batch, no padding, no cache."""
    known: dict[tuple[bytes, bytes], float] = {}
    found = np.zeros((len(traces), len(contexts)))
    for i, trace in enumerate(traces):
        for j, context in enumerate(contexts):
            key = np.asarray(trace, np.int64).tobytes(), np.asarray(context, np.int64).tobytes()
            if key not in known:
                known[key] = float(token_loop(model, context, trace, temperature)[0].sum()) if len(trace) else 0.0
            found[i, j] = known[key]
    return found
