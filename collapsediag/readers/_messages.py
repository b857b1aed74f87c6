"""Chat messages into turns: each message of the policy is one turn, and what answers it is its observation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from collapsediag.readers._fields import as_list
from collapsediag.readers._rows import Row, kind, shown
from collapsediag.rollouts import ToolCall, Turn

Message = dict[str, Any]

POLICY_ROLES = frozenset({"assistant", "agent", "model"})


def as_messages(row: Row, key: str, value: Any) -> list[Message]:
    """A list of chat messages in one shape: role, content as text, reasoning_content and tool_calls where they are.

    Content parts (text, thinking, tool calls) are sorted into those fields; null fields are left out, since parquet
    writes every field into every message.
    """
    messages = []
    for position, item in enumerate(as_list(row, key, value)):
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise row.error(
                f"field {key!r} must be a list of chat messages (objects with 'role' and 'content'), found "
                f"{kind(item)} ({shown(item)}) at position {position}."
            )
        messages.append(_message(row, f"{key}[{position}]", item))
    return messages


def _message(row: Row, key: str, item: Mapping[str, Any]) -> Message:
    made: Message = {name: value for name, value in item.items() if value is not None}
    content = made.get("content", "")
    if isinstance(content, list):
        made.update(_content_parts(row, key, content))
    elif isinstance(content, str):
        made["content"] = content
    else:
        raise row.error(f"field '{key}.content' must be text or a list of parts, found {kind(content)}.")
    reasoning = made.pop("reasoning", None) or made.pop("thinking", None)
    if isinstance(reasoning, str) and "reasoning_content" not in made:
        made["reasoning_content"] = reasoning
    calls = item.get("tool_calls") or made.pop("_calls", None)
    made.pop("tool_calls", None)
    made.pop("_calls", None)
    if calls:
        made["tool_calls"] = [
            _call(row, f"{key}.tool_calls", call) for call in as_list(row, f"{key}.tool_calls", calls)
        ]
    return made


def _content_parts(row: Row, key: str, parts: Sequence[Any]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("tool_call"), Mapping):
            calls.append(part["tool_call"])
        elif isinstance(part, Mapping) and isinstance(part.get("thinking"), str):
            thoughts.append(part["thinking"])
        elif isinstance(part, Mapping) and isinstance(part.get("text", part.get("refusal")), str):
            texts.append(part.get("text", part.get("refusal")))
        else:
            raise row.error(f"field '{key}.content' holds a part that is not text: {shown(part)}. Only text is scored.")
    made: Message = {"content": "".join(texts)}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["_calls"] = calls
    return made


def _call(row: Row, key: str, call: Any) -> Message:
    """One tool call as {"type", "id"?, "function": {"name", "arguments"}}; arguments an object where they parse."""
    if isinstance(call, str):  # older verifiers versions wrote each call as JSON text
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return {"type": "function", "function": {"name": "", "arguments": call}}
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise row.error(f"field {key!r} must hold tool calls as objects, found {shown(call)}.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        except (ValueError, RecursionError):
            pass  # stays text, and counts as malformed
    if isinstance(arguments, Mapping):
        arguments = {name: value for name, value in arguments.items() if value is not None}
    made: Message = {"type": "function", "function": {"name": function.get("name") or "", "arguments": arguments or {}}}
    if call.get("id"):
        made["id"] = call["id"]
    return made


def call_text(call: Message) -> str:
    """A structured call written out in the Hermes style, the commonest one; the real syntax is not in the file."""
    function = call["function"]
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {written}}}\n</tool_call>'


def output_text(message: Message) -> str:
    """What the policy wrote, put together again: reasoning between think tags, then the text, then its calls."""
    reasoning = message.get("reasoning_content")
    parts = [f"<think>{reasoning}</think>"] if reasoning else []
    parts.append(message["content"])
    calls = "\n".join(call_text(call) for call in message.get("tool_calls", ()))
    if calls:
        parts.append(("\n" if "".join(parts) else "") + calls)
    return "".join(parts)


def written_out(message: Mapping[str, Any]) -> Message:
    """The message with its tool calls as part of its text, for a chat template that knows no tool calls."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = "\n".join(call_text(call) for call in message["tool_calls"])
    content = message.get("content") or ""
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{content}\n{calls}" if content else calls}


def is_rebuilt(message: Message) -> bool:
    """Whether output_text had to add syntax that the file does not show."""
    return bool(message.get("reasoning_content") or message.get("tool_calls"))


def _results(calls: Sequence[Message], answers: Sequence[Message]) -> list[str | None]:
    """What each call returned: by call id where both sides carry ids, else in order."""
    tools = [message for message in answers if message["role"] in ("tool", "function")]
    by_id = {message["tool_call_id"]: message["content"] for message in tools if message.get("tool_call_id")}
    if by_id and all(call.get("id") for call in calls):
        return [by_id.get(call["id"]) for call in calls]
    contents: list[str | None] = [message["content"] for message in tools[: len(calls)]]
    return contents + [None] * (len(calls) - len(contents))


def tool_calls(message: Message, answers: Sequence[Message] = ()) -> tuple[ToolCall, ...]:
    """The message's structured calls with what they returned."""
    calls = message.get("tool_calls", ())
    made = []
    for call, result in zip(calls, _results(calls, answers), strict=True):
        arguments = call["function"]["arguments"]
        malformed = isinstance(arguments, str) or not call["function"]["name"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, sort_keys=True, ensure_ascii=False)
        made.append(ToolCall(name=call["function"]["name"], arguments=arguments, result=result, malformed=malformed))
    return tuple(made)


def turns_from_messages(
    context: Sequence[Message], rest: Sequence[Message], *, structured: bool = False, **last_turn: Any
) -> tuple[Turn, ...]:
    """One turn for each policy message of `rest`; the context of each is everything before it.

    structured: the source states every call, so that a message without one made none. Calls are None (to be parsed
    out of the text) unless that, or some message of the conversation, says so.
    last_turn: fields of the last turn (finish_reason).
    """
    places = [i for i, message in enumerate(rest) if message["role"] in POLICY_ROLES]
    structured = structured or any(rest[i].get("tool_calls") for i in places)
    turns = []
    for place, following in zip(places, [*places[1:], len(rest)][: len(places)], strict=True):
        answers = rest[place + 1 : following]
        turns.append(
            Turn(
                context_messages=(*context, *rest[:place]),
                output=output_text(rest[place]),
                observation="\n".join(message["content"] for message in answers) if answers else None,
                tool_calls=tool_calls(rest[place], answers) if structured else None,
                **(last_turn if place == places[-1] else {}),
            )
        )
    return tuple(turns)
