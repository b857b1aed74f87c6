"""Cut rollouts into (context, reasoning) pairs: who is scored under what.

    X = context + output[:start]    ends with the opening tag, or with the context that holds it
    Z = output[start:stop]          no part of either tag

Which turns: `first_turn` takes turn 1 of every rollout. `trajectory` takes one turn of every rollout, each of its
usable turns being equally likely: a draw without replacement, so that every trajectory has exactly the weight that
drawing trajectories uniformly gives it on average, and no pair comes twice by chance. (RAGEN draws with replacement:
same expectation, more variance.) `turn` takes every usable turn of every rollout; a limit then cuts it down to a
uniform draw over (trajectory, turn). A turn is usable if it has token ids and a closed, non-blank reasoning block
within the length limits; the others are counted under their reason.

Legend: N traces (rows of the coming matrix), P distinct contexts (its columns), M usable turns before any choice.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import PairError, SettingsError
from collapsediag.pair_selection import fitting_lengths, select_rows
from collapsediag.reasoning_mode import ReasoningChoice, choose_reasoning_mode
from collapsediag.rollouts import RolloutBatch
from collapsediag.spans import SpanFinder
from collapsediag.statistics import generator
from collapsediag.turn_cuts import (
    NAMESPACES,
    Cut,
    DropReason,
    PairSettings,
    context_numbers,
    context_of,
    trace_of,
    usable_cuts,
)

__all__ = ["NAMESPACES", "DropReason", "PairSettings", "ScoringPairs", "build_pairs", "resolve_reasoning"]

IntArray = NDArray[np.int64]


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
    reasoning: "think" (Z between the tags) or "completion" (Z is the whole output).
    notes: decisions a reader must know, in words.
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
    reasoning: str = "think"
    notes: tuple[str, ...] = ()

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

    @property
    def n_considered(self) -> int:
        """Turns looked at: the rows and everything counted in `dropped`."""
        return self.n_traces + sum(self.dropped.values())

    @property
    def cure(self) -> str:
        """Words to append to what was left out: what to do where something can be done, else ""."""
        return (
            "; tokenize_batch(batch, tokenizer) makes ids of text" if self.dropped.get(DropReason.NO_TOKEN_IDS) else ""
        )

    @property
    def shortfall(self) -> str | None:
        """Why no matrix metric can come of these pairs, in words; None where at least two contexts have traces."""
        left_out = ", ".join(f"{count} {reason.value.replace('_', ' ')}" for reason, count in self.dropped.items())
        if not self.n_traces:
            why = left_out or "the batch is empty"
            return f"no reasoning to score among {self.n_considered} turns ({why}){self.cure}"
        if self.n_contexts < 2:
            return "only one distinct context, so there is nothing to tell apart; at least two prompts are needed"
        return None


def resolve_reasoning(
    batch: RolloutBatch, *, settings: PairSettings | None = None, tokenizer: Any = None
) -> ReasoningChoice:
    """What `settings.reasoning` comes to for this batch, and why, in words: (mode, reason).

    For "auto": "think" where any turn opens a block or any context shows an opening tag, else "completion". Ask once
    and keep the answer: a run whose Z changes its meaning half-way cannot be read.

    tokenizer: a tokenizer or a SpanFinder; needed where outputs are token ids only.

    >>> batch = RolloutBatch.from_lists(step=0, prompts=["2+2="], completions=["4"])
    >>> resolve_reasoning(batch)
    ReasoningChoice(mode='completion', reason='none of 1 turns has <think>')
    """
    settings = settings or PairSettings()
    if settings.reasoning != "auto":
        return ReasoningChoice(settings.reasoning, "as set")
    return choose_reasoning_mode(batch, _finder(tokenizer, settings, batch), settings.reasoning_tags)


def build_pairs(
    batch: RolloutBatch,
    *,
    settings: PairSettings | None = None,
    tokenizer: Any = None,
    namespace: str = "first_turn",
    seed: int = 0,
    **changes: Any,
) -> ScoringPairs:
    """The rows and columns of one step's matrix, and the count of everything left out.

    settings: see PairSettings; single settings may be given by name instead or on top (`max_traces=64`).
    tokenizer: the policy's tokenizer, or a SpanFinder (which need not learn the vocabulary anew at every step). Not
        needed for reasoning="completion".
    namespace: which turns, see the module.
    seed: all draws come from (seed, batch.step, namespace): the same call gives the same pairs.

    Rows and columns are in the order of the batch. Equal contexts are one column. Nothing usable is no error: the
    result then has no rows, and `shortfall` says why. Raises PairError where tags must be found and there is no
    tokenizer to find them with.

    >>> batch = RolloutBatch.from_lists(step=1, prompts=[[1, 2], [1, 3]], completions=[[4, 5], [6]])
    >>> pairs = build_pairs(batch, reasoning="completion")
    >>> pairs.n_traces, pairs.n_contexts, [z.tolist() for z in pairs.traces]
    (2, 2, [[4, 5], [6]])
    """
    if namespace not in NAMESPACES:
        raise SettingsError(f"namespace must be one of {', '.join(NAMESPACES)}; found {namespace!r}.")
    settings = _changed(settings or PairSettings(), changes)
    notes = []
    finder = None
    if settings.reasoning != "completion":
        finder = _finder(tokenizer, settings, batch)
        if settings.reasoning == "auto":
            mode, why = choose_reasoning_mode(batch, finder, settings.reasoning_tags)
            settings = settings.with_reasoning(mode)
            notes.append(f"reasoning={mode}: {why}")
    rng = generator(seed, batch.step, NAMESPACES.index(namespace))
    dropped: Counter[DropReason] = Counter()
    cuts = usable_cuts(batch, namespace, settings, finder, dropped)
    if namespace == "trajectory":
        cuts = _one_turn_each(cuts, len(batch), rng, dropped)
    return _assemble(batch, cuts, settings, namespace, rng, dropped, notes)


def _changed(settings: PairSettings, changes: Mapping[str, Any]) -> PairSettings:
    known = {f.name for f in dataclasses.fields(PairSettings)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise SettingsError(f"unknown pair setting {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    return dataclasses.replace(settings, **changes)


def _finder(tokenizer: Any, settings: PairSettings, batch: RolloutBatch) -> SpanFinder | None:
    if isinstance(tokenizer, SpanFinder) and tokenizer.tags != settings.reasoning_tags:
        raise SettingsError(
            f"the SpanFinder looks for {tokenizer.tags.pairs} but the settings say tags={settings.tags}; build both "
            "with the same tags."
        )
    if tokenizer is None or isinstance(tokenizer, SpanFinder):
        return tokenizer
    return SpanFinder(tokenizer, settings.reasoning_tags, batch.eos_token_ids)


def _one_turn_each(
    cuts: list[Cut], n_rollouts: int, rng: np.random.Generator, dropped: Counter[DropReason]
) -> list[Cut]:
    """One of the usable turns of each rollout, uniformly. A rollout's draw does not depend on the other rollouts."""
    draw = rng.random(n_rollouts)
    of_rollout: dict[int, list[Cut]] = {}
    for cut in cuts:
        of_rollout.setdefault(cut.rollout, []).append(cut)
    drawn = [turns[int(draw[r] * len(turns))] for r, turns in of_rollout.items()]
    dropped[DropReason.NOT_DRAWN] += len(cuts) - len(drawn)
    return drawn


