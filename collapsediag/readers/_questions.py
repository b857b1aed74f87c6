"""Bare questions: prompts that no chat template was applied to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collapsediag.readers._fields import Fields, as_text
from collapsediag.readers._messages import as_messages
from collapsediag.readers._options import ReadOptions
from collapsediag.readers._rows import Row

QUESTION_KEYS = ("question", "query", "problem", "prompt", "instruction", "input")
SYSTEM_KEYS = ("system", "system_prompt")
WRAPPED = (
    "{n} prompts are bare questions, read as the user's chat message "
    "(as they stand: --plain-prompts, from Python wrap_questions=False)"
)

# A text with one of these went through a chat template already.
_TEMPLATE_MARKS = ("<|", "[INST]", "<start_of_turn>", "<\uff5c")


def question_context(row: Row, fields: Fields, options: ReadOptions) -> dict[str, Any]:
    """Turn fields of a prompt: its text, and the chat messages that were most likely made of it if it is bare."""
    found = fields.find(row, "question")
    if found is None:
        raise row.missing("question", "The prompt is needed: name its key in the key map (--map question=...).")
    if isinstance(found[1], list):
        return {"context_messages": tuple(as_messages(row, *found))}
    question = as_text(row, *found)
    if not options.wrap_questions or any(mark in question for mark in _TEMPLATE_MARKS):
        return {"context": question}
    system = fields.find(row, "system")
    messages = [] if system is None else [{"role": "system", "content": as_text(row, *system)}]
    return {"context": question, "context_messages": (*messages, {"role": "user", "content": question})}


def is_wrapped(context: Mapping[str, Any]) -> bool:
    """Whether question_context made a chat message of a bare question."""
    return "context" in context and "context_messages" in context
