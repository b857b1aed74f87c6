"""Every architecture people train, random weights, against a float64 loop over `[X | Z]`; which ones fall back."""

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
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Nats per token between the fast path and a float64 loop over the same weights.
FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-8
# Eager attention takes its softmax in float32 even in a float64 model, and so do some layers of the models that fall
# back: there both sides round to float32 inside, differently for different batch shapes.
FLOAT32_INSIDE_TOLERANCE = 1e-6
# The plain path repeats the model's own arithmetic; what differs is the model's float32 noise over batch shapes.
PLAIN_FLOAT32_TOLERANCE = 5e-5

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
    reason: str = ""  # a word of the log line of those that fall back


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
        "plain",
        False,
        "position_ids",
    ),
    Case("falcon alibi", "falcon", dict(FALCON, alibi=True), None, "plain", False, "ALiBi"),
    Case(
        "mamba",
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
        None,
        "plain",
        False,
        "position_ids",
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
        "plain",
        False,
        "position_ids",
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
        "plain",
        reason="linear_attention",
    ),
    Case(
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": None},
        None,
        "plain",
        reason="conv",
    ),
    Case("falcon h1", "falcon_h1", MAMBA_BITS, None, "plain", reason="hybrid"),
    Case("falcon h1 scaled", "falcon_h1", dict(lm_head_multiplier=0.5, **MAMBA_BITS), None, "plain", reason="hybrid"),
    Case(
        "rwkv",
        "rwkv",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "attention_hidden_size": 32},
        None,
        "plain",
        False,
        "position_ids",
    ),
    Case(
        "llama4 chunked",
        "llama4_text",
        {"attention_chunk_size": 12, "num_local_experts": 2, "intermediate_size_mlp": 64, "num_experts_per_tok": 1},
        None,
        "plain",
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
                parameter.mul_(3)  # so that the distributions are far from uniform
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


@torch.no_grad()
def float64_loop(model: Any, pairs: ScoringPairs) -> FloatArray:
    """One forward of `[X | Z]` for every cell, no batch, no padding, no cache."""
    logp_NP = np.zeros((pairs.n_traces, pairs.n_contexts))
    for i, trace in enumerate(pairs.traces):
        for j, context in enumerate(pairs.contexts):
            ids = torch.from_numpy(np.concatenate([context, trace]))[None]
            logp_TV = model(input_ids=ids).logits[0].double().log_softmax(-1)
            for t, token in enumerate(trace.tolist()):
                logp_NP[i, j] += float(logp_TV[context.size - 1 + t, token])
    return logp_NP


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_matches_a_float64_loop(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    model, pairs = make_model(case), make_pairs()
    length_N = np.array([t.size for t in pairs.traces])[:, None]
    # Small budgets force several steps, several batches, and continued steps.
    scorer = HFScorer(model, token_budget=40)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        fast = scorer.score(pairs).logp_NP
        again = HFScorer(model).score(pairs).logp_NP
        model.double()
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # grouped matrix products know no float64
        exact = HFScorer(model, token_budget=40).score(pairs).logp_NP
    truth = float64_loop(model, pairs)
    plain = case.path == "plain"
    float32 = PLAIN_FLOAT32_TOLERANCE if plain else FLOAT32_TOLERANCE
    float64 = FLOAT32_INSIDE_TOLERANCE if plain or case.attention == "eager" else FLOAT64_TOLERANCE
    np.testing.assert_array_less(np.abs(fast - truth) / length_N, float32)
    np.testing.assert_array_less(np.abs(again - truth) / length_N, float32)
    np.testing.assert_array_less(np.abs(exact - truth) / length_N, float64)
    assert scorer.info is not None
    assert scorer.info.path == case.path, scorer.info.reason
    lines = [record.getMessage() for record in caplog.records if record.name == "collapsediag"]
    assert len(lines) == (3 if case.path == "plain" else 0), lines  # one from each of the three scorers
    assert all(case.reason in line for line in lines)
    assert truth.std() > 1.0, "the scores do not depend on the traces; this model tests nothing"
