"""What the rollout metrics read of a batch, looked at once: a column per fact, a reason for every fact that is missing.

Legend: N rollouts, T turns (all of the batch, in order), G groups.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from collapsediag.metrics.answers import Extractor, final_answer, normalize_answer
from collapsediag.metrics.format import strip_end_of_turn
from collapsediag.metrics.grouped import BoolArray, FloatArray, IntArray, group_numbers
from collapsediag.metrics.length import truncated
from collapsediag.metrics.reward_input import checked_rewards, checked_success, rollout_name, success_by_threshold
from collapsediag.metrics.tool_parsers import split_output
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
from collapsediag.spans import SpanFinder, SpanStatus
from collapsediag.token_tags import plain_decoder

# Enough of a context's end to see whether the chat template has opened a reasoning tag.
_CONTEXT_TAIL_TOKENS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutTable:
    """Columns of a batch. Cached: each is computed when a metric first asks for it.

    answer, success_threshold, tokenizer: as in `rollout_metrics`.
    """

    batch: RolloutBatch
    tokenizer: Any = None
    answer: Extractor = "auto"
    success_threshold: float | None = None

    def where(self, row: int) -> str:
        """A rollout's name in an error message."""
        return rollout_name(self.batch.rollouts[row], row)

    @cached_property
    def turns(self) -> list[Turn]:
        """The T turns of all rollouts."""
        return [turn for rollout in self.batch for turn in rollout.turns]

    @cached_property
    def rollout_T(self) -> IntArray:
        """[T] the rollout of each turn."""
        return np.repeat(np.arange(len(self.batch)), [len(rollout.turns) for rollout in self.batch])

    @cached_property
    def group_N(self) -> IntArray:
        """[N] group numbers. Environments that each number their own prompts from 0 do not share groups."""
        return group_numbers((rollout.environment, rollout.group) for rollout in self.batch)

    @cached_property
    def reward_N(self) -> FloatArray:
        """[N] rewards, NaN where unscored."""
        return checked_rewards([rollout.reward for rollout in self.batch], self.where)

    @cached_property
    def components(self) -> dict[str, FloatArray]:
        """Reward components by name, [N] each, NaN where a rollout has none."""
        names = dict.fromkeys(name for rollout in self.batch for name in rollout.rewards)
        return {
            name: checked_rewards(
                [rollout.rewards.get(name) for rollout in self.batch],
                lambda row, name=name: f"component {name!r} of {self.where(row)}",  # type: ignore[misc]
            )
            for name in names
        }

    @cached_property
    def success_N(self) -> FloatArray:
        """[N] 1, 0, or NaN where neither a label nor a reward to compare with the threshold is known."""
        labels = checked_success([rollout.success for rollout in self.batch], self.where)
        if self.success_threshold is None:
            return labels
        return success_by_threshold(self.reward_N, self.success_threshold, labels)

    @cached_property
    def output_T(self) -> list[str | None]:
        """Output of each turn as text; decoded where only ids are known and there is a tokenizer."""
        return [self._text(turn) for turn in self.turns]

    def _text(self, turn: Turn) -> str | None:
        if turn.output is not None or self.tokenizer is None or turn.output_ids is None:
            return turn.output
        return strip_end_of_turn(self._decode(self._without_end(turn.output_ids).tolist()))

    def _without_end(self, ids: IntArray) -> IntArray:
        stop = ids.size
        while stop and int(ids[stop - 1]) in self._end_ids:
            stop -= 1
        return ids[:stop]

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        special = (getattr(self.tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
        return frozenset([*self.batch.eos_token_ids, *(int(i) for i in special if i is not None)])

    @cached_property
    def _decode(self) -> Any:
        return plain_decoder(self.tokenizer)

    @cached_property
    def context_T(self) -> list[str | None]:
        """What each turn saw, as text (only its end where it must be decoded); None where unknown."""
        return [self._context(turn) for turn in self.turns]

    def _context(self, turn: Turn) -> str | None:
        if turn.context is not None or self.tokenizer is None or turn.context_ids is None:
            return turn.context
        return str(self._decode(turn.context_ids[-_CONTEXT_TAIL_TOKENS:].tolist()))

    @cached_property
    def n_tokens_T(self) -> FloatArray:
        """[T] tokens the policy sampled, NaN where the source kept neither ids nor per-token numbers."""
        return np.array([_n_tokens(turn) for turn in self.turns], dtype=np.float64)

    @cached_property
    def length_T(self) -> tuple[str, FloatArray] | None:
        """("length", tokens) or ("length_words", words) of every turn, or None: the two are never mixed."""
        tokens = self.n_tokens_T.copy()
        missing = np.flatnonzero(np.isnan(tokens)).tolist()
        can_count = callable(self.tokenizer) or hasattr(self.tokenizer, "encode")
        if missing and can_count:  # a turn without ids has its text
            tokens[missing] = _token_counts(self.tokenizer, [self.output_T[t] or "" for t in missing])
        if not np.isnan(tokens).any():
            return "length", tokens
        if None in self.output_T:
            return None
        return "length_words", np.array([len(text.split()) for text in self.output_T if text is not None], dtype=float)

    @cached_property
    def truncated_T(self) -> FloatArray:
        """[T] 1, 0, or NaN where nobody can tell. Lengths of re-tokenised text do not decide it."""
        return truncated(
            [turn.finish_reason for turn in self.turns],
            np.full(len(self.turns), np.nan) if self.batch.approximate_ids else self.n_tokens_T,
            np.array([_last_token(turn) for turn in self.turns], dtype=np.int64),
            max_output_tokens=self.batch.max_output_tokens,
            eos_token_ids=self.batch.eos_token_ids,
        )

    @cached_property
    def all_ids(self) -> bool:
        """Every turn's output is known as token ids."""
        return all(turn.output_ids is not None for turn in self.turns)

    @cached_property
    def completion_N(self) -> list[Hashable] | None:
        """What each rollout wrote, to be compared byte for byte: ids where all are known, else text."""
        if self.all_ids:
            return self._by_rollout([turn.output_ids.tobytes() for turn in self.turns])  # type: ignore[union-attr]
        return None if None in self.output_T else self._by_rollout(self.output_T)

    def _by_rollout(self, values_T: Sequence[Hashable]) -> list[Hashable]:
        ends = np.cumsum([len(rollout.turns) for rollout in self.batch]).tolist()
        return [tuple(values_T[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def prompt_N(self) -> list[Hashable]:
        """What each rollout was asked: its group's first context; the group itself where no context is known."""
        first: dict[int, Hashable] = {}
        for rollout, group in zip(self.batch, self.group_N.tolist(), strict=True):
            if group not in first:
                first[group] = _prompt(rollout.turns[0], group)
        return [first[group] for group in self.group_N.tolist()]

    @cached_property
    def answer_N(self) -> list[str | None] | None:
        """[N] normalised final answers, None for a rollout without one; None where no output can be read."""
        ends = np.cumsum([len(rollout.turns) for rollout in self.batch]).tolist()
        last_N = [self.output_T[end - 1] for end in ends]
        if all(text is None for text in last_N) and all(rollout.answer is None for rollout in self.batch):
            return None
        return [self._answer(rollout, text) for rollout, text in zip(self.batch, last_N, strict=True)]

    def _answer(self, rollout: Rollout, text: str | None) -> str | None:
        answer = rollout.answer
        if answer is None and text is not None:
            answer = final_answer(text, self.answer)
        normal = None if answer is None else normalize_answer(str(answer))
        return normal or None

    def reasoning_mask(self, turn: Turn) -> BoolArray | None:
        """[T] the reasoning tokens of a turn, None (all of them) where there are no tags or nothing to find them by."""
        if self._finder is None or turn.output_ids is None:
            return None
        span = self._finder.find(turn.output_ids, turn.context_ids)
        if span.status is SpanStatus.ABSENT:
            return None
        mask = np.zeros(turn.output_ids.size, dtype=np.bool_)
        mask[span.start : span.stop] = span.status is not SpanStatus.EMPTY
        return mask

    @cached_property
    def _finder(self) -> SpanFinder | None:
        return None if self.tokenizer is None else SpanFinder(self.tokenizer, boundary_ids=self.batch.eos_token_ids)

    @cached_property
    def text_batch(self) -> RolloutBatch:
        """The batch, with decoded outputs where the source has ids only and there is a tokenizer."""
        if all(text is turn.output for text, turn in zip(self.output_T, self.turns, strict=True)):
            return self.batch
        outputs = iter(self.output_T)
        rollouts = [
            replace(rollout, turns=tuple(replace(turn, output=next(outputs)) for turn in rollout.turns))
            for rollout in self.batch
        ]
        return replace(self.batch, rollouts=tuple(rollouts))

    @cached_property
    def tools_N(self) -> list[Hashable | None]:
        """[N] the sequence of (tool, arguments) of each rollout, None where its outputs cannot be read."""
        return [self._calls(rollout) for rollout in self.text_batch]

    @staticmethod
    def _calls(rollout: Rollout) -> Hashable | None:
        calls: list[Hashable] = []
        for turn in rollout.turns:
            if turn.tool_calls is not None:
                calls += [(call.name, call.arguments) for call in turn.tool_calls]
            elif turn.output is None:
                return None
            elif "<" in turn.output:
                found = (segment.call for segment in split_output(turn.output))
                calls += [(call.name, call.arguments) for call in found if call is not None]
        return tuple(calls)


def _n_tokens(turn: Turn) -> float:
    for values in (turn.output_ids, turn.logprobs, turn.entropies):
        if values is not None:
            return float(values.size)
    return float("nan")


def _last_token(turn: Turn) -> int:
    return -1 if turn.output_ids is None or not turn.output_ids.size else int(turn.output_ids[-1])


def _prompt(turn: Turn, group: int) -> Hashable:
    if turn.context_ids is not None:
        return turn.context_ids.tobytes()
    if turn.context is not None:
        return turn.context
    if turn.context_messages is not None:
        return json.dumps([dict(message) for message in turn.context_messages], sort_keys=True, default=repr)
    return group


def _token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    if callable(tokenizer):
        encoded: Mapping[str, Any] = tokenizer(list(texts), add_special_tokens=False)
        return [len(ids) for ids in encoded["input_ids"]]
    return [len(getattr(ids, "ids", ids)) for ids in (tokenizer.encode(text) for text in texts)]
