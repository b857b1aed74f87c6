"""The scorer on adapters, heads and precisions that people train with; its self-check, its fallbacks, its errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring import attention, checks, hf, prefix
from collapsediag.scoring.attention import CascadeAttention
from collapsediag.scoring.hf import HFScorer, ScoreInfo
from collapsediag.scoring.protocol import CellScorer, Scorer
from collapsediag.scoring.short import pairs_of

from .conftest import import_or_skip
from .scoring_tiny import VOCABULARY, draw, loop, make_model, mixed_pairs, mixed_sequences, token_loop

TOLERANCE = 1e-8
# Eager attention takes its softmax in float32 even in a float64 model.
EAGER_TOLERANCE = 1e-5

PAIRS = mixed_pairs()
LENGTH_N = np.array([t.size for t in PAIRS.traces])[:, None]


def truth_of(model: Any, **options: Any) -> np.ndarray:
    return loop(model, PAIRS.contexts, PAIRS.traces, **options)


def info_of(scorer: HFScorer) -> ScoreInfo:
    assert scorer.info is not None
    return scorer.info


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "collapsediag" and r.levelno >= logging.WARNING]


def assert_fast_and_right(model: Any, **options: Any) -> None:
    tolerance = EAGER_TOLERANCE if getattr(model.config, "_attn_implementation", None) == "eager" else TOLERANCE
    scorer = HFScorer(model, **options)
    found = scorer.score_tokens(PAIRS, entropies=True)
    assert info_of(scorer).path == "prefix", scorer.info
    np.testing.assert_allclose(found.matrix.logp_NP, truth_of(model), rtol=0, atol=tolerance)
    assert found.own_entropy is not None
    for n in range(PAIRS.n_traces):
        logp, entropy = token_loop(model, PAIRS.contexts[PAIRS.own_N[n]], PAIRS.traces[n])
        np.testing.assert_allclose(found.own_logp[n], logp, rtol=0, atol=tolerance)
        np.testing.assert_allclose(found.own_entropy[n], entropy, rtol=0, atol=tolerance)


# -- heads -----------------------------------------------------------------------------------------------------------


def with_bias(model: Any, value: float | None = None) -> Any:
    old = model.lm_head
    model.lm_head = nn.Linear(old.in_features, old.out_features, bias=True, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.copy_(old.weight)
        model.lm_head.bias.copy_(torch.linspace(-3, 3, old.out_features))
        if value is not None:
            model.lm_head.bias[7] = value
    return model


HEADS: dict[str, Callable[[], Any]] = {
    "untied": make_model,
    "tied": lambda: make_model(tie_word_embeddings=True),
    "bias": lambda: with_bias(make_model()),
    "cap": lambda: make_model(
        "gemma2", query_pre_attn_scalar=4, final_logit_softcapping=1.5, attn_implementation="eager"
    ),
    "scale": lambda: make_model("cohere", logit_scale=0.3),
    "divided": lambda: make_model("granite", logits_scaling=5.0),
    "conv1d": lambda: make_model("gpt2"),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("rows", [None, 3])
def test_heads(name: str, rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """rows: of a logits chunk, so small that every forward pass needs several."""
    if rows is not None:
        monkeypatch.setattr("collapsediag.scoring.head.MAX_ROWS", rows)
        monkeypatch.setattr("collapsediag.scoring.head.HeadTap._rows_per_chunk", lambda self, hidden: rows)
    model = HEADS[name]()
    if name == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_fast_and_right(model)


def test_a_token_that_is_never_said() -> None:
    """-inf in the bias bans a token: its traces have no probability, its share of the entropy is 0, not NaN."""
    model = with_bias(make_model(), -torch.inf)
    contexts, traces = mixed_sequences()
    traces = [[t for t in trace if t != 7] or [8] for trace in traces]
    traces.append([9, 7, 9])
    found = HFScorer(model).score_tokens(pairs_of(contexts, traces, [0] * len(traces)), entropies=True)
    assert found.own_entropy is not None
    np.testing.assert_array_equal(found.matrix.logp_NP[-1], -np.inf)
    np.testing.assert_allclose(found.matrix.logp_NP[:-1], loop(model, contexts, traces[:-1]), rtol=0, atol=TOLERANCE)
    for trace, entropy in zip(traces, found.own_entropy, strict=True):
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(entropy, token_loop(model, contexts[0], trace)[1], rtol=0, atol=TOLERANCE)


class Transformed(nn.Module):
    """A head that does more than its config says."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.out_features = VOCABULARY
        self.weight = inner.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden).tanh() * 2


