"""The pretrained SmolLM2-135M against stored log-likelihoods of a plain float32 forward, and against itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np

from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of

from .conftest import DATA
from .scoring_tiny import token_loop

pytestmark = pytest.mark.pretrained

# Nats of a trace's sum: float32 over a trace of about a hundred tokens.
TOLERANCE = 2e-3


def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "golden" / "smollm2_matrix.json").read_text())
    return found


def pairs_and_truth(rows: list[int], columns: list[int]) -> tuple[ScoringPairs, np.ndarray]:
    stored = golden()
    contexts, traces = [stored["contexts"][j] for j in columns], [stored["traces"][i] for i in rows]
    own = [columns.index(stored["own"][i]) for i in rows]
    return pairs_of(contexts, traces, own), np.array(stored["logp_NP"])[np.ix_(rows, columns)]


def test_some_cells(smollm2_model: Any) -> None:
    """The longest and shortest of the stored traces under the longest and shortest of the contexts."""
    stored = golden()
    by_context = sorted(range(len(stored["contexts"])), key=lambda j: len(stored["contexts"][j]))
    columns = [by_context[0], by_context[-1]]
    of = [i for i, own in enumerate(stored["own"]) if own in columns]
    by_trace = sorted(of, key=lambda i: len(stored["traces"][i]))
    pairs, truth = pairs_and_truth([by_trace[0], by_trace[1], by_trace[-1]], columns)
    scorer = HFScorer(smollm2_model)
    found = scorer.score_tokens(pairs, entropies=True)
    assert scorer.info is not None
    assert (scorer.info.path, scorer.info.attention) == ("prefix", "cascade")
    np.testing.assert_allclose(found.matrix.logp_NP, truth, rtol=0, atol=TOLERANCE)
    # Entropies have no stored numbers: one trace by the loop.
    logp, entropy = token_loop(smollm2_model, pairs.contexts[pairs.own_N[0]], pairs.traces[0])
    assert found.own_entropy is not None
    np.testing.assert_allclose(found.own_logp[0], logp, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.own_entropy[0], entropy, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"attention": "masked"}, {"token_budget": 64}], ids=str)
def test_the_whole_matrix(smollm2_model: Any, options: dict[str, Any]) -> None:
    stored = golden()
    pairs, truth = pairs_and_truth(list(range(len(stored["traces"]))), list(range(len(stored["contexts"]))))
    scorer = HFScorer(smollm2_model, **options)
    found = scorer.score(pairs).logp_NP
    assert scorer.info is not None
    assert scorer.info.path == "prefix"
    np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_the_plain_path(smollm2_model: Any) -> None:
    pairs, truth = pairs_and_truth([0, 5, 11, 30], [0, 1, 2, 7])
    found = HFScorer(smollm2_model, attention="plain").score(pairs).logp_NP
    np.testing.assert_allclose(found, truth, rtol=0, atol=TOLERANCE)
