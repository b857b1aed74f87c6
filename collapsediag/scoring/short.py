"""The short way from token ids and a model to a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from collapsediag.arrays import to_numpy
from collapsediag.errors import PairError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.hf import HFScorer


def score(
    model: Any,
    contexts: Sequence[ArrayLike],
    traces: Sequence[ArrayLike],
    own: ArrayLike,
    *,
    group: ArrayLike | None = None,
    **options: Any,
) -> LogLikelihoodMatrix:
    """Score every trace under every context with a transformers causal language model.

    contexts: P token-id lists, distinct, each ending where the reasoning begins.
    traces: N token-id lists. own: [N] number of each trace's own context. group: [N] its prompt group, own if None.
    options: what `HFScorer` takes (temperature, token_budget, ...).

    Raises PairError where the lists do not fit, ScoringError where the model cannot score them.

    >>> import torch, transformers
    >>> config = transformers.GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> score(model, contexts=[[1, 2], [3]], traces=[[4, 5], [6]], own=[0, 1]).logp_NP.shape
    (2, 2)
    """
    return HFScorer(model, **options).score(pairs_of(contexts, traces, own, group=group))


def pairs_of(
    contexts: Sequence[ArrayLike], traces: Sequence[ArrayLike], own: ArrayLike, *, group: ArrayLike | None = None
) -> ScoringPairs:
    """ScoringPairs from lists. Raises PairError where they do not fit.

    >>> pairs_of([[1, 2], [3]], [[4, 5]], own=[1]).own_N.tolist()
    [1]
    """
    context_ids = tuple(_ids(ids, f"contexts[{j}]") for j, ids in enumerate(contexts))
    trace_ids = tuple(_ids(ids, f"traces[{i}]") for i, ids in enumerate(traces))
    own_N = _numbers(own, "own")
    if own_N.size and (own_N.size != len(trace_ids) or own_N.min() < 0 or own_N.max() >= len(context_ids)):
        raise PairError(
            f"own must hold one context number (0 to {len(context_ids) - 1}) for each of the {len(trace_ids)} traces, "
            f"found {own_N.size} entries from {own_N.min()} to {own_N.max()}."
        )
    group_N = own_N if group is None else _numbers(group, "group")
    if group_N.size != own_N.size:
        raise PairError(f"group has {group_N.size} entries but own has {own_N.size}; give one for each trace.")
    # A context that no trace calls its own still is a column, of one group.
    multiplicity = [max(1, np.unique(group_N[own_N == column]).size) for column in range(len(context_ids))]
    return ScoringPairs(
        contexts=context_ids,
        traces=trace_ids,
        own_N=own_N,
        group_N=group_N,
        multiplicity_P=np.array(multiplicity, dtype=np.int64),
        rollout_N=np.arange(len(trace_ids)),
        turn_N=np.zeros(len(trace_ids), dtype=np.int64),
    )


def _ids(values: ArrayLike, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = _numbers(values, name)
    if array.size and int(array.min()) < 0:
        raise PairError(
            f"{name} holds the negative id {int(array.min())} at position {int(array.argmin())}: cut padding off."
        )
    return array


def _numbers(values: ArrayLike, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        array = to_numpy(values)
    except (TypeError, ValueError) as error:
        raise PairError(f"{name} must be a flat list of whole numbers ({error}).") from error
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PairError(f"{name} must be a flat list of whole numbers, found shape {array.shape} of {array.dtype}.")
    if int(array.max()) > np.iinfo(np.int64).max:
        raise PairError(f"{name} holds {int(array.max())} at position {int(array.argmax())}, which is no token id.")
    return array.astype(np.int64)
