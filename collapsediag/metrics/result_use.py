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
from dataclasses import dataclass, field
from itertools import compress
from typing import Literal

import numpy as np

# What happened, in order: text the policy saw, text it wrote, and the text of one tool result.
Event = tuple[Literal["seen", "wrote", "result"], str]
_Gram = tuple[str, ...]

NGRAM = 3
MIN_DIGITS = 3
MIN_NAME = 3
MIN_IDENTIFIER = 4

# Chinese characters and Japanese kana are words of their own: those scripts put no space between words.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
_NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])\d+(?:\.\d+)?")
_DIGIT = re.compile(r"\d")
_LETTER = re.compile(r"[^\W\d_]")
# The word that opens a sentence of prose: a small letter follows. The entries of a list open lines too, and are names.
# White space is matched from where it begins: a pattern that may begin anywhere in it takes quadratic time.
_AFTER_SPACE = re.compile(r"(?:\A\s*|(?<!\s)\s+)\w+(?=,?\s+[a-z])")

_ASCII_SPACED = bytes(i if chr(i).isalnum() or chr(i) == "_" else 32 for i in range(128)) + bytes([32] * 128)


def _words(text: str) -> list[str]:
    """All words in order. Most text is ASCII, which a byte table cuts several times faster than the pattern does."""
    if text.isascii():
        return text.encode("ascii").translate(_ASCII_SPACED).decode("ascii").split()
    return _WORD.findall(text)


def _without_sentence_starts(text: str) -> str:
    """The text without the words that open a sentence: at its start, behind `. ! ?`, and on a new line.

    >>> _without_sentence_starts("She was in Ulm. There was rain.").split()
    ['was', 'in', 'Ulm.', 'was', 'rain.']
    """

    def word_or_gap(match: re.Match[str]) -> str:
        at = match.start()
        opens = at == 0 or text[at - 1] in ".!?" or "\n" in match[0]
        return " " if opens else match[0]

    return _AFTER_SPACE.sub(word_or_gap, text)


def _grams(words: Sequence[str]) -> Iterable[_Gram]:
    return zip(*(words[i:] for i in range(NGRAM)), strict=False)


def _numbers(text: str) -> set[str]:
    """Numbers of enough digits. "711,407" is read both ways, as one number and as a list of two: JSON may have no space
    there.
    """
    found: set[str] = set()
    for token in _NUMBER.findall(text):
        parts = [token.replace(",", ""), *token.split(",")] if "," in token else [token]
        for part in parts:
            if len(part) - part.count(".") >= MIN_DIGITS:
                found.add(part.rstrip("0").rstrip(".") if "." in part else part)
    return found


def _is_name(word: str) -> bool:
    """Looks like a name (a capital letter) or an identifier (letters and digits)."""
    if word.isalpha() and word.islower():  # most words
        return False
    if _DIGIT.search(word):
        return len(word) >= MIN_IDENTIFIER and _LETTER.search(word) is not None
    return len(word) >= MIN_NAME and word != word.lower()


@dataclass
class _Spans:
    """Spans of one text, or of many with the number of the result that owns each."""

    numbers: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    grams: dict[_Gram, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names or self.grams)

    def add(self, other: _Spans) -> None:
        self.numbers.update(other.numbers)
        self.names.update(other.names)
        self.grams.update(other.grams)

    def owners_in(self, text: str) -> set[int]:
        """The results whose spans a text of the policy repeats."""
        found: set[int] = set()
        words = _words(text)
        found.update(self.names[name] for name in self.names.keys() & set(words))
        if self.numbers and _DIGIT.search(text):
            found.update(self.numbers[number] for number in self.numbers.keys() & _numbers(text))
        if self.grams:
            folded = _words(text.casefold())
            found.update(self.grams[gram] for gram in self.grams.keys() & set(_grams(folded)))
        return found


class _Memory:
    """All that was said so far in one rollout."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.numbers: set[str] = set()

    def specific(self, text: str, owner: int) -> _Spans:
        """Spans of a result's text that occurred nowhere so far."""
        words = _words(text.casefold())
        new_words = set(words) - self.words
        spans = _Spans(numbers=dict.fromkeys(_numbers(text) - self.numbers, owner))
        if new_words:
            is_new = np.fromiter(map(new_words.__contains__, words), dtype=np.bool_, count=len(words))
            n_grams = max(len(words) - NGRAM + 1, 0)
            holds_new = np.logical_or.reduce([is_new[i : i + n_grams] for i in range(NGRAM)]).tolist()
            spans.grams = dict.fromkeys(compress(_grams(words), holds_new), owner)
            inside = set(_words(_without_sentence_starts(text)))
            spans.names = {w: owner for w in inside if _is_name(w) and w.casefold() in new_words}
        return spans

    def add(self, text: str) -> None:
        self.words.update(_words(text.casefold()))
        if _DIGIT.search(text):
            self.numbers |= _numbers(text)


def judge_results(events: Sequence[Event]) -> tuple[bool | None, ...]:
    """For each result in order: used (True), not used (False), or not judged (None).

    events: what happened in one rollout, in order.

    >>> judge_results([("seen", "Where was she born?"), ("result", "Born in Ulm, 1879."), ("wrote", "In Ulm.")])
    (True,)
    >>> judge_results([("seen", "Where was she born?"), ("result", "Born in Ulm, 1879."), ("wrote", "In Paris.")])
    (False,)
    """
    memory = _Memory()
    owned = _Spans()  # a span that is new in one result is not new in a later one, so it has one owner
    holds_span: list[bool] = []
    spoken_after = 0  # how many of the results were followed by words of the policy
    used: set[int] = set()
    last_result = max((at for at, (kind, _) in enumerate(events) if kind == "result"), default=-1)
    for at, (kind, text) in enumerate(events):
        if kind == "result":
            spans = memory.specific(text, len(holds_span))
            owned.add(spans)
            holds_span.append(bool(spans))
        elif kind == "wrote":
            if _WORD.search(text):
                spoken_after = len(holds_span)
            if owned:
                used |= owned.owners_in(text)
        if at < last_result:  # what is said after the last result makes nothing known to any other
            memory.add(text)
    return tuple((i in used) if holds and i < spoken_after else None for i, holds in enumerate(holds_span))
