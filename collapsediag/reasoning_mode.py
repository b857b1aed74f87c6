"""Decide what reasoning="auto" means for a batch: are there reasoning tags, or is the whole output the reasoning?"""

from __future__ import annotations

from typing import Literal, NamedTuple

from collapsediag.errors import PairError
from collapsediag.rollouts import RolloutBatch, Turn
from collapsediag.spans import SpanFinder, SpanStatus, find_reasoning, text_tags
from collapsediag.token_tags import ReasoningTags

ReasoningMode = Literal["think", "completion"]


class ReasoningChoice(NamedTuple):
    """What is scored as Z ("think": what stands between the tags; "completion": the whole output), and why."""

    mode: ReasoningMode
    reason: str


def choose_reasoning_mode(batch: RolloutBatch, finder: SpanFinder | None, tags: ReasoningTags) -> ReasoningChoice:
    """ "think" where any turn opens a block or any context shows an opening tag, else "completion"; and why, in words.

    A context that ends with an empty block (a chat template told not to think) shows nothing. Token ids are looked at
    where there is a finder for them, else text. Raises PairError where neither can be read.
    """
    turns = [turn for rollout in batch for turn in rollout.turns]
    opening = " or ".join(opens for opens, _ in tags.pairs)
    n_open = sum(_opens_block(turn, finder, tags) for turn in turns)
    if n_open:
        return ReasoningChoice("think", f"{n_open} of {len(turns)} turns open a block with {opening}")
    if any(_context_shows_tags(turn, finder, tags) for turn in turns):
        return ReasoningChoice("think", f"none of {len(turns)} turns opens a block, but contexts show {opening}")
    return ReasoningChoice("completion", f"none of {len(turns)} turns has {opening}")


def _opens_block(turn: Turn, finder: SpanFinder | None, tags: ReasoningTags) -> bool:
    if turn.output_ids is not None and finder is not None:
        return finder.find(turn.output_ids, turn.context_ids).status is not SpanStatus.ABSENT
    if turn.output is None:
        raise PairError(
            "reasoning='auto' looks for reasoning tags, but the outputs are token ids only and no tokenizer was given. "
            "Pass the tokenizer, or say reasoning='completion'."
        )
    return find_reasoning(turn.output, context=turn.context, tags=tags).status is not SpanStatus.ABSENT


def _context_shows_tags(turn: Turn, finder: SpanFinder | None, tags: ReasoningTags) -> bool:
    if turn.context_ids is not None and finder is not None:
        return finder.has_opening(turn.context_ids) and not finder.ends_without_thinking(turn.context_ids)
    messages = "\n".join(str(message.get("content") or "") for message in turn.context_messages or ())
    text = turn.context or messages
    found = text_tags(text, tags)
    if len(found) > 1 and found[-2].opens and not found[-1].opens:
        unthinking = not (text[found[-2].stop : found[-1].start] + text[found[-1].stop :]).strip()
        return not unthinking
    return any(tag.opens for tag in found)
