"""Reasoning spans on token ids: every kind of tokenizer, every way a tag can be cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import PairError
from collapsediag.spans import SpanFinder, SpanStatus
from collapsediag.token_tags import ReasoningTags

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

Ids = Sequence[int]


class Pieces:
    """A vocabulary of given pieces, with nothing but `decode`: what a tokenizer must at least be able to do."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = [bytes([i]) for i in range(256)] + list(pieces)

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")

    def ids(self, *pieces: str | bytes) -> list[int]:
        return [self.pieces.index(p.encode() if isinstance(p, str) else p) for p in pieces]


def split(finder: SpanFinder, decode: Any, ids: Ids, context: Ids | None = ()) -> tuple[str, str, str, str]:
    """Status, and the text of the output before Z, of Z and after it; checks that nothing is lost on the way."""
    span = finder.find(ids, context)
    parts = ids[: span.start], ids[span.start : span.stop], ids[span.stop :]
    assert [*parts[0], *parts[1], *parts[2]] == list(ids)
    return span.status.value, *(decode(list(part)) for part in parts)  # type: ignore[return-value]


def byte_level_bpe() -> Any:
    """A byte-level BPE in which `>` merges with a newline, `.` with `<`, and `>` with `<`."""
    split_at = tokenizers.pre_tokenizers.Split("~", "removed")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split_at, level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=level.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["<~think~>\n", "é~.<~/th~ink~>\n", "><", "ok~>\n", "ab"] * 20, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")


