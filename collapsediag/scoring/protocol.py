"""The seam between the metrics and whatever computes log-likelihoods."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs


@runtime_checkable
class Scorer(Protocol):
    """Anything that can say how likely each trace is under each context."""

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """Score every trace of `pairs` under every context.

        Returns a matrix with one row per trace of `pairs.traces` and one column per context, in their order, with
        `own_N`, `group_N` and `multiplicity_P` taken from `pairs`. Raises ScoringError where it cannot.
        """
        ...
