"""Cut rollouts into (context, reasoning) pairs: who is scored under what.

Legend: N traces (rows of the coming matrix), P distinct contexts (its columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import PairError

IntArray = NDArray[np.int64]


class DropReason(str, Enum):
    """Why a turn gave no row. Everything left out is counted under one of these."""

    NO_TOKEN_IDS = "no_token_ids"
    NO_REASONING = "no_reasoning_tag"
    UNCLOSED = "unclosed_reasoning"
    EMPTY = "empty_reasoning"
    EMPTY_CONTEXT = "empty_context"
    CONTEXT_TOO_LONG = "context_too_long"
    TRACE_TOO_LONG = "trace_too_long"
    SUBSAMPLED = "subsampled"


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoringPairs:
    """The rows and columns of one matrix, before it is scored.

    contexts: P distinct token-id vectors X_j, each non-empty, int64. X ends with the opening reasoning tag.
    traces: N token-id vectors Z_i, int64, without tags. Equal traces may repeat; a scorer computes them once.
    own_N: [N] column of each trace's own context.
    group_N: [N] group number of each trace (0, 1, ... in order of first appearance).
    multiplicity_P: [P] how many groups share a column.
    rollout_N, turn_N: [N] where the trace came from in the batch.
    dropped: how many turns were left out, by reason.
    namespace: "first_turn", "trajectory" or "turn": how the turns were drawn.
    """

    contexts: tuple[IntArray, ...]
    traces: tuple[IntArray, ...]
    own_N: IntArray
    group_N: IntArray
    multiplicity_P: IntArray
    rollout_N: IntArray
    turn_N: IntArray
    dropped: Mapping[DropReason, int] = field(default_factory=dict)
    namespace: str = "first_turn"

    def __post_init__(self) -> None:
        n, p = len(self.traces), len(self.contexts)
        for name in ("own_N", "group_N", "rollout_N", "turn_N"):
            if len(getattr(self, name)) != n:
                raise PairError(f"{name} has {len(getattr(self, name))} entries but there are {n} traces.")
        if len(self.multiplicity_P) != p:
            raise PairError(f"multiplicity_P has {len(self.multiplicity_P)} entries but there are {p} contexts.")

    @property
    def n_traces(self) -> int:
        """N, the number of rows."""
        return len(self.traces)

    @property
    def n_contexts(self) -> int:
        """P, the number of columns."""
        return len(self.contexts)
