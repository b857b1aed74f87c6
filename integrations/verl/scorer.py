"""Log-likelihoods from veRL's own workers: `actor_rollout_wg.compute_log_prob`, the call that makes `old_log_probs`.

An error on one rank alone leaves the others inside a collective and kills the job later. So whatever can be wrong with
a call is checked here, on the driver, before any rank hears of it: equal rows for each rank, none empty, none longer
than a micro-batch, every id within the vocabulary.

Legend: B pairs of one call, R ranks that share it, L tokens of one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import ScoringError
from collapsediag.scoring.function import FunctionScorer

Pair = tuple[list[int], list[int]]
MESH = "actor"


class Contract(Protocol):
    """How workers of one generation are asked: rows in, response log-probs of each row out."""

    def __call__(self, worker_group: Any, rows: Sequence[Pair], limits: Limits) -> list[NDArray[np.float64]]:
        """Log-probabilities of each row's trace, one array a row, in nats."""
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a call must keep to.

    temperature: of the scored distribution. Workers before 0.8 use their own config's, whatever they are told.
    row_tokens: longest row. micro_batch_tokens: of one forward pass on one rank, at least `row_tokens`.
    vocabulary: ids below this exist; None where unknown.
    """

    temperature: float
    row_tokens: int
    micro_batch_tokens: int
    vocabulary: int | None = None


class WorkerScorer(FunctionScorer):
    """Scores traces under contexts with the workers of a veRL trainer.

    call_tokens: tokens of one call; more goes in several. See Limits for the others. Each pair is a full row: nothing
    is shared between rows of one context, because the plain contract has no way to say so.
    """

    def __init__(self, worker_group: Any, contract: Contract, limits: Limits, *, call_tokens: int) -> None:
        super().__init__(self._log_probs, batch_tokens=call_tokens)
        self.worker_group = worker_group
        self.contract = contract
        self.limits = limits

    @property
    def temperature(self) -> float:
        """Of the distribution that is scored."""
        return self.limits.temperature

    def __repr__(self) -> str:
        return f"WorkerScorer(temperature={self.temperature:g})"

    def _log_probs(self, pairs: Sequence[Pair]) -> list[NDArray[np.float64]]:
        n_ranks = ranks_of(self.worker_group)
        rows, place_B = laid_out(pairs, n_ranks)
        check_rows(rows, n_ranks, self.limits)
        try:
            found = self.contract(self.worker_group, rows, self.limits)
        except ScoringError:
            raise
        except Exception as error:
            raise ScoringError(f"compute_log_prob failed on the workers: {last_line(error)}") from error
        return [found[i] for i in place_B]


def ranks_of(worker_group: Any) -> int:
    """R: how many ranks share the rows of a call. Not the world size: tensor and sequence parallel ranks share rows."""
    if not hasattr(worker_group, "_dispatch_info"):
        return int(worker_group.world_size)  # 0.4 and 0.5 split by world size
    if MESH not in worker_group._dispatch_info:
        worker_group._dispatch_info[MESH] = worker_group._query_dispatch_info(MESH)
    return int(max(worker_group._dispatch_info[MESH])) + 1


def laid_out(pairs: Sequence[Pair], n_ranks: int) -> tuple[list[Pair], list[int]]:
    """(rows as they are sent, place of each pair among them).

    Rows are filled up to a multiple of the ranks with the last pair, and dealt out in turn, because veRL cuts them into
    consecutive parts and pairs come longest first: otherwise the first rank would get all that is long.

    >>> rows, place = laid_out([([1], [2]), ([3], [4]), ([5], [6])], n_ranks=2)
    >>> [context[0] for context, _ in rows], place
    ([1, 5, 3, 5], [0, 2, 1])
    """
    filled = [*pairs, *[pairs[-1]] * (-len(pairs) % n_ranks)]
    order = sorted(range(len(filled)), key=lambda i: i % n_ranks)
    place_of = {i: place for place, i in enumerate(order)}
    return [filled[i] for i in order], [place_of[i] for i in range(len(pairs))]


def check_rows(rows: Sequence[Pair], n_ranks: int, limits: Limits) -> None:
    """Raise ScoringError for rows that could fail on a worker."""
    if not rows or len(rows) % n_ranks:
        raise ScoringError(f"{len(rows)} rows cannot be shared equally by {n_ranks} ranks; nothing was sent.")
    for number, (context, trace) in enumerate(rows):
        if not context or not trace:
            raise ScoringError(f"row {number} has no {'trace' if context else 'context'}; nothing was sent.")
        length = len(context) + len(trace)
        if length > min(limits.row_tokens, limits.micro_batch_tokens):
            raise ScoringError(
                f"row {number} has {length} tokens but a row may have {limits.row_tokens} and a micro-batch "
                f"{limits.micro_batch_tokens}; nothing was sent."
            )
        lowest, highest = min(*context, *trace), max(*context, *trace)
        if lowest < 0 or (limits.vocabulary is not None and highest >= limits.vocabulary):
            wrong = lowest if lowest < 0 else highest
            raise ScoringError(
                f"row {number} holds token {wrong} but the vocabulary has {limits.vocabulary}; nothing was sent."
            )


def last_line(error: Exception) -> str:
    """What a remote error says: Ray puts the worker's whole traceback into the message, the reason last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else '(no message)'}"


