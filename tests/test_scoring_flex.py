"""FlexAttention against loops in float64: torch's eager code for it, and in two tests kernels compiled for this CPU."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch._dynamo.utils import counters

from collapsediag.scoring import flex
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of

from .scoring_tiny import draw, loop, make_model, mixed_pairs
from .test_scoring_arch import CASES, FLOAT64_TOLERANCE, AllInFloat64, Case, make_pairs, token_loop, worst
from .test_scoring_arch import make_model as make_architecture

FloatArray = NDArray[np.float64]
TOLERANCE = 1e-10

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's eager FlexAttention: every score is written out, in any precision."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_kernel", lambda: torch_flex.flex_attention)


def by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> FloatArray:
    """[B, T, H, D], one token at a time."""
    q, k, v, seen = query.double().numpy(), key.double().numpy(), value.double().numpy(), allowed.numpy()
    batch, heads, tokens, width = q.shape
    out = np.zeros((batch, tokens, heads, width))
    for b, h, t in np.ndindex(batch, heads, tokens):
        group = h * k.shape[1] // heads
        (keys,) = np.nonzero(seen[b % len(seen), 0, t])
        score = k[b, group, keys] @ q[b, h, t] * scale
        if softcap is not None:
            score = softcap * np.tanh(score / softcap)
        weight = np.exp(score)
        total = weight.sum() + (0.0 if sink is None else np.exp(float(sink[h])))
        out[b, t, h] = weight @ v[b, group, keys] / total
    return out


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, **options: Any) -> Any:
    flex._ACTIVE.job = flex._Job()
    try:
        return flex.flex_attention_by_blocks(None, query, key, value, allowed, **options)[0]
    finally:
        flex._ACTIVE.job = None


def tensors(batch: int, heads: int, groups: int, tokens: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + keys)
    shapes = ((heads, tokens), (groups, keys), (groups, keys))
    return [torch.randn(batch, h, n, 8, dtype=dtype, generator=generator) for h, n in shapes]


def random_mask(rows: int, tokens: int, keys: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(keys)
    allowed = torch.rand(rows, 1, tokens, keys, generator=generator) < 0.3
    allowed[..., 0] = True  # everyone sees something
    return allowed


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (7, 128), (128, 256), (130, 300)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2)])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (1.5, False), (None, True), (0.7, True)])
def test_equals_the_definition(
    rows: int, tokens: int, keys: int, heads: int, groups: int, softcap: float | None, sinks: bool
) -> None:
    query, key, value = tensors(3, heads, groups, tokens, keys, torch.float64)
    allowed = random_mask(rows, tokens, keys)
    sink = torch.linspace(-2, 3, heads, dtype=torch.float64) if sinks else None
    found = attended(query, key, value, allowed, scaling=0.4, softcap=softcap, s_aux=sink)
    truth = by_definition(query, key, value, allowed, 0.4, softcap, sink)
    np.testing.assert_allclose(found.numpy(), truth, rtol=0, atol=1e-12)


def test_blocks_of_strangers_are_left_out() -> None:
    """Four trees of a block's length after 256 keys of a prefix: each block of tokens meets the prefix and its own."""
    allowed = torch.zeros(1, 1, 512, 768, dtype=torch.bool)
    allowed[..., :256] = True
    for tree in range(4):
        start = 128 * tree
        allowed[0, 0, start : start + 128, 256 + start : 384 + start] = torch.ones(128, 128).tril().bool()
    blocks = flex.block_mask(allowed, 2)
    assert blocks.shape == (1, 1, 512, 1024)
    dense = blocks.to_dense()[0, 0].int()
    assert dense.tolist() == [[1, 1, *(int(k == q) for k in range(4)), 0, 0] for q in range(4)]


def test_rows_that_pad_the_batch_see_nothing() -> None:
    allowed = random_mask(1, 100, 100)
    assert flex.block_mask(allowed, 4).to_dense().shape[0] == 1  # all rows see the same
    dense = flex.block_mask(allowed, 3).to_dense()
    assert dense[:, 0, 0, 0].tolist() == [1, 1, 1, 0]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", [c for c in CASES if c.path == "prefix"], ids=lambda case: case.name)
