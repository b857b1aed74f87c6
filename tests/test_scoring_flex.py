"""FlexAttention against loops in float64: torch's eager code for it, and in two tests kernels compiled for this CPU."""

from __future__ import annotations

import functools
import logging
import shutil
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from collapsediag.scoring import flex
from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.masks import AttentionKinds, step_masks, tree_mask
from collapsediag.scoring.memory import mask_bytes
from collapsediag.scoring.short import pairs_of

from .scoring_tiny import draw, loop, make_model, mixed_pairs
from .test_scoring_arch import CASES, FLOAT64_TOLERANCE, AllInFloat64, Case, make_pairs, token_loop, worst
from .test_scoring_arch import make_model as make_architecture
from .test_scoring_nan import broken_and_truth
from .test_scoring_nan import make_pairs as broken_pairs

FloatArray = NDArray[np.float64]
TOLERANCE = 1e-10

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's eager FlexAttention: every score is written out, in any precision."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_kernel", lambda: torch_flex.flex_attention)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch traces, guards and counts as ever, and runs its eager code where it would compile a kernel for minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex._kernel.cache_clear()
    yield
    flex._kernel.cache_clear()


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


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None, **options: Any
) -> Any:
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
    assert blocks.shape == (2, 1, 512, 1024)
    for dense in blocks.to_dense()[:, 0].int():
        assert dense.tolist() == [[1, 1, *(int(k == q) for k in range(4)), 0, 0] for q in range(4)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sink", [False, True])
def test_blocks_are_those_of_torch(rows: int, sink: bool) -> None:
    """Partly and fully seen ones, in the order in which torch would list them; rows that pad the batch see nothing."""
    batch, tokens, keys = 3, 200, 500
    allowed = torch.rand(rows, 1, tokens, keys, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[:, :, :128, 128:256] = True
    allowed[-1, :, :, 300:] = False
    whole = torch.zeros(4, 256, 512, dtype=torch.bool)
    whole[:batch, :tokens, :keys] = allowed[:, 0]
    whole[:batch, :tokens, -1] |= sink
    truth = torch_flex.create_block_mask(lambda b, h, q, k: whole[b, q, k], 4, None, 256, 512, device="cpu")
    found = flex.block_mask(allowed, batch, sink=sink)
    assert found.shape == truth.shape
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(found, name), getattr(truth, name)), name
    at = torch.meshgrid(torch.arange(batch), torch.arange(256), torch.arange(512), indexing="ij")
    assert torch.equal(found.mask_mod(at[0], torch.tensor(0), *at[1:]), whole[:batch])


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def gone(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.now -= size


@pytest.mark.parametrize("way", ["masked", "flex"])
@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"sliding_window": None}, True),
        ({"sliding_window": None}, False),
        ({"sliding_window": 50}, True),
        ({"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]}, True),
    ],
)
def test_masks_take_no_more_memory_than_their_formula_says(way: str, settings: dict[str, Any], rows: bool) -> None:
    access = ModelAccess.of(make_model("ministral", dtype=torch.bfloat16, **settings))
    batch, tokens, prefix_keys = 5, 130, 900
    valid = torch.ones(batch, prefix_keys, dtype=torch.bool) if rows else None
    position_BT = torch.arange(prefix_keys, prefix_keys + tokens).expand(batch, -1)
    own_TT = tree_mask(np.full(tokens, tokens))
    with LiveBytes() as live:
        dtype = torch.bool if way == "flex" else torch.bfloat16
        kinds = AttentionKinds.of(access)
        masks = step_masks(kinds, own_TT, position_BT, valid, torch.arange(prefix_keys)[None], dtype)
        if way == "flex":
            each = list(masks.values()) if isinstance(masks, dict) else [masks]
            blocks = [flex.block_mask(mask, batch) for mask in each]
            assert len(blocks) == (2 if "layer_types" in settings else 1)
    said = mask_bytes(access, way) * (batch if rows else 1) * tokens * (prefix_keys + tokens)
    assert said / 2.5 < live.peak <= 1.05 * said  # small tensors beside them


