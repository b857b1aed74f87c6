"""How long a chunk of traces is, and how many contexts run it together.

Legend: T tokens of a chunk; B contexts of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collapsediag.scoring.packing import IntArray, Slot, Step, build_steps, inputs_trie, lay_apart, lay_out

CHUNK_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
NEARLY = 1.003


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    """What a token costs on this model and machine; only the ratios matter.

    linear: cost of one token in the layers that do not look back (2 x their parameters, in FLOPs).
    per_key: cost of one (token, key) pair in the attention layers.
    per_row_key: cost of handing one key of one context row to the attention layers, where it is copied.
    own_trees_only: a token of a chunk attends to its own tree only; otherwise strangers' keys are computed and masked.
    per_forward: fixed cost of one forward pass.
    per_call: fixed cost of attending to one more piece (a context row's prefix, a tree) in all layers.
    max_tokens: tokens of one forward pass.
    max_context_tokens: tokens of context whose keys and values may be held at once.
    """

    linear: float = 1.0
    per_key: float = 0.0
    per_row_key: float = 0.0
    own_trees_only: bool = False
    per_forward: float = 0.0
    per_call: float = 0.0
    max_tokens: int = 1024
    max_context_tokens: int = 1 << 62


def _rows_that_fit(contexts: Sequence[IntArray], chunk: int, work: WorkModel) -> int:
    longest = max(c.size for c in contexts)
    by_memory = max(1, work.max_context_tokens // longest)
    rows = max(1, min(work.max_tokens // chunk, by_memory, len(contexts)))
    return -(-len(contexts) // -(-len(contexts) // rows))


def choose_shape(contexts: Sequence[IntArray], traces: Sequence[IntArray], work: WorkModel) -> tuple[list[Step], int]:
    """Steps and the number of contexts a batch that cost least: `(steps, rows)`.

    Long chunks repeat little of what traces share but let every token look at many strangers' keys (masked out, yet
    computed); short chunks over many contexts do the opposite. The work model decides. A trace is cut in pieces only
    where it does not fit one forward pass.
    """
    trie = inputs_trie(traces, _least_shared(traces, work))
    longest = int(trie.size_U.max(initial=0))
    sizes = [size for size in CHUNK_SIZES if min(longest, work.max_tokens) <= size <= work.max_tokens]
    best: tuple[float, list[Slot], int] | None = None
    for chunk in sizes or [work.max_tokens]:
        slots, rows = lay_out(trie, chunk), _rows_that_fit(contexts, chunk, work)
        cost = _cost(contexts, slots, rows, work)
        # Of two that cost about the same, the longer chunk over fewer contexts: it holds fewer keys and values.
        if best is None or cost < best[0] * NEARLY:
            best = (cost, slots, rows)
        if len(slots) <= 1:
            break
    assert best is not None
    return build_steps(traces, best[1], trie.least_shared), best[2]


def _least_shared(traces: Sequence[IntArray], work: WorkModel) -> int:
    """Tokens s that two traces must share before running these once pays for what they compute of each other's keys.

    Two trees of L tokens compute 2 L^2 (token, key) pairs, masked or not, and joined to one (2 L - s)^2. So joining
    pays where s linear > ((2 L - s)^2 - 2 L^2) per_key: from a token or two on in models of a useful size, from tens on
    in tiny ones.
    """
    if not work.own_trees_only or not work.per_key:  # strangers' keys are computed anyway, or cost nothing
        return 1
    length = float(np.mean([t.size for t in traces]))
    half = 2 * length + work.linear / work.per_key / 2
    return max(1, math.ceil(half - math.sqrt(half**2 - 2 * length**2)))


def apart_shape(contexts: Sequence[IntArray], traces: Sequence[IntArray], work: WorkModel) -> tuple[list[Step], int]:
    """Steps in which each trace runs by itself, and the number of contexts a batch."""
    trie = inputs_trie(traces)
    longest = min(int(trie.size_U.max(initial=1)), work.max_tokens)
    return build_steps(traces, lay_apart(trie, work.max_tokens)), _rows_that_fit(contexts, max(1, longest), work)


def _cost(contexts: Sequence[IntArray], slots: Sequence[Slot], rows: int, work: WorkModel) -> float:
    """Of running all slots for all contexts, in the units of the work model."""
    mean_context = float(np.mean([c.size for c in contexts]))
    calls = sum(rows + len(slot.ranges) for slot in slots)
    cost = -(-len(contexts) // rows) * ((len(slots) + 1) * work.per_forward + calls * work.per_call)
    for slot in slots:
        strangers = 0 if work.own_trees_only else slot.nodes
        keys = mean_context + slot.depth + strangers
        cost += len(contexts) * (slot.nodes * (work.linear + work.per_key * keys) + work.per_row_key * keys)
    return cost
