"""Who is scored under whom, in which order: integers only, no model.

Every distinct context and every distinct trace runs once. What contexts share at their beginning runs once and is
continued (a *base*, see `contexts`); what traces share runs once per context (see `packing`). Cells that are not all of
a rectangle (budget mode) become several *groups*, which share their bases.

Legend: N traces and P contexts as asked for; U distinct non-empty traces, C distinct contexts; G those of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapsediag.scoring.contexts import Base, ContextBatch, plan_bases, plan_batches
from collapsediag.scoring.packing import IntArray, Step, unique_sequences
from collapsediag.scoring.shape import WorkModel, apart_shape, choose_shape

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Contexts and traces that are all scored with each other.

    context_G, trace_G: their numbers among the distinct ones.
    steps: forward passes over the traces, run once for every batch; their trace numbers index trace_G.
    first_F: distinct first tokens; first_of_G: which of them each trace starts with.
    batches: how the contexts run; their context numbers index context_G, their base numbers the plan's.
    """

    context_G: IntArray
    trace_G: IntArray
    steps: tuple[Step, ...]
    first_F: IntArray
    first_of_G: IntArray
    batches: tuple[ContextBatch, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Everything that runs: beginnings that contexts share, also contexts of different groups, and the groups."""

    bases: tuple[Base, ...]
    groups: tuple[Group, ...]


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

    @property
    def longest_pair(self) -> int:
        """Tokens of the longest context and the longest trace together."""
        return max((t.size for t in self.traces), default=0) + max((c.size for c in self.contexts), default=0)

    def naive_tokens(self, scored_NP: BoolArray | None = None) -> int:
        """Tokens of `[X | Z]` over all asked-for cells of non-empty traces, duplicates included, padding not."""
        length_N = np.array([self.traces[u].size if u >= 0 else 0 for u in self.trace_of_N], dtype=np.int64)
        length_P = np.array([self.contexts[c].size for c in self.context_of_P], dtype=np.int64)
        cells = (length_N > 0)[:, None] & (np.True_ if scored_NP is None else scored_NP)
        return int(((length_N[:, None] + length_P[None, :]) * cells).sum())


def make_plan(unique: Unique, work: WorkModel, open_UC: BoolArray | None = None, *, apart: bool = False) -> Plan:
    """Rectangles that cover the open cells (all wanted ones where not given): contexts with the same traces together.

    apart: no trace runs beside another.
    """
    wanted = unique.wanted_UC if open_UC is None else open_UC
    columns = np.flatnonzero(wanted.any(axis=0))
    bases, base_of = plan_bases([unique.contexts[c] for c in columns])
    base_of_C = dict(zip(columns.tolist(), base_of, strict=True))
    by_traces: dict[bytes, list[int]] = {}
    for c in columns.tolist():
        by_traces.setdefault(wanted[:, c].tobytes(), []).append(c)
    groups = []
    for context_G in by_traces.values():
        trace_G = np.flatnonzero(wanted[:, context_G[0]])
        contexts, traces = [unique.contexts[c] for c in context_G], [unique.traces[u] for u in trace_G]
        steps, rows = (apart_shape if apart else choose_shape)(contexts, traces, work)
        first, first_of = np.unique(np.array([t[0] for t in traces], dtype=np.int64), return_inverse=True)
        base_of_G = [base_of_C[c] for c in context_G]
        groups.append(
            Group(
                context_G=np.array(context_G, dtype=np.int64),
                trace_G=trace_G,
                steps=tuple(steps),
                first_F=first,
                first_of_G=first_of.reshape(-1),
                batches=tuple(plan_batches(contexts, bases, base_of_G, rows, work.max_tokens)),
            )
        )
    return Plan(bases=tuple(bases), groups=tuple(groups))
