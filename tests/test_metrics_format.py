"""Every way to fail the tag format by hand, agreement with the span finder, callables, and linear time."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapsediag.errors import MetricError, SettingsError
from collapsediag.metrics.format import (
    FAILURES,
    CallableFormat,
    TagFormat,
    as_format,
    format_metrics,
    strip_end_of_turn,
)
from collapsediag.metrics.format_json import JsonFormat, ToolFormat
from collapsediag.metrics.format_regex import RegexBudgetError, RegexFormat
from collapsediag.spans import SpanStatus, find_reasoning

OPENED = "<|im_start|>assistant\n<think>\n"
NOT_OPENED = "<|im_start|>assistant\n"
CASES: list[tuple[str, str | None, str | None]] = [
    ("<think>a</think><answer>4</answer>", None, None),
    ("<think>a</think>\n\n<answer>4</answer>\n", NOT_OPENED, None),
    ("  <think>\na\n</think> <answer> 4 </answer><|im_end|>\n", None, None),
    ("a</think><answer>4</answer>", OPENED, None),
    ("a</think><answer>4</answer>", None, None),  # an unknown context: the closing tag shows that it was opened
    ("<think>\na</think><answer>4</answer>", OPENED, None),  # the policy repeats what the template wrote
    ("a</think><answer>4</answer>", NOT_OPENED, "no_think"),
    ("The answer is 4", None, "no_think"),
    ("", None, "no_think"),
    ("<answer>4</answer>", NOT_OPENED, "no_think"),
    ("<THINK>a</THINK><answer>4</answer>", None, "no_think"),
    ("<think>a <answer>4</answer>", None, "unclosed_think"),
    ("a <answer>4</answer>", OPENED, "unclosed_think"),
    ("<think>a</th><answer>4</answer>", None, "unclosed_think"),
    ("<think></think><answer>4</answer>", None, "empty_think"),
    ("\n \n</think><answer>4</answer>", OPENED, "empty_think"),
    ("Sure! <think>a</think><answer>4</answer>", None, "leading_text"),
    ("<think>a<think>b</think><answer>4</answer>", None, "repeated_think"),
    ("<think>a</think><think>b</think><answer>4</answer>", None, "repeated_think"),
    ("<think>a</think></think><answer>4</answer>", None, "repeated_think"),
    ("<think>a</think><answer>4</answer><think>b", None, "repeated_think"),
    ("<think>a</think>4", None, "no_answer"),
    ("<think><answer>4</answer></think>", None, "no_answer"),
    ("<think>a</think><answer>4", None, "unclosed_answer"),
    ("<think>a</think><answer>\n</answer>", None, "empty_answer"),
    ("<think>a</think>so <answer>4</answer>", None, "text_between"),
    ("<think>a</think><answer>4</answer><answer>5</answer>", None, "repeated_answer"),
    ("<think>a</think><answer>4<answer>5</answer>", None, "repeated_answer"),
    ("<think>a</think><answer>4</answer> Thanks!", None, "trailing_text"),
]


@pytest.mark.parametrize(("output", "context", "failure"), CASES)
def test_each_output_fails_in_its_own_way(output: str, context: str | None, failure: str | None) -> None:
    assert TagFormat().failures([output], [context]) == [failure]


def test_every_declared_failure_has_a_case() -> None:
    assert {failure for _, _, failure in CASES if failure} == set(TagFormat.failure_names)


def test_shares_add_up_to_one_and_ways_that_did_not_occur_are_zero() -> None:
    verdicts = TagFormat().failures([case[0] for case in CASES], [case[1] for case in CASES])
    values = format_metrics(verdicts, TagFormat.failure_names)
    shares = {name: value for name, value in values.items() if name.endswith("_fraction")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert values["format/n_turns"] == len(CASES)
    assert values["format/valid_fraction"] == 6 / len(CASES)
    assert values["format/unclosed_think_fraction"] == 3 / len(CASES)
    healthy = format_metrics([None], TagFormat.failure_names)
    assert set(healthy) == set(values)
    assert healthy["format/trailing_text_fraction"] == 0.0
    assert format_metrics([], TagFormat.failure_names) == {"format/n_turns": 0.0}


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "<|im_end|>"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), st.sampled_from([None, OPENED, NOT_OPENED, ""]))
def test_agrees_with_the_span_finder_and_with_a_regular_expression(output: str, context: str | None) -> None:
    (failure,) = TagFormat().failures([output], [context])
    status = find_reasoning(strip_end_of_turn(output), context=context).status
    assert (failure == "no_think") == (status is SpanStatus.ABSENT)
    assert (failure == "unclosed_think") == (status is SpanStatus.UNCLOSED)
    assert (failure == "empty_think") == (status is SpanStatus.EMPTY)
    text = strip_end_of_turn(output)
    if context == OPENED or (context is None and re.match(r"(?:(?!<think>).)*</think>", text, re.DOTALL)):
        text = "<think>" + re.sub(r"^(?:\s*<think>)+", "", text)
    text = re.sub(r"^\s*(?:<think>\s*)+<think>", "<think>", text)
    inner = r"(?:(?!</?think>).)*"
    body = r"(?:(?!</?think>|</?answer>).)*"
    strict = rf"\s*<think>(?=.*\S){inner}</think>\s*<answer>{body}</answer>\s*"
    match = re.fullmatch(strict, text, re.DOTALL)
    is_valid = bool(
        match
        and re.search(r"<think>(.*)</think>", text, re.DOTALL)[1].strip()  # type: ignore[index]
        and re.search(r"</think>\s*<answer>(.*)</answer>", text, re.DOTALL)[1].strip()  # type: ignore[index]
    )
    assert (failure is None) == is_valid


def test_other_tags_may_be_declared() -> None:
    agent = TagFormat(reasoning="reason", actions=("search", "answer"))
    outputs = ["<reason>a</reason><search>x</search>", "<reason>a</reason><answer>x</answer>"]
    assert agent.failures(outputs, [None, None]) == [None, None]
    both = "<reason>a</reason><search>x</search><answer>y</answer>"
    assert agent.failures([both, "<think>a</think>"], [None, None]) == ["repeated_answer", "no_think"]
    assert TagFormat(actions=()).failures(["<think>a</think> anything <b>"], [None]) == [None]
    assert TagFormat(actions="move").failures(["<think>a</think><move>up</move>"], [None]) == [None]  # one tag as text
    with pytest.raises(SettingsError, match="without brackets"):
        TagFormat(reasoning="<think>")


def test_callables_name_their_failures() -> None:
    judge: Callable[[str], Any] = lambda text: {"a": True, "b": False, "c": "too_rude"}.get(text)  # noqa: E731
    form = CallableFormat(judge)
    verdicts = form.failures(["a", "b", "c"], [None] * 3)
    assert verdicts == [None, "invalid", "too_rude"]
    values = format_metrics(verdicts, form.failure_names)
    assert values["format/invalid_fraction"] == values["format/custom/too_rude_fraction"] == 1 / 3
    declared = CallableFormat(judge, names=("too_rude", "too_long"))
    assert format_metrics([None], declared.failure_names)["format/custom/too_long_fraction"] == 0.0
    with pytest.raises(MetricError, match="returned None for 'd'"):
        form.failures(["d"], [None])
    with pytest.raises(MetricError, match="returned 'Too rude'"):
        CallableFormat(lambda _: "Too rude").failures(["d"], [None])
    with pytest.raises(MetricError, match="raised ZeroDivisionError"):
        CallableFormat(lambda _: 1 / 0).failures(["d"], [None])  # type: ignore[arg-type,return-value]


def test_what_may_be_declared_as_a_format() -> None:
    assert as_format(None) == TagFormat()
    assert as_format(TagFormat(actions=())) == TagFormat(actions=())
    assert isinstance(as_format(re.compile("a")), RegexFormat)
    assert isinstance(as_format(str.isdigit), CallableFormat)
    assert as_format("tags:think") == TagFormat(actions=())
    assert as_format("tags:think,search,answer") == TagFormat(actions=("search", "answer"))
    assert as_format("regex:.*up").failures(["go up", "up it goes"], [None, None]) == [None, "no_match"]
    for text in ("tags", "tags:", "regex:"):
        with pytest.raises(SettingsError, match="is no form of outputs: write tags:REASONING"):
            as_format(text)
    for wrong in ("<think>", "json:{}", 3, TagFormat, {"type": "object"}):
        with pytest.raises(SettingsError, match="format is"):
            as_format(wrong)


@pytest.mark.parametrize("output", ["", " ", "a", "a </s>", "</s><|im_end|></s>", "<eos>a", "<|im_end|"])
def test_end_of_turn_tokens_are_stripped_at_the_end_only(output: str) -> None:
    expected = re.sub(r"(?:\s|</s>|<\|im_end\|>)+$", "", output)
    assert strip_end_of_turn(output) == expected


# -- regular expressions ---------------------------------------------------------------------------------------------


def test_regex_verdicts_equal_those_of_re() -> None:
    outputs = ["<answer>4</answer>", "<answer>4</answer> x", "", "\ud800 <answer>\u00e9\n</answer>", "4\n<|im_end|>"]
    for pattern in (r"<answer>.*</answer>", re.compile(r"<ANSWER>.*</ANSWER>", re.IGNORECASE | re.DOTALL), r"\d"):
        compiled = re.compile(pattern)
        texts = [strip_end_of_turn(output) for output in outputs]
        full = [None if compiled.fullmatch(text) else "no_match" for text in texts]
        anywhere = [None if compiled.search(text) else "no_match" for text in texts]
        assert RegexFormat(pattern).failures(outputs, [None] * 5) == full
        assert RegexFormat(pattern, search=True).failures(outputs, [None] * 5) == anywhere
    assert RegexFormat("a").failures([], []) == []


def test_a_catastrophic_pattern_times_out_on_the_output_that_attacks_it_only() -> None:
    form = RegexFormat(r"(a+)+b", seconds=0.1)
    assert form.failures(["aab", "a" * 64, "ab", "x"], [None] * 4) == [None, "regex_timeout", None, "no_match"]


def test_the_usual_pattern_times_out_on_many_tags_instead_of_hanging() -> None:
    form = RegexFormat(re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL), seconds=0.1)
    attack = "<think>" + "</think><answer>" * 60_000
    assert form.failures([attack, "<think>a</think> <answer>b</answer>"], [None] * 2) == ["regex_timeout", None]


def test_a_batch_of_attacks_ends_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapsediag.metrics.format_regex.BUDGET_SECONDS", 1)
    start = time.monotonic()
    with pytest.raises(RegexBudgetError, match="backtracks"):
        RegexFormat(r"(a+)+b", seconds=0.5).failures(["a" * 64] * 1000, [None] * 1000)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("pattern", ["(", 3, rb"bytes", "a{2,1}"])
def test_what_is_no_pattern_is_refused(pattern: Any) -> None:
    with pytest.raises(SettingsError, match=r"is (?:not a regular expression|a pattern for bytes)"):
        RegexFormat(pattern)
    with pytest.raises(SettingsError, match="seconds"):
        RegexFormat("a", seconds=0)


# -- JSON and tools --------------------------------------------------------------------------------------------------

MOVE = {
    "type": "object",
    "required": ["move"],
    "properties": {
        "move": {"enum": ["up", "down"]},
        "steps": {"type": "integer", "minimum": 1, "maximum": 3},
        "path": {"type": "array", "items": {"type": ["number", "null"]}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 3},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("output", "failure"),
    [
        ('{"move": "up"}', None),
        ('<think>{"a"</think> {"move": "down", "steps": 3.0, "path": [1.5, null], "note": "abc"}<|im_end|>', None),
        ("", "no_json"),
        ("<think>hm</think>", "no_json"),
        ('{"move": "up"', "malformed_json"),
        ('{"move": "up"} and so on', "malformed_json"),
        ('{"move": NaN}', "malformed_json"),
        ("[" * 100_000, "malformed_json"),
        ("1" * 10_000, "malformed_json"),
        ("{}", "schema_mismatch"),
        ('["up"]', "schema_mismatch"),
        ('{"move": "left"}', "schema_mismatch"),
        ('{"move": "up", "steps": 0}', "schema_mismatch"),
        ('{"move": "up", "steps": 1.5}', "schema_mismatch"),
        ('{"move": "up", "steps": true}', "schema_mismatch"),
        ('{"move": "up", "path": [1, 2, 3]}', "schema_mismatch"),
        ('{"move": "up", "path": ["1"]}', "schema_mismatch"),
        ('{"move": "up", "note": "abcd"}', "schema_mismatch"),
        ('{"move": "up", "extra": 1}', "schema_mismatch"),
    ],
)
def test_json_of_a_declared_shape(output: str, failure: str | None) -> None:
    assert JsonFormat(MOVE).failures([output], [None]) == [failure]


def test_json_in_a_tag_and_the_rest_of_the_schema_language() -> None:
    tagged = JsonFormat({"anyOf": [{"const": 1}, {"type": "boolean"}, {"type": "string", "minLength": 2}]}, tag="out")
    outputs = ["<out>1</out>", "<out>true</out> <out>2</out>", 'x <out>"ab"', "1", "<out></out>", '<out>"a"</out>']
    expected = [None, "schema_mismatch", None, "no_json", "no_json", "schema_mismatch"]
    assert tagged.failures(outputs, [None] * 6) == expected


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"pattern": "a+"}, "schema uses pattern, which this format does not check"),
        ({"properties": {"a": {"oneOf": []}}}, r"schema\.a uses oneOf"),
        ({"items": {"type": "text"}}, r"schema\.items has the type 'text'"),
        ("object", "a schema is a dict"),
    ],
)
def test_a_schema_that_would_not_be_checked_whole_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        JsonFormat(schema)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("output", "failure"),
    [
        (call("add", a=1), None),
        ("<think>" + call("wrong") + "</think>" + call("add", a=1) + call("add", a=2), None),
        (call("add", a=1) + call("add", a="1"), "schema_mismatch"),
        (call("subtract", a=1), "unknown_tool"),
        ("<tool_call>add(1)</tool_call>", "malformed_json"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "malformed_json"),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "schema_mismatch"),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', "schema_mismatch"),
        ("I add 1.", "no_json"),
    ],
)
def test_tool_calls_fit_the_declared_tools(output: str, failure: str | None) -> None:
    parameters = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    by_name = ToolFormat({"add": parameters})
    as_openai = ToolFormat([{"type": "function", "function": {"name": "add", "parameters": parameters}}])
    assert by_name.failures([output], [None]) == as_openai.failures([output], [None]) == [failure]
    if failure == "no_json":
        assert ToolFormat({"add": parameters}, required=False).failures([output], [None]) == [None]


def test_a_tool_definition_without_a_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="has no name"):
        ToolFormat([{"type": "function", "function": {}}])


def test_all_failure_names_are_known_to_the_registry() -> None:
    names = {name for form in (TagFormat, RegexFormat, JsonFormat, ToolFormat) for name in form.failure_names}
    assert names | {"invalid"} == set(FAILURES)


# -- adversarial text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unit",
    ["<think>", "</think>", "<answer>", "</answer>", "</think><answer>", "<", " ", "\n", "{", "[", '{"a":', "</s>"],
)
def test_a_megabyte_of_anything_takes_linear_time(unit: str) -> None:
    text = "<think>a" + unit * (1_000_000 // len(unit))
    start = time.process_time()
    for form in (TagFormat(), JsonFormat({}), JsonFormat({}, tag="answer"), ToolFormat({})):
        form.failures([text], [None])
    assert time.process_time() - start < 5.0  # quadratic time would be minutes


def test_random_tag_soup_takes_linear_time() -> None:
    rng = random.Random(1)
    text = "".join(rng.choice(PIECES) for _ in range(200_000))
    start = time.process_time()
    TagFormat().failures([text], [text])
    assert time.process_time() - start < 5.0