def test_a_head_of_ones_own() -> None:
    model = make_model()
    model.lm_head = Transformed(model.lm_head)
    assert_fast_and_right(model)


def test_logits_that_are_changed_after_the_head_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """The config says nothing of it, so only comparing what comes out tells."""
    model = make_model()
    # This hook runs in the place where the model's own code would cap or scale its logits.
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    truth = truth_of(model)
    scorer = HFScorer(model)
    found = scorer.score(PAIRS).logp_NP
    np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)
    assert info_of(scorer).path == "plain"
    assert ["transforms its logits in a way that is not known" in line for line in warned(caplog)] == [True]


@pytest.mark.parametrize("way", ["auto", "plain"])
def test_a_token_banned_after_the_head_is_noticed(way: str) -> None:
    """One column of the logits is changed, which the single column that stands for them while tapped does not show."""
    model = make_model()

    def ban(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits[..., 9:10] = -20.0
        return output

    model.register_forward_hook(ban)
    truth = truth_of(model)
    scorer = HFScorer(model, attention=way)
    np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, truth, rtol=0, atol=TOLERANCE)
    assert info_of(scorer).path == "plain"


# -- adapters --------------------------------------------------------------------------------------------------------


def lora(model: Any, **settings: Any) -> Any:
    peft = import_or_skip("peft")
    wanted = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": False}
    tuned = peft.get_peft_model(model, peft.LoraConfig(**{**wanted, **settings}))
    return tuned.double().eval()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_dropout": 0.5},
        {"use_dora": True},
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_lora(settings: dict[str, Any]) -> None:
    base = make_model()
    without = truth_of(base)
    model = lora(base, **settings)
    assert_fast_and_right(model)
    assert np.abs(truth_of(model) - without).max() > 0.01, "the adapter changes nothing here"
    model.train()
    found = HFScorer(model).score(PAIRS).logp_NP
    assert all(module.training for module in model.modules())
    model.eval()
    np.testing.assert_allclose(found, truth_of(model), rtol=0, atol=TOLERANCE)


def test_an_adapter_switched_off_is_the_reference_policy() -> None:
    base = make_model()
    without = truth_of(base)
    model = lora(base)
    scorer = HFScorer(model)
    with_adapter = scorer.score(PAIRS).logp_NP
    with model.disable_adapter():
        np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, without, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(scorer.score(PAIRS).logp_NP, with_adapter)


def test_a_wrapped_and_a_compiled_model_are_scored_inside() -> None:
    model = make_model()
    truth = truth_of(model)
    for outer in (nn.DataParallel(model), torch.compile(model)):
        scorer = HFScorer(outer)
        np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, truth, rtol=0, atol=TOLERANCE)
        assert info_of(scorer).path == "prefix"


# -- low precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "noise"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str)
def test_low_precision_is_noise_not_bias(dtype: torch.dtype, noise: float) -> None:
    """rms difference from the same weights in float64, nats a token: a few units of the last place of a logit."""
    model = make_model(dtype=dtype, num_hidden_layers=4)
    scorer = HFScorer(model)
    found = scorer.score(PAIRS).logp_NP
    plain = HFScorer(model, attention="plain").score(PAIRS).logp_NP
    assert info_of(scorer).path == "prefix", scorer.info
    assert info_of(scorer).dtype == str(dtype).removeprefix("torch.")
    assert 0 < (info_of(scorer).check or 0) < 3 * noise
    truth = truth_of(model.double())
    error, plain_error = ((m - truth) / LENGTH_N for m in (found, plain))
    rms, plain_rms = (float(np.sqrt((e**2).mean())) for e in (error, plain_error))
    assert rms < noise
    assert rms < 2 * plain_rms + 1e-4, "the fast path is noisier than the model itself"
    assert abs(error.mean()) < noise / 2


# -- self-check and fallback -----------------------------------------------------------------------------------------


def all_causal(end_T: np.ndarray) -> torch.Tensor:
    """A tree mask gone wrong: strangers see each other."""
    return torch.ones(end_T.size, end_T.size, dtype=torch.bool).tril()


def rolled(parts: Any) -> Any:
    """A cache gone wrong: each key at its neighbour's place."""
    found = REAL_STACK(parts)
    for segment in found.segments:
        segment.keys_values[:] = [(k.roll(1, 2), v) for k, v in segment.keys_values]
    return found