def unigram(byte_fallback: bool = False) -> Any:
    """A Unigram vocabulary with the `▁` convention, as SentencePiece models have it."""
    text = ["<think> the cat sat </think> done", "a b c d <think> é", "the . </think>", "hello thinking > < /"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(text * 20, trainer)
    decoders = [tokenizers.decoders.Metaspace()]
    if byte_fallback:
        vocabulary = [(piece, -5.0) for piece, _ in tokenizer.get_vocab().items()]
        vocabulary = [("<unk>", 0.0)] + [entry for entry in vocabulary if entry[0] != "<unk>"]
        vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
        tokenizer.model = tokenizers.models.Unigram(vocabulary, unk_id=0, byte_fallback=True)
        decoders = [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    tokenizer.decoder = tokenizers.decoders.Sequence(decoders)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def word_level(kind: str) -> Any:
    """Words in one vocabulary; the tags are ordinary words, added tokens, or special tokens."""
    words = ["<unk>", "<end>", "the", "cat", "sat", "4"] + (["<think>", "</think>"] if kind == "word" else [])
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    if kind != "word":
        tags = [tokenizers.AddedToken(tag, special=kind == "special") for tag in ("<think>", "</think>")]
        fast.add_tokens(tags, special_tokens=kind == "special")
    return fast


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def raw(tokenizer: Any) -> Any:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# --- tags of one token -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["word", "added", "special"])
def test_a_tag_of_one_token(kind: str) -> None:
    tokenizer = word_level(kind)
    ids = encode(tokenizer, "<think> the cat </think> 4 <end>")
    assert len(ids) == 6
    expected = ("ok", "<think>", "the cat", "</think> 4 <end>")
    assert split(SpanFinder(tokenizer), raw(tokenizer), ids) == expected


@pytest.mark.parametrize("kind", ["word", "added", "special"])
def test_a_bare_tokenizer_of_the_tokenizers_library(kind: str) -> None:
    # Its decode hides special tokens unless told otherwise.
    fast = word_level(kind)
    ids = encode(fast, "<think> the cat </think> 4")
    assert SpanFinder(fast.backend_tokenizer).find(ids, []).status is SpanStatus.OK


def test_a_tag_that_decode_always_hides_is_known_by_its_id() -> None:
    class Hiding:
        def decode(self, ids: list[int]) -> str:
            return "".join({1: "", 2: "", 3: "two ", 4: "4"}[i] for i in ids)

        def convert_tokens_to_ids(self, token: str) -> int | None:
            return {"<think>": 1, "</think>": 2}.get(token)

    span = SpanFinder(Hiding()).find([4, 1, 3, 2, 4], [])
    assert (span.status, span.start, span.stop) == (SpanStatus.OK, 2, 3)


def test_the_unknown_token_is_not_taken_for_the_tag() -> None:
    class Unknown:
        unk_token_id = 0
        unk_token = "<unk>"

        def decode(self, ids: list[int]) -> str:
            return "".join({0: "", 1: "a"}[i] for i in ids)

        def convert_tokens_to_ids(self, token: str) -> int:
            return 0

    # With the context unknown, a closing tag anywhere would be seen as well.
    assert SpanFinder(Unknown()).find([1, 0, 1, 0]).status is SpanStatus.ABSENT


# --- tags of several tokens --------------------------------------------------------------------------------------


def test_a_token_across_the_edge_of_a_tag_goes_with_the_tag() -> None:
    tokenizer = byte_level_bpe()
    ids = encode(tokenizer, "<think>\nok é.</think>\n4")
    pieces = [tokenizer.decode([i]) for i in ids]
    assert ">\n" in pieces  # the premise: both edges run through a token
    assert ".<" in pieces
    assert split(SpanFinder(tokenizer), raw(tokenizer), ids) == ("ok", "<think>\n", "ok é", ".</think>\n4")


def test_tags_that_share_a_token() -> None:
    tokenizer = Pieces(b"><", b">x<", b"think", b"/think", b"<think></think>", b"><think>")
    finder = SpanFinder(tokenizer)
    empty = tokenizer.ids("<", "think", "><", "/think", ">", "4")
    assert split(finder, tokenizer.decode, empty) == ("empty", "<think><", "", "/think>4")
    # One character between them that no token of its own carries: nothing can be scored.
    thin = tokenizer.ids("<", "think", ">x<", "/think", ">", "4")
    assert split(finder, tokenizer.decode, thin)[0] == "empty"
    both = tokenizer.ids("4", "<think></think>", "4")
    assert split(finder, tokenizer.decode, both) == ("empty", "4<think></think>", "", "4")
    run = tokenizer.ids("<", "think", "><think>", "a", "<", "/think", ">")
    assert split(finder, tokenizer.decode, run) == ("ok", "<think><think>", "a", "</think>")
    not_a_run = tokenizer.ids("<", "think", ">x<", "think", ">", "a", "<", "/think", ">")
    assert split(finder, tokenizer.decode, not_a_run)[0] == "nested"


def test_overlapping_looks_are_not_tags() -> None:
    tokenizer = Pieces(b"<<", b"<think", b"><", b"/think>")
    finder = SpanFinder(tokenizer)
    ids = tokenizer.ids("<think", "<think", "><", "<<", "t", "<", "/think>")
    assert split(finder, tokenizer.decode, ids) == ("ok", "<think<think><", "<<t", "</think>")
    # "/think>" after "<<": the second "<" of that token begins the tag.
    ids = tokenizer.ids("<think", ">", "a", "<<", "/think>")
    assert split(finder, tokenizer.decode, ids) == ("ok", "<think>", "a", "<</think>")


def test_decode_is_told_to_hide_nothing() -> None:
    class HidingByDefault:
        """Its tags are made of tokens that it takes for special."""

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            shown = ["<", "think", "/think", ">", "a"]
            return "".join(shown[i] for i in ids if not (skip_special_tokens and i in (0, 3)))

    span = SpanFinder(HidingByDefault()).find([0, 1, 3, 4, 0, 2, 3], [])
    assert (span.status, span.start, span.stop) == (SpanStatus.OK, 3, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>the cat</think>4", ("ok", "<think>", "the cat", "</think>4")),
        ("é <think>\né🙂</think>4", ("ok", "é <think>\n", "é🙂", "</think>4")),
        ("4", ("absent", "", "", "4")),
        ("<think>the cat", ("unclosed", "<think>", "the cat", "")),
        ("<think>the cat</thin", ("unclosed", "<think>", "the cat</thin", "")),
        ("<think>\n\n</think>4", ("empty", "<think>\n", "\n", "</think>4")),
        ("<think>a<think>b</think>c</think>", ("nested", "<think>", "a<think>b", "</think>c</think>")),
        ("<think>\n<think>ab</think>", ("ok", "<think>\n<think>", "ab", "</think>")),
        ("<think>a</think><think>b</think>", ("ok", "<think>", "a", "</think><think>b</think>")),
    ],
)
def test_each_rule_on_several_pieces(text: str, expected: tuple[str, str, str, str]) -> None:
    tokenizer = byte_level_bpe()
    assert split(SpanFinder(tokenizer), raw(tokenizer), encode(tokenizer, text)) == expected


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_sentencepiece_like_vocabulary(byte_fallback: bool) -> None:
    tokenizer = unigram(byte_fallback)
    ids = encode(tokenizer, "a <think> the cat sat.</think> done")
    assert len(encode(tokenizer, "</think>")) > 1
    status, before, reasoning, after = split(SpanFinder(tokenizer), raw(tokenizer), ids)
    assert status == "ok"
    assert before.strip().endswith("<think>")
    assert reasoning.strip() == "the cat sat."
    assert after.strip() == "</think> done"


def test_tags_spelled_in_single_bytes() -> None:
    tokenizer = unigram(byte_fallback=True)
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "<think>é</think>".encode()]
    assert split(SpanFinder(tokenizer), raw(tokenizer), ids) == ("ok", "<think>", "é", "</think>")


