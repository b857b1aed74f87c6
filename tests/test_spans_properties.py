"""Properties of spans on token ids, against an oracle that knows each token's bytes and never decodes anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collapsediag.spans import SpanFinder, SpanStatus, find_reasoning
from collapsediag.token_tags import ReasoningTags

OPEN, CLOSE = b"<think>", b"</think>"
CPU_SECONDS = 2.0  # 100,000 tokens; quadratic code takes minutes
SHARED_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

# Pieces that cut tags, characters and white space in awkward places; the 256 bytes come first.
AWKWARD = [b"think", b"<think", b">\n", b".<", b"></", b"<think>", b"</think>", b"\xc3", b"a\xe2\x97", b"\x81<", b"><"]
AWKWARD += [b"\n\n", b" the", b"</", b"think>x", b"/th", b"ink", b"\xf0\x9f", b"\x99\x82>", b"<think></think>", b" <"]


class BytePieces:
    """Byte pieces with a decode that replaces what is not UTF-8, as byte-level tokenizers do; counts its work."""

    def __init__(self) -> None:
        self.pieces = [bytes([i]) for i in range(256)] + AWKWARD
        self.decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


class DroppingBytePieces(BytePieces):
    """The same, with a decode that drops what is not UTF-8."""

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="ignore")


def oracle(pieces: Sequence[bytes]) -> tuple[str, int, int]:
    """Status and token span from the bytes alone: find the tags in the bytes, then keep whole tokens between them."""
    data = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    begins = [0, *ends[:-1]]
    at = data.find(OPEN)
    if at < 0:
        return "absent", 0, 0
    begin = at + len(OPEN)
    while True:  # opening tags in a row
        rest = data[begin:]
        gap = len(rest) - len(rest.lstrip(b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"))
        if not rest[gap:].startswith(OPEN):
            break
        begin += gap + len(OPEN)
    end = data.find(CLOSE, begin)
    start = sum(b < begin for b in begins)  # tokens that begin before Z does belong to the opening side
    if end < 0:
        return "unclosed", start, len(pieces)
    stop = max(start, sum(e <= end for e in ends))
    between = b"".join(pieces[start:stop])
    if not between.decode("utf-8", errors="replace").strip():
        return "empty", start, stop
    return ("nested" if OPEN in data[begin:end] else "ok"), start, stop


TOKENS = st.one_of(st.integers(0, 255), st.sampled_from([*map(ord, "<>/think \n"), *range(256, 256 + len(AWKWARD))]))
IDS = st.lists(TOKENS, max_size=30)


def with_tags(parts: list[list[int]], spellings: list[list[bytes]]) -> list[int]:
    """Token runs with a tag between each two, spelled in the given pieces."""
    pieces = BytePieces().pieces
    ids = list(parts[0])
    for part, spelling in zip(parts[1:], spellings, strict=False):
        ids += [pieces.index(piece) for piece in spelling] + part
    return ids


SPELLINGS = st.sampled_from(
    [
        [b"<think>"],
        [b"<", b"think", b">"],
        [b"<think", b">\n"],
        [b".<", b"think", b"><"],
        [b"<", b"t", b"h", b"ink", b">"],
        [b"</think>"],
        [b"</", b"think", b">"],
        [b"</", b"think>x"],
        [b"></", b"think", b">\n"],
        [b"<", b"/th", b"ink", b">"],
        [b"<think></think>"],
    ]
)


@given(st.lists(IDS, min_size=1, max_size=5), st.lists(SPELLINGS, min_size=4, max_size=4))
@settings(max_examples=400, deadline=None)
def test_spans_are_where_the_bytes_say(parts: list[list[int]], spellings: list[list[bytes]]) -> None:
    ids = with_tags(parts, spellings)
    tokenizer = BytePieces()
    span = SpanFinder(tokenizer).find(ids, [])
    assert (span.status.value, span.start, span.stop) == oracle([tokenizer.pieces[i] for i in ids])


@given(st.lists(IDS, min_size=1, max_size=4), st.lists(SPELLINGS, min_size=3, max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_decoder_that_drops_broken_characters_finds_the_same_spans(
    parts: list[list[int]], spellings: list[list[bytes]]
) -> None:
    # Broken characters are white space to neither decoder's reader, but the dropping one does not show them at all;
    # so only valid text can be compared.
    ids = with_tags(parts, spellings)
    tokenizer = DroppingBytePieces()
    pieces = [tokenizer.pieces[i] for i in ids]
    try:
        b"".join(pieces).decode()
    except UnicodeDecodeError:
        return
    span = SpanFinder(tokenizer).find(ids, [])
    status, start, stop = oracle(pieces)
    assert (span.start, span.stop) == (start, stop)
    assert span.status.value == status or b"\xef\xbf\xbd".decode() in b"".join(pieces[start:stop]).decode(
        errors="replace"
    )


@given(
    st.text(alphabet="<>/think é🙂中\n.", max_size=60), st.lists(st.sampled_from(["<think>", "</think>"]), max_size=3)
)
def test_one_token_a_character_is_the_same_as_text(filler: str, tags: list[str]) -> None:
    text = filler[:20] + "".join(tag + filler[i * 7 : i * 7 + 20] for i, tag in enumerate(tags))

    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    context = [ord(c) for c in filler]
    assert SpanFinder(Letters()).find([ord(c) for c in text], context) == find_reasoning(text, context=filler)


@given(st.lists(st.sampled_from(["a", "b", "ab", "ba", "aba", "x", "yx", "xyx", " "]), max_size=20))
def test_tags_that_overlap_themselves_are_read_from_the_left(pieces: list[str]) -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return "".join(pieces[i] for i in ids)

    tags = ReasoningTags((("aba", "xyx"),))
    text = "".join(pieces)
    in_text = find_reasoning(text, context="", tags=tags)
    in_tokens = SpanFinder(Words(), tags).find(range(len(pieces)), [])
    assert in_tokens.opened_in_context == in_text.opened_in_context
    assert in_tokens.repeated == in_text.repeated
    if in_text.has_reasoning and in_tokens.has_reasoning:
        assert "".join(pieces[in_tokens.start : in_tokens.stop]) in text[in_text.start : in_text.stop]
    assert (in_tokens.status is SpanStatus.ABSENT) == (in_text.status is SpanStatus.ABSENT)
    assert (in_tokens.status is SpanStatus.UNCLOSED) == (in_text.status is SpanStatus.UNCLOSED)
    letters = [ord(c) for c in text]

    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    assert SpanFinder(Letters(), tags).find(letters, []) == in_text


def byte_table(tokenizer: Any) -> Callable[[int], bytes]:
    """Bytes of each token of a byte-level vocabulary, by GPT-2's published table: no decode involved."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    table = {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}
    return lambda token: bytes(table[c] for c in tokenizer.convert_ids_to_tokens(token))


