"""The turns of one row of the generic schema: from token ids, turns, messages or text, whichever says most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collapsediag.readers._fields import Fields, as_boolean, as_floats, as_ids, as_list, as_object, as_text
from collapsediag.readers._messages import POLICY_ROLES, Message, as_messages, tool_calls, turns_from_messages
from collapsediag.readers._options import ReadOptions
from collapsediag.readers._questions import WRAPPED, is_wrapped, question_context
from collapsediag.readers._rows import Row, kind
from collapsediag.rollouts import Rollout, Turn

TURN_ALIASES: Mapping[str, Sequence[str]] = {
    "prompt": ("prompt", "context", "input"),
    "question": ("question", "query", "problem", "instruction"),
    "system": ("system", "system_prompt"),
    "messages": ("messages", "context_messages", "conversation"),
    "prompt_ids": ("prompt_ids", "context_ids", "prompt_token_ids", "input_token_ids"),
    "completion": ("completion", "output", "response", "generation"),
    "completion_ids": ("completion_ids", "output_ids", "response_ids", "completion_token_ids", "response_token_ids"),
    "token_ids": ("token_ids", "tokens"),
    "model_mask": ("model_mask", "response_mask", "loss_mask", "tool_mask", "env_mask"),
    "turns": ("turns",),
    "logprobs": ("logprobs", "completion_logprobs", "sampling_logprobs", "rollout_log_probs"),
    "entropies": ("entropies",),
    "finish_reason": ("finish_reason", "stop_reason"),
    "truncated": ("truncated", "is_truncated"),
    "tool_calls": ("tool_calls",),
    "observation": ("observation", "env_response", "state"),
}


class _Record:
    """A row, or one object of its `turns`, looked up under our names."""

    def __init__(self, row: Row, fields: Fields, data: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        self.row, self.fields, self.data, self.prefix = row, fields, data, prefix

    def get(self, name: str, convert: Any) -> Any:
        found = self.fields.find(self.row, name, self.data)
        return None if found is None else convert(self.row, self.prefix + found[0], found[1])

    def raw(self, name: str) -> tuple[str, Any] | None:
        found = self.fields.find(self.row, name, self.data)
        return None if found is None else (self.prefix + found[0], found[1])

    def per_token(self) -> dict[str, Any]:
        """Log-probabilities, entropies and how the turn ended."""
        reason = self.get("finish_reason", as_text)
        if reason is None:
            cut = self.get("truncated", as_boolean)
            reason = None if cut is None else ("length" if cut else "stop")
        values = {
            "logprobs": self.get("logprobs", as_floats),
            "entropies": self.get("entropies", as_floats),
            "finish_reason": reason,
        }
        return {name: value for name, value in values.items() if value is not None}

    def context(self) -> dict[str, Any]:
        """What the policy saw before the turn, in every form that is given."""
        made: dict[str, Any] = {"context_ids": self.get("prompt_ids", as_ids)}
        prompt = self.raw("prompt")
        if prompt is not None and isinstance(prompt[1], list):
            made["context_messages"] = tuple(as_messages(self.row, *prompt))
        elif prompt is not None:
            made["context"] = as_text(self.row, *prompt)
        return {name: value for name, value in made.items() if value is not None}


def turns_of(row: Row, fields: Fields, options: ReadOptions) -> tuple[tuple[Turn, ...], list[str]]:
    """(turns, notes) of a row."""
    record = _Record(row, fields)
    if record.raw("turns") is not None:
        return _from_turns(record), []
    if record.raw("token_ids") is not None:
        return _from_flat(record, record.get("token_ids", as_ids), record.get("model_mask", as_ids)), []
    completion = record.raw("completion")
    if completion is None and record.raw("completion_ids") is None:
        return _from_conversation(record), []
    context = record.context()
    if not context and record.raw("messages") is not None:
        context = {"context_messages": tuple(record.get("messages", as_messages))}
    if not context and record.raw("question") is not None:
        context = question_context(row, fields, options)
    notes = [WRAPPED] if is_wrapped(context) else []
    if completion is not None and isinstance(completion[1], list):
        return _from_messages(record, context, as_messages(row, *completion)), notes
    return _single(record, context, completion), notes


def _single(record: _Record, context: Mapping[str, Any], completion: tuple[str, Any] | None) -> tuple[Turn, ...]:
    """One turn of text, ids, or both; several where a mask over the completion's ids says so."""
    ids = record.get("completion_ids", as_ids)
    mask = record.get("model_mask", as_ids)
    if ids is not None and mask is not None and not np.all(mask):
        return _masked_completion(record, context, ids, mask)
    output = None if completion is None else as_text(record.row, *completion)
    extra: dict[str, Any] = {"observation": record.get("observation", as_text)}
    calls = record.raw("tool_calls")
    if calls is not None:
        message = as_messages(record.row, "tool_calls", [{"role": "assistant", "tool_calls": calls[1]}])[0]
        extra["tool_calls"] = tool_calls(message)
    return (Turn(output=output, output_ids=ids, **context, **record.per_token(), **extra),)