def test_a_slow_tokenizer() -> None:
    tokenizer = transformers.ByT5Tokenizer()
    assert not tokenizer.is_fast
    ids = encode(tokenizer, "é<think>é🙂</think>4")
    status, before, reasoning, after = split(SpanFinder(tokenizer), raw(tokenizer), ids)
    assert (status, before, reasoning, after) == ("ok", "é<think>", "é🙂", "</think>4")


@pytest.mark.parametrize("build", [byte_level_bpe, transformers.ByT5Tokenizer, lambda: unigram(byte_fallback=True)])
def test_tags_of_characters_that_are_spread_over_tokens(build: Any) -> None:
    tokenizer = build()
    tags = ReasoningTags((("◁think▷", "◁/think▷"),))
    ids = encode(tokenizer, "a◁think▷é◁◁/think▷◁")
    status, before, reasoning, after = split(SpanFinder(tokenizer, tags), raw(tokenizer), ids)
    assert (status, before.strip(), reasoning, after) == ("ok", "a◁think▷", "é◁", "◁/think▷◁")


@pytest.mark.pretrained
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nOkay, 🙂.</think>\n4", ("ok", "<think>", "\nOkay, 🙂.", "</think>\n4")),
        ("x > 1\n<think> if a<b</think>", ("ok", "x > 1\n<think>", " if a<b", "</think>")),
        ("<think>\n\n</think>4", ("empty", "<think>", "\n\n", "</think>4")),
        ("<think>…", ("unclosed", "<think>", "…", "")),
        ("the </think>", ("absent", "", "", "the </think>")),
    ],
)
def test_the_tokenizer_of_a_pretrained_model(
    smollm2_tokenizer: Any, text: str, expected: tuple[str, str, str, str]
) -> None:
    ids = encode(smollm2_tokenizer, text)
    assert split(SpanFinder(smollm2_tokenizer), raw(smollm2_tokenizer), ids) == expected


def test_several_pairs_of_tags_each_closed_by_its_own() -> None:
    tokenizer = Pieces(b"<think>", b"</think>", b"[r", b"[/r")
    finder = SpanFinder(tokenizer, ReasoningTags((("<think>", "</think>"), ("[r]", "[/r]"))))
    ids = tokenizer.ids("[r", "]", "a", "</think>", "b", "[/r", "]", "c")
    assert split(finder, tokenizer.decode, ids) == ("ok", "[r]", "a</think>b", "[/r]c")
    assert split(finder, tokenizer.decode, ids[2:], context=ids[:2]) == ("ok", "", "a</think>b", "[/r]c")
    assert finder.open_pair(ids[:2]) == 1
    assert finder.open_pair(tokenizer.ids("<think>", "[r", "]", "[/r", "]")) == 0
    assert finder.open_pair(tokenizer.ids("[r", "]", "<think>")) == 0
    assert finder.open_pair(tokenizer.ids("<think>", "[r", "]")) == 1


# --- contexts ----------------------------------------------------------------------------------------------------