def test_every_architecture_matches_a_float64_loop(case: Case) -> None:
    model, pairs = make_architecture(case).double(), make_pairs()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # grouped matrix products know no float64
    scorer, implementation = HFScorer(model, token_budget=40, attention="flex"), model.config._attn_implementation
    with AllInFloat64():
        scores = scorer.score_tokens(pairs, every_context=True)
        truth = token_loop(model, pairs)
    assert worst(scores.logp, truth) < FLOAT64_TOLERANCE
    assert scorer.info is not None
    assert model.config._attn_implementation == implementation
    own_code = case.model_type == "falcon"  # its layers call torch themselves, whatever attention the config names
    assert (scorer.info.path, scorer.info.attention) == ("prefix", "masked" if own_code else "flex")


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=5)
MODELS = {"full": make_model(), "window": make_model("mistral", sliding_window=5)}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", MODELS)
@given(contexts=sequences, traces=sequences, budget=st.sampled_from([16, 40, 2048]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_set_of_contexts_and_traces(
    kind: str, contexts: list[list[int]], traces: list[list[int]], budget: int
) -> None:
    pairs = pairs_of(contexts, traces, [i % len(contexts) for i in range(len(traces))])
    scorer = HFScorer(MODELS[kind], token_budget=budget, attention="flex", check_every=0)
    found = scorer.score(pairs).logp_NP
    np.testing.assert_allclose(found, loop(MODELS[kind], contexts, traces), rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.attention == "flex"


def lengths(context: int, trace: int, contexts: int = 3) -> Any:
    rng = np.random.default_rng(context)
    pairs = [draw(rng, context + 3 * j) for j in range(contexts)], [draw(rng, trace + j) for j in range(6)]
    return pairs_of(*pairs, [i % contexts for i in range(6)])


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gemma2", "gpt_oss"))])
def test_compiled_kernels_equal_the_loop_and_serve_all_lengths_of_their_bucket(kind: str) -> None:
    """Windows, caps and sinks included. The first lengths compile, others of the same buckets do not."""
    sizes: dict[str, Any] = {
        "llama": {},
        "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 4},
        "gpt_oss": {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1},
    }[kind]
    model = make_model(kind, dtype=torch.float32, **sizes)
    scorer = HFScorer(model, attention="flex", token_budget=256, check_every=1)
    made = []
    for context, trace in ((40, 9), (70, 5), (33, 12)):
        pairs = lengths(context, trace)
        before = counters["stats"]["unique_graphs"]
        found = scorer.score(pairs).logp_NP
        made.append(counters["stats"]["unique_graphs"] - before)
        np.testing.assert_allclose(found, loop(model, pairs.contexts, pairs.traces), rtol=0, atol=1e-4)
        assert scorer.info is not None
        assert (scorer.info.path, scorer.info.attention) == ("prefix", "flex")
        assert scorer.info.check is not None
    assert 0 < made[0] <= 6
    assert made[1:] == [0, 0]


@needs_compiler
@pytest.mark.slow
def test_more_shapes_than_torch_compiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past 8 shapes torch would raise; and what it allows elsewhere stays as it was."""
    monkeypatch.setattr(flex, "BLOCK", 16)
    monkeypatch.setattr(flex, "bucket", lambda n, least=16: max(least, 1 << (n - 1).bit_length()))
    before = torch._dynamo.config.recompile_limit
    model = make_model(dtype=torch.float32)
    scorer = HFScorer(model, attention="flex", check_every=0, token_budget=1024)
    counted = counters["stats"]["unique_graphs"]
    for context, trace, contexts in ((10, 3, 1), (20, 3, 2), (40, 9, 3), (70, 20, 5), (150, 40, 2), (300, 20, 5)):
        pairs = lengths(context, trace, contexts)
        found = scorer.score(pairs).logp_NP
        np.testing.assert_allclose(found, loop(model, pairs.contexts, pairs.traces), rtol=0, atol=1e-4)
        assert scorer.info is not None
        assert scorer.info.attention == "flex"
    assert counters["stats"]["unique_graphs"] - counted > 8
    assert torch._dynamo.config.recompile_limit == before


def test_a_kernel_that_cannot_be_had_leaves_the_masked_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(flex, "_kernel", no_compiler)
    model, pairs = make_model(), mixed_pairs()
    scorer = HFScorer(model, attention="flex")
    with caplog.at_level(logging.INFO, logger="collapsediag"):
        found = scorer.score(pairs).logp_NP
    np.testing.assert_allclose(found, loop(model, pairs.contexts, pairs.traces), rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert (scorer.info.path, scorer.info.attention) == ("prefix", "masked")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "flex attention does not suit LlamaForCausalLM: its forward failed on the fast path (RuntimeError: Failed to "
        "find C compiler)."
    )


@pytest.mark.usefixtures("uncompiled")
def test_a_wrong_kernel_is_found_by_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch_flex.flex_attention
    monkeypatch.setattr(flex, "_kernel", lambda: lambda *args, **options: real(*args, **{**options, "scale": 0.1}))
    model, pairs = make_model(), mixed_pairs()
    scorer = HFScorer(model, attention="flex")
    found = scorer.score(pairs).logp_NP
    np.testing.assert_allclose(found, loop(model, pairs.contexts, pairs.traces), rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.attention == "masked"


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dropout": 0.1}, "mask or dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"alibi": torch.zeros(1)}, "alibi"),
    ],
)
def test_what_changes_scores_otherwise_is_refused(options: dict[str, Any], named: str) -> None:
    query, key, value = tensors(1, 2, 2, 4, 4, torch.float64)
    with pytest.raises(flex.UnsupportedModelError, match=named):
        attended(query, key, value, random_mask(1, 4, 4), **options)
