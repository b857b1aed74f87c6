"""FunctionScorer: any trainer's log-prob function, against a float64 loop over a tiny model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.cells import batches, distinct_cells, distinct_traces
from collapsediag.scoring.function import FunctionScorer, sums_of
from collapsediag.scoring.protocol import CellScorer, Scorer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 97
FLOAT32_TOLERANCE = 1e-5  # nats per token; the batched float32 forward against the float64 one


@functools.cache
def tiny_model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)  # a sharper distribution than a fresh initialisation has
    return model.to(dtype)


def pairs_of(contexts: list[list[int]], traces: list[list[int]], own: list[int]) -> ScoringPairs:
    zero = np.zeros(len(traces), dtype=np.int64)
    return ScoringPairs(
        contexts=tuple(np.array(c, dtype=np.int64) for c in contexts),
        traces=tuple(np.array(t, dtype=np.int64) for t in traces),
        own_N=np.array(own), group_N=np.array(own), multiplicity_P=np.ones(len(contexts), dtype=np.int64),
        rollout_N=zero, turn_N=zero,
    )  # fmt: skip


@functools.cache
def random_pairs() -> ScoringPairs:
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, VOCABULARY, size).tolist() for size in (1, 9, 5)]
    traces = [rng.integers(0, VOCABULARY, size).tolist() for size in (4, 1, 13, 7)]
    traces += [traces[2], traces[2][:6]]
    return pairs_of(contexts, traces, [0, 1, 2, 0, 1, 2])


@functools.cache
def oracle(pairs: ScoringPairs) -> np.ndarray:
    """One float64 forward per cell, one token at a time summed by hand."""
    model = tiny_model(torch.float64)
    expected = np.zeros((pairs.n_traces, pairs.n_contexts))
    for i, trace in enumerate(pairs.traces):
        for j, context in enumerate(pairs.contexts):
            ids = torch.tensor([context.tolist() + trace.tolist()])
            with torch.no_grad():
                logp = model(input_ids=ids).logits[0].log_softmax(-1)
            expected[i, j] = sum(float(logp[len(context) - 1 + t, token]) for t, token in enumerate(trace.tolist()))
    return expected


class TrainerLogProbs:
    """A trainer's function: one right-padded forward, per-token log-probs; remembers what it was asked."""

    def __init__(self, returns: str) -> None:
        self.model, self.returns = tiny_model(), returns
        self.batches: list[list[tuple[list[int], list[int]]]] = []

    def __call__(self, batch: list[tuple[list[int], list[int]]]) -> Any:
        self.batches.append(batch)
        longest = max(len(c) + len(t) for c, t in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, (context, trace) in enumerate(batch):
            ids[row, : len(context) + len(trace)] = torch.tensor(context + trace)
        logp = self.model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)  # with gradients, on purpose
        logp = logp.gather(-1, ids[:, 1:, None])[..., 0]
        rows = [logp[r, len(c) - 1 : len(c) - 1 + len(t)] for r, (c, t) in enumerate(batch)]
        if self.returns == "sums":
            return torch.stack([row.sum() for row in rows])
        if self.returns == "padded":
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if self.returns == "lists":
            return [row.tolist() for row in rows]
        if self.returns == "floats":
            return [row.sum().item() for row in rows]
        return rows


@pytest.mark.parametrize("returns", ["sums", "padded", "lists", "floats", "tensors"])
@pytest.mark.parametrize("batch_tokens", [1, 40, 16_384])
def test_every_form_gives_the_float64_matrix(returns: str, batch_tokens: int) -> None:
    pairs, fn = random_pairs(), TrainerLogProbs(returns)
    matrix = FunctionScorer(fn, batch_tokens=batch_tokens).score(pairs)
    longest = max(len(trace) for trace in pairs.traces)
    np.testing.assert_allclose(matrix.logp_NP, oracle(pairs), rtol=0, atol=FLOAT32_TOLERANCE * longest)
    np.testing.assert_array_equal(matrix.own_N, pairs.own_N)
    np.testing.assert_array_equal(matrix.length_N, [4, 1, 13, 7, 13, 6])
    assert matrix.is_complete


def test_equal_pairs_are_asked_once_and_batches_keep_the_budget() -> None:
    pairs, fn = random_pairs(), TrainerLogProbs("sums")
    FunctionScorer(fn, batch_tokens=40).score(pairs)
    asked = [(tuple(c), tuple(t)) for batch in fn.batches for c, t in batch]
    assert sorted(asked) == sorted(set(asked))
    assert len(asked) == 3 * 5  # six traces, two of them equal
    for batch in fn.batches:
        longest = max(len(c) + len(t) for c, t in batch)
        assert len(batch) == 1 or len(batch) * longest <= 40
    lengths = [max(len(c) + len(t) for c, t in batch) for batch in fn.batches]
    assert lengths == sorted(lengths, reverse=True)
    assert all(type(c) is list and type(c[0]) is int and type(t) is list for batch in fn.batches for c, t in batch)


def test_cells_ask_only_for_what_is_marked() -> None:
    pairs, fn = random_pairs(), TrainerLogProbs("sums")
    scored = np.zeros((6, 3), dtype=bool)
    scored[0, 1] = scored[4, 2] = scored[2, 2] = scored[1, 0] = True
    logp = FunctionScorer(fn).score_cells(pairs, scored)
    assert sum(len(batch) for batch in fn.batches) == 3  # traces 2 and 4 are equal
    np.testing.assert_allclose(logp[scored], oracle(pairs)[scored], atol=1e-4)
    assert np.isnan(logp[~scored]).all()


