"""A trace whose activations are NaN has no score; those that run beside it keep theirs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of

from .scoring_tiny import draw, loop, make_model

TOLERANCE = 1e-8
BROKEN = 7
PADDING = 0


def break_tokens(model: Any) -> None:
    """NaN wherever the token is read, as an activation that overflowed would be; and where padding is read."""
    weight = model.lm_head.weight
    if weight is model.get_input_embeddings().weight:
        model.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[[BROKEN, PADDING]] = torch.nan


def broken_and_truth(model: Any, pairs: ScoringPairs) -> tuple[Any, np.ndarray]:
    """The model with broken tokens, and the sound model's scores of whatever reads none of them, NaN elsewhere."""
    truth = loop(model, pairs.contexts, pairs.traces)
    # Where the broken token is the last of a trace it is predicted but never read.
    read = np.array([BROKEN in trace[:-1] for trace in pairs.traces])[:, None]
    truth[read | np.array([BROKEN in context for context in pairs.contexts])[None, :]] = np.nan
    break_tokens(model)
    return model, truth


def drawn(rng: np.random.Generator, n: int) -> list[int]:
    return [token if token != BROKEN else 8 for token in draw(rng, n)]


def make_pairs(*, broken_context: bool) -> ScoringPairs:
    rng = np.random.default_rng(0)
    shared = drawn(rng, 30)
    contexts = [shared + drawn(rng, n) for n in (4, 9, 1)] + [drawn(rng, 6)]
    traces = [drawn(rng, int(n)) for n in rng.integers(2, 40, 9)]
    traces[4] = [*traces[4][:1], BROKEN, *drawn(rng, 6)]
    traces += [traces[4][:1] + drawn(rng, 3), traces[4][:1], [*traces[0][:2], BROKEN], [BROKEN, 9], list(traces[4])]
    if broken_context:
        contexts.insert(1, [*shared, BROKEN, *drawn(rng, 3)])
    return pairs_of(contexts, traces, [i % len(contexts) for i in range(len(traces))])


@pytest.mark.parametrize("broken_context", [False, True])
@pytest.mark.parametrize("budget", [16, 60, None])
@pytest.mark.parametrize("way", ["cascade", "masked", "plain"])
def test_only_traces_that_hold_the_broken_token_are_nan(way: str, budget: int | None, broken_context: bool) -> None:
    pairs = make_pairs(broken_context=broken_context)
    model, truth = broken_and_truth(make_model(), pairs)
    assert 0 < np.isnan(truth).sum() < truth.size
    scorer = HFScorer(model, token_budget=budget, attention=way)
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.path == ("plain" if way == "plain" else "prefix"), scorer.info
    tokens = scorer.score_tokens(pairs, entropies=True)
    assert tokens.own_entropy is not None
    for n, (logp, entropy) in enumerate(zip(tokens.own_logp, tokens.own_entropy, strict=True)):
        assert logp.sum() == pytest.approx(truth[n, pairs.own_N[n]], abs=TOLERANCE, nan_ok=True)
        assert np.isnan(entropy.sum()) == np.isnan(truth[n, pairs.own_N[n]])


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt2"])
def test_windows_and_learned_positions(model_type: str) -> None:
    settings = {"sliding_window": 9, "query_pre_attn_scalar": 4} if model_type == "gemma3_text" else {}
    pairs = make_pairs(broken_context=True)
    model, truth = broken_and_truth(make_model(model_type, **settings), pairs)
    found = HFScorer(model, token_budget=60).score(pairs).logp_NP
    np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)


def forwards(model: Any, pairs: ScoringPairs) -> int:
    count = 0

    def add(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = model.register_forward_pre_hook(add)
    HFScorer(model, token_budget=60, check_every=0).score(pairs)
    handle.remove()
    return count


def test_nothing_runs_twice_where_no_trace_is_to_blame() -> None:
    """Neither in a sound model, nor in one whose every context is NaN, as after a broken update."""
    model, pairs = make_model(), make_pairs(broken_context=False)
    sound = forwards(model, pairs)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    assert forwards(model, pairs) == sound
    model = make_model()
    break_tokens(model)
    assert forwards(model, pairs) > sound


@pytest.mark.parametrize("way", ["auto", "plain"])
def test_padding_that_outlasts_a_window_is_no_nan(way: str) -> None:
    """Eager attention takes its softmax in float32, where the mask of a float64 model is minus infinity."""
    model = make_model("mistral", sliding_window=4)
    model.set_attn_implementation("eager")
    rng = np.random.default_rng(0)
    contexts, traces = [draw(rng, 6), draw(rng, 20)], [draw(rng, 3), draw(rng, 15)]
    scorer = HFScorer(model, attention=way)
    found = scorer.score(pairs_of(contexts, traces, [0, 1])).logp_NP
    np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=1e-6)
    assert scorer.info is not None
    assert scorer.info.path == ("prefix" if way == "auto" else "plain")
