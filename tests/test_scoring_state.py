"""Models whose layers no tree of traces can share: each context runs once, traces continue copies of its state."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring import state
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of

from .scoring_tiny import VOCABULARY, draw, loop, make_model, mixed_pairs, token_loop

TOLERANCE = 1e-8
# Bloom takes its softmax in float32 also in a float64 model.
FLOAT32_INSIDE_TOLERANCE = 1e-6


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "collapsediag"]


def convolving() -> Any:
    return make_model("lfm2", layer_types=["conv", "full_attention"], full_attn_idxs=None)


def biased() -> Any:
    return make_model("bloom", n_layer=2, n_head=4, vocab_size=VOCABULARY)


@pytest.mark.parametrize("budget", [16, None])
@pytest.mark.parametrize(("make", "tolerance"), [(convolving, TOLERANCE), (biased, FLOAT32_INSIDE_TOLERANCE)])
def test_equals_the_loop(make: Any, tolerance: float, budget: int | None, caplog: pytest.LogCaptureFixture) -> None:
    model, pairs = make(), mixed_pairs()
    scorer = HFScorer(model, token_budget=budget, check_every=1)
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        found = scorer.score_tokens(pairs, entropies=True)
    assert scorer.info is not None
    assert (scorer.info.path, scorer.info.attention) == ("state", None)
    assert scorer.info.check is not None
    assert scorer.info.check < tolerance
    assert told(caplog) == []
    np.testing.assert_allclose(found.matrix.logp_NP, loop(model, pairs.contexts, pairs.traces), rtol=0, atol=tolerance)
    assert found.own_entropy is not None
    for n in range(pairs.n_traces):
        logp, entropy = token_loop(model, pairs.contexts[pairs.own_N[n]], pairs.traces[n])
        np.testing.assert_allclose(found.own_logp[n], logp, rtol=0, atol=tolerance)
        np.testing.assert_allclose(found.own_entropy[n], entropy, rtol=0, atol=tolerance)


def test_contexts_of_one_token_and_cells_left_out() -> None:
    model, rng = convolving(), np.random.default_rng(0)
    contexts, traces = [draw(rng, n) for n in (1, 2, 9)], [draw(rng, n) for n in (1, 5, 12)]
    wanted = np.array([[True, False, True], [True, True, False], [False, True, True]])
    found = HFScorer(model).score_cells(pairs_of(contexts, traces, [0, 1, 2]), wanted)
    truth = loop(model, contexts, traces)
    np.testing.assert_allclose(found[wanted], truth[wanted], rtol=0, atol=TOLERANCE)
    assert np.isnan(found[~wanted]).all()


def even_pairs() -> ScoringPairs:
    """Traces of one length, so that nothing is padded."""
    rng = np.random.default_rng(1)
    return pairs_of([draw(rng, 40), draw(rng, 30)], [draw(rng, 10) for _ in range(6)], [0, 1] * 3)


def test_each_context_runs_once() -> None:
    model, pairs = convolving(), even_pairs()
    scorer = HFScorer(model, check_every=0)
    scorer.score(pairs)
    told: list[tuple[int, int]] = []
    scorer.score(pairs, progress=lambda done, total: told.append((done, total)))
    tokens = 39 + 29 + 2 * 6 * 10
    assert scorer.estimate(pairs).tokens == tokens
    assert told[-1] == (tokens, tokens)
    ran: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: ran.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scorer.score(pairs)
    handle.remove()
    checked = 40 + 8 - 1  # a few tokens of the first pair, by the head in chunks and by the model's own
    assert tokens < sum(ran) <= tokens + 2 * checked


def test_a_state_that_stops_being_right_is_caught(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, pairs = convolving(), even_pairs()
    truth = loop(model, pairs.contexts, pairs.traces)
    scorer = HFScorer(model, check_every=1)
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=TOLERANCE)
    monkeypatch.setattr(state, "_copies", lambda begun, rows, device: {"use_cache": True})  # forgets the context
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        for _ in range(2):
            np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.path == "plain"
    (line,) = told(caplog)
    assert "is scored by the plain path, because it has layers of type conv." in line


def test_memory_that_runs_out_is_halved_and_gone_on_with() -> None:
    model, pairs = convolving(), even_pairs()

    def run_out(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].numel() > 45:
            raise torch.OutOfMemoryError("out of memory")

    truth = loop(model, pairs.contexts, pairs.traces)
    model.register_forward_pre_hook(run_out, with_kwargs=True)
    scorer = HFScorer(model, check_every=0)
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=TOLERANCE)
    assert scorer.info is not None
    assert scorer.info.path == "state"
    assert scorer.info.token_budget < 512


@pytest.mark.parametrize(("first_context", "first_trace", "context", "trace"), [(1, 10, 8, 10), (20, 1, 20, 10)])
def test_a_first_call_with_single_tokens_decides_nothing(
    first_context: int, first_trace: int, context: int, trace: int
) -> None:
    """Mamba continues its state by one token rightly, by several wrongly, and from nothing as in full."""
    model = make_model("mamba", state_size=4)
    rng, scorer = np.random.default_rng(0), HFScorer(model)
    for n_context, n_trace in ((first_context, first_trace), (context, trace)):
        contexts, traces = ([draw(rng, n) for _ in range(2)] for n in (n_context, n_trace))
        found = scorer.score(pairs_of(contexts, traces, [0, 1])).logp_NP
        np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=1e-4)
