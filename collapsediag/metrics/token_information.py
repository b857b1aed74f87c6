"""What each token of a trace says about its prompt.

Legend: P contexts, T tokens of the trace.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

from collapsediag.errors import MetricError

FloatArray = NDArray[np.float64]


def token_information(logp_PT: ArrayLike, own: int, log_weight_P: Any = None) -> FloatArray:
    """[T] log p(z_t | own context, z_<t) - log p(z_t | z_<t), nats: how much more likely its own context makes a token.

    p(z_t | z_<t) is the mixture over contexts with the weights that they have once z_<t is known (Bayes). So the
    values add up to log p(Z | own) - log p(Z), the trace's gap, whatever the order in which it told its prompt.
    A token may well be negative: it fits other contexts better than its own.

    logp_PT: log-prob of each token under each context, nats; NaN under contexts that were not scored.
    own: row of the trace's own context.
    log_weight_P: log pi of each context, as the matrix metrics weigh them (`log_mixture_weights`); uniform where None.

    Raises MetricError where a log-prob of the own context is not finite.

    >>> token_information(np.log([[0.9, 0.5], [0.1, 0.5]]), own=0).round(3).tolist()
    [0.588, 0.0]
    """
    logp = np.asarray(logp_PT, dtype=np.float64)
    weight_P = np.full(len(logp), -np.log(len(logp))) if log_weight_P is None else np.asarray(log_weight_P)
    if not np.isfinite(logp[own]).all():
        raise MetricError("a token's log-prob under its own context is not finite; its information is not defined.")
    # Differences to the own context first: exact where contexts agree, and nothing overflows.
    ahead_PT = np.cumsum(logp - logp[own], axis=1)
    scored_P = ~np.isnan(logp).any(axis=1)
    start = logsumexp(weight_P[scored_P])
    lead_T = -logsumexp(ahead_PT[scored_P] + weight_P[scored_P, None], axis=0)
    information: FloatArray = np.diff(lead_T, prepend=-start)
    return information
