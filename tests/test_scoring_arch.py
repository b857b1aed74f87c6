"""Every architecture people train, random weights, token by token against a float64 loop over `[X | Z]`."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Nats, each single token under each context, against a float64 loop over the same weights.
FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-8
# Where the model's own float32 forward is further off than that (of these only Mamba's scan, 4.7e-5), the scorer may
# be as far off as the model.
OWN_NOISE_FACTOR = 1.5

VOCABULARY = 97
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Shorter than the contexts, so that windows slide inside the prefix and inside the traces.
WINDOW = {"sliding_window": 12}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
MAMBA_BITS = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "multi_query": True,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Case:
    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None
    path: str = "prefix"
    tiny: bool = True
    reason: str = ""  # a word of why the others do not pack
    gain: float = 8.0  # of the weights, so that attention is sharp and distributions far from uniform


CASES = [
    Case("llama", "llama"),
    Case("llama eager", "llama", attention="eager"),
    Case("llama tied", "llama", {"tie_word_embeddings": True}),
    Case("qwen2", "qwen2"),
    Case("qwen2 window", "qwen2", dict(use_sliding_window=True, max_window_layers=2, **WINDOW)),
    Case("qwen3", "qwen3"),
    Case("qwen3 window", "qwen3", dict(use_sliding_window=True, max_window_layers=2, **WINDOW)),
    Case("mistral window", "mistral", WINDOW),
    Case("gemma2 window", "gemma2", dict(query_pre_attn_scalar=8, **WINDOW), "eager"),
    Case("gemma2 caps", "gemma2", dict(query_pre_attn_scalar=8, final_logit_softcapping=2.0, **WINDOW), "eager"),
    Case("gemma3 window", "gemma3_text", dict(query_pre_attn_scalar=8, **WINDOW, **ALTERNATING)),
    Case(
        "gemma3n",
        "gemma3n_text",
        dict(
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
            num_kv_shared_layers=2,
            laurel_rank=4,
            altup_num_inputs=2,
            altup_active_idx=0,
            activation_sparsity_pattern=[0.0] * 4,
            **WINDOW,
            **ALTERNATING,
        ),
    ),
    Case(
        "gemma4",  # whose config gives no head width for all layers
        "gemma4_text",
        dict(
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
            num_kv_shared_layers=2,
            global_head_dim=16,
            **WINDOW,
            **ALTERNATING,
        ),
    ),
    Case("phi", "phi"),
    Case("phi3 window", "phi3", WINDOW),
    Case(
        "gpt2",
        "gpt2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        tiny=False,
    ),
    Case("gpt neox", "gpt_neox"),
    Case(
        "gpt neo local",
        "gpt_neo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 12,
            "max_position_embeddings": 256,
        },
        None,
        "state",
        False,
        "local attention",
    ),
    Case("opt", "opt", dict(TINY, ffn_dim=64, word_embed_proj_dim=32, pad_token_id=1, eos_token_id=2), tiny=False),
    Case("falcon rope", "falcon", dict(FALCON, alibi=False), tiny=False),
    Case("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("mixtral router", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
    Case("qwen3 moe", "qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    Case("gpt oss", "gpt_oss", dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW, **ALTERNATING), "eager"),
    Case("deepseek v3", "deepseek_v3", DEEPSEEK),
    Case("cohere", "cohere", {"logit_scale": 0.5}),
    Case("cohere2 window", "cohere2", dict(**WINDOW, **ALTERNATING)),
    Case("granite", "granite", {"logits_scaling": 4.0}),
    Case("olmo2", "olmo2"),
    Case("starcoder2 window", "starcoder2", WINDOW),
    Case("stablelm", "stablelm"),
    Case("smollm3", "smollm3"),
    Case("glm4", "glm4"),
    Case(
        "bloom",
        "bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        None,
        "state",
        False,
        "position_ids",
    ),
    Case("falcon alibi", "falcon", dict(FALCON, alibi=True), None, "state", False, "ALiBi"),
    Case(
        "mamba",
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
        None,
        "plain",
        False,
        "position_ids",
        gain=3.0,  # a state multiplies its gain at every step
    ),
    Case(
        "mamba2",
        "mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
        None,
        "state",
        False,
        "position_ids",
        gain=3.0,  # a state multiplies its gain at every step
    ),
    Case(
        "jamba",
        "jamba",
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        None,
        "plain",
        reason="linear_attention",
    ),
    Case(
        "qwen3 next",
        "qwen3_next",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        None,
        "state",
        reason="linear_attention",
        gain=3.0,
    ),
    Case(
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": None},
        None,
        "state",
        reason="conv",
    ),
    Case("falcon h1", "falcon_h1", MAMBA_BITS, None, "state", reason="hybrid"),
    Case("falcon h1 scaled", "falcon_h1", dict(lm_head_multiplier=0.5, **MAMBA_BITS), None, "state", reason="hybrid"),
    Case(
        "rwkv",
        "rwkv",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "attention_hidden_size": 32},
        None,
        "plain",
        False,
        "position_ids",
        gain=3.0,  # a state multiplies its gain at every step
    ),
    Case(
        "llama4 chunked",
        "llama4_text",
        {"attention_chunk_size": 12, "num_local_experts": 2, "intermediate_size_mlp": 64, "num_experts_per_tok": 1},
        None,
        "state",
        reason="chunked_attention",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _quiet_transformers() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def make_model(case: Case) -> Any:
    # Initialisation draws from the global generator; the test restores it.
    state = torch.get_rng_state()
    torch.manual_seed(1)
    config = CONFIG_MAPPING[case.model_type](**{**(TINY if case.tiny else {}), **case.settings})
    options = {} if case.attention is None else {"attn_implementation": case.attention}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()
    torch.set_rng_state(state)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(case.gain)
    return model


def make_pairs() -> ScoringPairs:
    rng = random.Random(0)

    def draw(n: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(n)]

    shared = draw(20)
    contexts = [shared + draw(rng.randint(2, 9)) for _ in range(3)]
    traces = [draw(rng.randint(2, 14)) for _ in range(4)]
    traces += [list(traces[0]), traces[1][:1] + draw(5), traces[2] + draw(3), draw(1)]
    return pairs_of(contexts, traces, [i % 3 for i in range(len(traces))])


class AllInFloat64(TorchFunctionMode):
    """Models that take a softmax, a router or a scan in float32 whatever their type take it in float64 in here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@torch.no_grad()
