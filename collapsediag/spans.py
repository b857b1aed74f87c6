"""Where the reasoning of a turn begins and ends, on token ids where there are any, on text where there are none.

The rules, the same for both:

* A block opens at the first opening tag of the output, or before it: the context opens the block if its last opening
  tag comes after its last closing tag and nothing that ends a turn (a special token) stands between that tag and the
  output. Closed blocks of few-shot prompts and an unfinished block of an earlier turn therefore open nothing.
* Opening tags in a row with only white space between them are one opening; the last of them counts. So a policy that
  writes `<think>` although its template already did is read as it meant it.
* The block closes at the first closing tag of its pair after that. An opening tag inside it makes it `NESTED`; the
  reasoning is still everything up to that first closing tag, the inner tag included: the rollouts of one prompt then
  keep one context between them, which cutting at the inner tag would take from them.
* The first block counts; later ones set `repeated`.
* White space alone is `EMPTY`. No closing tag is `UNCLOSED`. Neither an opening tag nor an open context is `ABSENT`.

A token that holds a part of a tag and some other text goes with the tag: one that ends the opening tag belongs to the
context, one that begins the closing tag is left out of the reasoning. So no part of a tag is ever scored, at the price
of the few characters that share its token. A tag split between context and output is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collapsediag.token_tags import DEFAULT_TAGS, ReasoningTags, TokenTagSearch

IntArray = NDArray[np.int64]

# Turn markers as chat templates write them, for contexts that are known as text only.
TEXT_BOUNDARY = r"<[|\uff5c][^<>|\uff5c]{1,40}[|\uff5c]>|</?s>|<(?:start|end)_of_turn>|<eos>"


class SpanStatus(str, Enum):
    """What was found of a turn's reasoning."""

    OK = "ok"
    NESTED = "nested"
    ABSENT = "absent"
    UNCLOSED = "unclosed"
    EMPTY = "empty"


@dataclass(frozen=True, kw_only=True)
class ReasoningSpan:
    """The reasoning of one output: `output[start:stop]`, in tokens or in characters, as it was searched.

    For `ABSENT` start and stop are 0; for `UNCLOSED` stop is the end of the output; for `EMPTY` the span holds the
    white space between the tags, or nothing.
    opened_in_context: the opening tag stands in the context, not in the output.
    repeated: another block opens after this one.
    """

    status: SpanStatus
    start: int = 0
    stop: int = 0
    opened_in_context: bool = False
    repeated: bool = False

    @property
    def has_reasoning(self) -> bool:
        """There is reasoning to score or read: the block is closed and not blank."""
        return self.status in (SpanStatus.OK, SpanStatus.NESTED)


class _Tag(Protocol):
    @property
    def opens(self) -> bool: ...
    @property
    def pair(self) -> int: ...


class _TextTag(NamedTuple):
    opens: bool
    pair: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Block:
    """Numbers of the tags that open (-1: the context did) and close (None: nothing did) a block."""

    opener: int
    closer: int | None
    nested: bool
    repeated: bool


def _open_pair(tags: Iterable[_Tag]) -> int | None:
    """The pair whose last opening tag has no closing tag after it; the latest such."""
    opened: dict[int, int] = {}
    for number, tag in enumerate(tags):
        if tag.opens:
            opened[tag.pair] = number
        else:
            opened.pop(tag.pair, None)
    return max(opened, key=lambda pair: opened[pair]) if opened else None


def _choose_block(tags: Sequence[_Tag], opened: int | None, blank: Callable[[int, int], bool]) -> _Block | None:
    """The block that the rules choose. `blank(i, j)`: only white space between tags i and j; -1 is the start."""
    opener = -1
    if opened is None:
        opener = next((number for number, tag in enumerate(tags) if tag.opens), -1)
        if opener < 0:
            return None
        opened = tags[opener].pair
    while opener + 1 < len(tags) and tags[opener + 1].opens and blank(opener, opener + 1):
        opener += 1
        opened = tags[opener].pair
    nested = False
    for number in range(opener + 1, len(tags)):
        if tags[number].pair == opened:
            if not tags[number].opens:
                repeated = any(tag.opens for tag in tags[number + 1 :])
                return _Block(opener, number, nested, repeated)
            nested = True
    return _Block(opener, None, nested, False)


def _status(block: _Block, is_blank: bool) -> SpanStatus:
    if block.closer is None:
        return SpanStatus.UNCLOSED
    if is_blank:
        return SpanStatus.EMPTY
    return SpanStatus.NESTED if block.nested else SpanStatus.OK


@lru_cache(maxsize=64)
def _tag_pattern(tags: ReasoningTags) -> re.Pattern[str]:
    """One group a tag, and the last for turn markers, so that a tag that looks like a marker stays a tag.

    Literal alternatives and one bounded run: a search is one pass over the text.
    """
    return re.compile("|".join(f"({re.escape(tag)})" for tag in tags.texts) + f"|({TEXT_BOUNDARY})")


