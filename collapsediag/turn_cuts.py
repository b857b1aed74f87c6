"""Which turns of a batch can be scored, and where their reasoning begins and ends: everything before any choice."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import PairError, SettingsError
from collapsediag.rollouts import RolloutBatch, Turn
from collapsediag.spans import SpanFinder, SpanStatus
from collapsediag.token_tags import ReasoningTags

IntArray = NDArray[np.int64]
Reasoning = Literal["auto", "think", "completion"]

# Draws of turns in words, in the order in which they are judged and shown.
DRAWS = {"first_turn": "first turn", "trajectory": "one turn per trajectory", "turn": "all turns"}
NAMESPACES = tuple(DRAWS)


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
    NOT_DRAWN = "not_drawn"  # another turn of the same trajectory was drawn


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """How turns are cut into pairs, and how many are kept. None is no limit.

    reasoning: "think", "completion", or "auto" (decided from the batch; keep the answer for the rest of the run).
    tags: pairs of opening and closing tags, any of which a turn may use.
    max_contexts, max_traces: columns and rows of the matrix. max_pairs: its cells, rows times columns.
    max_context_tokens, max_trace_tokens: longer ones are left out, never cut: a cut trace is another trace.
    max_total_tokens: the model's limit on context plus trace; held by every crossed pair, not only by matched ones.

    Raises SettingsError for a value that fits none of these.
    """

    reasoning: Reasoning = "auto"
    tags: tuple[tuple[str, str], ...] = ReasoningTags.pairs
    max_contexts: int | None = None
    max_traces: int | None = None
    max_pairs: int | None = None
    max_context_tokens: int | None = None
    max_trace_tokens: int | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.reasoning not in get_args(Reasoning):
            raise SettingsError(f"reasoning must be 'auto', 'think' or 'completion', found {self.reasoning!r}.")
        object.__setattr__(self, "tags", self.reasoning_tags.pairs)
        for name in (f.name for f in dataclasses.fields(self) if f.name.startswith("max_")):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingsError(f"{name} must be a whole number from 1 on, or None for no limit; found {value!r}.")

    @property
    def reasoning_tags(self) -> ReasoningTags:
        """The tags, checked."""
        return ReasoningTags(self.tags)

    @property
    def caps(self) -> str:
        """The limits on how many are kept, in words that name where each is set; "" where there is none.

        >>> PairSettings(max_traces=64).caps
        'max_traces=64 (--max-traces)'
        """
        limits = {name: getattr(self, name) for name in ("max_contexts", "max_traces", "max_pairs")}
        return ", ".join(f"{n}={v} (--{n.replace('_', '-')})" for n, v in limits.items() if v is not None)

    def with_reasoning(self, reasoning: Reasoning) -> PairSettings:
        """The same settings with the question of `reasoning` settled."""
        return dataclasses.replace(self, reasoning=reasoning)


class Cut(NamedTuple):
    """A usable turn: X is its context and output[:start], Z is output[start:stop]."""

    rollout: int
    turn: int
    start: int
    stop: int
    context_tokens: int


def usable_cuts(
    batch: RolloutBatch,
    namespace: str,
    settings: PairSettings,
    finder: SpanFinder | None,
    dropped: Counter[DropReason],
) -> list[Cut]:
    """The usable turns in the order of the batch; the others are counted in `dropped`. `finder`: None without tags."""
    cuts = []
    for r, rollout in enumerate(batch.rollouts):
        for t, turn in enumerate(rollout.turns[:1] if namespace == "first_turn" else rollout.turns):
            cut = _cut(turn, settings, finder, batch.eos_token_ids)
            if isinstance(cut, DropReason):
                dropped[cut] += 1
            else:
                cuts.append(Cut(r, t, *cut))
    return cuts


_REASON_OF_STATUS = {
    SpanStatus.ABSENT: DropReason.NO_REASONING,
    SpanStatus.UNCLOSED: DropReason.UNCLOSED,
    SpanStatus.EMPTY: DropReason.EMPTY,
}


def _cut(
    turn: Turn, settings: PairSettings, finder: SpanFinder | None, eos: tuple[int, ...]
) -> tuple[int, int, int] | DropReason:
    """(start, stop, context tokens) of a turn, or why it gives no pair."""
    if turn.context_ids is None or turn.output_ids is None:
        return DropReason.NO_TOKEN_IDS
    if settings.reasoning == "completion":
        start, stop = 0, _before_trailing_eos(turn.output_ids, eos)
    else:
        if finder is None:
            raise PairError(
                "reasoning='think' finds tags in token ids, which needs the tokenizer. Pass it, or say "
                "reasoning='completion' to score whole outputs."
            )
        span = finder.find(turn.output_ids, turn.context_ids)
        if not span.has_reasoning:
            return _REASON_OF_STATUS[span.status]
        start, stop = span.start, span.stop
    context_tokens = int(turn.context_ids.size) + start
    if stop <= start:
        return DropReason.EMPTY
    if context_tokens == 0:
        return DropReason.EMPTY_CONTEXT
    if settings.max_context_tokens is not None and context_tokens > settings.max_context_tokens:
        return DropReason.CONTEXT_TOO_LONG
    if settings.max_trace_tokens is not None and stop - start > settings.max_trace_tokens:
        return DropReason.TRACE_TOO_LONG
    return start, stop, context_tokens


def _before_trailing_eos(output_ids: IntArray, eos: tuple[int, ...]) -> int:
    """Where the output ends without its end-of-turn tokens. Everything else that was sampled belongs to it."""
    content = np.flatnonzero(~np.isin(output_ids, eos)) if eos else np.arange(output_ids.size)
    return int(content[-1]) + 1 if content.size else 0


def _context_parts(batch: RolloutBatch, cut: Cut) -> tuple[IntArray, IntArray]:
    turn = batch.rollouts[cut.rollout].turns[cut.turn]
    assert turn.context_ids is not None
    assert turn.output_ids is not None
    return turn.context_ids, turn.output_ids[: cut.start]


def context_of(batch: RolloutBatch, cut: Cut) -> IntArray:
    """X, read-only; the turn's own context where that is all of it."""
    context, opening = _context_parts(batch, cut)
    return _frozen(np.concatenate([context, opening]) if opening.size else context)


def trace_of(batch: RolloutBatch, cut: Cut) -> IntArray:
    """Z, a read-only view."""
    output = batch.rollouts[cut.rollout].turns[cut.turn].output_ids
    assert output is not None
    return _frozen(output[cut.start : cut.stop])


def context_numbers(batch: RolloutBatch, cuts: list[Cut]) -> IntArray:
    """[M] number of each cut's X: equal token ids, equal number; 0, 1, ... in the order of first appearance."""
    number_of: dict[bytes, int] = {}
    numbers = []
    for cut in cuts:
        # A digest and not the bytes themselves: multi-turn contexts are long, and almost all distinct.
        digest = hashlib.blake2b(digest_size=16)
        for part in _context_parts(batch, cut):
            digest.update(np.ascontiguousarray(part).data)
        numbers.append(number_of.setdefault(digest.digest(), len(number_of)))
    return np.asarray(numbers, dtype=np.int64)


def _frozen(ids: IntArray) -> IntArray:
    view: IntArray = ids.view()
    view.flags.writeable = False
    return view
