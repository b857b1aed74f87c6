"""Share the work of one matrix over the ranks of a training job: each scores a part, the result is gathered once.

Two things that hang distributed jobs are kept out. A failure on one rank is told to all before anyone leaves, so that
all raise the same error. And where a forward pass is itself a collective (FSDP, ZeRO-3: parameters are gathered layer
by layer) all ranks run the same number of them, whatever their parts need: before each one they vote, and who is done
runs an idle one along.

Legend: N traces (rows), P contexts (columns), W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from collapsediag.errors import ScoringError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.cells import BoolArray, FloatArray, IntArray, distinct_traces, matrix_of, tokens_digest
from collapsediag.scoring.guard import undisturbed
from collapsediag.scoring.protocol import CellScorer

DEFAULT_TIMEOUT_S = 600.0
LONGEST_REASON = 2000


def share_cells(pairs: ScoringPairs, world_size: int, scored_NP: BoolArray | None = None) -> list[BoolArray]:
    """W masks [N, P] that together mark every wanted cell once, with about equal work.

    The ranks form a grid, contexts cut one way and traces the other. Cutting contexts repeats only what all contexts
    share; cutting traces repeats every context; the cheaper grid is taken. Both are cut in lexicographic order, so
    that sequences with a common beginning stay on one rank. Rows of equal traces stay together.

    >>> ids = np.array([1, 2]), np.array([3, 4]), np.array([5])
    >>> blank = {"group_N": [0] * 3, "rollout_N": [0] * 3, "turn_N": [0] * 3, "multiplicity_P": [1] * 3}
    >>> masks = share_cells(ScoringPairs(contexts=ids, traces=ids, own_N=[0, 1, 2], **blank), 2)
    >>> (masks[0].astype(int) + masks[1]).tolist()
    [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
    """
    n, p = pairs.n_traces, pairs.n_contexts
    wanted_NP = np.ones((n, p), dtype=np.bool_) if scored_NP is None else np.asarray(scored_NP, dtype=np.bool_)
    work = _Work.of(pairs, wanted_NP)
    most = max(1, min(world_size, p))
    grids = [work.grid(parts, world_size // parts) for parts in range(most, 0, -1)]
    part_U, part_P, _ = min(grids, key=lambda grid: grid[2])
    tiles = [(b, a) for b in range(int(part_U.max(initial=0)) + 1) for a in range(int(part_P.max(initial=0)) + 1)]
    masks = [(part_U == b)[work.trace_N][:, None] & (part_P == a)[None, :] & wanted_NP for b, a in tiles]
    return masks + [np.zeros((n, p), dtype=np.bool_)] * (world_size - len(masks))


@dataclass(frozen=True, eq=False)
class _Work:
    """Tokens behind each cell; U distinct traces."""

    trace_N: IntArray
    tokens_UP: FloatArray
    length_P: FloatArray
    order_U: IntArray
    order_P: IntArray

    @classmethod
    def of(cls, pairs: ScoringPairs, wanted_NP: BoolArray) -> _Work:
        trace_N = distinct_traces(pairs)
        _, first_U = np.unique(trace_N, return_index=True)
        wanted_UP = np.zeros((first_U.size, pairs.n_contexts), dtype=np.bool_)
        np.logical_or.at(wanted_UP, trace_N, wanted_NP)
        length_U = np.array([len(pairs.traces[i]) for i in first_U], dtype=np.float64)
        return cls(
            trace_N,
            wanted_UP * length_U[:, None],
            np.array([len(context) for context in pairs.contexts], dtype=np.float64),
            _lexicographic([pairs.traces[i] for i in first_U]),
            _lexicographic(list(pairs.contexts)),
        )

    def grid(self, context_parts: int, trace_parts: int) -> tuple[IntArray, IntArray, float]:
        """Part of each trace, part of each context, and the tokens that the rank with the most of them runs."""
        part_P = _cut(self.order_P, self.tokens_UP.sum(axis=0) / trace_parts + self.length_P, context_parts)
        part_U = _cut(self.order_U, self.tokens_UP.sum(axis=1), trace_parts)
        tokens_BP = np.stack([self.tokens_UP[part_U == b].sum(axis=0) for b in range(trace_parts)])
        cost_BP = np.where(tokens_BP > 0, tokens_BP + self.length_P, 0.0)
        cost_BA = np.stack([cost_BP[:, part_P == a].sum(axis=1) for a in range(context_parts)])
        return part_U, part_P, float(cost_BA.max())


def _lexicographic(sequences: list[IntArray]) -> IntArray:
    keys = [np.asarray(ids).astype(">i8").tobytes() for ids in sequences]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def _cut(order: IntArray, cost: FloatArray, parts: int) -> IntArray:
    """Part number of each item: consecutive items in `order`, cut so that the parts cost about the same."""
    part = np.zeros(order.size, dtype=np.int64)
    total = float(cost.sum())
    if total > 0:
        # An item belongs to the part that holds the middle of its share of the total.
        middle = np.cumsum(cost[order]) - cost[order] / 2
        part[order] = np.minimum((middle * parts / total).astype(np.int64), parts - 1)
    return part


class DistributedScorer:
    """Scores one matrix with all ranks of a process group; every rank gets the whole matrix.

    inner: what scores on each rank; it must be able to score single cells.
    model: the module whose forward passes are collectives (FSDP, FSDP2, ZeRO-3, or a function that calls
        DistributedDataParallel). Where not given, `inner.model` is looked at and used if its parameters are sharded.
    idle: runs one small forward pass of `model`; the default feeds it one token.
    group: a process group that can carry CPU tensors (gloo). Where not given one is made, which all ranks must do
        together, like everything here.
    timeout_s: of the group that is made: how long ranks wait for one that died.

    Every rank must call `score` with the same pairs (`gather_batch` brings the rollouts together); ranks that hold
    others are told apart by their tokens. An exception on any rank is raised on all of them as ScoringError. What
    cannot be told is a failure in the middle of a sharded forward pass: the others wait inside it, as they would in
    the trainer's own, until the group's time-out.

    Without an initialised process group, or with one rank, it is just `inner`.
    """

    def __init__(
        self,
        inner: CellScorer,
        *,
        model: nn.Module | None = None,
        idle: Callable[[], object] | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.inner = inner
        found = getattr(inner, "model", None)
        # The module that HFScorer calls, below wrappers that only compile: a hook on those would never fire.
        self.model = model if model is not None else (ModelAccess.of(found).outer if is_sharded(found) else None)
        self.idle = idle
        self.group = group
        if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def __repr__(self) -> str:
        return f"DistributedScorer({self.inner!r})"

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """The whole matrix, on every rank. Raises ScoringError on all ranks where one of them could not."""
        everything_NP = np.ones((pairs.n_traces, pairs.n_contexts), dtype=np.bool_)
        return matrix_of(pairs, self.score_cells(pairs, everything_NP))

    def score_cells(self, pairs: ScoringPairs, scored_NP: BoolArray) -> FloatArray:
        """Log-likelihoods [N, P] of the marked cells, on every rank; NaN elsewhere."""
        if self.group is None or dist.get_world_size(self.group) == 1:
            return self.inner.score_cells(pairs, scored_NP)
        check_same(tokens_digest(pairs, scored_NP), self.group)
        error: BaseException | None = None
        logp_NP = np.zeros((pairs.n_traces, pairs.n_contexts))
        try:
            mine_NP = share_cells(pairs, dist.get_world_size(self.group), scored_NP)[dist.get_rank(self.group)]
            with self._in_step():
                if mine_NP.any():
                    logp_NP[mine_NP] = self.inner.score_cells(pairs, mine_NP)[mine_NP]
        except Exception as failure:
            error = failure
        raise_together(error, self.group)
        gathered = torch.from_numpy(logp_NP)
        dist.all_reduce(gathered, group=self.group)  # every cell is zero on all ranks but one
        whole_NP: FloatArray = np.where(scored_NP, gathered.numpy(), np.nan)
        return whole_NP

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        assert self.group is not None
        if self.model is None:
            yield
        else:
            with forwards_in_step(self.model, self.group, self.idle):
                yield


@contextmanager
def forwards_in_step(
    model: nn.Module, group: dist.ProcessGroup, idle: Callable[[], object] | None = None
) -> Iterator[None]:
    """Inside, all ranks run the same number of forward passes of `model`, also where the body raises on some.

    Before each pass the ranks count who still has one to run; on leaving, a rank runs idle passes until nobody has.
    The vote goes over `group`, not over the group that the model gathers its parameters on.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    idling = idle or (lambda: model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device)))
    voting = True

    def vote(wants: bool) -> bool:
        count = torch.tensor([int(wants)])
        dist.all_reduce(count, group=group)
        return bool(count.item())

    def before_forward(module: nn.Module, args: Any) -> None:
        if voting:
            vote(True)

    # First of all hooks: the vote must be over when FSDP's own hook starts to gather.
    handle = model.register_forward_pre_hook(before_forward, prepend=True)
    try:
        yield
    finally:
        voting = False
        handle.remove()
        with undisturbed(model):
            while vote(False):
                idling()