def _assemble(
    batch: RolloutBatch,
    cuts: list[Cut],
    settings: PairSettings,
    namespace: str,
    rng: np.random.Generator,
    dropped: Counter[DropReason],
    notes: list[str],
) -> ScoringPairs:
    cuts = _within_total(batch, cuts, settings.max_total_tokens, dropped)
    column_M = context_numbers(batch, cuts)
    group_M = _numbered(batch.rollouts[cut.rollout].group for cut in cuts)
    selection = select_rows(
        # Uniform over (trajectory, turn) means that a limit must not even out the groups.
        np.arange(len(cuts)) if namespace == "turn" else group_M,
        column_M,
        max_columns=settings.max_contexts,
        max_rows=settings.max_traces,
        max_cells=settings.max_pairs,
        rng=rng,
    )
    dropped[DropReason.SUBSAMPLED] += len(cuts) - selection.rows.size
    rows = [cuts[i] for i in selection.rows.tolist()]
    own_N = np.searchsorted(selection.columns, column_M[selection.rows])
    group_N = _numbered(group_M[selection.rows].tolist())
    if namespace == "first_turn":
        notes = [*notes, *_split_groups(column_M, group_M)]
    return ScoringPairs(
        contexts=_contexts(batch, cuts, column_M, selection.columns),
        traces=tuple(trace_of(batch, cut) for cut in rows),
        own_N=own_N,
        group_N=group_N,
        multiplicity_P=_multiplicity(own_N, group_N, selection.columns.size),
        rollout_N=np.asarray([cut.rollout for cut in rows], dtype=np.int64),
        turn_N=np.asarray([cut.turn for cut in rows], dtype=np.int64),
        dropped={reason: dropped[reason] for reason in DropReason if dropped[reason]},
        namespace=namespace,
        reasoning=settings.reasoning,
        notes=tuple(notes),
    )