CONTEXTS = [
    ("Q<think>\n", True),
    ("Q<think>", True),
    ("Q<think>Okay", True),
    ("Q<think>x</think>4Q", False),
    ("Q<think>x</think>4Q<think>", True),
    ("Q<think>\n\n</think>\n\n", False),
    ("use <think> and </think> <|start|>Q<think>\n", True),
    # Said, or left open by an earlier turn, and then a new turn began.
    ("use <think> <|start|>Q", False),
    ("Q<think>cut off<|end|>Q", False),
    ("<|start|>Q</think><think>", True),
    ("", False),
]


@pytest.mark.parametrize(("context", "opened"), CONTEXTS)
def test_each_context(context: str, opened: bool) -> None:
    tokenizer = byte_level_bpe()
    finder = SpanFinder(tokenizer)
    context_ids = encode(tokenizer, context)
    span = finder.find(encode(tokenizer, "ab</think>4"), context_ids)
    assert span.opened_in_context is opened
    assert (span.status, span.start) == ((SpanStatus.OK if opened else SpanStatus.ABSENT), 0)
    written = finder.find(encode(tokenizer, "<think>ab</think>4"), context_ids)
    assert written.status is SpanStatus.OK
    assert not written.opened_in_context
    assert written.start == len(encode(tokenizer, "<think>"))


def test_a_turn_marker_is_found_however_far_back() -> None:
    tokenizer = byte_level_bpe()
    finder = SpanFinder(tokenizer)
    opened = encode(tokenizer, "<think>")
    filler = encode(tokenizer, "a b ") * 1500
    end = encode(tokenizer, "<|end|>")
    assert finder.open_pair(opened + filler) == 0
    assert finder.open_pair(opened + filler + end + filler) is None
    assert finder.open_pair(opened + end + opened + filler) == 0
    assert finder.open_pair(filler + opened + end + filler) is None
    assert finder.open_pair(filler + end + opened + filler) == 0


def test_turn_markers_that_the_tokenizer_does_not_know_as_special_can_be_named() -> None:
    tokenizer = Pieces(b"<think>", b"[end]")
    context = tokenizer.ids("<think>", "a", "[end]")
    assert SpanFinder(tokenizer).open_pair(context) == 0
    assert SpanFinder(tokenizer, boundary_ids=tokenizer.ids("[end]")).open_pair(context) is None


def test_special_tokens_that_make_up_a_tag_are_no_turn_markers() -> None:
    pieces = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "analysis", "final", "a"]

    class Harmony:
        all_special_ids = (0, 1, 2, 3)

        def decode(self, ids: list[int]) -> str:
            return "".join(pieces[i] for i in ids)

    tags = ReasoningTags((("<|channel|>analysis<|message|>", "<|end|>"),))
    finder = SpanFinder(Harmony(), tags)
    span = finder.find([1, 4, 2, 6, 6, 3, 0, 1, 5, 2, 6], [0])
    assert (span.status, span.start, span.stop) == (SpanStatus.OK, 3, 5)
    assert finder.open_pair([0, 1, 4, 2]) == 0
    assert finder.open_pair([0, 1, 4, 2, 6, 0]) is None


def test_an_unknown_context_is_inferred_from_a_closing_tag_that_comes_first() -> None:
    tokenizer = byte_level_bpe()
    ids = encode(tokenizer, "ab</think>4")
    span = SpanFinder(tokenizer).find(ids)
    assert span.status is SpanStatus.OK
    assert span.opened_in_context
    assert SpanFinder(tokenizer).find(ids, []).status is SpanStatus.ABSENT


# --- refusals ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_decoded_is_named() -> None:
    with pytest.raises(PairError, match=r"cannot decode the token ids \[999\].*IndexError"):
        SpanFinder(Pieces()).find([999], [])
    with pytest.raises(PairError, match="larger than any vocabulary"):
        SpanFinder(Pieces()).find([2**40], [])
    with pytest.raises(PairError, match=r"str has no decode\(ids\)"):
        SpanFinder("a tokenizer's name")


def test_nothing_is_no_reasoning() -> None:
    finder = SpanFinder(Pieces())
    assert finder.find([], []).status is SpanStatus.ABSENT
    assert finder.find(np.zeros(0, dtype=np.int64), None).status is SpanStatus.ABSENT
    assert finder.find([], [ord(c) for c in "<think>"]).status is SpanStatus.UNCLOSED