def text_tags(text: str, tags: ReasoningTags, *, after_boundary: bool = False) -> list[_TextTag]:
    """All tags in the text, leftmost first; with `after_boundary` those after the last turn marker only."""
    found: list[_TextTag] = []
    for match in _tag_pattern(tags).finditer(text):
        number = (match.lastindex or 1) - 1
        if number < len(tags.texts):
            found.append(_TextTag(number % 2 == 0, number // 2, match.start(), match.end()))
        elif after_boundary:
            found.clear()
    return found


def find_reasoning(text: str, *, context: str | None = None, tags: ReasoningTags = DEFAULT_TAGS) -> ReasoningSpan:
    """The reasoning span of an output known as text, in characters. See the module for the rules.

    context: what the policy saw, as text; where it is unknown (None), an output whose first tag closes a block is
        taken to have been opened by its context. "" says that there was no context.

    >>> span = find_reasoning("<think>two and two</think><answer>4</answer>")
    >>> span.status.value, "<think>two and two</think><answer>4</answer>"[span.start:span.stop]
    ('ok', 'two and two')
    >>> find_reasoning("<think>two and").status.value, find_reasoning("<think>\\n\\n</think>4").status.value
    ('unclosed', 'empty')
    """
    found = text_tags(text, tags)
    opened = _open_pair(text_tags(context, tags, after_boundary=True)) if context else None
    if context is None and found and not found[0].opens:
        opened = found[0].pair

    def edge(i: int) -> int:
        return found[i].stop if i >= 0 else 0

    block = _choose_block(found, opened, lambda i, j: not text[edge(i) : found[j].start].strip())
    if block is None:
        return ReasoningSpan(status=SpanStatus.ABSENT)
    start = edge(block.opener)
    stop = len(text) if block.closer is None else found[block.closer].start
    return ReasoningSpan(
        status=_status(block, not text[start:stop].strip()),
        start=start,
        stop=stop,
        opened_in_context=block.opener < 0,
        repeated=block.repeated,
    )


class SpanFinder:
    """Finds reasoning spans on token ids; keep one per run, it learns the vocabulary as it goes.

    tokenizer: anything with `decode(ids) -> str`.
    boundary_ids: tokens that end a turn, beside those that the tokenizer calls special.

    >>> class Letters:
    ...     def decode(self, ids):
    ...         return "".join(map(chr, ids))
    >>> ids = [ord(c) for c in "<think>4</think>4"]
    >>> span = SpanFinder(Letters()).find(ids)
    >>> span.status.value, span.start, span.stop
    ('ok', 7, 8)
    """

    def __init__(self, tokenizer: Any, tags: ReasoningTags = DEFAULT_TAGS, boundary_ids: Iterable[int] = ()) -> None:
        self.tags = tags
        self._search = TokenTagSearch(tokenizer, tags, boundary_ids)

    def find(self, output_ids: ArrayLike, context_ids: ArrayLike | None = None) -> ReasoningSpan:
        """The reasoning span of an output, in tokens: X is context + output[:start], Z is output[start:stop].

        context_ids: what the policy saw; where it is unknown (None), an output whose first tag closes a block is taken
            to have been opened by its context. [] says that there was no context.
        """
        ids = np.asarray(output_ids, dtype=np.int64)
        found = self._search.find(ids)
        opened = None if context_ids is None else self.open_pair(context_ids)
        if context_ids is None and found and not found[0].opens:
            opened = found[0].pair

        def blank(i: int, j: int) -> bool:
            if i >= 0 and found[j].start < found[i].stop:  # both tags hold parts of one token
                shared = self._search.piece(int(ids[found[j].start]))
                return not found[j].head[len(shared) - len(found[i].tail) :].strip()
            before, start = (found[i].tail, found[i].stop) if i >= 0 else ("", 0)
            return not (before + found[j].head).strip() and self._search.is_blank(ids[start : found[j].start])

        block = _choose_block(found, opened, blank)
        if block is None:
            return ReasoningSpan(status=SpanStatus.ABSENT)
        start = found[block.opener].stop if block.opener >= 0 else 0
        stop = int(ids.size) if block.closer is None else max(start, found[block.closer].start)
        return ReasoningSpan(
            # Blank by its own tokens: text that only shares a token with a tag cannot be scored.
            status=_status(block, self._search.is_blank(ids[start:stop])),
            start=start,
            stop=stop,
            opened_in_context=block.opener < 0,
            repeated=block.repeated,
        )

    def open_pair(self, context_ids: ArrayLike) -> int | None:
        """Number of the tag pair that the context leaves open for the output, None if it leaves none open."""
        ids = np.asarray(context_ids, dtype=np.int64)
        return _open_pair(self._search.find(ids[self._search.after_last_boundary(ids) :]))

    def has_opening(self, ids: ArrayLike) -> bool:
        """An opening tag is among the ids."""
        return any(tag.opens for tag in self._search.find(np.asarray(ids, dtype=np.int64)))

    def ends_without_thinking(self, context_ids: ArrayLike) -> bool:
        """The context ends with an empty block: a chat template that was told not to think."""
        ids = np.asarray(context_ids, dtype=np.int64)
        found = self._search.find(ids)
        if len(found) < 2 or found[-1].opens or not found[-2].opens or found[-1].tail.strip():
            return False
        inside, after = ids[found[-2].stop : found[-1].start], ids[found[-1].stop :]
        edges = (found[-2].tail + found[-1].head).strip()
        return not edges and self._search.is_blank(inside) and self._search.is_blank(after)
