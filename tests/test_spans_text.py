"""Reasoning spans in text: the rules one by one, a regular expression as oracle, and hostile input."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapsediag.errors import SettingsError
from collapsediag.spans import SpanStatus, find_reasoning
from collapsediag.token_tags import ReasoningTags

OPEN, CLOSE = "<think>", "</think>"
CPU_SECONDS = 2.0  # a million characters; quadratic code takes minutes


def cut(text: str, **options: object) -> tuple[str, str]:
    span = find_reasoning(text, **options)  # type: ignore[arg-type]
    return span.status.value, text[span.start : span.stop]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>two</think>2", ("ok", "two")),
        ("so: <think>two</think>2", ("ok", "two")),
        ("2", ("absent", "")),
        ("", ("absent", "")),
        ("<think>two", ("unclosed", "two")),
        ("<think>", ("unclosed", "")),
        ("<think>two</thi", ("unclosed", "two</thi")),
        ("<thin", ("absent", "")),
        ("<think></think>2", ("empty", "")),
        ("<think>\n\n \t</think>2", ("empty", "\n\n \t")),
        ("<think>a<think>b</think>c</think>", ("nested", "a<think>b")),
        ("<think>a<think>b", ("unclosed", "a<think>b")),
        ("<think>\n<think>\na</think>", ("ok", "\na")),
        ("<think>a</think>\n<think>b</think>", ("ok", "a")),
        ("<THINK>a</THINK>", ("absent", "")),
    ],
)
def test_each_rule(text: str, expected: tuple[str, str]) -> None:
    assert cut(text, context="") == expected


@pytest.mark.parametrize(
    ("context", "text", "expected", "opened"),
    [
        # The template opens the block.
        ("Q<think>\n", "two</think>2", ("ok", "two"), True),
        ("Q<think>\n", "two", ("unclosed", "two"), True),
        ("Q<think>\n", "\n</think>2", ("empty", "\n"), True),
        # Few-shot blocks are closed; the last one is open.
        ("Q<think>x</think>1 Q", "two</think>2", ("absent", ""), False),
        ("Q<think>x</think>1 Q<think>", "two</think>2", ("ok", "two"), True),
        # A template that was told not to think.
        ("Q<think>\n\n</think>\n\n", "2", ("absent", ""), False),
        # Prefilled reasoning.
        ("Q<think>Okay, ", "two</think>2", ("ok", "two"), True),
        # The policy writes the tag that was there already.
        ("Q<think>\n", "\n<think>two</think>2", ("ok", "two"), False),
        ("Q<think>\n", "so <think>two</think>2", ("nested", "so <think>two"), True),
        # An earlier turn was cut off inside its block, and the template's turn markers say so.
        ("Q<think>tw<|im_end|>\n<|im_start|>assistant\n", "<think>two</think>2", ("ok", "two"), False),
        ("Q<think>tw<|im_end|>\n<|im_start|>assistant\n", "two</think>2", ("absent", ""), False),
        ("<s>Use <think> tags.</s>", "2", ("absent", ""), False),
        ("<\uff5cAssistant\uff5c><think>\n", "two</think>2", ("ok", "two"), True),
    ],
)
def test_each_context(context: str, text: str, expected: tuple[str, str], opened: bool) -> None:
    assert cut(text, context=context) == expected
    assert find_reasoning(text, context=context).opened_in_context is opened


def test_unknown_context_is_inferred_from_a_closing_tag_that_comes_first() -> None:
    assert cut("two</think>2") == ("ok", "two")
    assert find_reasoning("two</think>2").opened_in_context
    assert cut("two</think>2", context="") == ("absent", "")
    assert cut("2") == ("absent", "")


def test_repeated_blocks_are_flagged_and_the_first_counts() -> None:
    assert find_reasoning("<think>a</think><think>b</think>").repeated
    assert not find_reasoning("<think>a</think>b</think>").repeated
    assert not find_reasoning("<think>a<think>b</think>").repeated


def test_several_pairs_of_tags_each_closed_by_its_own() -> None:
    tags = ReasoningTags((("<think>", "</think>"), ("[r]", "[/r]")))
    assert cut("[r]a</think>b[/r]", tags=tags) == ("ok", "a</think>b")
    assert cut("<think>a[/r]b</think>", tags=tags) == ("ok", "a[/r]b")
    assert cut("<think>[r]a[/r]</think>", tags=tags) == ("ok", "a")
    assert cut("a[/r]", context="<think>x</think>[r]", tags=tags) == ("ok", "a")
    assert cut("[r]a[/r]") == ("absent", "")


def test_a_tag_that_looks_like_a_turn_marker_stays_a_tag() -> None:
    tags = ReasoningTags((("<|think|>", "<|/think|>"),))
    assert cut("two<|/think|>2", context="<|assistant|><|think|>", tags=tags) == ("ok", "two")


def test_a_tag_with_characters_of_regular_expressions() -> None:
    tags = ReasoningTags((("(?:.*)+", "$^"),))
    assert cut("x(?:.*)+two$^2", tags=tags) == ("ok", "two")


@pytest.mark.parametrize(
    "pairs",
    [
        (),
        (("<think>", ""),),
        (("<think>", " "),),
        (("#", "#"),),
        (("<t", "<think>"),),
        ("<think>",),
        (("a", "b", "c"),),
        (("<think>", "</think>"), ("<think>", "<end>")),
    ],
)
def test_tags_that_cannot_be_told_apart_are_refused(pairs: object) -> None:
    with pytest.raises(SettingsError, match="tag"):
        ReasoningTags(pairs)  # type: ignore[arg-type]


FRAGMENTS = st.lists(st.sampled_from([OPEN, CLOSE, " ", "\n", "a", "<", "<think", "</", ">", "é"]), max_size=14)


@given(FRAGMENTS)
def test_agrees_with_a_regular_expression(fragments: list[str]) -> None:
    text = "".join(fragments)
    match = re.search(r"<think>(?:\s*<think>)*(?P<z>.*?)</think>", text, re.DOTALL)
    span = find_reasoning(text, context="")
    if match is None:
        assert span.status is (SpanStatus.UNCLOSED if OPEN in text else SpanStatus.ABSENT)
        return
    assert (span.start, span.stop) == match.span("z")
    blank = not match["z"].strip()
    expected = SpanStatus.EMPTY if blank else SpanStatus.NESTED if OPEN in match["z"] else SpanStatus.OK
    assert span.status is expected
    assert span.repeated == (OPEN in text[match.end() :])


@given(FRAGMENTS, st.sampled_from(["Q<think>", "Q<think>\n"]))
def test_an_opened_context_is_like_the_tag_in_front(fragments: list[str], context: str) -> None:
    text = "".join(fragments)
    inside = find_reasoning(text, context=context)
    whole = find_reasoning(context + text, context="")
    assert inside.status is whole.status
    assert context[1:] + text[inside.start : inside.stop] == (
        context[1:] + (context + text)[max(whole.start, len(context)) : whole.stop]
    )


@pytest.mark.parametrize(
    "text",
    [
        "<" * 1_000_000,
        "<think>" * 150_000,
        "<think> x" * 100_000,
        "<think>" + "</thin" * 150_000,
        "<think>" + " " * 1_000_000,
        "<think></think>" * 70_000,
        "<|" * 500_000,
        "<think>" + "\n <think>" * 100_000 + "</think>" * 100_000,
    ],
    ids=lambda text: text[:20].strip(),
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    begun = time.process_time()
    find_reasoning(text, context=text)
    assert time.process_time() - begun < CPU_SECONDS