def test_an_empty_trace_scores_zero_and_is_not_asked() -> None:
    fn = TrainerLogProbs("sums")
    matrix = FunctionScorer(fn).score(pairs_of([[3], [4, 5]], [[], [6]], [0, 1]))
    np.testing.assert_array_equal(matrix.logp_NP[0], [0.0, 0.0])
    assert all(trace for batch in fn.batches for _, trace in batch)


def test_nan_stays_visible_in_its_own_row_only() -> None:
    matrix = FunctionScorer(lambda batch: [float("nan") if t == [7] else -1.0 for _, t in batch]).score(
        pairs_of([[3], [4]], [[7], [8]], [0, 1])
    )
    np.testing.assert_array_equal(matrix.nonfinite_N, [True, False])


def test_protocols_and_settings() -> None:
    scorer = FunctionScorer(lambda batch: [])
    assert isinstance(scorer, Scorer)
    assert isinstance(scorer, CellScorer)
    with pytest.raises(SettingsError, match="batch_tokens is 0"):
        FunctionScorer(lambda batch: [], batch_tokens=0)
    with pytest.raises(SettingsError, match="must be a function"):
        FunctionScorer(None)  # type: ignore[arg-type]


PAIRS = pairs_of([[3], [4]], [[7, 8], [9]], [0, 1])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda batch: [0.3] * len(batch), "cannot be positive"),
        (lambda batch: [float("inf")] * len(batch), "cannot be positive"),
        (lambda batch: [-1.0] * (len(batch) + 1), "returned 5 entries for 4 pairs"),
        (lambda batch: None, "returned NoneType"),
        (lambda batch: -1.0, "returned float"),
        (lambda batch: [[-1.0] * len(c + t) for c, t in batch], "tokens must not be counted"),
        (lambda batch: [[-1.0] * (len(t) - 1) for _, t in batch], "the trace's first token must"),
        (lambda batch: np.full((len(batch), 3), -1.0), r"shape \(4, 3\)"),
        (lambda batch: np.full((len(batch), 2), -1.0), "Right-pad with zeros"),
        (lambda batch: ["a"] * len(batch), "returned str"),
        (lambda batch: np.array([True] * len(batch)), "of bool"),
        (lambda batch: [[-1.0], -1.0, -1.0, -1.0], "returned shape"),
        (lambda batch: 1 / 0, "failed on a batch of 4 pairs .longest 3 tokens.: ZeroDivisionError"),
    ],
)
def test_a_misbehaving_function_is_named(fn: Any, message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        FunctionScorer(fn).score(PAIRS)


def test_left_padding_is_refused_instead_of_summed() -> None:
    left = np.array([[-1.0, -2.0], [0.0, -3.0]])
    with pytest.raises(ScoringError, match="Right-pad"):
        sums_of(left, [2, 1], "fn")
    np.testing.assert_array_equal(sums_of(np.array([[-1.0, -2.0], [-3.0, np.nan]]), [2, 1], "fn"), [-3.0, -3.0])


def test_cells_against_a_loop() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        n, p = rng.integers(1, 9), rng.integers(1, 5)
        traces = [rng.integers(0, 2, rng.integers(0, 3)).tolist() for _ in range(n)]
        pairs = pairs_of([[9] * (j + 1) for j in range(p)], traces, rng.integers(0, p, n).tolist())
        scored = rng.random((n, p)) < 0.5
        cells = distinct_cells(pairs, scored)
        wanted = {(tuple(traces[i]), j) for i in range(n) for j in range(p) if scored[i, j] and traces[i]}
        found = [(tuple(traces[i]), j) for i, j in zip(cells.row_C, cells.context_C, strict=True)]
        assert len(found) == len(set(found))
        assert set(found) == wanted
        value = {key: -float(k + 1) for k, key in enumerate(found)}
        table = cells.matrix(np.array([value[key] for key in found]))
        for i in range(n):
            for j in range(p):
                expected = np.nan if not scored[i, j] else value.get((tuple(traces[i]), j), 0.0)
                np.testing.assert_equal(table[i, j], expected)
        assert sorted(np.concatenate([*batches(cells.length_C, 4), []]).tolist()) == list(range(len(cells)))


def test_traces_of_another_integer_type_are_not_confused() -> None:
    zero = np.zeros(2, dtype=np.int64)
    pairs = ScoringPairs(
        contexts=(np.array([1]),), traces=(np.array([1, 0], dtype=np.int32), np.array([1], dtype=np.int64)),
        own_N=zero, group_N=zero, multiplicity_P=np.array([1]), rollout_N=zero, turn_N=zero,
    )  # fmt: skip
    assert distinct_traces(pairs).tolist() == [0, 1]


@pytest.mark.parametrize("wrong", [np.ones((6, 2), dtype=bool), np.ones((6, 3)), np.ones(3, dtype=bool)])
def test_a_mask_that_does_not_fit_is_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ScoringError, match="scored_NP must be booleans of shape"):
        distinct_cells(random_pairs(), wrong)
