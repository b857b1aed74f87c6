"""Random contexts and traces: the fast path gives the oracle's matrix, tokens and entropies, whatever the sharing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring import attention
from collapsediag.scoring import cache as cache_module
from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.attention import Own, attend, attend_by_definition
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.prefix import unsupported_reason
from collapsediag.scoring.short import pairs_of

FloatArray = NDArray[np.float64]
VOCABULARY = 23
# Nats per trace in float64: rounding of the few layers that compute in float32 whatever the model's type.
TOLERANCE = 2e-7


@cache
def tiny(kind: str) -> Any:
    state = torch.get_rng_state()
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    config = MistralConfig(**shape, sliding_window=7) if kind == "window" else LlamaConfig(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    torch.set_rng_state(state)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


@torch.no_grad()
def oracle(model: Any, pairs: ScoringPairs, temperature: float = 1.0) -> list[list[tuple[FloatArray, FloatArray]]]:
    """[N][P] (log-prob, entropy) of each token, one forward of `[X | Z]` each."""
    rows = []
    for trace in pairs.traces:
        row = []
        for context in pairs.contexts:
            logits = model(input_ids=torch.from_numpy(np.concatenate([context, trace]))[None]).logits[0] / temperature
            logp = logits.log_softmax(-1)[context.size - 1 : context.size - 1 + trace.size]
            entropy = -(logp.exp() * logp).sum(-1)
            row.append((logp[torch.arange(trace.size), torch.from_numpy(trace)].numpy(), entropy.numpy()))
        rows.append(row)
    return rows


def sums(rows: list[list[tuple[FloatArray, FloatArray]]]) -> FloatArray:
    return np.array([[logp.sum() for logp, _ in row] for row in rows])


# Three letters and common stems: identical sequences, prefixes of each other and one-token traces all occur.
letters = st.lists(st.integers(0, 2), min_size=1, max_size=9)
context_stems = st.sampled_from([[], list(range(10)), list(range(20))])
trace_stems = st.sampled_from([[], [5] * 20, [6, 7] * 15])


def join(stem: list[int], rest: list[int]) -> list[int]:
    return stem + rest


contexts_strategy = st.lists(st.builds(join, context_stems, letters), min_size=1, max_size=5, unique_by=tuple)
traces_strategy = st.lists(st.one_of(st.builds(join, trace_stems, letters), st.just([])), min_size=1, max_size=7)


@pytest.mark.parametrize("kind", ["cascade", "masked", "window"])
@given(contexts=contexts_strategy, traces=traces_strategy, budget=st.sampled_from([16, 40, 2048]))
@settings(max_examples=25, deadline=None)
def test_any_set_of_contexts_and_traces(
    kind: str, contexts: list[list[int]], traces: list[list[int]], budget: int
) -> None:
    model = tiny("window" if kind == "window" else "full")
    pairs = pairs_of(contexts, traces, [i % len(contexts) for i in range(len(traces))])
    way = "masked" if kind == "window" else kind
    scorer = HFScorer(model, token_budget=budget, attention=way, check_every=0)
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, sums(oracle(model, pairs)), rtol=0, atol=TOLERANCE)
    if any(traces):
        assert scorer.info is not None
        assert (scorer.info.path, scorer.info.attention) == ("prefix", way)


@pytest.mark.parametrize("way", ["cascade", "masked", "plain"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_and_entropies(way: str, temperature: float) -> None:
    model = tiny("full")
    rng = np.random.default_rng(0)
    stem = rng.integers(0, VOCABULARY, 30)
    contexts = [np.concatenate([stem, rng.integers(0, VOCABULARY, 3 + j)]) for j in range(4)]
    traces = [rng.integers(0, VOCABULARY, n) for n in (5, 9, 1, 30)]
    # Equal traces of different prompts: each has the entropies of its own.
    traces += [traces[1], np.concatenate([traces[3][:20], traces[0]]), np.zeros(0, dtype=np.int64)]
    own = [0, 1, 2, 3, 2, 0, 1]
    pairs = pairs_of(contexts, traces, own)
    scorer = HFScorer(model, temperature=temperature, token_budget=32, attention=way)
    scores = scorer.score_tokens(pairs, entropies=True, every_context=True)
    truth = oracle(model, pairs, temperature)
    np.testing.assert_allclose(scores.matrix.logp_NP, sums(truth), rtol=0, atol=TOLERANCE)
    assert scores.own_entropy is not None
    assert scores.logp is not None
    for n, row in enumerate(truth):
        np.testing.assert_allclose(scores.own_logp[n], row[own[n]][0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(scores.own_entropy[n], row[own[n]][1], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(scores.logp[n], np.array([logp for logp, _ in row]), rtol=0, atol=TOLERANCE)


def test_tokens_without_entropies() -> None:
    pairs = pairs_of([[1, 2]], [[3, 4]], [0])
    scores = HFScorer(tiny("full")).score_tokens(pairs)
    assert (scores.own_entropy, scores.logp) == (None, None)
    np.testing.assert_allclose(scores.own_logp[0].sum(), scores.matrix.logp_NP[0, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["cascade", "masked", "plain"])
def test_some_cells_only(way: str) -> None:
    model, rng = tiny("full"), np.random.default_rng(2)
    stem = rng.integers(0, VOCABULARY, 40)
    contexts = [np.concatenate([stem[: 40 - 40 * (j == 3)], rng.integers(0, VOCABULARY, 4 + j)]) for j in range(5)]
    traces = [rng.integers(0, VOCABULARY, 6) for _ in range(6)]
    traces[4] = traces[1]
    pairs = pairs_of(contexts, traces, [0] * 6)
    wanted = rng.random((6, 5)) < 0.5
    told: list[tuple[int, int]] = []
    scorer = HFScorer(model, attention=way)
    scored = scorer.score_cells(pairs, wanted, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (scorer.estimate(pairs, wanted).tokens,) * 2
    truth = sums(oracle(model, pairs))
    np.testing.assert_allclose(scored[wanted], truth[wanted], rtol=0, atol=TOLERANCE)
    assert np.isnan(scored[~wanted]).all()


@pytest.mark.parametrize("way", ["cascade", "masked"])
def test_a_long_shared_beginning_is_not_copied_into_each_row(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MIN_SHARED_COPY", 16)
    model, rng = tiny("full"), np.random.default_rng(3)
    stem = rng.integers(0, VOCABULARY, 40)
    contexts = [np.concatenate([stem, rng.integers(0, VOCABULARY, 2 + 3 * j)]) for j in range(4)]
    pairs = pairs_of(contexts, [rng.integers(0, VOCABULARY, 50) for _ in range(3)], [0, 1, 2])
    made = []
    stack = cache_module.stack

    def spy(parts: Any) -> Any:
        made.append(stack(parts))
        return made[-1]

    monkeypatch.setattr("collapsediag.scoring.prefix.stack", spy)
    logp_NP = HFScorer(model, token_budget=128, attention=way).score(pairs).logp_NP
    np.testing.assert_allclose(logp_NP, sums(oracle(model, pairs)), rtol=0, atol=TOLERANCE)
    assert [len(prefix.segments) for prefix in made] == [2] * len(made)
    assert all(prefix.segments[0].keys_values[0][0].shape[0] == 1 for prefix in made)


def test_long_traces() -> None:
    model, rng = tiny("full"), np.random.default_rng(4)
    contexts = [rng.integers(0, VOCABULARY, 30) for _ in range(2)]
    stem = rng.integers(0, VOCABULARY, 900)
    traces = [np.concatenate([stem, rng.integers(0, VOCABULARY, 100 + 50 * k)]) for k in range(3)]
    pairs = pairs_of(contexts, traces, [0, 1, 0])
    scorer = HFScorer(model, token_budget=256)
    cost = scorer.estimate(pairs)
    assert cost.tokens < 1.02 * cost.floor_tokens
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, sums(oracle(model, pairs)), rtol=0, atol=1e-5)


def test_progress_counts_the_plan() -> None:
    pairs = pairs_of([[1, 2, 3], [4]], [[5, 6, 7], [8, 9], []], [0, 1, 0])
    calls: list[tuple[int, int]] = []
    for way in ("auto", "masked", "plain"):
        calls.clear()
        scorer = HFScorer(tiny("full"), token_budget=16, attention=way)
        scorer.score(pairs, progress=lambda done, total: calls.append((done, total)))
        assert calls[-1] == (scorer.estimate(pairs).tokens,) * 2
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_attention_kernel_and_its_definition(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(2, h, n, 8, dtype=dtype, generator=generator) for h, n in ((heads[0], 5), (heads[1], 9))]
    query, key, value = draw[0], draw[1], draw[1].flip(-1)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    mask = torch.zeros(1, 1, 5, 9, dtype=dtype).masked_fill_(torch.rand(5, 9, generator=generator) < 0.4, -torch.inf)
    mask[..., 0] = 0
    for arguments in ({}, {"mask": mask}, {"causal": True}):
        out, lse = attend(query, key, value, 0.3, **arguments)
        expected, expected_lse = attend_by_definition(query, key, value, 0.3, **arguments)
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.to(expected_lse.dtype), expected_lse, rtol=0, atol=tolerance)


def test_blocks_cover_the_tree_mask() -> None:
    # Three trees: a chain of 40, a branching one, and small ones that are joined.
    end = np.array([40] * 40 + [45, 43, 43, 45, 45] + [46, 47, 48] + [90] * 42)
    own = Own(end, torch.device("cpu"))
    covered = torch.zeros(90, 90, dtype=torch.bool)
    for start, stop, mask in own.blocks(torch.float64):
        size = stop - start
        block = torch.ones(size, size).tril().bool() if mask is None else mask[0, 0] == 0
        covered[start:stop, start:stop] = block
    assert torch.equal(covered, own.mask())
    assert [(a, b, m is None) for a, b, m in own.blocks(torch.float64)] == [(0, 40, True), (40, 90, False)]
    assert attention.MIN_BLOCK <= 40


def test_windows_that_differ_from_layer_to_layer_take_no_common_mask() -> None:
    """transformers gives no value of the whole config then."""

    class Config:
        per_layer_config = (SimpleNamespace(sliding_window=4), SimpleNamespace(sliding_window=9), SimpleNamespace())
        model_type = "mistral"

        @property
        def sliding_window(self) -> int:
            raise RuntimeError("'sliding_window' is a per-layer attribute")

    access = replace(ModelAccess.of(tiny("llama")), config=Config())
    assert access.setting("sliding_window") == 9
    assert unsupported_reason(access) == "its layers have windows of different sizes"