# -- the two contracts -----------------------------------------------------------------------------------------------


def score_tensordict(worker_group: Any, rows: Sequence[Pair], limits: Limits) -> list[NDArray[np.float64]]:
    """Engine workers (0.8 on, 0.7 where told to): jagged tensors in, log-probs of whole rows out.

    The value at position t is that of token t+1; a row's last one belongs to nobody.
    """
    import torch
    from verl.utils import tensordict_utils

    def jagged(values: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    ids = [torch.tensor([*context, *trace]) for context, trace in rows]
    data = tensordict_utils.get_tensordict(
        {
            "input_ids": jagged(ids),
            "position_ids": jagged([torch.arange(len(row)) for row in ids]),
            # Wanted by the engines although no loss is asked for.
            "loss_mask": jagged([torch.tensor([0] * len(x) + [1] * len(z)) for x, z in rows]),
        },
        non_tensor_dict={
            "temperature": limits.temperature,
            "compute_loss": False,
            "calculate_entropy": False,
            # Of our own: fixed micro-batches of the user's config would want their multiple of rows.
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": limits.micro_batch_tokens,
        },
    )
    log_probs = tensordict_utils.get(worker_group.compute_log_prob(data), "log_probs")
    bounds = log_probs.offsets().tolist()
    lengths = [len(row) for row in ids]
    if [stop - start for start, stop in itertools.pairwise(bounds)] != lengths:
        raise ScoringError(f"compute_log_prob gave rows of other lengths than the {len(rows)} that were sent.")
    values = log_probs.values().float().cpu().numpy().astype(np.float64)
    return [values[stop - len(z) - 1 : stop - 1] for stop, (_, z) in zip(bounds[1:], rows, strict=True)]


@dataclass(frozen=True)
class ScoreDataProto:
    """Workers before 0.8: padded tensors in (context left-padded, trace right-padded), `old_log_probs` out."""

    pad_token: int

    def __call__(self, worker_group: Any, rows: Sequence[Pair], limits: Limits) -> list[NDArray[np.float64]]:
        """See Contract. The temperature is that of the workers' config."""
        import torch
        from verl import DataProto

        width = max(len(context) for context, _ in rows)
        longest = max(len(trace) for _, trace in rows)
        ids = torch.full((len(rows), width + longest), self.pad_token)
        attention = torch.zeros_like(ids)
        for i, (context, trace) in enumerate(rows):
            start, stop = width - len(context), width + len(trace)
            ids[i, start:stop] = torch.tensor([*context, *trace])
            attention[i, start:stop] = 1
        data = DataProto.from_dict(
            {
                "input_ids": ids,
                "attention_mask": attention,
                "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
                "responses": ids[:, width:].clone(),
            },
            meta_info={"temperature": limits.temperature},
        )
        found = worker_group.compute_log_prob(data).batch["old_log_probs"].float().cpu().numpy().astype(np.float64)
        if found.shape != (len(rows), longest):
            raise ScoringError(f"compute_log_prob gave {found.shape} where {(len(rows), longest)} was sent.")
        return [found[i, : len(trace)] for i, (_, trace) in enumerate(rows)]
