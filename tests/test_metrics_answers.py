"""Final answers: found in real solutions, in nested braces, and brought to one spelling as decimal arithmetic would."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapsediag.errors import MetricError, SettingsError
from collapsediag.metrics.answers import boxed_answer, final_answer, last_number, normalize_answer, tag_answer

DATA = Path(__file__).parent / "data" / "rollouts"


def test_finds_what_the_evaluation_found_in_800_real_solutions() -> None:
    different = []
    for line in (DATA / "simplerl_math_100x8_endings.jsonl").read_text().splitlines():
        row = json.loads(line)
        for ending, predicted in zip(row["ending"], row["pred"], strict=True):
            pair = normalize_answer(final_answer(ending) or ""), normalize_answer(predicted)
            different += [pair] if pair[0] != pair[1] else []
    # The evaluation also cuts off units; here all 8 solutions of that prompt keep theirs, and stay one answer.
    assert different == [("4:30\\text{p.m.}", "4:30")] * 8


balanced = st.recursive(
    st.text(alphabet="ab1 \\,", max_size=4).filter(lambda t: not t.endswith("\\")),
    lambda inner: st.builds(lambda a, b: f"{{{a}}}{b}", inner, inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(balanced, st.text(alphabet="ab{}\\", max_size=5))
def test_a_box_ends_where_its_braces_balance(inside: str, before: str) -> None:
    escaped = inside.replace("\\", "\\\\")  # a lone backslash would escape the brace after it
    assert boxed_answer(f"{before} \\boxed{{1}} \\boxed{{{escaped}}} and }} more") == escaped


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1\}} or }", r"[0, 1\}"),  # an escaped brace is text
        (r"\boxed{1\\}2}", r"1\\"),  # behind a line break it is not
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed{1} then \boxed{2", None),  # the last box was cut off: what it would have said is not known
        (r"\boxed 5", None),
        ("no box", None),
    ],
)
def test_boxes_at_the_edges(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>a</answer><answer> b\n</answer>", "b"),
        ("<answer>a", None),
        ("</answer><answer>", None),
        ("<answer></answer>", ""),
    ],
)
def test_tags_at_the_edges(text: str, answer: str | None) -> None:
    assert tag_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 apples and 4", "4"),
        ("It costs $1,250.50.", "1,250.50"),
        ("x = -7", "-7"),
        ("10-5", "5"),
        ("1, 2, and 3,", "3"),
        ("6.02e23 atoms", "6.02e23"),
        ("half: .5", ".5"),
        ("version2 of model3b", None),
        ("none", None),
        ("7" + " word" * 2000, "7"),  # far from the end
    ],
)
def test_last_numbers(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("how", "answer"),
    [("auto", "4"), ("boxed", "3"), ("tag", r"\boxed{4}"), ("number", "9"), (lambda text: text[-1], "9")],
)
def test_the_user_says_where_answers_stand(how: Any, answer: str) -> None:
    assert final_answer(r"<answer>\boxed{4}</answer> \boxed{3} 9", how) == answer


def test_auto_falls_back_from_tag_to_box_to_number() -> None:
    assert final_answer("<answer>Up</answer> 3") == "Up"
    assert final_answer(r"\boxed{x} or 3") == "x"
    assert final_answer("so 3.") == "3"
    assert final_answer("so be it") is None


def test_a_number_in_a_thought_is_no_answer() -> None:
    assert final_answer("<think>2 and 3</think> I give up") is None
    assert final_answer("<think>first \\boxed{2}, then 3") is None
    assert final_answer("2</think> 3") == "3"
    assert final_answer("<think>2 and 3", "number") == "3"  # where the user says so, it is looked for anywhere


def test_other_extractors_are_refused() -> None:
    with pytest.raises(SettingsError, match="answer is 'regex'"):
        final_answer("a", "regex")  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="answer callable returned 3"):
        final_answer("a", lambda _: 3)  # type: ignore[arg-type,return-value]


@settings(max_examples=400, deadline=None)
@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-10000, max_value=10000),
    st.decimals(allow_nan=False, allow_infinity=False, places=1, min_value=-10000, max_value=10000),
)
def test_two_spellings_are_one_answer_exactly_when_the_decimals_are_equal(a: Decimal, b: Decimal) -> None:
    spellings = [f"{a:f}", f"{a:+f}", f" {a:,f} ", f"{a:f}00", f"${a:f}$"]
    assert len({normalize_answer(text) for text in spellings}) == 1
    assert (normalize_answer(f"{a:f}") == normalize_answer(f"{b:f}")) == (a == b)
    assert (normalize_answer(f"{a:f}") == normalize_answer(f"{a + Decimal(1):f}")) is False


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Up", " up. ", True),
        ("1 \\frac{8}{91}", "1\\frac{8}{91}", True),
        ("007", "7", True),
        ("-0", "0", True),
        ("1,000", "1000.00", True),
        ("1,00", "100", False),  # no thousands separator
        ("(1,200)", "(1200)", False),  # a pair, not a number
        ("0.1", "0.10000000000000000000000000000000001", False),  # no number is rounded
        ("12345678901234567890123", "12345678901234567890124", False),
        ("1/2", "0.5", False),
        (".", "", True),
    ],
)
def test_spellings(one: str, other: str, same: bool) -> None:
    assert (normalize_answer(one) == normalize_answer(other)) is same


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "}", "<answer>", "</answer>", "1", "1,", "-", ".", "1.", "1e", " "])
def test_a_megabyte_of_anything_takes_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    start = time.process_time()
    for candidate in (text, "\\boxed{" + text, "<answer>" + text + "</answer>"):
        normalize_answer(final_answer(candidate) or "")
    assert time.process_time() - start < 5.0  # quadratic time would be minutes
