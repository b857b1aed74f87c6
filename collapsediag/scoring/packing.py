"""Sequences that share prefixes, cut into steps a model can run: integers only.

A *step* is one forward pass's worth of trace tokens: the nodes of a trie in depth-first order, each seeing the nodes
above it. A step continues the keys and values of its parent step (-1: of the context itself), so that a prefix shared
by many traces runs once, and no step is longer than the token budget.

Legend: U unique sequences in lexicographic order; T nodes of a step; R nodes whose logits are needed; M (node, next
token) pairs; K (trace, position) entries, each of which reads one pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

# A shared stretch gets a step of its own only where it is long enough to fill a forward pass somewhat, and where that
# saves tokens: below these, running it again in the next chunk is cheaper than one more, nearly empty, forward pass.
MIN_SHARED_TOKENS = 16
MIN_SAVED_TOKENS = 64
# How many half-filled chunks are kept open; more would take longer to search than they save.
MAX_OPEN_CHUNKS = 64


def common_length(a: IntArray, b: IntArray) -> int:
    """Number of leading tokens that two sequences share.

    >>> common_length(np.array([1, 2, 3]), np.array([1, 2, 9, 9]))
    2
    """
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def unique_sequences(sequences: Sequence[IntArray]) -> tuple[list[IntArray], IntArray]:
    """The distinct sequences in lexicographic order, and the number of each input among them.

    >>> found, number = unique_sequences([np.array([2, 1]), np.array([1]), np.array([2, 1])])
    >>> [s.tolist() for s in found], number.tolist()
    ([[1], [2, 1]], [1, 0, 1])
    """
    # Big-endian bytes of non-negative integers sort as the integers do, a prefix before what it begins.
    keys = [np.asarray(s).astype(">i8").tobytes() for s in sequences]
    order = {key: number for number, key in enumerate(sorted(set(keys)))}
    number_of = np.array([order[key] for key in keys], dtype=np.int64)
    unique: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(order)
    for sequence, number in zip(sequences, number_of.tolist(), strict=True):
        # A copy: the rollouts' own arrays are read-only, which torch warns about and must not be.
        unique[number] = np.array(sequence, dtype=np.int64)
    return unique, number_of


def adjacent_common(sequences: Sequence[IntArray]) -> IntArray:
    """[U] common length of each sequence with the one before it; 0 for the first."""
    common = [0, *(common_length(a, b) for a, b in pairwise(sequences))]
    return np.array(common[: len(sequences)], dtype=np.int64)


def trie_size(sequences: Sequence[IntArray]) -> int:
    """Nodes of the trie of these sequences: tokens that must run when every shared prefix runs once.

    >>> trie_size([np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([1, 2, 3])])
    4
    """
    unique, _ = unique_sequences(sequences)
    return int(sum(s.size for s in unique) - adjacent_common(unique).sum())


class SortedTrie:
    """Sequences in lexicographic order with the questions that packing asks of their trie, and asks for each budget.

    least_shared: beginnings shorter than this count as not shared.
    """

    def __init__(self, sequences: Sequence[IntArray], least_shared: int = 1):
        self.sequences = list(sequences)
        self.least_shared = least_shared
        self.size_U = np.array([s.size for s in self.sequences], dtype=np.int64)
        self.common_U = adjacent_common(self.sequences)
        self.common_U[self.common_U < least_shared] = 0
        self._shape: dict[tuple[int, int], tuple[int, int, list[tuple[int, int]]]] = {}

    def nodes(self, low: int, high: int, depth: int) -> int:
        """Nodes deeper than `depth` in the trie of sequences low..high-1, which share their first `depth` tokens."""
        # Each adjacent pair of a range that shares `depth` tokens shares at least that much.
        return self._of(low, high)[0] - depth

    def common(self, low: int, high: int) -> int:
        """Common length of sequences low..high-1."""
        return self._of(low, high)[1]

    def children(self, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges of sequences that part where low..high-1 part."""
        return self._of(low, high)[2]

    def _of(self, low: int, high: int) -> tuple[int, int, list[tuple[int, int]]]:
        found = self._shape.get((low, high))
        if found is None:
            size, adjacent = self.size_U[low:high], self.common_U[low + 1 : high]
            common = int(min(size.min(), adjacent.min())) if high - low > 1 else int(size[0])
            cuts = [low, *(low + 1 + np.flatnonzero(adjacent <= common)).tolist(), high]
            found = int(size.sum() - adjacent.sum()), common, list(pairwise(cuts))
            self._shape[low, high] = found
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward pass over trace tokens, for any context.

    token_T: the tokens, in depth-first order of their trie.
    depth_T: how many trace tokens precede each; its position is the context's length plus this.
    end_T: node q sees node k exactly if k <= q < end_T[k].
    parent: the step whose keys and values this one continues, -1 for the context.
    keep: later steps continue this one, so its keys and values are kept.
    row_R: nodes whose next-token distribution is read.
    pair_row_M, pair_target_M: index into row_R, and the token looked up there; sorted by row.
    entry_pair_K, entry_trace_K, entry_time_K: which pair holds the log-prob of which token of which trace.
    """

    token_T: IntArray
    depth_T: IntArray
    end_T: IntArray
    parent: int
    keep: bool
    row_R: IntArray
    pair_row_M: IntArray
    pair_target_M: IntArray
    entry_pair_K: IntArray
    entry_trace_K: IntArray
    entry_time_K: IntArray

    @property
    def n_tokens(self) -> int:
        """T, the tokens of this forward pass for one context."""
        return int(self.token_T.size)


def _subtree_end(depth_T: list[int]) -> IntArray:
    """[T] first later node that is not below each node, from the depths in depth-first order."""
    end = [len(depth_T)] * len(depth_T)
    open_: list[int] = []
    for node, depth in enumerate(depth_T):
        while open_ and depth_T[open_[-1]] >= depth:
            end[open_.pop()] = node
        open_.append(node)
    return np.array(end, dtype=np.int64)


class _Builder:
    """Collects trie nodes and the entries that read them until a step is full."""

    def __init__(self, parent: int, depth: int, least_shared: int):
        self.parent, self.depth, self.least_shared = parent, depth, least_shared
        self.token: list[int] = []
        self.node_depth: list[int] = []
        self.path: list[int] = []
        self.last: IntArray | None = None
        self.node: list[IntArray] = []
        self.target: list[IntArray] = []
        self.trace: list[IntArray] = []
        self.time: list[IntArray] = []

    def add(self, number: int, trace: IntArray) -> None:
        """Add the nodes of `trace` from this builder's depth to its end, and its entries."""
        inputs = trace[:-1]
        common = 0 if self.last is None else common_length(self.last, inputs)
        shared = max(self.depth, common) if common >= self.least_shared else self.depth
        first = len(self.token)
        self.path = self.path[: shared - self.depth] + list(range(first, first + inputs.size - shared))
        self.token += inputs[shared:].tolist()
        self.node_depth += range(shared, inputs.size)
        self.last = inputs
        self._add_entries(np.array([number]), trace[None, self.depth + 1 :], np.array(self.path, dtype=np.int64))

    def add_shared(self, numbers: IntArray, traces: Sequence[IntArray], stop: int) -> None:
        """Add the stretch up to `stop` that all these traces share, and their entries."""
        first = traces[numbers[0]]
        self.token, self.node_depth = first[self.depth : stop].tolist(), list(range(self.depth, stop))
        target = np.repeat(first[None, self.depth + 1 : stop + 1], numbers.size, axis=0)
        target[:, -1] = [traces[number][stop] for number in numbers]  # where they may part
        self._add_entries(numbers, target, np.arange(stop - self.depth))

    def _add_entries(self, numbers: IntArray, target: IntArray, path: IntArray) -> None:
        """Entries of traces `numbers`, whose tokens after this builder's depth are the rows of `target`."""
        count, times = target.shape
        self.node.append(np.tile(path, count))
        self.target.append(target.reshape(-1))
        self.trace.append(np.repeat(numbers, times))
        self.time.append(np.tile(np.arange(self.depth + 1, self.depth + 1 + times), count))

    def step(self, *, keep: bool) -> Step:
        node, target = np.concatenate(self.node), np.concatenate(self.target)
        # One pair per distinct (node, next token): traces that share both read the same number.
        width = int(target.max()) + 1
        pairs, entry_pair = np.unique(node * width + target, return_inverse=True)
        rows, pair_row = np.unique(pairs // width, return_inverse=True)
        return Step(
            token_T=np.array(self.token, dtype=np.int64),
            depth_T=np.array(self.node_depth, dtype=np.int64),
            end_T=_subtree_end(self.node_depth),
            parent=self.parent,
            keep=keep,
            row_R=rows,
            pair_row_M=pair_row.reshape(-1),
            pair_target_M=pairs % width,
            entry_pair_K=entry_pair.reshape(-1),
            entry_trace_K=np.concatenate(self.trace),
            entry_time_K=np.concatenate(self.time),
        )


@dataclass(frozen=True)
class Slot:
    """One step before it is built: sequences `ranges` of the trie from `depth` on, up to `stop` (None: to their ends).

    parent: the slot it continues. nodes: tokens it holds, at most.
    """

    parent: int
    depth: int
    stop: int | None
    ranges: tuple[tuple[int, int], ...]
    nodes: int


def _sort_out(
    trie: SortedTrie, low: int, high: int, depth: int, budget: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Split low..high-1, which share `depth` tokens, into what is packed and what gets a step of its own.

    Packed: ranges (low, high, nodes) that fit one step. Own step: ranges (low, high, to_depth) whose shared stretch up
    to to_depth would cost more, run again in each of their chunks, than one more forward pass.
    """
    packed: list[tuple[int, int, int]] = []
    shared: list[tuple[int, int, int]] = []
    ranges = [(low, high)]
    while ranges:
        a, b = ranges.pop()
        nodes, common = trie.nodes(a, b, depth), trie.common(a, b)
        edge = common - depth
        chunks = -(-nodes // budget)
        if edge == 0 or nodes > budget:
            if nodes == edge:  # one chain: empty, or longer than a step, and then all but its last piece goes ahead
                shared += [(a, b, depth + budget * (chunks - 1))] if nodes else []
            elif edge >= MIN_SHARED_TOKENS and edge * (chunks - 1) >= MIN_SAVED_TOKENS:
                shared.append((a, b, common))
            else:
                ranges += reversed(trie.children(a, b))
        else:
            packed.append((a, b, nodes))
    return packed, shared


def _first_fit(packed: Sequence[tuple[int, int, int]], budget: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """Ranges and node count of each chunk: the largest ranges first, each into the first chunk that has room.

    A subtree is never torn apart: its shared beginning would run in both halves.
    """
    chunks: list[tuple[list[tuple[int, int]], int]] = []
    for low, high, nodes in sorted(packed, key=lambda item: (-item[2], item[0])):
        for number in range(max(0, len(chunks) - MAX_OPEN_CHUNKS), len(chunks)):
            ranges, filled = chunks[number]
            if filled + nodes <= budget:
                chunks[number] = ([*ranges, (low, high)], filled + nodes)
                break
        else:
            chunks.append(([(low, high)], nodes))
    return [(tuple(sorted(ranges)), filled) for ranges, filled in chunks]


def lay_out(trie: SortedTrie, budget: int) -> list[Slot]:
    """Slots of at most `budget` tokens that cover the trie, parents before children, in depth-first order.

    In that order a kept parent is done with as early as can be, so that few keys and values are alive at once.
    """
    if budget < 1:
        raise ValueError(f"the token budget is {budget}; at least 1 is needed.")
    slots: list[Slot] = []
    waiting = [(0, len(trie.sequences), 0, 0, -1)] if trie.sequences else []
    while waiting:
        low, high, depth, stop, parent = waiting.pop()
        while depth < stop:  # the shared stretch, in pieces of the budget
            piece = min(stop, depth + budget)
            slots.append(Slot(parent, depth, piece, ((low, high),), piece - depth))
            parent, depth = len(slots) - 1, piece
        packed, shared = _sort_out(trie, low, high, depth, budget)
        slots += [Slot(parent, depth, None, ranges, nodes) for ranges, nodes in _first_fit(packed, budget)]
        waiting += [(a, b, depth, to, parent) for a, b, to in reversed(shared)]
    return slots


def lay_apart(trie: SortedTrie, budget: int) -> list[Slot]:
    """Slots in which each sequence runs by itself: nothing is shared, and nothing stands beside it, masked or not."""
    slots: list[Slot] = []
    for number, size in enumerate(trie.size_U.tolist()):
        parent = -1
        for depth in range(0, size, budget):
            stop = depth + budget if depth + budget < size else None
            slots.append(Slot(parent, depth, stop, ((number, number + 1),), min(budget, size - depth)))
            parent = len(slots) - 1
    return slots


def build_steps(traces: Sequence[IntArray], slots: Sequence[Slot], least_shared: int = 1) -> list[Step]:
    """The slots' steps. least_shared: that of the trie they were laid out from."""
    steps = []
    for slot in slots:
        builder = _Builder(slot.parent, slot.depth, least_shared)
        for low, high in slot.ranges:
            if slot.stop is not None:
                builder.add_shared(np.arange(low, high), traces, slot.stop)
                continue
            for number in range(low, high):
                if traces[number].size - 1 > slot.depth:
                    builder.add(number, traces[number])
        steps.append(builder.step(keep=slot.stop is not None))
    return steps


def inputs_trie(traces: Sequence[IntArray], least_shared: int = 1) -> SortedTrie:
    """The trie that runs: the last token of a trace predicts nothing, so it is not an input."""
    return SortedTrie([t[:-1] for t in traces], least_shared)


def pack_traces(traces: Sequence[IntArray], budget: int) -> list[Step]:
    """Steps of at most `budget` tokens that cover every trace. `traces`: distinct, non-empty, in lexicographic order.

    The first token of a trace is predicted by the context's last position, so a trace of one token needs no node.

    >>> steps = pack_traces([np.array([5, 6, 7]), np.array([5, 6, 8, 9]), np.array([5, 7, 1])], budget=8)
    >>> steps[0].token_T.tolist(), steps[0].depth_T.tolist(), steps[0].end_T.tolist()
    ([5, 6, 8, 7], [0, 1, 2, 1], [4, 3, 3, 4])
    """
    return build_steps(traces, lay_out(inputs_trie(traces), budget))


def last_uses(parents: Sequence[int]) -> dict[int, int]:
    """For each step that others continue: the number of the last one that does; after it, its memory is free.

    >>> last_uses([-1, 0, 0, -1])
    {-1: 3, 0: 2}
    """
    return {parent: number for number, parent in enumerate(parents)}