def _contexts(batch: RolloutBatch, cuts: list[Cut], column_M: IntArray, columns: IntArray) -> tuple[IntArray, ...]:
    _, first = np.unique(column_M, return_index=True)  # column numbers are 0, 1, ..., so first[c] is where c appears
    return tuple(context_of(batch, cuts[i]) for i in first[columns].tolist())


def _multiplicity(own_N: IntArray, group_N: IntArray, n_contexts: int) -> IntArray:
    """[P] distinct groups with a trace under each column; 1 for a column that only serves as an alternative."""
    sharing = np.unique(np.stack([own_N, group_N]), axis=1)[0]
    return np.maximum(1, np.bincount(sharing, minlength=n_contexts))


def _split_groups(column_M: IntArray, group_M: IntArray) -> list[str]:
    """A note where rollouts of one group have several contexts: each is a column, and near-equal ones compete."""
    of_group = np.unique(np.stack([group_M, column_M]), axis=1)[0]
    counts = np.bincount(of_group)
    n_split = int((counts > 1).sum())
    if not n_split:
        return []
    return [f"{n_split} of {counts.size} groups have more than one distinct context, up to {int(counts.max())}"]


def _within_total(batch: RolloutBatch, cuts: list[Cut], limit: int | None, dropped: Counter[DropReason]) -> list[Cut]:
    """Leave out contexts or traces until every crossed pair fits into the model."""
    if limit is None or not cuts:
        return cuts
    context_M = np.asarray([cut.context_tokens for cut in cuts])
    trace_M = np.asarray([cut.stop - cut.start for cut in cuts])
    longest_context, longest_trace = fitting_lengths(context_M, trace_M, context_numbers(batch, cuts), limit)
    kept = []
    for cut in cuts:
        if cut.context_tokens > longest_context:
            dropped[DropReason.CONTEXT_TOO_LONG] += 1
        elif cut.stop - cut.start > longest_trace:
            dropped[DropReason.TRACE_TOO_LONG] += 1
        else:
            kept.append(cut)
    return kept


def _numbered(values: Iterable[Any]) -> IntArray:
    """Numbers 0, 1, ... of hashable values in the order of first appearance."""
    number_of: dict[Any, int] = {}
    return np.asarray([number_of.setdefault(value, len(number_of)) for value in values], dtype=np.int64)
