"""The seam between the metrics and whatever computes log-likelihoods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import SettingsError
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


@runtime_checkable
class CellScorer(Protocol):
    """A scorer that can also be asked for some cells of the matrix only; budget mode needs it."""

    def score_cells(self, pairs: ScoringPairs, scored_NP: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Log-likelihoods [N, P] in nats where `scored_NP` is True; what stands elsewhere is not read.

        The own column need not be among them: budget mode may know it already. Raises ScoringError where it cannot.
        """
        ...


@runtime_checkable
class TokenScorer(Protocol):
    """A scorer that can also say how likely each token of some traces is; shading a trace needs it."""

    def score_with_tokens(
        self, pairs: ScoringPairs, rows: Sequence[int], scored_NP: NDArray[np.bool_] | None = None
    ) -> tuple[LogLikelihoodMatrix, list[NDArray[np.float64]] | None]:
        """`score`, and from the same pass for each of `rows` the [P, T] log-probs of its tokens, nats.

        scored_NP: score these cells only. Row j of [P, T] holds the tokens under context j, NaN where that cell was not
        scored. None in place of the tokens where a scorer that this one asks has none.
        """
        ...


def checked_scorer(scorer: Any) -> Scorer | None:
    """The scorer, or None for none; SettingsError for what is no scorer, such as a model or the name of one."""
    if scorer is None or (isinstance(scorer, Scorer) and not isinstance(scorer, type)):
        return scorer
    if hasattr(scorer, "forward") and not isinstance(scorer, type):
        # The repr of a model is all its layers.
        raise SettingsError(f"scorer: a {type(scorer).__name__} is no scorer; wrap it: scorer=HFScorer(model).")
    raise SettingsError(
        f"scorer={scorer!r:.80} ({type(scorer).__name__}) is no scorer: that is an object with score(pairs), such as "
        "HFScorer(model) of the model in training, or FunctionScorer(fn). None measures the rollouts alone."
    )