REAL_STACK = prefix.stack


def shifted(*args: Any) -> Any:
    """Positions gone wrong: one too many."""
    found = REAL_STACK(*args)
    return type(found)(found.segments, found.length_B + 1, found.valid_BK, found.position_BK)


@pytest.mark.parametrize(
    "broken", [(attention, "tree_mask", all_causal), (prefix, "stack", rolled), (prefix, "stack", shifted)]
)
def test_a_fast_path_that_is_wrong_is_caught_and_left(
    broken: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    truth = truth_of(model)
    monkeypatch.setattr(*broken)
    wrong = HFScorer(model, check_every=0).score(PAIRS).logp_NP
    assert np.abs(wrong - truth).max() > 0.01, "what was broken does not show; this tests nothing"
    scorer = HFScorer(model)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        for _ in range(3):
            np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, truth, rtol=0, atol=TOLERANCE)
            tokens = scorer.score_tokens(PAIRS, entropies=True)
            assert [v.sum() for v in tokens.own_logp] == pytest.approx(
                truth[np.arange(PAIRS.n_traces), PAIRS.own_N], abs=TOLERANCE
            )
    assert info_of(scorer).path == "plain"
    assert "nats a token in the self-check" in (info_of(scorer).reason or "")
    (line,) = warned(caplog)
    assert line.startswith("LlamaForCausalLM is scored by the plain path, because its fast scores differ")


def test_a_wrong_cascade_leaves_the_masked_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    real = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, scale, **options: real(q, k, v, scale * 1.5, **options))
    scorer = HFScorer(model)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, truth_of(model), rtol=0, atol=TOLERANCE)
    assert (info_of(scorer).path, info_of(scorer).attention) == ("prefix", "masked")
    assert warned(caplog) == []


def test_a_model_that_refuses_the_fast_path_in_its_own_words(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    truth = truth_of(model)

    def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs.get("position_ids") is not None:
            raise ValueError("no positions please\nsecond line")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    scorer = HFScorer(model)
    for _ in range(2):
        np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, truth, rtol=0, atol=TOLERANCE)
    (line,) = warned(caplog)
    assert "because its forward failed on the fast path (ValueError: no positions please)." in line