TEXT = st.text(alphabet="<>/think aé🙂中\n.,;0", max_size=30)


@pytest.mark.pretrained
@given(TEXT, TEXT, TEXT, st.sampled_from(["<think>", "<think>\n", ".<think>"]), st.integers(0, 40), st.data())
@SHARED_FIXTURE
def test_spans_of_a_pretrained_vocabulary_however_it_is_cut(
    smollm2_tokenizer: Any, before: str, inside: str, after: str, opening: str, cut: int, data: st.DataObject
) -> None:
    text = before + opening + inside + "</think>" + after
    # A policy may sample any spelling: the text is cut at any byte and each part encoded for itself.
    raw = text.encode()
    middle = data.draw(st.integers(0, len(raw)))
    of_bytes = byte_table(smollm2_tokenizer)
    singles = {of_bytes(i): i for i in range(17, 1000) if len(of_bytes(i)) == 1}
    odd = [singles.get(bytes([b])) for b in raw[middle : middle + 5]]
    try:
        head, tail = raw[:middle].decode(), raw[middle + 5 :].decode()
    except UnicodeDecodeError:
        head, tail, odd = raw.decode(), "", []
    if None in odd:
        head, tail, odd = raw.decode(), "", []

    def encode(text: str) -> list[int]:
        return list(smollm2_tokenizer(text, add_special_tokens=False).input_ids) if text else []

    ids = encode(head) + [i for i in odd if i is not None] + encode(tail)
    pieces = [of_bytes(i) for i in ids]
    if b"".join(pieces) != raw:  # the vocabulary lacks some bytes
        return
    span = SpanFinder(smollm2_tokenizer).find(ids, [])
    status, start, stop = oracle(pieces)
    assert (span.status.value, span.start, span.stop) == (status, start, stop)
    if span.status is SpanStatus.OK:
        # What Z says is what stands between the tags, but for what shares a token with a tag.
        between = find_reasoning(text, context="")
        reasoning = b"".join(pieces[span.start : span.stop])
        assert reasoning in text[between.start : between.stop].encode()
        missing = between.stop - between.start - len(reasoning.decode(errors="ignore"))
        assert missing <= len(pieces[span.start - 1]) + len(pieces[span.stop])


def ids_of(tokenizer: BytePieces, *pieces: bytes) -> list[int]:
    return [tokenizer.pieces.index(piece) for piece in pieces]


HOSTILE = {
    "no tag": [b" the"],
    "half tags": [b"<"],
    "tags of one token": [b"<think>"],
    "nested tags of several pieces": [b"<", b"think", b">\n", b" the"],
    "a run of opening tags": [b"<", b"t", b"h", b"ink", b">\n"],
    "closing tags": [b"</", b"think", b">"],
    "invalid bytes": [b"\xff", b"<", b"\xc3", b"\xf0\x9f"],
    "white space": [b"<think>", *[b"\n\n"] * 99],
    "tags in single bytes": [bytes([b]) for b in b"<think>a"],
    "never quite a tag": [bytes([b]) for b in b"<think"],
}


@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_outputs_take_linear_time(pattern: list[bytes]) -> None:
    tokenizer = BytePieces()
    ids = np.resize(np.array(ids_of(tokenizer, *pattern)), 100_000)
    finder = SpanFinder(tokenizer)
    begun = time.process_time()
    finder.find(ids, ids)
    assert time.process_time() - begun < CPU_SECONDS
    # The vocabulary is decoded once, tags a few times, and the output never.
    assert tokenizer.decoded < 10_000


def test_ordinary_outputs_are_not_decoded() -> None:
    rng = np.random.default_rng(0)
    tokenizer = BytePieces()
    finder = SpanFinder(tokenizer)
    tags = ids_of(tokenizer, b"<", b"think", b">\n"), ids_of(tokenizer, b"</", b"think", b">")
    for _ in range(200):
        # Half of the tokens could begin a tag: code and formulas are full of them.
        noise = rng.choice(ids_of(tokenizer, b"<", b" the", b".<", b"\xf0\x9f", b">\n", b"\n\n"), size=2_000)
        ids = np.concatenate([noise[:100], tags[0], noise, tags[1], noise[:50]])
        span = finder.find(ids, [])
        assert (span.start, span.stop) == (103, 2103)
    assert tokenizer.decoded < 20_000  # of 430,000 tokens
