"""Does the policy use what its tools return? Judged by repeated spans, without a model, in linear time.

A result is **used** where the policy later writes one of the spans that the result, and nothing before it, held:

* a number of at least three digits (`711`, `1,234` as 1234, `55.61`), trailing zeros after the point left out;
* a name: a word of at least three letters that has a capital letter and does not open a sentence of prose, or a word
  of at least four characters that mixes letters and digits (`Guatemala`, `FESTIVAL24`); the word is new in any case,
  and repeated with the same capitals;
* three consecutive words (any case) of which at least one is new itself: three known words in a new order ("of the
  film") are too easily written by chance.

"Before" is everything in the rollout up to the result: the whole context, all that the policy wrote, the arguments of
the call that fetched it, earlier results. Words of a result that are repeated by a second result belong to the first.
"Later" is all that the policy writes after the result: reasoning, answer, and the arguments of later calls.

A result is **not judged** (None) where it holds no such span (`{"success": true}`, an empty list, an exact repeat of
an earlier result, a single digit), or where the policy wrote nothing after it. Those are no evidence either way.

What it cannot see: use without repetition (a paraphrase, a number rounded or computed with, a board read aloud), and
repetition without use (the policy knew the name anyway, and would have written it without the tool).

How well it does: on 76 results of real agents, labelled by hand before the rule was written (Search-R1, NeMo-Gym,
Atropos, TRL, a knowledge-graph agent), it judges 43 of the 46 that a person can judge and errs in 4 of them (9%),
every time by missing a use; a use is found in 30 of 34. Results taken from another source, which the policy cannot
have read, are called used in less than 1% of cases. Hand labels are few and mostly of agents that do use their
results: read the rate against the run's own past, not as an absolute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

# What happened, in order: text the policy saw, text it wrote, and the text of one tool result.
Event = tuple[Literal["seen", "wrote", "result"], str]
_Key = tuple[str, ...]

NGRAM = 3
MIN_DIGITS = 3
MIN_NAME = 3
MIN_IDENTIFIER = 4

# Chinese characters and Japanese kana are words of their own: those scripts put no space between words.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
_NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])\d+(?:\.\d+)?")
# The word that opens a sentence of prose: a small letter follows. The entries of a list open lines too, and are names.
_SENTENCE_START = re.compile(r"(?:\A|[.!?]\s|\n)\s*\w+(?=,?\s+[a-z])")


def _grams(words: Sequence[str]) -> Iterable[_Key]:
    return zip(*(words[i:] for i in range(NGRAM)), strict=False)


def _numbers(text: str) -> set[_Key]:
    """Numbers as keys. "711,407" is read both ways, as one number and as a list of two: JSON has no space there."""
    found: set[_Key] = set()
    for token in _NUMBER.findall(text):
        parts = [token.replace(",", ""), *(token.split(",") if "," in token else ())]
        for part in parts:
            plain = part.rstrip("0").rstrip(".") if "." in part else part
            if sum(c.isdigit() for c in part) >= MIN_DIGITS:
                found.add(("number", plain))
    return found


def _names(text: str) -> set[str]:
    """Words that look like names or identifiers; the words that open sentences are cut away first."""
    return {
        word
        for word in set(_WORD.findall(_SENTENCE_START.sub(" ", text)))
        if (len(word) >= MIN_NAME and word != word.lower() and not any(c.isdigit() for c in word))
        or (len(word) >= MIN_IDENTIFIER and any(c.isdigit() for c in word) and any(c.isalpha() for c in word))
    }


def _written_keys(text: str, words: Sequence[str]) -> set[_Key]:
    """Everything in the policy's text that could be a span of a result."""
    keys: set[_Key] = set(_grams([word.casefold() for word in words]))
    keys.update(("name", word) for word in words)
    keys.update(_numbers(text))
    return keys


class _Memory:
    """All that was said so far in one rollout."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.keys: set[_Key] = set()

    def specific(self, text: str) -> set[_Key]:
        """Spans of `text` that occurred nowhere so far."""
        words = [word.casefold() for word in _WORD.findall(text)]
        new_words = set(words) - self.words
        if not new_words and not _numbers(text) - self.keys:
            return set()
        keys: set[_Key] = {gram for gram in _grams(words) if not new_words.isdisjoint(gram)}
        keys.update(_numbers(text) - self.keys)
        keys.update(("name", name) for name in _names(text) if name.casefold() in new_words)
        return keys

    def add(self, text: str) -> None:
        self.words.update(word.casefold() for word in _WORD.findall(text))
        self.keys.update(_numbers(text))


def judge_results(events: Sequence[Event]) -> tuple[bool | None, ...]:
    """For each result in order: used (True), not used (False), or not judged (None).

    events: what happened in one rollout, in order.

    >>> judge_results([("seen", "Where was she born?"), ("result", "Born in Ulm, 1879."), ("wrote", "In Ulm.")])
    (True,)
    >>> judge_results([("seen", "Where was she born?"), ("result", "Born in Ulm, 1879."), ("wrote", "In Paris.")])
    (False,)
    """
    memory = _Memory()
    owner: dict[_Key, int] = {}  # a span that is new in one result is not new in a later one, so it has one owner
    holds_span: list[bool] = []
    spoken_after = 0  # how many of the results were followed by words of the policy
    used: set[int] = set()
    for kind, text in events:
        if kind == "result":
            keys = memory.specific(text)
            owner.update(dict.fromkeys(keys, len(holds_span)))
            holds_span.append(bool(keys))
        elif kind == "wrote":
            words = _WORD.findall(text)
            if words:
                spoken_after = len(holds_span)
            if owner:
                used.update(owner[key] for key in owner.keys() & _written_keys(text, words))
        memory.add(text)
    return tuple((i in used) if holds and i < spoken_after else None for i, holds in enumerate(holds_span))