def token_loop(model: Any, pairs: ScoringPairs) -> list[FloatArray]:
    """[P, T] log-probs of each trace: one forward of `[X | Z]` for every cell, no batch, no padding, no cache."""
    found = []
    for trace in pairs.traces:
        logp_PT = np.zeros((pairs.n_contexts, trace.size))
        for j, context in enumerate(pairs.contexts):
            ids = torch.from_numpy(np.concatenate([context, trace]))[None]
            logp_TV = model(input_ids=ids).logits[0].double().log_softmax(-1)
            for t, token in enumerate(trace.tolist()):
                logp_PT[j, t] = float(logp_TV[context.size - 1 + t, token])
        found.append(logp_PT)
    return found


def worst(found: Any, truth: list[FloatArray]) -> float:
    """Largest difference in any token."""
    return max(float(np.abs(a - b).max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_token_matches_a_float64_loop(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    model, pairs = make_model(case), make_pairs()
    # Small budgets force several steps, several batches, and continued steps.
    scorer = HFScorer(model, token_budget=40)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        scores = scorer.score_tokens(pairs, every_context=True)
        again = HFScorer(model).score_tokens(pairs, every_context=True)
        own = token_loop(model, pairs)
        model.double()
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # grouped matrix products know no float64
        with AllInFloat64():
            exact = HFScorer(model, token_budget=40).score_tokens(pairs, every_context=True)
            truth = token_loop(model, pairs)
    float32 = max(FLOAT32_TOLERANCE, OWN_NOISE_FACTOR * worst(own, truth))
    assert worst(scores.logp, truth) < float32
    assert worst(again.logp, truth) < float32
    assert worst(exact.logp, truth) < FLOAT64_TOLERANCE
    sums_NP = np.stack([logp_PT.sum(axis=1) for logp_PT in truth])
    np.testing.assert_allclose(exact.matrix.logp_NP, sums_NP, rtol=0, atol=FLOAT64_TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.path == case.path, scorer.info.reason
    lines = [record.getMessage() for record in caplog.records if record.name == "collapsediag"]
    assert len(lines) == (3 if case.path == "plain" else 0), lines  # one from each of the three scorers
    assert all(case.reason in line for line in [*lines, scorer.info.reason or ""])
    assert sums_NP.std() > 1.0, "the scores do not depend on the traces; this model tests nothing"
    assert (worst(own, truth) > FLOAT32_TOLERANCE) == (case.name == "mamba")
