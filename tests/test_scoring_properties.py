"""Any contexts, any traces: the packed scores are those of a float64 loop over `[X | Z]`, whatever way they run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of

from .scoring_tiny import VOCABULARY, draw, loop, make_model, token_loop

# Nats of a trace's sum: float64 all through, but for norms that round to float32 inside.
TOLERANCE = 1e-8

LLAMA = make_model()
# A window shorter than the stems below, on every second layer.
WINDOWED = make_model(
    "gemma3_text", query_pre_attn_scalar=4, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
)
GPT2 = make_model("gpt2")

# Few letters, and stems that many share: prefixes, duplicates and one-token traces occur all the time.
words = st.lists(st.integers(3, 5), max_size=6)
stems = st.sampled_from([[], [], [3] * 12, [3, 4] * 12 + [5], [4] * 40])
filled = st.builds(lambda stem, word, last: [*stem, *word, last], stems, words, st.integers(3, 5))
traces_of = st.lists(st.one_of(filled, filled, st.just([])), min_size=1, max_size=7)
contexts_of = st.lists(filled, min_size=1, max_size=4)
budgets = st.sampled_from([16, 17, 40, None])
common = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def pairs(contexts: list[list[int]], traces: list[list[int]]) -> ScoringPairs:
    return pairs_of(contexts, traces, [i % len(contexts) for i in range(len(traces))])


def scored(model: Any, contexts: list[list[int]], traces: list[list[int]], **options: Any) -> np.ndarray:
    scorer = HFScorer(model, **options)
    found = scorer.score(pairs(contexts, traces)).logp_NP
    assert scorer.info is None or scorer.info.path == "prefix", scorer.info
    return found


@given(contexts_of, traces_of, budgets, st.sampled_from(["cascade", "masked"]))
@example([[3]], [[4]], None, "cascade")  # P = 1, N = 1, one token each: nothing but a context's last position
@example([[3], [3]], [[4], [4], []], 16, "masked")  # equal columns, equal rows, an empty one
@example([[3, 4], [5, 4]], [[3, 4, 5], [3, 4], [3], [3, 4, 5, 5]], 16, "cascade")  # each begins the next
@example([[3] * 40, [3] * 41, [3] * 39], [[3] * 50, [3] * 49, [3] * 50 + [4]], 16, "masked")  # contexts too
@common
def test_equals_the_loop(contexts: list[list[int]], traces: list[list[int]], budget: int | None, way: str) -> None:
    found = scored(LLAMA, contexts, traces, token_budget=budget, attention=way)
    np.testing.assert_allclose(found, loop(LLAMA, contexts, traces), rtol=0, atol=TOLERANCE)


@given(contexts_of, traces_of, budgets)
@settings(common, max_examples=20)
def test_equals_the_loop_under_sliding_windows(
    contexts: list[list[int]], traces: list[list[int]], budget: int | None
) -> None:
    found = scored(WINDOWED, contexts, traces, token_budget=budget)
    np.testing.assert_allclose(found, loop(WINDOWED, contexts, traces), rtol=0, atol=TOLERANCE)


@given(contexts_of, traces_of, budgets)
@settings(common, max_examples=20)
def test_equals_the_loop_with_absolute_positions(
    contexts: list[list[int]], traces: list[list[int]], budget: int | None
) -> None:
    found = scored(GPT2, contexts, traces, token_budget=budget)
    np.testing.assert_allclose(found, loop(GPT2, contexts, traces), rtol=0, atol=TOLERANCE)


@given(contexts_of, traces_of, budgets, st.sampled_from([0.05, 0.5, 2.5]))
@settings(common, max_examples=20)
def test_equals_the_loop_at_any_temperature(
    contexts: list[list[int]], traces: list[list[int]], budget: int | None, temperature: float
) -> None:
    found = scored(LLAMA, contexts, traces, token_budget=budget, temperature=temperature)
    truth = loop(LLAMA, contexts, traces, temperature)
    # Logits divided by 0.05 carry 20 times the rounding.
    np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE / min(1.0, temperature))


@given(contexts_of, traces_of, budgets, st.data())
@settings(common, max_examples=25)
def test_cells_equal_the_loop_and_the_others_are_left_out(
    contexts: list[list[int]], traces: list[list[int]], budget: int | None, data: st.DataObject
) -> None:
    n, p = len(traces), len(contexts)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n * p, max_size=n * p)), dtype=bool).reshape(n, p)
    found = HFScorer(LLAMA, token_budget=budget).score_cells(pairs(contexts, traces), mask)
    np.testing.assert_array_equal(np.isnan(found), ~mask)
    np.testing.assert_allclose(found[mask], loop(LLAMA, contexts, traces)[mask], rtol=0, atol=TOLERANCE)


@given(contexts_of, traces_of, st.integers(0, 999))
@settings(common, max_examples=20)
def test_shuffled_rows_and_columns_shuffle_the_scores(
    contexts: list[list[int]], traces: list[list[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(len(traces)), rng.permutation(len(contexts))
    before = scored(LLAMA, contexts, traces, token_budget=32)
    after = scored(LLAMA, [contexts[j] for j in columns], [traces[i] for i in rows], token_budget=32)
    # Bit by bit: the plan knows the set of contexts and traces, not their order.
    np.testing.assert_array_equal(after, before[np.ix_(rows, columns)])


@given(contexts_of, traces_of, budgets)
@settings(common, max_examples=20)
def test_tokens_and_entropies_equal_the_loop(
    contexts: list[list[int]], traces: list[list[int]], budget: int | None
) -> None:
    given_pairs = pairs(contexts, traces)
    found = HFScorer(LLAMA, token_budget=budget).score_tokens(given_pairs, entropies=True, every_context=True)
    assert found.logp is not None
    assert found.own_entropy is not None
    for n, trace in enumerate(traces):
        own = int(given_pairs.own_N[n])
        for j, context in enumerate(contexts):
            logp, entropy = token_loop(LLAMA, context, trace) if trace else (np.zeros(0), np.zeros(0))
            np.testing.assert_allclose(found.logp[n][j], logp, rtol=0, atol=TOLERANCE)
            assert found.matrix.logp_NP[n, j] == pytest.approx(found.logp[n][j].sum(), abs=1e-12)
            if j == own:
                np.testing.assert_array_equal(found.own_logp[n], found.logp[n][j])
                np.testing.assert_allclose(found.own_entropy[n], entropy, rtol=0, atol=TOLERANCE)


@given(contexts_of, traces_of, budgets, st.sampled_from(["cascade", "masked"]))
@settings(common, max_examples=20)
def test_the_estimate_counts_the_tokens_that_run(
    contexts: list[list[int]], traces: list[list[int]], budget: int | None, way: str
) -> None:
    ran, told = [], []
    handle = LLAMA.register_forward_pre_hook(
        lambda module, args, kwargs: ran.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scorer = HFScorer(LLAMA, token_budget=budget, attention=way, check_every=0)
    given_pairs = pairs(contexts, traces)
    try:
        scorer.score(given_pairs, progress=lambda done, total: told.append((done, total)))
    finally:
        handle.remove()
    expected = scorer.estimate(given_pairs).tokens
    assert sum(ran) == expected
    assert [done for done, _ in told] == np.cumsum(ran).tolist()
    assert {total for _, total in told} <= {expected}
    assert max(ran, default=0) <= max(scorer.token_budget or 2048, 16)


@pytest.mark.parametrize("way", ["cascade", "masked"])
def test_traces_of_hundreds_of_tokens_in_small_and_large_pieces(way: str) -> None:
    rng = np.random.default_rng(5)
    stem, other = draw(rng, 250), draw(rng, 130)
    contexts = [other + draw(rng, n) for n in (3, 40)] + [stem[:7]]
    traces = [stem + draw(rng, 20), stem + draw(rng, 3), stem[:200], stem[:90] + draw(rng, 60), draw(rng, 1)]
    truth = loop(LLAMA, contexts, traces)
    for budget in (16, 96, 512, None):
        found = scored(LLAMA, contexts, traces, token_budget=budget, attention=way)
        np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE, err_msg=f"budget {budget}")


def test_a_beginning_long_enough_to_stay_one_copy_for_all_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    from collapsediag.scoring import cache

    monkeypatch.setattr(cache, "MIN_SHARED_COPY", 20)
    rng = np.random.default_rng(6)
    shared = draw(rng, 60)
    contexts = [shared + draw(rng, n) for n in (5, 9, 2, 9)]
    traces = [draw(rng, int(n)) for n in rng.integers(1, 20, 9)]
    for model in (LLAMA, WINDOWED):
        truth = loop(model, contexts, traces)
        for budget in (16, 64, None):
            found = scored(model, contexts, traces, token_budget=budget)
            np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cascade", "masked"])
def test_a_thousand_tokens(way: str) -> None:
    rng = np.random.default_rng(7)
    stem = draw(rng, 900)
    contexts = [draw(rng, 50), draw(rng, 20)]
    traces = [stem + draw(rng, 30), stem + draw(rng, 25), stem[:500] + draw(rng, 200)]
    truth = loop(LLAMA, contexts, traces)
    for budget in (64, 700, None):
        found = scored(LLAMA, contexts, traces, token_budget=budget, attention=way)
        np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@given(
    contexts_of, traces_of, budgets, st.sampled_from(["cascade", "masked"]), st.sampled_from([LLAMA, WINDOWED, GPT2])
)
@settings(common, max_examples=300)
def test_equals_the_loop_on_many_more(
    contexts: list[list[int]], traces: list[list[int]], budget: int | None, way: str, model: Any
) -> None:
    way = "auto" if model is WINDOWED else way
    found = HFScorer(model, token_budget=budget, attention=way).score(pairs(contexts, traces)).logp_NP
    np.testing.assert_allclose(found, loop(model, contexts, traces), rtol=0, atol=TOLERANCE)


def test_the_loop_tells_contexts_and_orders_apart() -> None:
    """The oracle itself: what it says depends on the context, on the order of its tokens, and sums to one."""
    a, b = loop(LLAMA, [[3, 4, 5], [4, 3, 5]], [[6, 7]])[0]
    assert abs(a - b) > 1e-3
    alone = [token_loop(LLAMA, [3, 4], [v])[0][0] for v in range(VOCABULARY)]
    assert np.exp(alone).sum() == pytest.approx(1.0, abs=1e-12)
    with torch.no_grad():
        logits = LLAMA(input_ids=torch.tensor([[3, 4]])).logits[0, -1].numpy()
    assert int(np.argmax(alone)) == int(np.argmax(logits))
