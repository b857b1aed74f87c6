"""Outputs that must hold JSON of a declared shape, or calls of declared tools.

The schema language is the part of JSON Schema that tool definitions use; a keyword outside it is refused when the
format is made, because a rule that is silently not checked would report garbage as valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collapsediag.errors import SettingsError
from collapsediag.metrics.format import strip_end_of_turn

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_CHECKED = {"type", "enum", "const", "required", "properties", "additionalProperties", "items", "minItems", "maxItems"}
_CHECKED |= {"minLength", "maxLength", "minimum", "maximum", "anyOf"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "format", "strict", "deprecated"}


@dataclass(frozen=True)
class JsonFormat:
    """Outputs that are, or hold in a tag, JSON that fits a schema.

    schema: JSON Schema of types, enums, required, properties, items and limits; {} takes any JSON.
    tag: where the JSON stands: every `<tag>...</tag>` block must fit, and there must be one. None: the whole output,
        behind the reasoning where there is one.
    reasoning: tag of a reasoning block to skip; JSON inside it is thought, not output.

    >>> JsonFormat({"type": "object", "required": ["move"]}).failures(['{"move": "up"}', '{"move"', "{}"], [None] * 3)
    [None, 'malformed_json', 'schema_mismatch']
    """

    schema: Mapping[str, Any]
    tag: str | None = None
    reasoning: str = "think"

    failure_names = ("no_json", "malformed_json", "schema_mismatch")

    def __post_init__(self) -> None:
        _check_schema(self.schema, "schema")

    def failures(self, outputs: Sequence[str], contexts: Sequence[str | None]) -> list[str | None]:
        """The failure of each output, None for a valid one."""
        return [self._failure(output) for output in outputs]

    def _failure(self, output: str) -> str | None:
        for block in _blocks(output, self.tag, self.reasoning) or [""]:
            failure = self._block_failure(block)
            if failure is not None:
                return failure
        return None

    def _block_failure(self, block: str) -> str | None:
        if not block.strip():
            return "no_json"
        try:
            value = json.loads(block, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return "malformed_json"
        return None if _fits(value, self.schema) else "schema_mismatch"


@dataclass(frozen=True)
class ToolFormat:
    """Outputs whose tool calls parse, name a declared tool, and give arguments that fit its schema.

    tools: name -> JSON Schema of its arguments, or a list of OpenAI tool definitions
        (`{"type": "function", "function": {"name", "parameters"}}`).
    tag: calls stand in `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen).
    required: an output without any call fails as `no_json`; set False where answering without a tool is allowed.

    >>> search = {"search": {"type": "object", "required": ["query"]}}
    >>> call = '<tool_call>{"name": "%s", "arguments": {"query": "x"}}</tool_call>'
    >>> ToolFormat(search).failures([call % "search", call % "find", "hm"], [None] * 3)
    [None, 'unknown_tool', 'no_json']
    """

    tools: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
    tag: str = "tool_call"
    reasoning: str = "think"
    required: bool = True

    failure_names = ("no_json", "malformed_json", "schema_mismatch", "unknown_tool")

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", _tool_schemas(self.tools))
        for name, schema in _tool_schemas(self.tools).items():
            _check_schema(schema, f"tools[{name!r}]")

    def failures(self, outputs: Sequence[str], contexts: Sequence[str | None]) -> list[str | None]:
        """The failure of each output, None for a valid one."""
        tools = _tool_schemas(self.tools)
        return [self._failure(output, tools) for output in outputs]

    def _failure(self, output: str, tools: Mapping[str, Mapping[str, Any]]) -> str | None:
        blocks = _blocks(output, self.tag, self.reasoning)
        if not blocks:
            return "no_json" if self.required else None
        for block in blocks:
            failure = _CALL._block_failure(block)
            if failure is not None:
                return failure
            call = json.loads(block)
            if call["name"] not in tools:
                return "unknown_tool"
            if not _fits(call.get("arguments", {}), tools[call["name"]]):
                return "schema_mismatch"
        return None


def _tool_schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    if isinstance(tools, Mapping):
        return dict(tools)
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        definition = tool.get("function", tool)
        if "name" not in definition:
            raise SettingsError(f"a tool definition has no name: {tool!r:.100}. Expected OpenAI's function format.")
        schemas[definition["name"]] = definition.get("parameters", {})
    return schemas


def _blocks(output: str, tag: str | None, reasoning: str) -> list[str]:
    """The texts that should be JSON: what stands behind the last closing reasoning tag, or the tag blocks in it.

    An opening tag that is never closed gives the text up to the end: a call that was cut off is malformed, not absent.
    """
    text = strip_end_of_turn(output)
    closing = text.rfind(f"</{reasoning}>")
    text = text[closing + len(reasoning) + 3 :] if closing >= 0 else text
    if tag is None:
        return [text]
    return [part.split(f"</{tag}>", 1)[0] for part in text.split(f"<{tag}>")[1:]]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise SettingsError(f"{where} is {schema!r:.60}; a schema is a dict such as {{'type': 'object'}}.")
    unknown = sorted(set(schema) - _CHECKED - _ANNOTATIONS)
    if unknown:
        raise SettingsError(
            f"{where} uses {', '.join(unknown)}, which this format does not check. Leave it out, or pass a callable "
            f"that calls a full validator. Checked here: {', '.join(sorted(_CHECKED))}."
        )
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _TYPES:
            raise SettingsError(f"{where} has the type {kind!r}; JSON knows {', '.join(_TYPES)}.")
    for key, inner in schema.get("properties", {}).items():
        _check_schema(inner, f"{where}.{key}")
    for i, inner in enumerate(schema.get("anyOf", [])):
        _check_schema(inner, f"{where}.anyOf[{i}]")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema and not isinstance(schema[keyword], bool):
            _check_schema(schema[keyword], f"{where}.{keyword}")


def _fits(value: Any, schema: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    kinds = schema.get("type")
    if kinds is not None and not any(_is_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "anyOf" in schema and not any(_fits(value, option) for option in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        return _object_fits(value, schema)
    if isinstance(value, list):
        return _in_range(len(value), schema, "minItems", "maxItems") and all(
            _fits(item, schema.get("items", True)) for item in value
        )
    if isinstance(value, str):
        return _in_range(len(value), schema, "minLength", "maxLength")
    return isinstance(value, bool) or value is None or _in_range(value, schema, "minimum", "maximum")


def _object_fits(value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    if any(key not in value for key in schema.get("required", ())):
        return False
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    return all(_fits(item, properties.get(key, other)) for key, item in value.items())


def _is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    # JSON Schema: 2.0 is an integer.
    return isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _same(value: Any, option: Any) -> bool:
    return isinstance(value, bool) == isinstance(option, bool) and bool(value == option)


def _in_range(number: float, schema: Mapping[str, Any], low: str, high: str) -> bool:
    return not (number < schema.get(low, number)) and not (number > schema.get(high, number))


# What stands in a <tool_call> block, whatever the tool.
_CALL = JsonFormat(
    {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
    }
)