def _masked_completion(record: _Record, context: Mapping[str, Any], ids: Any, mask: Any) -> tuple[Turn, ...]:
    prompt = context.get("context_ids")
    if prompt is None:
        raise record.row.error(
            "a mask over 'completion_ids' needs 'prompt_ids' too, to make contexts of the later turns."
        )
    if mask.size != ids.size:
        raise record.row.error(
            f"the mask has {mask.size} entries but 'completion_ids' has {ids.size}; one each is needed."
        )
    return _from_flat(record, np.concatenate([prompt, ids]), np.concatenate([np.zeros_like(prompt), mask]), prompt.size)


def _from_flat(record: _Record, ids: Any, mask: Any, shift: int = 0) -> tuple[Turn, ...]:
    """Turns cut out of one flat trajectory by its mask. shift: prompt tokens that per-token values do not cover."""
    if mask is None:
        raise record.row.missing("model_mask", "With 'token_ids', 1 marks what the policy wrote and 0 the rest.")
    fields = record.per_token()
    for name in ("logprobs", "entropies"):
        if name in fields and fields[name].size + shift == ids.size:
            fields[name] = np.concatenate([np.zeros(shift), fields[name]])
        elif name in fields:
            raise record.row.error(
                f"{name!r} has {fields[name].size} values for {ids.size - shift} tokens; one each is needed."
            )
    return Rollout.from_trajectory(token_ids=ids, model_mask=mask > 0, group="", **fields).turns


def _from_messages(record: _Record, context: Mapping[str, Any], rest: list[Message]) -> tuple[Turn, ...]:
    """A completion given as messages, with its token ids where they are there too."""
    per_token = record.per_token()
    ids = record.get("completion_ids", as_ids)
    messages = context.get("context_messages", ())
    if not messages and "context" in context:
        messages = ({"role": "user", "content": context["context"]},)
    if ids is None:
        ending = {"finish_reason": per_token["finish_reason"]} if "finish_reason" in per_token else {}
        turns = turns_from_messages(messages, rest, **ending)
        if not turns:
            raise record.row.error("the completion holds no message of the assistant.")
        return turns
    mask = record.get("model_mask", as_ids)
    texts = turns_from_messages(messages, rest)
    if mask is None and len(texts) != 1:
        raise record.row.error(
            f"'completion_ids' hold {len(texts)} messages of the policy and no mask; 'model_mask' must say which "
            "tokens it wrote."
        )
    flat = _single(record, {k: v for k, v in context.items() if k == "context_ids"}, None)
    return (
        tuple(with_text(turn, text) for turn, text in zip(flat, texts, strict=True))
        if len(flat) == len(texts)
        else flat
    )


def with_text(turn: Turn, text: Turn) -> Turn:
    """The ids of one turn and the text of the other."""
    return Turn(
        context_ids=turn.context_ids,
        output_ids=turn.output_ids,
        logprobs=turn.logprobs,
        entropies=turn.entropies,
        finish_reason=turn.finish_reason,
        context_messages=text.context_messages,
        output=text.output,
        observation=text.observation,
        tool_calls=text.tool_calls,
    )


def _from_conversation(record: _Record) -> tuple[Turn, ...]:
    """A whole conversation under `messages`: every message of the assistant is a turn."""
    found = record.raw("messages")
    if found is None:
        raise record.row.missing(
            "completion",
            "A row needs what the policy wrote: 'completion', 'completion_ids', 'turns' or 'messages'; by another "
            "name: key map (--map completion=THEIR_NAME).",
        )
    turns = turns_from_messages((), as_messages(record.row, *found), **record.per_token())
    if not turns:
        roles = ", ".join(sorted(POLICY_ROLES))
        raise record.row.error(f"{found[0]!r} holds no message of the policy (role {roles}).")
    return turns


def _from_turns(record: _Record) -> tuple[Turn, ...]:
    """Explicit turns; the first takes the row's own context where it has none."""
    found = record.raw("turns")
    assert found is not None
    made: list[Turn] = []
    for i, item in enumerate(as_list(record.row, *found)):
        where = f"{found[0]}[{i}]"
        data = as_object(record.row, where, item)
        turn = _Record(record.row, record.fields, data, where + ".")
        context = turn.context()
        if "context_messages" not in context and turn.raw("messages") is not None:
            context["context_messages"] = tuple(turn.get("messages", as_messages))
        if not context and i == 0:
            context = record.context()
        completion = turn.raw("completion")
        if completion is None and turn.raw("completion_ids") is None:
            raise record.row.error(
                f"{where} has neither 'output' nor 'output_ids' (it is {kind(item)} with {sorted(data)[:8]})."
            )
        made.extend(_single(turn, context, completion))
    if not made:
        raise record.row.error(f"{found[0]!r} is empty: a rollout has at least one turn.")
    return tuple(made)
