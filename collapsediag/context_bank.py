"""Contexts of recent batches, kept as further columns for batches that have too few prompts of their own.

Some trainers put one prompt into a batch. Its traces can then be told apart from nothing. With a bank they are compared
with what the policy was asked a moment ago: a trace that fits those prompts as well as its own says nothing about its
own. The columns are real contexts, so chance is 1/P and the bound log P with all P columns counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import SettingsError
from collapsediag.pairs import ScoringPairs

IntArray = NDArray[np.int64]


class ContextBank:
    """The `size` most recent distinct contexts of each namespace, newest first.

    >>> ids, zero = (np.array([1, 2]),), np.zeros(1, dtype=np.int64)
    >>> pairs = [ScoringPairs(contexts=(np.array([1, n]),), traces=ids, own_N=zero, group_N=zero,
    ...                       multiplicity_P=np.array([1]), rollout_N=zero, turn_N=zero) for n in (5, 6)]
    >>> bank = ContextBank(4)
    >>> bank.add(pairs[0])
    >>> bank.extended(pairs[1]).n_contexts
    2
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise SettingsError(f"context_bank is {size}; it is a number of contexts, 1 or more, or 0 for no bank.")
        self.size = size
        self._contexts: dict[str, list[IntArray]] = {}

    def is_full(self, namespace: str) -> bool:
        """Whether it holds as many contexts as it may."""
        return len(self._contexts.get(namespace, ())) >= self.size

    def add(self, pairs: ScoringPairs) -> None:
        """Remember the pairs' own contexts. One that is known already becomes the newest."""
        used = sorted(set(np.asarray(pairs.own_N).tolist()))
        kept = {_key(pairs.contexts[column]): np.array(pairs.contexts[column]) for column in used}
        for context in self._contexts.get(pairs.namespace, ()):
            kept.setdefault(_key(context), context)
        self._contexts[pairs.namespace] = list(kept.values())[: self.size]

    def extended(self, pairs: ScoringPairs, max_total_tokens: int | None = None) -> ScoringPairs:
        """`pairs` with the bank's contexts as further columns, without those it has itself or that would not fit.

        max_total_tokens: the model's limit on context plus trace.
        """
        own = {_key(context) for context in pairs.contexts}
        longest = max((len(trace) for trace in pairs.traces), default=0)
        further = tuple(
            context
            for context in self._contexts.get(pairs.namespace, ())
            if _key(context) not in own and (max_total_tokens is None or len(context) + longest <= max_total_tokens)
        )
        if not further or not pairs.n_traces:
            return pairs
        note = (
            f"{pairs.namespace}: {len(further)} of {pairs.n_contexts + len(further)} contexts come from the context "
            "bank (prompts of earlier batches)"
        )
        return dataclasses.replace(
            pairs,
            contexts=(*pairs.contexts, *further),
            multiplicity_P=np.concatenate([pairs.multiplicity_P, np.ones(len(further), dtype=np.int64)]),
            notes=(*pairs.notes, note),
        )

    def state_dict(self) -> dict[str, Any]:
        """The contexts as plain lists of token ids."""
        return {namespace: [ids.tolist() for ids in contexts] for namespace, contexts in self._contexts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Raises SettingsError, and takes nothing over, where that is damaged."""
        if not isinstance(state, Mapping):
            raise SettingsError(
                f"the saved context bank is of type {type(state).__name__}, and must be contexts by namespace."
            )
        self._contexts = {namespace: _saved(namespace, held)[: self.size] for namespace, held in state.items()}


def _saved(namespace: str, held: Any) -> list[IntArray]:
    try:
        contexts = [np.asarray(ids) for ids in held]
        is_fit = all(ids.ndim == 1 and ids.size and ids.dtype.kind in "iu" and ids.min() >= 0 for ids in contexts)
    except (TypeError, ValueError):  # no list, or ragged ones
        is_fit = False
    if not is_fit:
        raise SettingsError(
            f"the saved context bank is damaged: {namespace!r:.80} is {held!r:.80}, and must be lists of token ids. "
            "Leave it out to begin with an empty one."
        )
    return [ids.astype(np.int64) for ids in contexts]


def _key(context: Any) -> bytes:
    return np.asarray(context, dtype=np.int64).tobytes()
