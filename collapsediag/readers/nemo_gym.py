"""NeMo-Gym rollouts: one row a rollout in the shape of OpenAI's Responses interface.

`responses_create_params.input` is the context, `response.output` a list of items: reasoning, messages, function calls
and their outputs. Items of the policy up to the next function output are one turn. Where the items carry
`prompt_token_ids` and `generation_token_ids` (training runs), those are the turn's token ids; elsewhere the output is
put together from the items, reasoning between think tags. The group is `_ng_task_index`, or rows of one input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import as_floats, as_group, as_ids, as_integer, as_list, as_name, as_number, as_object
from collapsediag.readers._messages import Message, as_messages, is_rebuilt, turns_from_messages
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row, kind, shown
from collapsediag.readers._source import Parsed, Source, prompt_digest
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

_REBUILT = "{n} outputs were put together from reasoning, text and tool calls: their syntax is a guess"


def from_nemo_gym(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of NeMo-Gym rollouts. Options: see ReadOptions."""
    return read_source(NemoGymSource, path, options)


class NemoGymSource(Source):
    """See the module."""

    name = "nemo_gym"
    title = "NeMo-Gym rollouts"
    aliases: ClassVar = {
        "request": ("responses_create_params",),
        "response": ("response",),
        "group": ("_ng_task_index",),
        "id": ("_ng_rollout_index",),
        "reward": ("reward",),
        "answer": ("extracted_answer",),
        "environment": ("task_name", "dataset", "domain"),
        "step": ("step",),
    }

    def parse(self, row: Row) -> Parsed:
        """One rollout."""
        request, response = self.value(row, "request", as_object), self.value(row, "response", as_object)
        if request is None or response is None:
            raise row.missing(
                "responses_create_params" if request is None else "response",
                "A NeMo-Gym row has 'responses_create_params' and 'response'.",
            )
        turns, rebuilt = _turns(row, request, response)
        if not turns:
            return Parsed(self.value(row, "step", as_integer), dropped={"no_output": 1})
        group = self.value(row, "group", as_group)
        notes = [_REBUILT] if rebuilt else []
        if group is None:
            notes.append("{n} rollouts have no _ng_task_index: grouped by identical input")
        rollout = Rollout(
            turns=turns,
            group=prompt_digest(turns[0]) if group is None else group,
            environment=self.value(row, "environment", as_name),
            reward=self.value(row, "reward", as_number),
            rewards=self._components(row),
            answer=self.value(row, "answer", as_name),
            id=self.value(row, "id", as_name),
            metadata=_metadata(row, request),
        )
        return Parsed(
            self.value(row, "step", as_integer),
            [rollout],
            notes=notes,
            batch=_batch(row, response),
            named_group=group is not None,
        )

    def _components(self, row: Row) -> dict[str, float | None]:
        """The verifier's own numbers beside the reward."""
        used = self.fields.used_keys()
        return {
            key: as_number(row, key, value)
            for key, value in row.data.items()
            if key not in used and not key.startswith("_ng_") and isinstance(value, (bool, int, float))
        }


def _batch(row: Row, response: Mapping[str, Any]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    if response.get("temperature") is not None:
        batch["temperature"] = as_number(row, "response.temperature", response["temperature"])
    if response.get("max_output_tokens") is not None:
        batch["max_output_tokens"] = as_integer(row, "response.max_output_tokens", response["max_output_tokens"])
    return batch


def _metadata(row: Row, request: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        key: value
        for key, value in row.data.items()
        if key not in ("responses_create_params", "response") and isinstance(value, str)
    }
    tools = [
        {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool}}
        for tool in request.get("tools") or ()
        if isinstance(tool, Mapping) and tool.get("type") == "function"
    ]
    return {**kept, "tools": tools} if tools else kept