def test_layers_that_slice_or_copy_the_mask() -> None:
    """A view has the blocks of its mask; of copies, which never come again, no more than a few are held."""
    job, allowed = flex._Job(), random_mask(3, 50, 70)
    blocks = job.blocks_of(allowed, 3, sink=False)
    assert job.blocks_of(allowed[:, :, :, :70], 3, sink=False) is blocks
    assert job.blocks_of(allowed[:, :, :, :69], 3, sink=False) is not blocks
    assert job.blocks_of(allowed, 3, sink=True) is not blocks
    copies = [weakref.ref(copy) for copy in (allowed.clone() for _ in range(20)) if job.blocks_of(copy, 3, sink=False)]
    assert sum(copy() is not None for copy in copies) <= flex.MAX_MASKS
    assert torch.equal(job.blocks_of(allowed, 3, sink=False).kv_num_blocks, blocks.kv_num_blocks)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("broken_context", [False, True])
def test_only_the_guilty_trace_is_nan(broken_context: bool) -> None:
    pairs = broken_pairs(broken_context=broken_context)
    model, truth = broken_and_truth(make_model(), pairs)
    scorer = HFScorer(model, token_budget=60, attention="flex")
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=1e-8)
    assert scorer.info is not None
    assert (scorer.info.path, scorer.info.attention) == ("prefix", "flex")


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
        "llama": {"hidden_size": 24, "num_attention_heads": 6},  # three to a key head
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


