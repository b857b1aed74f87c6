from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collapsediag.errors import MetricError, ScoringError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.information import row_values
from collapsediag.metrics.token_information import token_information
from collapsediag.monitor import Monitor
from collapsediag.pairs import ScoringPairs
from collapsediag.record import Record, TraceSample
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
from collapsediag.run_folder import RunStore, read_traces
from collapsediag.scoring.budget import BudgetScorer
from collapsediag.scoring.function import FunctionScorer
from collapsediag.scoring.hf import HFScorer
from collapsediag.scoring.short import pairs_of
from collapsediag.testing import planted, random_policy
from collapsediag.trace_samples import sampled_rows, score_keeping

from .scoring_tiny import make_model, mixed_pairs, token_loop
from .tiny_policy import byte_tokenizer

FloatArray = NDArray[np.float64]


# -- what a token says about its prompt ---------------------------------------------------------------------


def by_bayes(logp_PT: FloatArray, own: int, weight_P: Sequence[float]) -> list[float]:
    """The definition in words: predict the token with every context, each believed as far as the tokens before say."""
    believed = [w / math.fsum(weight_P) for w in weight_P]
    values = []
    for t in range(logp_PT.shape[1]):
        likelihood = [math.exp(logp_PT[j, t]) for j in range(len(believed))]
        predicted = math.fsum(b * p for b, p in zip(believed, likelihood, strict=True))
        values.append(logp_PT[own, t] - math.log(predicted))
        believed = [b * p / predicted for b, p in zip(believed, likelihood, strict=True)]
    return values


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 5.0, 2.0)])
def test_a_token_is_measured_against_what_bayes_predicts(weights: tuple[float, ...]) -> None:
    logp_PT = np.log(np.random.default_rng(3).uniform(0.05, 1.0, (3, 9)))
    log_weight_P = np.log(np.array(weights) / sum(weights))
    for own in range(3):
        found = token_information(logp_PT, own, log_weight_P)
        np.testing.assert_allclose(found, by_bayes(logp_PT, own, weights), rtol=0, atol=1e-12)


def test_over_all_strings_the_tokens_of_a_policy_add_up_to_its_exact_information() -> None:
    policy = random_policy(n_contexts=3, dependence=0.7, sharpness=1.5, vocab_size=3, length=3, seed=4)
    total = 0.0
    for own in range(3):
        for string in itertools.product(range(3), repeat=3):
            prefixes = [sum(v * 3 ** (t - 1 - i) for i, v in enumerate(string[:t])) for t in range(3)]
            logp_PT = np.log([[policy.tables[t][j, prefixes[t], string[t]] for t in range(3)] for j in range(3)])
            probability = math.exp(logp_PT[own].sum()) / 3
            total += probability * token_information(logp_PT, own).sum()
    assert total == pytest.approx(policy.mutual_information(), abs=1e-12)


def test_a_template_says_nothing_and_a_word_that_only_one_prompt_has_says_everything() -> None:
    logp_PT = np.full((4, 6), -1.3)
    np.testing.assert_array_equal(token_information(logp_PT, 2), np.zeros(6))
    logp_PT[:, 3] = -np.inf
    logp_PT[2, 3] = -0.5
    found = token_information(logp_PT, 2)
    assert found[3] == pytest.approx(math.log(4), abs=1e-12)
    np.testing.assert_allclose(np.delete(found, 3), 0.0, atol=1e-12)


def test_thousands_of_tokens_do_not_overflow() -> None:
    logp_PT = np.random.default_rng(0).uniform(-30.0, 0.0, (5, 4000))
    matrix = LogLikelihoodMatrix(logp_NP=logp_PT.sum(axis=1)[None], length_N=[4000], own_N=[1])
    expected = row_values(matrix, normalization="sequence").gap_N[0]
    assert token_information(logp_PT, 1).sum() == pytest.approx(expected, rel=1e-12)


def test_a_token_that_its_own_context_excludes_has_no_value() -> None:
    with pytest.raises(MetricError, match="own context is not finite"):
        token_information(np.array([[-1.0, -np.inf], [-1.0, -1.0]]), 0)


