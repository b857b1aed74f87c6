"""Fakes with known answers, for testing what is built on this library.

`EnumerablePolicy` is small enough that I(X; Z) and H(Z|X) are sums over all its strings, not estimates; `planted` cuts
a scored matrix, a batch of rollouts and a scorer out of one such policy in a known regime; `TableScorer` stands in for
a model.

Legend: P contexts, G traces per context, N = P * G traces, V vocabulary, T tokens of a trace, S = V**T strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax, logsumexp

from collapsediag.errors import ScoringError, SettingsError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.metrics.retrieval import top_k_scores
from collapsediag.pairs import ScoringPairs
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

Regime = Literal["healthy", "compressed", "template", "low_entropy"]
# Regime -> (share of the logits that depends on the context, scale of the logits).
_REGIMES: dict[str, tuple[float, float]] = {
    "healthy": (1.0, 2.0),
    "compressed": (1.0, 12.0),
    "template": (0.0, 1.0),
    "low_entropy": (0.0, 12.0),
}

_MAX_STRINGS = 65_536

Table = Callable[[Sequence[int], Sequence[int]], float] | Mapping[tuple[tuple[int, ...], tuple[int, ...]], float]


class TableScorer:
    """A Scorer that looks log-likelihoods up: a function of (context ids, trace ids), or a mapping from such pairs.

    `n_calls` counts how often `score` was asked, `n_lookups` how many cells were looked up. A pair that the table does
    not hold raises ScoringError; an empty trace is certain (0 nats) and never looked up.

    >>> scorer = TableScorer(lambda context, trace: -float(len(trace)))
    >>> scorer.score(planted("healthy", n_contexts=2, group_size=1, length=3).pairs()).logp_NP.tolist()
    [[-3.0, -3.0], [-3.0, -3.0]]
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.n_calls = 0
        self.n_lookups = 0

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """The matrix of `pairs`, one lookup per cell."""
        self.n_calls += 1
        contexts = [tuple(int(token) for token in ids) for ids in pairs.contexts]
        traces = [tuple(int(token) for token in ids) for ids in pairs.traces]
        logp_NP = np.array([[self._look_up(c, z) for c in contexts] for z in traces], dtype=np.float64)
        return LogLikelihoodMatrix(
            logp_NP=logp_NP.reshape(len(traces), len(contexts)),
            length_N=np.array([len(z) for z in traces], dtype=np.int64),
            own_N=pairs.own_N,
            group_N=pairs.group_N,
            multiplicity_P=pairs.multiplicity_P,
        )

    def _look_up(self, context: tuple[int, ...], trace: tuple[int, ...]) -> float:
        if not trace:
            return 0.0
        self.n_lookups += 1
        if callable(self._table):
            return float(self._table(context, trace))
        try:
            return float(self._table[context, trace])
        except KeyError:
            raise ScoringError(f"the table has no entry for context {context} and trace {trace}.") from None


