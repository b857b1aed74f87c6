"""How contexts run: what they share at their beginning once, then in batches of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from collapsediag.scoring.packing import IntArray, SortedTrie

# A shared beginning gets a forward pass of its own only where it saves this much.
MIN_BASE_TOKENS = 8
MIN_BASE_SAVED_TOKENS = 32


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
        usable = min(trie.common(low, high), int(trie.size_U[low:high].min()) - 1)
        edge = usable - depth
        if edge >= MIN_BASE_TOKENS and edge * (high - low - 1) >= MIN_BASE_SAVED_TOKENS:
            bases.append(Base(parent=parent, start=depth, tokens=contexts[order[low]][depth:usable]))
            parent, depth = len(bases) - 1, usable
        children = trie.children(low, high)
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
