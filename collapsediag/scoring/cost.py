"""What a matrix costs in tokens: by the plan, by the naive way, and at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapsediag.scoring.packing import IntArray, trie_size, unique_sequences
from collapsediag.scoring.plan import Group, Plan, Unique, make_plan
from collapsediag.scoring.shape import WorkModel

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """What a matrix costs, in tokens: by this plan, by the naive way, and at least.

    pairs: (trace, context) cells that are asked for, empty traces left out.
    tokens: tokens that the plan's forward passes run, padding included.
    logit_rows: positions whose next-token distribution is computed.
    naive_tokens: forwarding `[X | Z]` for every pair.
    floor_tokens: distinct (context, token) evaluations; no exact method that forwards tokens can run fewer.
    floor_rows: distinct next-token distributions.
    """

    pairs: int
    tokens: int
    logit_rows: int
    naive_tokens: int
    floor_tokens: int
    floor_rows: int

    def describe(self) -> str:
        r"""One line for people.

        >>> cost = CostEstimate(pairs=8, tokens=25, logit_rows=9, naive_tokens=100, floor_tokens=20, floor_rows=9)
        >>> print(cost.describe().replace("; ", ";\n"))
        8 pairs: 25 tokens to run (100 by forwarding every pair in full, 4.0 times as many;
        no packing can need fewer than 20)
        """
        times = self.naive_tokens / self.tokens if self.tokens else 1.0
        return (
            f"{self.pairs:,} pairs: {self.tokens:,} tokens to run ({self.naive_tokens:,} by forwarding every pair in "
            f"full, {times:.1f} times as many; no packing can need fewer than {self.floor_tokens:,})"
        )


def floor_of(contexts: Sequence[IntArray], traces: Sequence[IntArray]) -> tuple[int, int]:
    """(tokens, next-token distributions) that must be computed at least to score all traces under all contexts.

    >>> floor_of([np.array([1, 2]), np.array([1, 3])], [np.array([7, 8]), np.array([7, 9])])
    (5, 4)
    """
    if not contexts or not traces:
        return 0, 0
    count = len(unique_sequences(contexts)[0])
    nodes = trie_size([t[:-1] for t in traces])
    return trie_size(contexts) + count * nodes, count * (nodes + 1)


def plan_tokens(unique: Unique, plan: Plan) -> tuple[int, int]:
    """(tokens, logit rows) that a plan runs, padding included."""
    counts = [_group_tokens(unique, plan, group) for group in plan.groups]
    shared = sum(base.tokens.size for base in plan.bases)
    return shared + sum(tokens for tokens, _ in counts), sum(rows for _, rows in counts)


def _group_tokens(unique: Unique, plan: Plan, group: Group) -> tuple[int, int]:
    contexts = [unique.contexts[c] for c in group.context_G]
    tokens = 0
    for batch in group.batches:
        for prefill in batch.prefills:
            base = batch.bases[prefill[0]]
            start = 0 if base < 0 else plan.bases[base].start + plan.bases[base].tokens.size
            tokens += len(prefill) * (max(contexts[batch.contexts[row]].size for row in prefill) - start)
    tokens += len(contexts) * sum(step.n_tokens for step in group.steps)
    rows = len(contexts) * (1 + sum(step.row_R.size for step in group.steps))
    return int(tokens), int(rows)


def estimate(unique: Unique, plan: Plan, scored_NP: BoolArray | None = None) -> CostEstimate:
    """Exact counts for this plan, for the naive way, and for the floor."""
    tokens, rows = plan_tokens(unique, plan)
    contexts = [unique.contexts[c] for group in plan.groups for c in group.context_G]
    nodes = [(g.context_G.size, trie_size([unique.traces[u][:-1] for u in g.trace_G])) for g in plan.groups]
    filled = unique.trace_of_N >= 0
    cells = filled[:, None] & (np.ones(len(unique.context_of_P), bool) if scored_NP is None else scored_NP)
    return CostEstimate(
        pairs=int(cells.sum()),
        tokens=tokens,
        logit_rows=rows,
        naive_tokens=unique.naive_tokens(scored_NP),
        floor_tokens=trie_size(contexts) + sum(count * n for count, n in nodes),
        floor_rows=sum(count * (n + 1) for count, n in nodes),
    )


def estimate_cost(
    contexts: Sequence[IntArray],
    traces: Sequence[IntArray],
    *,
    scored_NP: BoolArray | None = None,
    work: WorkModel | None = None,
) -> CostEstimate:
    """What scoring these traces under these contexts costs, before any model is loaded.

    >>> shared = np.arange(100)
    >>> contexts = [np.r_[shared, 200 + np.arange(20) * 7 + k] for k in range(4)]
    >>> cost = estimate_cost(contexts, [np.arange(k, k + 30) for k in range(10)])
    >>> cost.pairs, cost.floor_tokens, cost.naive_tokens
    (40, 1340, 6000)
    """
    unique = Unique.of(contexts, traces, scored_NP)
    return estimate(unique, make_plan(unique, work or WorkModel()), scored_NP)