class _Conversation:
    """Responses items gathered into chat messages: the policy's items in a row are one message."""

    def __init__(self, row: Row, where: str) -> None:
        self.row, self.where = row, where
        self.messages: list[Message] = []
        self.ids: list[Mapping[str, Any]] = []  # of each policy message: the item that carries its token ids, or {}
        self._open: Message | None = None

    def add(self, position: int, item: Any) -> None:
        """Take one item."""
        where = f"{self.where}[{position}]"
        if not isinstance(item, Mapping):
            raise self.row.error(f"field {where!r} must be an object, found {kind(item)} ({shown(item)}).")
        what = item.get("type") or "message"
        if what == "reasoning":
            parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
            self._policy().setdefault("reasoning_content", "")
            self._policy()["reasoning_content"] += self._text(where, parts)
        elif what == "function_call":
            call = {
                "id": item.get("call_id"),
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            calls = as_messages(self.row, where, [{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"]
            self._policy().setdefault("tool_calls", []).extend(calls)
        elif what == "function_call_output":
            self._other({"role": "tool", "tool_call_id": item.get("call_id"), "content": self._output(where, item)})
        elif what == "message":
            self._message(where, item)
        else:
            raise self.row.error(f"field {where!r} is an item of the unknown type {shown(what)}.")
        if item.get("generation_token_ids") is not None:
            self.ids[-1] = item
            self._open = None

    def _message(self, where: str, item: Mapping[str, Any]) -> None:
        role = "system" if item.get("role") == "developer" else item.get("role")
        if role == "assistant":
            message = self._policy()
            message["content"] += self._text(where, item.get("content"))
            return
        self._other(as_messages(self.row, where, [{"role": role, "content": item.get("content")}])[0])

    def _policy(self) -> Message:
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
            self.messages.append(self._open)
            self.ids.append({})
        return self._open

    def _other(self, message: Message) -> None:
        self._open = None
        self.messages.append(message)

    def _text(self, where: str, content: Any) -> str:
        return str(as_messages(self.row, where, [{"role": "assistant", "content": content}])[0]["content"])

    def _output(self, where: str, item: Mapping[str, Any]) -> str:
        return self._text(where, item.get("output"))


def _messages(row: Row, value: Any, where: str) -> _Conversation:
    conversation = _Conversation(row, where)
    items = [{"role": "user", "content": value}] if isinstance(value, str) else as_list(row, where, value)
    for position, item in enumerate(items):
        conversation.add(position, item)
    return conversation


def _turns(row: Row, request: Mapping[str, Any], response: Mapping[str, Any]) -> tuple[tuple[Turn, ...], bool]:
    """(turns, whether the text of one had to be put together)."""
    context = _messages(row, request.get("input"), "responses_create_params.input").messages
    if request.get("instructions"):
        context = [{"role": "system", "content": str(request["instructions"])}, *context]
    said = _messages(row, response.get("output"), "response.output")
    details = response.get("incomplete_details")
    cut = isinstance(details, Mapping) and details.get("reason") == "max_output_tokens"
    reason = "length" if cut else ("stop" if response.get("status") == "completed" else None)
    turns = turns_from_messages(context, said.messages, structured=True, finish_reason=reason)
    rebuilt = any(is_rebuilt(m) for m, item in zip(_spoken(said), said.ids, strict=True) if not item)
    return tuple(_with_ids(row, turn, item) for turn, item in zip(turns, said.ids, strict=True)), rebuilt


def _spoken(conversation: _Conversation) -> list[Message]:
    return [message for message in conversation.messages if message["role"] == "assistant"]


def _with_ids(row: Row, turn: Turn, item: Mapping[str, Any]) -> Turn:
    if not item:
        return turn
    ids: dict[str, Any] = {"output_ids": as_ids(row, "generation_token_ids", item["generation_token_ids"])}
    if item.get("prompt_token_ids") is not None:
        ids["context_ids"] = as_ids(row, "prompt_token_ids", item["prompt_token_ids"])
    if item.get("generation_log_probs") is not None:
        ids["logprobs"] = as_floats(row, "generation_log_probs", item["generation_log_probs"])
    return replace(turn, **ids)
