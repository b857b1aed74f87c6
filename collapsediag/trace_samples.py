"""Choose which traces of a scored step are kept for reading, and write them out as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collapsediag.errors import MetricError, ScoringError
from collapsediag.matrix import FloatArray, IntArray, LogLikelihoodMatrix
from collapsediag.metrics.information import Mixture, log_mixture_weights
from collapsediag.metrics.reward_input import as_float
from collapsediag.metrics.token_information import token_information
from collapsediag.pairs import ScoringPairs
from collapsediag.record import TraceSample
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.protocol import Scorer, TokenScorer
from collapsediag.statistics import generator

# Nats; a trace's values are for shading, and every digit is written for every token of every kept trace.
TOKEN_DIGITS = 4
# Bytes of one character come in at most this many tokens; what is still no text after them never will be.
MAX_HELD_TOKENS = 8
REPLACEMENT = "\ufffd"


def sampled_rows(n_traces: int, limit: int, seed: int, step: int) -> IntArray:
    """Rows of at most `limit` traces, drawn without replacement and seeded by (seed, step); all where there are fewer.

    The draw does not look at the scores: a sample of the worst would make every run look collapsed.

    >>> sampled_rows(3, limit=32, seed=0, step=0).tolist()
    [0, 1, 2]
    """
    if n_traces <= limit:
        return np.arange(n_traces)
    return np.sort(generator(seed, step).choice(n_traces, size=limit, replace=False))


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRows:
    """A scored step with what is known of the tokens of the rows that are kept.

    tokens: for each of `rows` [P, T] log-probs, nats; None where the scorer has none, for the reason given.
    """

    matrix: LogLikelihoodMatrix
    rows: IntArray
    tokens: list[FloatArray] | None = None
    reason: str | None = None


def score_keeping(scorer: Scorer, pairs: ScoringPairs, rows: IntArray) -> ScoredRows:
    """Score `pairs`, and keep the log-probs of the tokens of `rows` where the scorer has them from the same pass.

    Raises ScoringError where the matrix does not fit the pairs.
    """
    tokens = reason = None
    if isinstance(scorer, TokenScorer):
        matrix, tokens = scorer.score_with_tokens(pairs, rows.tolist())
    else:
        matrix = scorer.score(pairs)
    if tokens is None:
        reason = f"this way of scoring gives no log-probs of single tokens ({_without_tokens(scorer)})"
    if matrix.logp_NP.shape != (pairs.n_traces, pairs.n_contexts):
        raise ScoringError(
            f"{type(scorer).__name__} returned a matrix of shape {matrix.logp_NP.shape} for {pairs.n_traces} "
            f"traces and {pairs.n_contexts} contexts; one row a trace and one column a context is needed."
        )
    if not np.array_equal(matrix.own_N, pairs.own_N):
        row = int(np.flatnonzero(matrix.own_N != pairs.own_N)[0])
        raise ScoringError(
            f"{type(scorer).__name__} returned own_N[{row}] = {int(matrix.own_N[row])} where the trace's own context "
            f"is {int(pairs.own_N[row])}; rows and columns are to be in the order of the pairs, own_N is pairs.own_N."
        )
    return ScoredRows(matrix=matrix, rows=rows, tokens=tokens, reason=reason)


def _without_tokens(scorer: Any) -> str:
    """Who it is that has no log-probs of tokens: of scorers that ask another one, the last that is asked."""
    name = type(scorer).__name__
    inner = getattr(scorer, "inner", None)
    if inner is None or not isinstance(scorer, TokenScorer):
        return name
    return f"{_without_tokens(inner)} inside {name}"


def sample_traces(
    batch: RolloutBatch, pairs: ScoringPairs, scored: ScoredRows, tokenizer: Any, mixture: Mixture = "uniform"
) -> list[TraceSample]:
    """The kept rows as text, each token with what it says about its prompt where that is known.

    mixture: of contexts, as the matrix metrics were told.
    """
    matrix = scored.matrix
    decoder = None if tokenizer is None else _Decoder(tokenizer)
    weight_NP = np.broadcast_to(log_mixture_weights(matrix, mixture), matrix.logp_NP.shape)
    samples = []
    for number, row in enumerate(scored.rows.tolist()):
        logp_PT = None if scored.tokens is None else scored.tokens[number]
        shades = _shades(decoder, pairs.traces[row], logp_PT, int(pairs.own_N[row]), weight_NP[row], scored.reason)
        samples.append(_sample(batch, pairs, matrix, decoder, row, shades))
    return samples


def _sample(
    batch: RolloutBatch,
    pairs: ScoringPairs,
    matrix: LogLikelihoodMatrix,
    decoder: _Decoder | None,
    row: int,
    shades: dict[str, Any],
) -> TraceSample:
    rollout = batch.rollouts[int(pairs.rollout_N[row])]
    own = int(pairs.own_N[row])
    scores = np.where(np.isfinite(matrix.logp_NP[row]), matrix.logp_NP[row], -np.inf)
    # Own wins a tie: a trace that scores the same everywhere was not retrieved as another one.
    best = own if scores[own] >= scores.max() else int(scores.argmax())
    return TraceSample(
        namespace=pairs.namespace,
        row=row,
        own=own,
        best=best,
        group=str(rollout.group),
        length=int(matrix.length_N[row]),
        logp_P=tuple(float(v) for v in matrix.logp_NP[row]),
        context=_text(decoder, pairs.contexts[own]),
        context_best=None if best == own else _text(decoder, pairs.contexts[best]),
        trace=_text(decoder, pairs.traces[row]),
        reward=None if rollout.reward is None else as_float(rollout.reward),
        environment=rollout.environment,
        **shades,
    )


def _text(decoder: _Decoder | None, ids: IntArray) -> str | None:
    return None if decoder is None else decoder.text(ids.tolist())


def _shades(
    decoder: _Decoder | None,
    trace_T: IntArray,
    logp_PT: FloatArray | None,
    own: int,
    weight_P: FloatArray,
    reason: str | None,
) -> dict[str, Any]:
    """tokens and pmi of one trace, or the reason why there are none."""
    if logp_PT is None:
        return {"pmi_reason": reason}
    if decoder is None:
        return {"pmi_reason": "no tokenizer was at hand to write its tokens"}
    try:
        information = token_information(logp_PT, own, weight_P)
    except MetricError as error:
        return {"pmi_reason": str(error)}
    pieces = decoder.pieces(trace_T.tolist())
    if pieces is None:
        return {"pmi_reason": "the texts of its tokens do not join to its text"}
    return {"tokens": pieces, "pmi": tuple(round(float(value), TOKEN_DIGITS) for value in information)}


@dataclass
class _Decoder:
    """Token ids as text, short runs looked up once."""

    tokenizer: Any
    known: dict[tuple[int, ...], str] = field(default_factory=dict)

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...] | None:
        """The text that each token adds to those before it; None where they do not join to the text of all.

        A token is decoded together with the last one that gave text, because many decoders write a token differently
        at the beginning. One that is part of a character adds nothing until the character is whole.
        """
        pieces: list[str] = []
        begin = done = 0
        for number in range(len(ids)):
            before, after = self._run(ids[begin:done]), self._run(ids[begin : number + 1])
            held = after.endswith(REPLACEMENT) and number + 1 < len(ids) and number - done < MAX_HELD_TOKENS
            pieces.append("" if held else after[len(before) :])
            if not held:
                begin, done = done, number + 1
        return tuple(pieces) if "".join(pieces) == self.text(ids) else None

    def _run(self, ids: Sequence[int]) -> str:
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = self.text(key) if key else ""
        return self.known[key]