@dataclass(frozen=True, eq=False)
class EnumerablePolicy:
    """A policy given by explicit next-token tables, whose information quantities are exact sums over all strings.

    tables: `tables[t][j, prefix, v] = p(z_t = v | context j, prefix)`, shape [P, V**t, V]; a prefix is numbered as the
        base-V number its tokens spell, first token first. Contexts are equally likely. Values in nats.
    """

    tables: tuple[FloatArray, ...]

    def __post_init__(self) -> None:
        p, _, v = self.tables[0].shape
        for t, table in enumerate(self.tables):
            if table.shape != (p, v**t, v) or not np.allclose(table.sum(axis=2), 1.0) or not (table > 0).all():
                raise SettingsError(f"tables[{t}] must be positive rows that sum to 1, shape {(p, v**t, v)}.")
        if v ** len(self.tables) > _MAX_STRINGS:
            raise SettingsError(f"{v}**{len(self.tables)} strings are too many to sum over (at most {_MAX_STRINGS}).")

    @property
    def n_contexts(self) -> int:
        """P."""
        return int(self.tables[0].shape[0])

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.tables[0].shape[2])

    @property
    def length(self) -> int:
        """T, the length of every trace."""
        return len(self.tables)

    @cached_property
    def logp_PS(self) -> FloatArray:
        """log p(string s | context j) of all S strings, [P, S]."""
        total = np.zeros((self.n_contexts, 1))
        for table in self.tables:
            total = (total[:, :, None] + np.log(table)).reshape(self.n_contexts, -1)
        return total

    @cached_property
    def gap_PS(self) -> FloatArray:
        """log p(s|j) - log p(s), [P, S]: what one trace adds to the information."""
        marginal_S = logsumexp(self.logp_PS, axis=0) - np.log(self.n_contexts)
        gap: FloatArray = self.logp_PS - marginal_S
        return gap

    def expect(self, value_PS: FloatArray) -> float:
        """Exact mean of a function of (context, string) under the policy."""
        return float((np.exp(self.logp_PS) * value_PS).sum() / self.n_contexts)

    def mutual_information(self) -> float:
        """I(X; Z), nats per trace, exact."""
        return self.expect(self.gap_PS)

    def conditional_entropy(self) -> float:
        """H(Z|X), nats per trace, exact."""
        return self.expect(-self.logp_PS)

    def reasoning_entropy(self) -> float:
        """H(Z), nats per trace, exact."""
        return self.expect(self.gap_PS - self.logp_PS)

    def retrieval_accuracy(self, k: int = 1) -> float:
        """Expected share of traces whose own context is among the k best, exact."""
        return self.expect(top_k_scores(self.logp_PS.T, k).T)

    def sample(self, group_size: int, seed: int) -> tuple[IntArray, IntArray]:
        """G traces per context, groups in order: tokens [N, T] and own context [N]."""
        rng = np.random.default_rng(seed)
        cumulative_PS = np.cumsum(np.exp(self.logp_PS), axis=1)
        draws_PG = rng.random((self.n_contexts, group_size)) * cumulative_PS[:, -1:]
        strings = [np.searchsorted(c, d, side="right") for c, d in zip(cumulative_PS, draws_PG, strict=True)]
        digits = self.vocab_size ** np.arange(self.length - 1, -1, -1)
        tokens_NT = np.concatenate(strings)[:, None] // digits % self.vocab_size
        return tokens_NT.astype(np.int64), np.repeat(np.arange(self.n_contexts), group_size)

    def log_prob(self, context: int, trace: Sequence[int] | IntArray) -> float:
        """log p(trace | context), one table look-up per token; traces shorter than T are prefixes."""
        prefix, total = 0, 0.0
        for table, token in zip(self.tables, trace, strict=False):
            total += float(np.log(table[context, prefix, token]))
            prefix = prefix * self.vocab_size + int(token)
        return total

    def matrix(self, tokens_NT: ArrayLike, own_N: ArrayLike) -> LogLikelihoodMatrix:
        """Every trace scored under every context."""
        traces = np.asarray(tokens_NT, dtype=np.int64)
        strings_N = traces @ (self.vocab_size ** np.arange(self.length - 1, -1, -1))
        return LogLikelihoodMatrix(
            logp_NP=self.logp_PS[:, strings_N].T,
            length_N=np.full(traces.shape[0], self.length),
            own_N=np.asarray(own_N),
        )


def random_policy(
    *, n_contexts: int, dependence: float, sharpness: float, vocab_size: int = 4, length: int = 3, seed: int = 0
) -> EnumerablePolicy:
    """A policy with random next-token logits `sharpness * ((1 - dependence) * common + dependence * own)`.

    >>> round(random_policy(n_contexts=4, dependence=0.0, sharpness=1.0).mutual_information(), 12)
    0.0
    """
    rng = np.random.default_rng(seed)
    tables = []
    for t in range(length):
        common = rng.normal(size=(1, vocab_size**t, vocab_size))
        own = rng.normal(size=(n_contexts, vocab_size**t, vocab_size))
        tables.append(np.exp(log_softmax(sharpness * ((1 - dependence) * common + dependence * own), axis=2)))
    return EnumerablePolicy(tables=tuple(tables))