def raise_together(error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Tell all ranks of a failure on any of them; if there is one, every rank raises ScoringError.

    Every rank must call this at the same point, with its own exception or None. The rank that failed keeps its
    exception as the cause.
    """
    if group is None or dist.get_world_size(group) == 1:
        reasons = [None if error is None else _reason(error)]
    else:
        reasons = [None] * dist.get_world_size(group)
        dist.all_gather_object(reasons, None if error is None else _reason(error), group=group)
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise ScoringError(f"rank {failed[0][0]} of {len(reasons)} failed{more}: {failed[0][1]}") from error


def check_same(digest: str, group: dist.ProcessGroup) -> None:
    """Raise ScoringError on every rank where their digests differ."""
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    other = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if other:
        raise ScoringError(
            f"rank {other[0]} was given other pairs to score than rank 0. Every rank must score the same pairs: bring "
            "the rollouts together first (gather_batch) and cut them with the same settings and seed."
        )


def gather_batch(batch: RolloutBatch, group: dist.ProcessGroup | None = None) -> RolloutBatch:
    """All ranks' rollouts of one step, in the order of ranks, on every rank; what was dropped is added up.

    group: must carry Python objects; the default group where not given.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return batch
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, batch, group=group)
    dropped: dict[str, int] = {}
    for part in found:
        for reason, count in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return replace(
        batch,
        rollouts=tuple(rollout for part in found for rollout in part.rollouts),
        dropped=dropped,
        notes=tuple(dict.fromkeys(note for part in found for note in part.notes)),
    )


def is_sharded(model: Any) -> bool:
    """Whether forward passes of `model` gather parameters from other ranks (FSDP, FSDP2, ZeRO-3)."""
    if not isinstance(model, nn.Module):
        return False
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    # FSDP2 keeps DTensors; ZeRO-3 marks its parameters.
    return any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in model.parameters())


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]