@pytest.mark.usefixtures("traced")
def test_more_shapes_than_torch_compiles_by_itself_and_nothing_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its limit torch would raise. What the user compiled is neither compiled again nor kept from it."""
    monkeypatch.setattr(flex, "BLOCK", 16)
    monkeypatch.setattr(flex, "bucket", lambda n, least=16: max(least, 1 << (n - 1).bit_length()))
    model = make_model()
    training = torch.compile(model, dynamic=False)
    tokens = [torch.arange(3, 3 + n)[None] for n in (5, 9)]
    with torch._dynamo.config.patch(recompile_limit=4):
        start = counters["stats"]["unique_graphs"]
        before = [training(input_ids=ids, use_cache=False).logits for ids in tokens]
        scorer = HFScorer(training, attention="flex", check_every=0, token_budget=1024)
        counted = counters["stats"]["unique_graphs"]
        assert counted - start >= len(tokens)
        for context, trace, contexts in ((10, 3, 1), (20, 3, 2), (40, 9, 3), (70, 20, 5), (150, 40, 2)):
            pairs = lengths(context, trace, contexts)
            found = scorer.score(pairs).logp_NP
            np.testing.assert_allclose(found, loop(model, pairs.contexts, pairs.traces), rtol=0, atol=TOLERANCE)
            assert scorer.info is not None
            assert scorer.info.attention == "flex"
        compiled = counters["stats"]["unique_graphs"]
        assert compiled - counted > 8
        assert torch._dynamo.config.recompile_limit == 4
        after = [training(input_ids=ids, use_cache=False).logits for ids in tokens]
        assert counters["stats"]["unique_graphs"] == compiled
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("traced")
def test_what_fills_its_bucket_takes_no_kernel_of_its_own() -> None:
    """Where nothing is padded, queries and keys come in the order in which the layer laid them."""
    counted = []
    for batch, tokens, keys in ((4, 127, 250), (4, 128, 250), (4, 128, 256), (3, 128, 256)):
        query, key, value = (
            torch.zeros(batch, length, heads, 8).transpose(1, 2)
            for heads, length in ((4, tokens), (2, keys), (2, keys))
        )
        with torch._dynamo.config.patch(recompile_limit=flex.MAX_KERNELS):  # other tests have used up the usual one
            attended(query, key, value, random_mask(batch, tokens, keys))
        counted.append(counters["stats"]["unique_graphs"])
    assert len(set(counted)) == 1


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


def expect_masked(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model, pairs = make_model(dtype=torch.float32), mixed_pairs()
    scorer = HFScorer(model, attention="flex", check_every=0)
    with caplog.at_level(logging.INFO, logger="collapsediag"):
        found = scorer.score(pairs).logp_NP
    np.testing.assert_allclose(found, loop(model, pairs.contexts, pairs.traces), rtol=0, atol=1e-4)
    assert scorer.info is not None
    assert (scorer.info.path, scorer.info.attention) == ("prefix", "masked")
    assert [record.getMessage() for record in caplog.records] == [
        f"flex attention does not suit LlamaForCausalLM: {reason}."
    ]


def test_where_torch_compiles_nothing_no_scores_are_written_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There torch would run FlexAttention as it stands: slowly, with the scores of all tokens under all keys."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    flex._kernel.cache_clear()
    try:
        expect_masked("torch does not compile it (TORCHDYNAMO_DISABLE is set, or its FLOPs are being counted)", caplog)
    finally:
        flex._kernel.cache_clear()


def test_a_torch_before_flex_attention_leaves_the_masked_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, patched = torch._dynamo.config, []

    def patch(**changes: int) -> Any:
        patched.append(changes)
        return real.patch(recompile_limit=changes["cache_size_limit"])

    monkeypatch.delattr(torch.compiler, "set_stance")
    monkeypatch.setattr(torch._dynamo, "config", SimpleNamespace(cache_size_limit=8, patch=patch))
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    expect_masked("FlexAttention needs torch 2.6 or later, and this is torch 2.5.1", caplog)
    assert patched == [{"cache_size_limit": flex.MAX_KERNELS}]


@pytest.mark.parametrize("way", ["auto", "masked", "plain"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_policy_that_trains_with_flex_attention(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, as everything of the policy runs meanwhile, it would write out all scores: torch warns of that."""
    monkeypatch.setattr(torch_flex, "_WARNINGS_SHOWN", set())
    model, pairs = make_model(kind, **({"query_pre_attn_scalar": 4} if kind == "gemma2" else {})), mixed_pairs()
    truth = loop(model, pairs.contexts, pairs.traces)
    model.config._attn_implementation = "flex_attention"
    np.testing.assert_allclose(HFScorer(model, attention=way).score(pairs).logp_NP, truth, rtol=0, atol=1e-5)
    assert model.config._attn_implementation == "flex_attention"


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
        ({"indices": torch.zeros(1)}, "indices"),  # of the keys that an indexer chose
    ],
)
def test_what_changes_scores_otherwise_is_refused(options: dict[str, Any], named: str) -> None:
    query, key, value = tensors(1, 2, 2, 4, 4, torch.float64)
    with pytest.raises(flex.UnsupportedModelError, match=named):
        attended(query, key, value, random_mask(1, 4, 4), **options)


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        random_mask(1, 4, 5).float(),
        random_mask(1, 4, 5).expand(2, 2, 4, 5),  # of each head
        random_mask(1, 4, 6),  # of more keys than there are
        random_mask(3, 4, 5),
    ],
)
def test_other_masks_than_of_tokens_and_keys_are_refused(allowed: torch.Tensor | None) -> None:
    query, key, value = tensors(2, 2, 2, 4, 5, torch.float64)
    with pytest.raises(flex.UnsupportedModelError, match="mask or dropout"):
        attended(query, key, value, allowed)


def test_an_interrupt_leaves_torch_and_the_model_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(flex, "_kernel", interrupted)
    model = make_model().train()
    with torch._dynamo.config.patch(recompile_limit=5), torch.compiler.set_stance("eager_on_recompile"):
        with pytest.raises(KeyboardInterrupt):
            HFScorer(model, attention="flex").score(mixed_pairs())
        assert torch._dynamo.config.recompile_limit == 5
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert flex._ACTIVE.job is None