# Token ids of planted rollouts; the reasoning words follow, then one token per prompt.
BOS, THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE, EOS, YES, NO = range(8)
_SCAFFOLD = ("<bos>", "<think>", "</think>", "<answer>", "</answer>", "<eos>", "yes", "no")
_FIRST_WORD = len(_SCAFFOLD)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planted:
    """One step of a policy in a known regime: row i of `matrix` is rollout i of `batch`.

    truth: exact values of the metrics that `matrix` estimates, by metric name.
    """

    regime: Regime
    policy: EnumerablePolicy
    matrix: LogLikelihoodMatrix
    batch: RolloutBatch
    truth: Mapping[str, float]

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of token ids; words are joined by spaces."""
        words = [*_SCAFFOLD, *(f"w{v}" for v in range(self.policy.vocab_size))]
        words += [f"prompt{j}" for j in range(self.policy.n_contexts)]
        return " ".join(words[int(i)] for i in ids)

    def scorer(self) -> TableScorer:
        """The policy as a Scorer, for traces with or without the tags and the answer."""
        return TableScorer(self._logp_ids)

    def pairs(self) -> ScoringPairs:
        """The (context, reasoning) pairs of `batch`, tags left out."""
        n, t = self.matrix.n_traces, self.policy.length
        turns = [rollout.turns[0] for rollout in self.batch.rollouts]
        first_row = np.searchsorted(self.matrix.own_N, np.arange(self.policy.n_contexts))
        return ScoringPairs(
            contexts=tuple(turns[row].context_ids for row in first_row),
            traces=tuple(turn.output_ids[:t] for turn in turns),  # type: ignore[index]  # ids are always there
            own_N=np.array(self.matrix.own_N),
            group_N=np.array(self.matrix.group_N),
            multiplicity_P=np.array(self.matrix.multiplicity_P),
            rollout_N=np.arange(n),
            turn_N=np.zeros(n, dtype=np.int64),
        )

    def _logp_ids(self, context: Sequence[int], trace: Sequence[int]) -> float:
        first_prompt = _FIRST_WORD + self.policy.vocab_size
        prompts = [token - first_prompt for token in context if token >= first_prompt]
        if len(prompts) != 1:
            raise ScoringError(f"context {tuple(context)} holds {len(prompts)} prompt tokens; planted ones hold one.")
        words = [token - _FIRST_WORD for token in trace if _FIRST_WORD <= token < first_prompt]
        # Tags are certain once the words are written; the answer is a coin that knows nothing of the prompt.
        answers = sum(token in (YES, NO) for token in trace)
        return self.policy.log_prob(prompts[0], words) + answers * float(np.log(0.5))


def planted(
    regime: Regime, *, n_contexts: int = 8, group_size: int = 8, length: int = 6, seed: int = 0, step: int = 0
) -> Planted:
    """A step of a policy that is "healthy", "compressed", "template"-collapsed or collapsed to "low_entropy".

    The two collapsed ones ignore their prompt exactly: I(X; Z) = 0 and every row of the matrix is one tie. Rewards are
    fair coins in every regime, so that nothing can be told from them.

    >>> step = planted("template", length=3)
    >>> round(step.truth["retrieval_accuracy"], 6), len(step.batch)
    (0.125, 64)
    >>> step.decode(step.batch.rollouts[0].turns[0].output_ids)
    'w2 w2 w3 </think> <answer> yes </answer> <eos>'
    """
    if regime not in get_args(Regime):
        raise SettingsError(f"regime is {regime!r}; it is one of {', '.join(get_args(Regime))}.")
    dependence, sharpness = _REGIMES[regime]
    policy = random_policy(n_contexts=n_contexts, dependence=dependence, sharpness=sharpness, length=length, seed=seed)
    tokens_NT, own_N = policy.sample(group_size, seed + 1)
    matrix = policy.matrix(tokens_NT, own_N)
    solved_N = np.random.default_rng(seed + 2).random(own_N.size) < 0.5
    rollouts = tuple(
        _planted_rollout(policy, tokens_T, int(j), bool(solved))
        for tokens_T, j, solved in zip(tokens_NT, own_N, solved_N, strict=True)
    )
    batch = RolloutBatch(step=step, rollouts=rollouts, eos_token_ids=(EOS,), source=f"planted {regime}")
    return Planted(regime=regime, policy=policy, matrix=matrix, batch=batch, truth=_truth(policy))


def _planted_rollout(policy: EnumerablePolicy, tokens_T: IntArray, context: int, solved: bool) -> Rollout:
    words = [_FIRST_WORD + int(v) for v in tokens_T]
    answer = YES if solved else NO
    turn = Turn(
        context_ids=np.array([BOS, _FIRST_WORD + policy.vocab_size + context, THINK_OPEN]),
        output_ids=np.array([*words, THINK_CLOSE, ANSWER_OPEN, answer, ANSWER_CLOSE, EOS]),
        context=f"prompt{context} <think>",
        output=f"{' '.join(f'w{v}' for v in tokens_T)} </think> <answer> {_SCAFFOLD[answer]} </answer>",
        finish_reason="stop",
    )
    return Rollout(turns=(turn,), group=f"prompt{context}", reward=float(solved), success=solved)


def _truth(policy: EnumerablePolicy) -> dict[str, float]:
    per_trace = {
        "mi": policy.mutual_information(),
        "conditional_entropy": policy.conditional_entropy(),
        "reasoning_entropy": policy.reasoning_entropy(),
    }
    truth = {"retrieval_accuracy": policy.retrieval_accuracy()}
    for name, value in per_trace.items():
        stem = "estimate" if name == "mi" else "est"
        truth[f"{name}_seq_{stem}"] = value
        truth[f"{name}_{stem}"] = value / policy.length
    return truth


__all__ = [
    "EnumerablePolicy",
    "Planted",
    "TableScorer",
    "planted",
    "random_policy",
]