def test_layers_of_a_kind_that_is_not_known_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hf, "continues", lambda *args: False)
    model = make_model("mistral", sliding_window=None)
    truth = truth_of(model)
    model.config.layer_types = ["full_attention", "whirling_attention"]
    scorer = HFScorer(model)
    for _ in range(2):
        np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, truth, rtol=0, atol=TOLERANCE)
    (line,) = warned(caplog)
    assert "because it has layers of type whirling_attention." in line
    assert info_of(scorer) == ScoreInfo(
        path="plain",
        reason="it has layers of type whirling_attention",
        attention=None,
        check=None,
        dtype="float64",
        token_budget=info_of(scorer).token_budget,
    )
    cost = scorer.estimate(PAIRS)
    cells = {(PAIRS.traces[i].tobytes(), j) for i in range(PAIRS.n_traces) for j in range(PAIRS.n_contexts)}
    assert cost.tokens == sum(len(t) // 8 - 1 + PAIRS.contexts[j].size for t, j in cells)


def test_what_was_asked_for_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    scorer = HFScorer(model, attention="plain")
    np.testing.assert_allclose(scorer.score(PAIRS).logp_NP, truth_of(model), rtol=0, atol=TOLERANCE)
    assert (info_of(scorer).path, info_of(scorer).reason) == ("plain", "that was asked for")
    assert warned(caplog) == []


@pytest.mark.parametrize(("every", "checked"), [(0, []), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (50, [0])])
def test_checks_come_at_the_first_call_and_every_so_many(
    every: int, checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = hf.self_check

    def spy(access: Any, results: Any, settings: Any, call: int) -> Any:
        calls.append(call)
        return real(access, results, settings, call)

    monkeypatch.setattr(hf, "self_check", spy)
    scorer = HFScorer(make_model(), check_every=every)
    noted = []
    for call in range(7):
        scorer.score(PAIRS)
        if info_of(scorer).check is not None:
            noted.append(call)
            assert (info_of(scorer).check or 0) < TOLERANCE
    assert calls == noted == checked


def test_the_longest_pair_is_always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[tuple[int, int]]] = []
    real = checks.plain_logp

    def spy(access: Any, contexts: Any, traces: Any, cells: Any, *rest: Any) -> None:
        seen.append({(traces[u].size, contexts[c].size) for u, c in cells})
        real(access, contexts, traces, cells, *rest)

    monkeypatch.setattr(checks, "plain_logp", spy)
    scorer = HFScorer(make_model(), check_every=1)
    for _ in range(4):
        scorer.score(PAIRS)
    longest = max(t.size for t in PAIRS.traces), max(c.size for c in PAIRS.contexts)
    assert len(seen) == 4
    assert all(longest in lengths and 1 < len(lengths) <= 4 for lengths in seen)
    assert len(set(map(frozenset, seen))) > 1, "the same pairs are checked every time"


def test_an_error_that_appears_later_is_caught_at_the_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that changes under the scorer's feet, as one whose window starts to matter once outputs grow."""
    model = make_model()
    scorer = HFScorer(model, check_every=2, attention="masked")
    truth = truth_of(model)
    for call in range(4):
        if call == 1:
            monkeypatch.setattr(attention, "tree_mask", all_causal)
        right = np.abs(scorer.score(PAIRS).logp_NP - truth).max() < TOLERANCE
        assert (right, info_of(scorer).path) == ((call != 1), "prefix" if call < 2 else "plain")


@pytest.mark.parametrize("kind", ["llama", "gpt_neo"])
def test_pairs_far_longer_than_any_before_are_checked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 6 tokens says nothing of itself in pairs of 5."""
    local = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 6}
    model = make_model(kind, **(local if kind == "gpt_neo" else {}))
    monkeypatch.setattr(hf, "unsupported_reason", lambda access: None)
    scorer, checked = HFScorer(model), []
    for length in (2, 2, 30, 30, 55, 70):
        rng = np.random.default_rng(length)
        contexts, traces = [draw(rng, length), draw(rng, length + 1)], [draw(rng, length) for _ in range(3)]
        found = scorer.score(pairs_of(contexts, traces, [0, 1, 0])).logp_NP
        np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=TOLERANCE)
        checked.append(info_of(scorer).check is not None)
    assert checked == [True, False, True, False, False, kind == "llama"]  # the other one is plain from then on


def test_cascade_is_only_tried_where_it_suits() -> None:
    from collapsediag.scoring.access import ModelAccess

    assert CascadeAttention.suits(ModelAccess.of(make_model()))
    assert not CascadeAttention.suits(ModelAccess.of(make_model("mistral", sliding_window=8)))
    assert not CascadeAttention.suits(ModelAccess.of(make_model("gemma3_text", sliding_window=8)))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_a_negative_id_in_pairs_of_ones_own_is_refused() -> None:
    """Padding that was left in: the last token is only looked up, and -1 would be the vocabulary's last."""
    row = {name: np.array([0]) for name in ("own_N", "group_N", "rollout_N", "turn_N", "multiplicity_P")}
    pairs = ScoringPairs(contexts=(np.array([3, 4]),), traces=(np.array([5, -1]),), **row)
    with pytest.raises(ScoringError, match="trace 0 holds token id -1 at position 1"):
        HFScorer(make_model(), check_every=0).score(pairs)


def refusing_model() -> Any:
    """A model whose forward must not be reached."""
    model = make_model()

    def fail(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise AssertionError("a forward pass ran before the input was checked")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    return model


def pairs_with(contexts: list[list[int]], traces: list[list[int]]) -> ScoringPairs:
    return pairs_of(contexts, traces, [0] * len(traces))


BAD: dict[str, tuple[list[list[int]], list[list[int]], str]] = {
    "trace id": (
        [[3], [4]],
        [[5], [6, VOCABULARY]],
        rf"trace 1 holds token id {VOCABULARY} at position 1, but the model's vocabulary has {VOCABULARY} entries "
        rf"\(0 to {VOCABULARY - 1}\)\. .*use the policy that wrote the rollouts",
    ),
    "context id": ([[3], [4, 5, 10**12]], [[5]], r"context 1 holds token id 1000000000000 at position 2"),
    "empty context": ([[3], []], [[5]], r"context 1 is empty: .*begin-of-sequence"),
    "too long": (
        [[3] * 10, [4] * 1000, [5]],
        [[5], [6] * 25],
        r"context 1 \(1000 tokens\) and trace 1 \(25 tokens\) are 1025 tokens together, but the model's limit is 1024\."
        r".*max_context_tokens, max_trace_tokens",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("way", ["auto", "plain"])
def test_errors_before_any_forward(name: str, way: str) -> None:
    contexts, traces, message = BAD[name]
    scorer, pairs = HFScorer(refusing_model(), attention=way), pairs_with(contexts, traces)
    jobs: list[Callable[[], Any]] = [
        lambda: scorer.score(pairs),
        lambda: scorer.score_tokens(pairs),
        lambda: scorer.score_cells(pairs, np.ones((len(traces), len(contexts)), dtype=bool)),
        lambda: scorer.estimate(pairs),
    ]
    for job in jobs:
        with pytest.raises(ScoringError, match=message):
            job()


def test_the_limit_itself_fits_and_may_be_set() -> None:
    model = make_model(max_position_embeddings=64)
    contexts, traces = [[3] * 40, [4] * 3], [[5] * 24, [6]]
    found = HFScorer(model).score(pairs_with(contexts, traces)).logp_NP
    np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=TOLERANCE)
    with pytest.raises(ScoringError, match="are 65 tokens together"):
        HFScorer(model).score(pairs_with(contexts, [[5] * 25]))
    with pytest.raises(ScoringError, match="are 64 tokens together, but the model's limit is 63"):
        HFScorer(model, max_tokens=63).score(pairs_with(contexts, traces))


def test_no_trace_no_forward() -> None:
    scorer = HFScorer(refusing_model())
    assert scorer.score(pairs_of([[3]], [[], []], [0, 0])).logp_NP.tolist() == [[0.0], [0.0]]
    nothing = np.zeros((1, 2), dtype=bool)
    assert np.isnan(scorer.score_cells(pairs_of([[3], [4]], [[5]], [0]), nothing)).all()
    tokens = scorer.score_tokens(pairs_of([[3]], [[]], [0]), entropies=True, every_context=True)
    assert tokens.own_entropy is not None
    assert tokens.logp is not None
    assert [v.shape for v in (*tokens.own_logp, *tokens.own_entropy, *tokens.logp)] == [(0,), (0,), (1, 0)]


@pytest.mark.parametrize("mask", [np.ones((2, 2), dtype=bool), np.ones((9, 4)), np.ones(36, dtype=bool)])
def test_cells_of_another_shape(mask: np.ndarray) -> None:
    with pytest.raises(ScoringError, match=r"scored_NP must be booleans of shape \(9, 4\)"):
        HFScorer(refusing_model()).score_cells(PAIRS, mask)


@pytest.mark.parametrize("way", ["auto", "masked", "plain"])
def test_weights_that_are_nan_give_rows_that_are_nan(way: str) -> None:
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    scorer = HFScorer(model, attention=way)
    found = scorer.score_tokens(PAIRS, entropies=True)
    assert np.isnan(found.matrix.logp_NP).all()
    assert info_of(scorer).path == ("plain" if way == "plain" else "prefix")
    assert found.own_entropy is not None
    assert all(np.isnan(entropy).all() for entropy in found.own_entropy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash"}, "attention 'flash' is not known; choose one of auto, cascade, flex, masked, plain"),
        ({"token_budget": 15}, "token_budget is 15; at least 16"),
        ({"check_every": -1}, "check_every is -1; 0 switches the self-check off"),
        ({"temperature": 0}, "temperature is 0; it must be above 0"),
    ],
)
def test_settings_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        HFScorer(make_model(), **options)


def test_it_is_what_the_metrics_ask_for() -> None:
    scorer = HFScorer(make_model())
    assert isinstance(scorer, Scorer)
    assert isinstance(scorer, CellScorer)
    matrix = scorer.score(PAIRS)
    assert matrix.length_N.tolist() == [t.size for t in PAIRS.traces]
    assert matrix.own_N.tolist() == PAIRS.own_N.tolist()
    assert matrix.logp_NP.dtype == np.float64


def test_other_pairs_with_the_same_scorer() -> None:
    """Nothing of one call is left in the next."""
    model, rng = make_model(), np.random.default_rng(8)
    scorer = HFScorer(model)
    for n, p in ((3, 2), (1, 1), (5, 3)):
        contexts = [draw(rng, int(k)) for k in rng.integers(1, 30, p)]
        traces = [draw(rng, int(k)) for k in rng.integers(1, 30, n)]
        found = scorer.score(pairs_with(contexts, traces)).logp_NP
        np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=TOLERANCE)