# -- from the scorer ---------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["auto", "plain"])
@pytest.mark.parametrize("mixture", ["uniform", "multiplicity"])
def test_kept_tokens_are_those_of_the_loop_and_add_up_to_the_gap(attention: str, mixture: Any) -> None:
    model, pairs = make_model(), mixed_pairs()
    pairs.multiplicity_P[:] = [1, 3, 2, 1]
    rows = np.array([0, 3, 5, 8])
    scored = score_keeping(HFScorer(model, attention=attention), pairs, rows)
    assert scored.tokens is not None
    gap_N = row_values(scored.matrix, normalization="sequence", mixture=mixture).gap_N
    weight_P = pairs.multiplicity_P if mixture == "multiplicity" else np.ones(4)
    for logp_PT, row in zip(scored.tokens, rows.tolist(), strict=True):
        expected = [token_loop(model, context, pairs.traces[row])[0] for context in pairs.contexts]
        np.testing.assert_allclose(logp_PT, expected, rtol=0, atol=1e-9)
        found = token_information(logp_PT, int(pairs.own_N[row]), np.log(weight_P / weight_P.sum()))
        assert found.sum() == pytest.approx(gap_N[row], abs=1e-9)


def test_keeping_tokens_leaves_the_matrix_as_it_is() -> None:
    model, pairs = make_model(), mixed_pairs()
    with_tokens = score_keeping(HFScorer(model), pairs, np.arange(pairs.n_traces)).matrix
    np.testing.assert_array_equal(with_tokens.logp_NP, HFScorer(model).score(pairs).logp_NP)


def test_tokens_of_other_rows_are_not_kept() -> None:
    model, pairs = make_model(), mixed_pairs()
    results = HFScorer(model)._results(pairs, None, None, every_context=[0])
    # Row 5 is equal to row 0 and shares its tokens.
    assert {trace for trace, _ in results._logp} == {int(results.unique.trace_of_N[0])}


# -- through the monitor ---------------------------------------------------------------------


def batch_of(texts: Sequence[Sequence[str]], encode: Callable[[str], list[int]]) -> RolloutBatch:
    rollouts = [
        Rollout(turns=(Turn(context_ids=encode(f"Q{p}:"), output_ids=encode(text)),), group=p, reward=0.0)  # type: ignore[arg-type]
        for p, group in enumerate(texts)
        for text in group
    ]
    return RolloutBatch(step=0, rollouts=tuple(rollouts))


TEXTS = (("a b", "né!"), ("日本", "🙂 ok"), ("a b", "x"))


def observed(tokenizer: Any, scorer: Any = None, **options: Any) -> Record:
    def encode(text: str) -> list[int]:
        return list(byte_tokenizer()(text, add_special_tokens=False)["input_ids"])

    scorer = scorer or HFScorer(make_model(vocab_size=272))
    monitor = Monitor(scorer, every=1, reasoning="completion", tokenizer=tokenizer, on_error="raise", **options)
    return monitor.observe(0, batch_of(TEXTS, encode))


def test_a_kept_trace_has_its_tokens_as_text_and_what_each_of_them_says() -> None:
    record = observed(byte_tokenizer())
    gap_N = row_values(record.matrices["first_turn"], normalization="sequence").gap_N
    assert [trace.trace for trace in record.traces] == [text for group in TEXTS for text in group]
    for trace in record.traces:
        assert trace.tokens is not None
        assert trace.pmi is not None
        assert "".join(trace.tokens) == trace.trace
        assert len(trace.tokens) == len(trace.pmi) == trace.length
        assert sum(trace.pmi) == pytest.approx(gap_N[trace.row], abs=1e-4 * trace.length)
        assert trace.pmi_reason is None
    assert record.traces[2].tokens == ("", "", "日", "", "", "本")
    assert any(abs(value) > 1e-3 for trace in record.traces for value in trace.pmi or ())


def test_the_mixture_is_the_one_of_the_definition() -> None:
    record = observed(byte_tokenizer(), definition="ragen")
    matrix = record.matrices["first_turn"]
    gap_N = row_values(matrix, normalization="sequence", mixture="multiplicity").gap_N
    for trace in record.traces:
        assert sum(trace.pmi or ()) == pytest.approx(gap_N[trace.row], abs=1e-3)


NO_TOKENS = "this way of scoring gives no log-probs of single tokens ({})"


class SpacedWords:
    """Writes a token differently where it comes first, as sentence-piece decoders do."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(f"w{i}" for i in ids)


class Shouts:
    """Writes all of them differently from some of them."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return f"{zlib.crc32(bytes(str(ids), 'ascii')):x}"


