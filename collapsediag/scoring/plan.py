"""Who is scored under whom, in which order, and what it costs: integers only, no model.

Every distinct context and every distinct trace runs once. What contexts share at their beginning runs once and is
continued (a *base*); what traces share runs once per context (see `packing`).

Legend: N traces and P contexts as asked for; U distinct non-empty traces, C distinct contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from collapsediag.scoring.packing import IntArray, SortedTrie, Step, last_uses, pack_traces, trie_size, unique_sequences

BoolArray = NDArray[np.bool_]

MIN_BASE_TOKENS = 8
MIN_BASE_SAVED_TOKENS = 32
CHUNK_SIZES = (64, 128, 256, 512, 1024, 2048)


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
        """One line for people.

        >>> CostEstimate(pairs=8, tokens=25, logit_rows=9, naive_tokens=100, floor_tokens=20, floor_rows=9).describe()
        '8 pairs: 25 tokens to run (100 by forwarding every pair in full, 4.0 times as many; at least 20)'
        """
        times = self.naive_tokens / self.tokens if self.tokens else 1.0
        return (
            f"{self.pairs:,} pairs: {self.tokens:,} tokens to run ({self.naive_tokens:,} by forwarding every pair in "
            f"full, {times:.1f} times as many; at least {self.floor_tokens:,})"
        )


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    """What a token costs on this model and machine; only the ratios matter.

    linear: cost of one token in the layers that do not look back (2 x their parameters, in FLOPs).
    per_key: cost of one (token, key) pair in the attention layers.
    per_forward: fixed cost of one forward pass.
    max_tokens: tokens of one forward pass.
    max_context_tokens: tokens of context whose keys and values may be held at once.
    """

    linear: float = 1.0
    per_key: float = 0.0
    per_forward: float = 0.0
    max_tokens: int = 1024
    max_context_tokens: int = 1 << 62


@dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """A beginning that several contexts share: `tokens` after the first `start`, which are base `parent` (-1: none)."""

    parent: int
    start: int
    tokens: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextBatch:
    """Contexts whose traces run together: one row each.

    contexts: numbers of the distinct contexts.
    bases: the base each of them continues, -1 for none.
    prefills: rows of the batch that run in one forward pass, all with the same base.
    """

    contexts: tuple[int, ...]
    bases: tuple[int, ...]
    prefills: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Contexts and traces that are all scored with each other.

    context_G, trace_G: their numbers among the distinct ones.
    steps: forward passes over the traces, run once for every batch; their trace numbers index trace_G.
    first_F: distinct first tokens; first_of_G: which of them each trace starts with.
    bases, batches: how the contexts run.
    """

    context_G: IntArray
    trace_G: IntArray
    steps: tuple[Step, ...]
    first_F: IntArray
    first_of_G: IntArray
    bases: tuple[Base, ...]
    batches: tuple[ContextBatch, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Unique:
    """The distinct contexts and non-empty traces behind N x P cells.

    contexts, traces: distinct, in lexicographic order.
    context_of_P: number of each column's context; trace_of_N: number of each row's trace, -1 for an empty one.
    wanted_UC: which cells are asked for.
    """

    contexts: tuple[IntArray, ...]
    traces: tuple[IntArray, ...]
    context_of_P: IntArray
    trace_of_N: IntArray
    wanted_UC: BoolArray

    @classmethod
    def of(cls, contexts: Sequence[IntArray], traces: Sequence[IntArray], scored_NP: BoolArray | None = None) -> Unique:
        """Merge equal contexts and equal traces. `scored_NP`: only these cells are wanted (all where not given)."""
        filled = np.array([t.size > 0 for t in traces], dtype=np.bool_)
        unique_contexts, context_of = unique_sequences(contexts)
        unique_traces, number = unique_sequences([t for t in traces if t.size])
        trace_of = np.full(len(traces), -1, dtype=np.int64)
        trace_of[filled] = number
        wanted = np.zeros((len(unique_traces), len(unique_contexts)), dtype=np.bool_)
        if scored_NP is None:
            wanted[:] = True
        else:
            rows, columns = np.nonzero(scored_NP & filled[:, None])
            wanted[trace_of[rows], context_of[columns]] = True
        return cls(
            contexts=tuple(unique_contexts),
            traces=tuple(unique_traces),
            context_of_P=context_of,
            trace_of_N=trace_of,
            wanted_UC=wanted,
        )

    def naive_tokens(self, scored_NP: BoolArray | None = None) -> int:
        """Tokens of `[X | Z]` over all asked-for cells of non-empty traces, duplicates included, padding not."""
        length_N = np.array([self.traces[u].size if u >= 0 else 0 for u in self.trace_of_N], dtype=np.int64)
        length_P = np.array([self.contexts[c].size for c in self.context_of_P], dtype=np.int64)
        cells = (length_N > 0)[:, None] & (np.True_ if scored_NP is None else scored_NP)
        return int(((length_N[:, None] + length_P[None, :]) * cells).sum())


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


def plan_bases(contexts: Sequence[IntArray]) -> tuple[list[Base], list[int]]:
    """Shared beginnings worth running once, and the base that each context continues.

    A base never covers a context's last token: its logits are needed, per context.

    >>> bases, base_of = plan_bases([np.arange(50), np.r_[np.arange(40), 7, 8], np.array([9, 9])])
    >>> [b.tokens.size for b in bases], base_of
    ([40], [0, 0, -1])
    """
    order = sorted(range(len(contexts)), key=lambda c: contexts[c].astype(">i8").tobytes())
    trie = SortedTrie([contexts[c] for c in order])
    bases: list[Base] = []
    base_of = [-1] * len(contexts)
    waiting = [(0, len(contexts), 0, -1)]
    while waiting:
        low, high, depth, parent = waiting.pop()
        if high - low < 2:
            for position in range(low, high):
                base_of[order[position]] = parent
            continue
        common = trie.common(low, high)
        usable = min(common, int(trie.size_U[low:high].min()) - 1)
        edge = usable - depth
        if edge >= MIN_BASE_TOKENS and edge * (high - low - 1) >= MIN_BASE_SAVED_TOKENS:
            bases.append(Base(parent=parent, start=depth, tokens=contexts[order[low]][depth:usable]))
            parent, depth = len(bases) - 1, usable
        children = list(trie.children(low, high, common))
        if len(children) == 1:  # equal contexts cannot occur: they were merged
            children = [(position, position + 1) for position in range(low, high)]
        waiting += [(a, b, depth, parent) for a, b in reversed(children)]
    return bases, base_of


def plan_batches(
    contexts: Sequence[IntArray], bases: Sequence[Base], base_of: Sequence[int], rows: int, max_tokens: int
) -> list[ContextBatch]:
    """Batches of at most `rows` contexts: those with the same base together, the longest first within a base.

    Longest first, because the memory that a batch needs is then known early.
    """
    order = sorted(range(len(contexts)), key=lambda c: (base_of[c], -contexts[c].size))
    n_batches = -(-len(order) // rows)
    cuts = np.linspace(0, len(order), n_batches + 1).round().astype(int).tolist()
    batches = []
    for start, stop in pairwise(cuts):
        chosen = order[start:stop]
        starts = [0 if base_of[c] < 0 else bases[base_of[c]].start + bases[base_of[c]].tokens.size for c in chosen]
        prefills: list[list[int]] = []
        for row, c in enumerate(chosen):
            last = prefills[-1] if prefills else []
            longest = contexts[chosen[last[0]]].size - starts[last[0]] if last else 0
            if last and base_of[chosen[last[0]]] == base_of[c] and longest * (len(last) + 1) <= max_tokens:
                last.append(row)
            else:
                prefills.append([row])
        batches.append(
            ContextBatch(
                contexts=tuple(chosen),
                bases=tuple(base_of[c] for c in chosen),
                prefills=tuple(tuple(rows_) for rows_ in prefills),
            )
        )
    return batches


def _rows_that_fit(contexts: Sequence[IntArray], chunk: int, work: WorkModel) -> int:
    longest = max(c.size for c in contexts)
    by_memory = max(1, work.max_context_tokens // longest)
    rows = max(1, min(work.max_tokens // chunk, by_memory, len(contexts)))
    return -(-len(contexts) // -(-len(contexts) // rows))


def choose_shape(contexts: Sequence[IntArray], traces: Sequence[IntArray], work: WorkModel) -> tuple[list[Step], int]:
    """Steps and the number of contexts a batch that cost least: `(steps, rows)`.

    Long chunks repeat little of what traces share but let every token look at many strangers' keys (masked out, yet
    computed); short chunks over many contexts do the opposite. The work model decides.
    """
    mean_context = float(np.mean([c.size for c in contexts]))
    best: tuple[float, list[Step], int] | None = None
    for chunk in CHUNK_SIZES:
        if chunk > work.max_tokens and best is not None:
            break
        steps = pack_traces(traces, min(chunk, work.max_tokens))
        rows = _rows_that_fit(contexts, chunk, work)
        batches = -(-len(contexts) // rows)
        cost = batches * len(steps) * work.per_forward
        for step in steps:
            keys = mean_context + step.depth_T.min(initial=0) + step.n_tokens
            cost += len(contexts) * step.n_tokens * (work.linear + work.per_key * keys)
        if best is None or cost < best[0]:
            best = (cost, steps, rows)
        if len(steps) <= 1:
            break
    assert best is not None
    return best[1], best[2]


def plan_group(unique: Unique, context_G: IntArray, trace_G: IntArray, work: WorkModel) -> Group:
    """Plan one full rectangle of cells."""
    contexts = [unique.contexts[c] for c in context_G]
    traces = [unique.traces[u] for u in trace_G]
    steps, rows = choose_shape(contexts, traces, work)
    bases, base_of = plan_bases(contexts)
    first, first_of = np.unique(np.array([t[0] for t in traces], dtype=np.int64), return_inverse=True)
    return Group(
        context_G=np.asarray(context_G, dtype=np.int64),
        trace_G=np.asarray(trace_G, dtype=np.int64),
        steps=tuple(steps),
        first_F=first,
        first_of_G=first_of.reshape(-1),
        bases=tuple(bases),
        batches=tuple(plan_batches(contexts, bases, base_of, rows, work.max_tokens)),
    )


def plan_groups(unique: Unique, work: WorkModel, done_C: BoolArray | None = None) -> list[Group]:
    """Rectangles that cover the wanted cells: contexts that want the same traces together. `done_C` are left out."""
    wanted = unique.wanted_UC
    by_traces: dict[bytes, list[int]] = {}
    for c in range(wanted.shape[1]):
        if wanted[:, c].any() and not (done_C is not None and done_C[c]):
            by_traces.setdefault(wanted[:, c].tobytes(), []).append(c)
    return [
        plan_group(unique, np.array(columns, dtype=np.int64), np.flatnonzero(wanted[:, columns[0]]), work)
        for columns in by_traces.values()
    ]


def group_tokens(unique: Unique, group: Group) -> tuple[int, int]:
    """(tokens, logit rows) that one group runs, padding included."""
    contexts = [unique.contexts[c] for c in group.context_G]
    tokens = sum(base.tokens.size for base in group.bases)
    for batch in group.batches:
        for prefill in batch.prefills:
            base = batch.bases[prefill[0]]
            start = 0 if base < 0 else group.bases[base].start + group.bases[base].tokens.size
            tokens += len(prefill) * (max(contexts[batch.contexts[row]].size for row in prefill) - start)
    tokens += len(contexts) * sum(step.n_tokens for step in group.steps)
    rows = len(contexts) * (1 + sum(step.row_R.size for step in group.steps))
    return int(tokens), int(rows)


def estimate(unique: Unique, groups: Sequence[Group], scored_NP: BoolArray | None = None) -> CostEstimate:
    """Exact counts for these groups, for the naive way, and for the floor (over groups that share nothing)."""
    counts = [group_tokens(unique, group) for group in groups]
    floors = [
        floor_of([unique.contexts[c] for c in g.context_G], [unique.traces[u] for u in g.trace_G]) for g in groups
    ]
    filled = unique.trace_of_N >= 0
    cells = filled[:, None] & (np.ones(len(unique.context_of_P), bool) if scored_NP is None else scored_NP)
    return CostEstimate(
        pairs=int(cells.sum()),
        tokens=sum(tokens for tokens, _ in counts),
        logit_rows=sum(rows for _, rows in counts),
        naive_tokens=unique.naive_tokens(scored_NP),
        floor_tokens=sum(tokens for tokens, _ in floors),
        floor_rows=sum(rows for _, rows in floors),
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
    return estimate(unique, plan_groups(unique, work or WorkModel()), scored_NP)


__all__ = ["CostEstimate", "WorkModel", "estimate_cost", "last_uses"]
