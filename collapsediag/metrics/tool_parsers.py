"""Tool calls and tool results, out of the ways in which people write them.

Four syntaxes are known: OpenAI messages (`tool_calls`), OpenAI Responses items as NeMo-Gym stores them
(`function_call`, `function_call_output`), Hermes and Qwen text (`<tool_call>{"name": ..., "arguments": ...}
</tool_call>`, Qwen3-Coder's `<function=...>` inside it too), and Search-R1 text (`<search>...</search>`). Results in
text stand in `<information>` or `<tool_response>`.

A call that does not parse under its own syntax is kept and marked `malformed`: a policy that forgets how to call its
tools is a finding, not a line to skip.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from collapsediag.rollouts import ToolCall

_CALL_TAGS = ("tool_call", "search")
_OPENING = re.compile(r"<(tool_call|search|information|tool_response)>")
# No name holds "<": else each of a thousand unclosed tags would be read to the end of the text.
_QWEN_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# How tools and environments say "that did not work" in plain text. Only at the start of the result: a search result
# may well be an article about errors.
_ERROR_TEXT = re.compile(
    r"\s*(?:\w*(?:error|exception)\s*(?::|executing\b|calling\b|while\b|when\b|during\b|occurred\b)"
    r"|traceback \(most recent call last\)"
    r"|(?:my previous |the |your )?(?:action|tool call|function call|arguments?) (?:is|are|was|were) invalid\b"
    r"|invalid (?:tool|action|function|arguments?|json)\b"
    r"|\{\s*['\"]error['\"]\s*:(?!\s*(?:None|null|false|''|\"\")))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Segment:
    """A stretch of a turn's output: what the policy wrote, a call within it, or a result pasted in between.

    kind: "text" (plain words of the policy), "call" (also the policy's words, tags left out), or "result".
    call: the parsed call of a "call" segment.
    """

    kind: Literal["text", "call", "result"]
    text: str
    call: ToolCall | None = None


def canonical_arguments(arguments: object) -> tuple[str, bool]:
    """Arguments as JSON text with sorted keys, and whether they parse: a JSON object, or nothing at all.

    >>> canonical_arguments('{"b": 1, "a": 2}')
    ('{"a":2,"b":1}', True)
    >>> canonical_arguments('{"b": 1')
    ('{"b": 1', False)
    """
    value = arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        value = {}
    elif isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments, False
    if not isinstance(value, Mapping):
        return str(arguments), False
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")), True
    except (TypeError, ValueError):
        return str(arguments), False


def make_call(name: object, arguments: object, result: str | None = None, error: bool | None = None) -> ToolCall:
    """A ToolCall from the name and arguments of any source; malformed where the name is no text or they do not parse.

    An error that the source does not state is read from the result by `result_is_error`.
    """
    text, parsed = canonical_arguments(arguments)
    named = isinstance(name, str) and bool(name.strip())
    if error is None and result is not None:
        error = result_is_error(result)
    return ToolCall(
        name=str(name).strip() if named else "",
        arguments=text,
        result=result,
        error=error,
        malformed=not (named and parsed),
    )


def calls_from_message(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Calls of one OpenAI-style assistant message: `tool_calls`, the older `function_call`, or content parts.

    >>> calls_from_message({"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]})[0].arguments
    '{"a":1}'
    """
    entries = list(message.get("tool_calls") or ())
    if message.get("function_call"):
        entries.append(message["function_call"])
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        entries += [p.get("tool_call", p) for p in content if isinstance(p, Mapping) and p.get("type") == "tool_call"]
    calls = []
    for entry in entries:
        inner = entry.get("function", entry) if isinstance(entry, Mapping) else {}
        inner = inner if isinstance(inner, Mapping) else {}
        calls.append(make_call(inner.get("name"), inner.get("arguments", "") if inner else str(entry)))
    return tuple(calls)


def calls_from_response_items(items: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """Calls among OpenAI Responses items, each with the result that its `call_id` names.

    >>> items = [{"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c1"},
    ...          {"type": "function_call_output", "call_id": "c1", "output": "3"}]
    >>> calls_from_response_items(items)[0].result
    '3'
    """
    results = {item.get("call_id"): item.get("output") for item in items if item.get("type") == "function_call_output"}
    calls = []
    for item in items:
        if item.get("type") == "function_call":
            result = results.get(item.get("call_id"))
            calls.append(make_call(item.get("name"), item.get("arguments"), None if result is None else str(result)))
    return tuple(calls)


def _tool_call_block(text: str) -> ToolCall:
    """The call inside `<tool_call>`. JSON decides whether it parses; a missing closing tag alone is not held against
    it, as in the parsers of the inference engines, because the end-of-turn token often stands in its place.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        function = _QWEN_FUNCTION.search(text)
        if function:
            # Behind the last closing tag nothing can match, and each opening one would look for it in vain.
            closed = function[2][: function[2].rfind("</parameter>") + len("</parameter>")]
            return make_call(function[1], dict(_QWEN_PARAMETER.findall(closed)))
        return ToolCall(name="", arguments=text.strip(), malformed=True)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(name="", arguments=text.strip(), malformed=True)
    return make_call(value["name"], value.get("arguments", value.get("parameters")))


def _search_block(text: str, closed: bool) -> ToolCall:
    """The call inside `<search>`: any text is a query, but the closing tag must be there: it triggers the search."""
    query = " ".join(text.split())
    return (
        make_call("search", {"query": query})
        if query and closed
        else ToolCall(name="search", arguments=query, malformed=True)
    )


def split_output(text: str) -> tuple[Segment, ...]:
    """A turn's output cut into the policy's words, its calls, and results pasted into it. Linear in its length.

    Calls count wherever they stand, inside `<think>` too, because the executors (veRL's and Search-R1's regular
    expressions) run them there. A call that is not closed before the next tag ends there.

    >>> [s.kind for s in split_output("I look. <search>x</search><information>y</information> So y.")]
    ['text', 'call', 'result', 'text']
    """
    segments: list[Segment] = []
    closings: dict[str, int] = {}
    at = 0
    opening = _OPENING.search(text)
    while opening:
        tag, start = opening[1], opening.end()
        if text[at : opening.start()].strip():
            segments.append(Segment("text", text[at : opening.start()]))
        following = _OPENING.search(text, start)
        if closings.get(tag, -1) < start:  # remembered, so that a thousand unclosed tags do not each scan to the end
            found = text.find(f"</{tag}>", start)
            closings[tag] = found if found >= 0 else len(text)
        end = closings[tag]
        is_call = tag in _CALL_TAGS
        closed = end < len(text) and not (is_call and following and following.start() < end)
        if not closed:
            end = following.start() if following else len(text)
        inside = text[start:end]
        if is_call:
            call = _tool_call_block(inside) if tag == "tool_call" else _search_block(inside, closed)
            segments.append(Segment("call", inside, call))
        else:
            segments.append(Segment("result", inside))
        at = end + len(f"</{tag}>") if closed else end
        opening = _OPENING.search(text, at)
    if text[at:].strip():
        segments.append(Segment("text", text[at:]))
    return tuple(segments)


def result_is_error(text: str) -> bool:
    """Whether a tool's answer says that the call failed: a true `error` or `is_error` key, a status "error" or
    "failed", or words such as `TypeError:`, `Traceback (most recent call last)`, `My previous action is invalid` at its
    start. An empty result is not an error.

    >>> result_is_error('{"error": "no such city"}'), result_is_error("Error analysis is a field of statistics.")
    (True, False)
    """
    stripped = text.lstrip()
    if stripped.startswith("{"):
        try:
            value = json.loads(stripped)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            flags = (value.get(key) for key in ("error", "errors", "is_error", "isError"))
            return any(bool(flag) for flag in flags) or value.get("status") in ("error", "failed")
    return _ERROR_TEXT.match(stripped) is not None