def test_words_keep_their_spaces_and_a_decoder_that_does_not_add_up_gives_the_reason() -> None:
    first = observed(SpacedWords()).traces[0]
    assert first.tokens is not None
    assert [piece.startswith(" ") for piece in first.tokens] == [False, True, True]
    for trace in observed(Shouts()).traces:
        if trace.length > 1:
            assert (trace.tokens, trace.pmi) == (None, None)
            assert trace.pmi_reason == "the texts of its tokens do not join to its text"
    assert {trace.pmi_reason for trace in observed(None).traces} == {"no tokenizer was at hand to write its tokens"}


def test_bytes_that_never_become_text_do_not_hold_back_the_rest() -> None:
    class Broken:
        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return "".join("\ufffd" if i % 2 else "a" for i in ids)

    for trace in observed(Broken()).traces:
        assert "".join(trace.tokens or ()) == trace.trace


def test_a_scorer_without_tokens_says_so_on_a_budget_too() -> None:
    step = planted("healthy", n_contexts=3, group_size=2)
    monitor = Monitor(step.scorer(), every=1, tokenizer=step, on_error="raise")
    for trace in monitor.observe(0, step.batch).traces:
        assert (trace.tokens, trace.pmi) == (None, None)
        assert trace.pmi_reason == NO_TOKENS.format("TableScorer")
    budget = BudgetScorer(FunctionScorer(lambda batch: [-1.0 * len(trace) for _, trace in batch]), 1)
    assert {trace.pmi_reason for trace in observed(byte_tokenizer(), budget).traces} == {
        NO_TOKENS.format("FunctionScorer inside BudgetScorer")
    }


def test_on_a_budget_the_tokens_add_up_to_the_gap_over_the_contexts_that_were_scored() -> None:
    record = observed(byte_tokenizer(), BudgetScorer(HFScorer(make_model(vocab_size=272)), 1))
    matrix = record.matrices["first_turn"]
    assert matrix.scored_NP.sum(axis=1).tolist() == [2] * 6
    gap_N = row_values(matrix, normalization="sequence").gap_N
    for trace in record.traces:
        assert sum(trace.pmi or ()) == pytest.approx(gap_N[trace.row], abs=1e-4 * trace.length)
        assert len(trace.pmi or ()) == trace.length


def test_equal_traces_of_other_prompts_keep_to_the_contexts_that_each_was_scored_under() -> None:
    pairs = pairs_of([[3, 4], [5, 6], [7, 8], [9, 10]], [[11, 12, 13]] * 2, [0, 2])
    scored_NP = np.array([[True, True, False, False], [False, False, True, True]])
    matrix, tokens = HFScorer(make_model()).score_with_tokens(pairs, [0, 1], scored_NP)
    np.testing.assert_array_equal(matrix.scored_NP, scored_NP)
    for row in range(2):
        np.testing.assert_array_equal(~np.isnan(tokens[row]).any(axis=1), scored_NP[row])
        np.testing.assert_allclose(tokens[row].sum(axis=1), matrix.logp_NP[row], rtol=0, atol=1e-12)


def test_a_matrix_of_another_shape_is_refused() -> None:
    class Wrong:
        def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
            return LogLikelihoodMatrix(logp_NP=[[-1.0, -2.0]], length_N=[1], own_N=[0])

    with pytest.raises(ScoringError, match=r"Wrong returned a matrix of shape \(1, 2\) for 9 traces"):
        score_keeping(Wrong(), mixed_pairs(), np.arange(2))


# -- which rows, and on disk ---------------------------------------------------------------------


def test_the_draw_is_seeded_by_step_and_without_repeats() -> None:
    rows = sampled_rows(50, 8, 1, 7)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert len(rows) == 8
    assert rows.tolist() == sampled_rows(50, 8, 1, 7).tolist() != sampled_rows(50, 8, 1, 8).tolist()


def test_tokens_survive_the_run_folder_and_old_lines_are_still_read(tmp_path: Path) -> None:
    record = observed(byte_tokenizer())
    with RunStore(tmp_path / "run") as store:
        store.append(record)
    for line, trace in zip(read_traces(tmp_path / "run", 0), record.traces, strict=True):
        assert (tuple(line["tokens"]), tuple(line["pmi"])) == (trace.tokens, trace.pmi)
        assert "pmi_reason" not in line
    old = TraceSample(namespace="first_turn", row=0, own=0, best=0, group="g", length=1, logp_P=(-1.0, -2.0))
    assert not {"tokens", "pmi", "pmi_reason"} & set(old.to_json())
