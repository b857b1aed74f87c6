"""Find reasoning tags among token ids, for any tokenizer, without re-tokenising anything.

A tag may be one token or many, and its first and last token may hold neighbouring text (`>` and a newline in one
token). Decoding token by token and adding up the pieces is wrong for byte-level vocabularies, where one character can
be spread over tokens, and decoding ever longer prefixes is quadratic. So: only a token whose own text can begin a tag
is looked at, and only the few tokens after it are decoded together, one more at a time, until the tag is complete or
impossible. What was learnt about a run of ids is remembered, so a batch costs a handful of decodes.

Legend: T tokens of the ids searched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import PairError, SettingsError

IntArray = NDArray[np.int64]

# What a decoder writes for bytes that are not (yet) a character.
REPLACEMENT = "\ufffd"
# No vocabulary is as large; an id above it is a hash, a pointer, or ids of something else.
LARGEST_TOKEN_ID = 1 << 24
# Runs of ids remembered before starting over: bounds the memory of a finder that lives as long as a training run.
REMEMBERED_RUNS = 200_000

_KNOWN, _STARTS, _BLANK, _BOUNDARY, _UNSEEN = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class ReasoningTags:
    """Pairs of (opening, closing) tags; any of them may be used, a block is closed by the tag of its own pair.

    Raises SettingsError for a blank tag, equal tags, or one that begins another: such could not be told apart.

    >>> ReasoningTags((("<think>", "</think>"), ("[r]", "[/r]"))).texts
    ('<think>', '</think>', '[r]', '[/r]')
    """

    pairs: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)

    def __post_init__(self) -> None:
        pairs = tuple(self.pairs)
        if not pairs or any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
            raise SettingsError(f"tags must be pairs such as (('<think>', '</think>'),), found {self.pairs!r}.")
        object.__setattr__(self, "pairs", tuple((str(opening), str(closing)) for opening, closing in pairs))
        tags = self.texts
        for i, tag in enumerate(tags):
            if any("\ud800" <= c <= "\udfff" for c in tag):
                raise SettingsError(f"the reasoning tag {tag!r} holds half a character; no tokenizer writes that.")
            if not tag.strip():
                raise SettingsError(f"the reasoning tag {tag!r} is blank; give the text that opens and closes a block.")
            for other in tags[:i] + tags[i + 1 :]:
                if other.startswith(tag):
                    raise SettingsError(
                        f"the reasoning tag {tag!r} is equal to, or the beginning of, {other!r}, so that the two "
                        "cannot be told apart; give tags of which none begins another."
                    )

    @property
    def texts(self) -> tuple[str, ...]:
        """All tags in a row: opening and closing of pair 0, opening and closing of pair 1, ..."""
        return tuple(tag for pair in self.pairs for tag in pair)


DEFAULT_TAGS = ReasoningTags()


class TokenTag(NamedTuple):
    """A tag at tokens [start, stop): `head` is the text before it in its first token, `tail` after it in its last."""

    opens: bool
    pair: int
    start: int
    stop: int
    head: str
    tail: str


class _Hit(NamedTuple):
    """A tag that begins `at` this character of a token and takes this many `tokens`; `length` of the first in chars."""

    at: int
    tag: int
    tokens: int
    head: str
    tail: str
    length: int


def plain_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """`decode` of any tokenizer, told to hide no token and tidy no space where it can be told so."""
    decode = getattr(tokenizer, "decode", None)
    if not callable(decode):
        raise PairError(
            f"{type(tokenizer).__name__} has no decode(ids) method; pass the tokenizer of the policy that was sampled."
        )
    try:
        parameters = inspect.signature(decode).parameters
    except (TypeError, ValueError):  # a compiled function that does not say
        parameters = {}  # type: ignore[assignment]
    options = {"skip_special_tokens": False} if "skip_special_tokens" in parameters else {}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if options and ("clean_up_tokenization_spaces" in parameters or takes_any):
        options["clean_up_tokenization_spaces"] = False

    def call(ids: list[int]) -> str:
        try:
            return str(decode(ids, **options))
        except Exception as error:
            raise PairError(
                f"the tokenizer ({type(tokenizer).__name__}) cannot decode the token ids {ids[:8]}: "
                f"{type(error).__name__}: {error}. Was the policy sampled with another vocabulary?"
            ) from error

    return call


def _single_ids(tokenizer: Any, tags: tuple[str, ...]) -> dict[int, str]:
    """Ids of tags that are one token. Only needed where decode hides such tokens; everywhere else decode shows them."""
    lookup = getattr(tokenizer, "convert_tokens_to_ids", None) or getattr(tokenizer, "token_to_id", None)
    found: dict[int, str] = {}
    for tag in tags if callable(lookup) else ():
        try:
            token = lookup(tag)  # type: ignore[misc]
        except (TypeError, ValueError, KeyError):  # character vocabularies refuse longer strings
            continue
        if isinstance(token, int) and (
            token != getattr(tokenizer, "unk_token_id", None) or getattr(tokenizer, "unk_token", None) == tag
        ):
            found[token] = tag
    return found


def _special_ids(tokenizer: Any) -> set[int]:
    """Ids that the tokenizer declares special (turn markers and the like); the unknown token is ordinary text."""
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None and callable(getattr(tokenizer, "get_added_tokens_decoder", None)):
        added = tokenizer.get_added_tokens_decoder()
    special |= {int(i) for i, token in (added or {}).items() if getattr(token, "special", False)}
    markers = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    unknown = getattr(tokenizer, "unk_token_id", None)
    return special - ({unknown} - markers)


class TokenTagSearch:
    """Where the tags are in token ids; keep one per run, it learns the vocabulary as it goes.

    tokenizer: anything with `decode(ids) -> str`: fast or slow, of transformers or not.
    boundary_ids: tokens that end a turn, beside those that the tokenizer itself calls special.
    """

    def __init__(self, tokenizer: Any, tags: ReasoningTags = DEFAULT_TAGS, boundary_ids: Iterable[int] = ()) -> None:
        self._texts = tags.texts
        self._decode = plain_decoder(tokenizer)
        self._single = _single_ids(tokenizer, self._texts)
        self._boundary = _special_ids(tokenizer) | {int(i) for i in boundary_ids}
        self._longest = max(len(tag.encode()) for tag in self._texts) + 8  # one byte a token, and slack for empty ones
        self._table = np.zeros(0, dtype=np.uint8)
        self._runs: dict[tuple[int, ...], tuple[tuple[_Hit, ...], bool]] = {}

    def piece(self, token: int) -> str:
        """The text of one token alone; a part of a character shows as the replacement character."""
        return self._single[token] if token in self._single else self._decode([token])

    def find(self, ids: IntArray) -> list[TokenTag]:
        """All tags in `ids` [T], leftmost first, none overlapping: what a left-to-right search of the text finds."""
        found: list[TokenTag] = []
        for start in np.flatnonzero(self._flags(ids) & _STARTS).tolist():
            window = ids[start : start + self._longest].tolist()
            for hit in self._hits(window):
                if found and start <= found[-1].stop - 1:
                    room = len(found[-1].tail) if start == found[-1].stop - 1 else 0
                    if hit.length - hit.at > room:
                        continue
                opens, pair, stop = hit.tag % 2 == 0, hit.tag // 2, start + hit.tokens
                found.append(TokenTag(opens, pair, start, stop, hit.head, hit.tail))
        return found

    def is_blank(self, ids: IntArray) -> bool:
        """Nothing but white space in these tokens; true for none."""
        flags = self._flags(ids)
        if not (flags & _BLANK).all():
            return False
        # Tokens that show nothing alone may be parts of a character (some decoders drop those): look at them together.
        return not (flags & _UNSEEN).any() or not self._decode(ids.tolist()).strip()

    def after_last_boundary(self, ids: IntArray, block: int = 1024) -> int:
        """Position after the last token that ends a turn or marks its parts, 0 if there is none. Reads from the end."""
        for stop in range(ids.size, 0, -block):
            start = max(0, stop - block)
            marks = np.flatnonzero(self._flags(ids[start:stop]) & _BOUNDARY)
            if marks.size:
                return start + int(marks[-1]) + 1
        return 0

    def _flags(self, ids: IntArray) -> NDArray[np.uint8]:
        if not ids.size:
            return np.zeros(0, dtype=np.uint8)
        top = int(ids.max())
        if top > LARGEST_TOKEN_ID:
            raise PairError(f"token id {top} is larger than any vocabulary; are these really token ids?")
        if top >= self._table.size:
            self._table = np.pad(self._table, (0, max(top + 1, 2 * self._table.size) - self._table.size))
        flags = self._table[ids]
        if not flags.all():
            for token in np.unique(ids[flags == 0]).tolist():
                self._table[token] = self._classify(token)
            flags = self._table[ids]
        return flags

    def _classify(self, token: int) -> int:
        piece = self.piece(token)
        flags = _KNOWN
        if any(self._match(piece, at) is not None for at in self._starts(piece)):
            flags |= _STARTS
        if not piece.strip():
            flags |= _BLANK if piece else _BLANK | _UNSEEN
        # A special token that is itself a tag, or a part of one (`<|channel|>analysis`), separates nothing.
        if token in self._boundary and not any(piece and (piece in tag or tag in piece) for tag in self._texts):
            flags |= _BOUNDARY
        return flags

    @staticmethod
    def _starts(piece: str) -> range:
        # Some decoders write nothing for a part of a character: an empty piece may still begin a tag.
        return range(max(1, len(piece)))

    def _match(self, text: str, at: int) -> int | None:
        """Number of the tag at `text[at:]`, -1 if more tokens could complete one there, None if not."""
        rest = text[at:]
        for number, tag in enumerate(self._texts):
            if rest.startswith(tag):
                return number
        stem = rest.rstrip(REPLACEMENT)
        for tag in self._texts:
            # What is not a whole character yet can only become one that is not ASCII.
            could_grow = (rest and stem == rest) or not tag[len(stem) : len(stem) + 1].isascii()
            if could_grow and len(stem) < len(tag) and tag.startswith(stem):
                return -1
        return None

    def _hits(self, window: list[int]) -> list[_Hit]:
        """Tags that begin in the first token of `window`, each with the fewest tokens that complete it."""
        found: dict[int, _Hit] = {}
        for n in range(1, len(window) + 1):
            hits, may_grow = self._read_run(tuple(window[:n]))
            for hit in hits:
                found.setdefault(hit.at, hit)
            if not may_grow:
                break
        return [found[at] for at in sorted(found)]

    def _read_run(self, run: tuple[int, ...]) -> tuple[tuple[_Hit, ...], bool]:
        known = self._runs.get(run)
        if known is not None:
            return known
        first = self.piece(run[0])
        text = first if len(run) == 1 else self._decode(list(run))
        hits: list[_Hit] = []
        may_grow = False
        for at in self._starts(first):
            match = self._match(text, at)
            if match is not None and match >= 0:
                # A token that shows nothing begins the tag only if the tag needs it.
                if not first and self._decode(list(run[1:])).startswith(self._texts[match]):
                    continue
                tail = text[at + len(self._texts[match]) :]
                hits.append(_Hit(at, match, len(run), first[:at], tail, len(first)))
            may_grow = may_grow or match == -1
        if len(self._runs) >= REMEMBERED_RUNS:
            self._runs.clear()
        self._runs[run] = known = (tuple(hits), may_grow)
        return known
