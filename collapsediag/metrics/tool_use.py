"""One rollout read as a story of its tools: which calls were made, what came back, what the policy wrote afterwards.

What the source states (`Turn.tool_calls`, `ToolCall.result`, `Turn.observation`) is believed; the rest is parsed from
the outputs and from what each turn's context adds to the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from collapsediag.metrics.result_use import Event, judge_results
from collapsediag.metrics.tool_parsers import result_is_error, split_output
from collapsediag.rollouts import Rollout, ToolCall, Turn

_TOOL_ROLES = ("tool", "function", "environment", "observation", "ipython")


@dataclass(frozen=True)
class ToolUse:
    """What one rollout did with its tools.

    calls: every attempt in order, results attached where it is certain which call they answer.
    used: for each tool result in order: used by later turns, not used, or None where that cannot be judged.
    """

    calls: tuple[ToolCall, ...]
    used: tuple[bool | None, ...]


def _context_increment(earlier: Turn | None, turn: Turn) -> tuple[str, str]:
    """What the turn's context adds to the earlier turn's: (answers of the environment, everything else). Linear over a
    rollout, because a context that extends the one before is read from where that ended.
    """
    if turn.context is not None:
        if earlier is None or earlier.context is None or not turn.context.startswith(earlier.context):
            return "", turn.context
        added = turn.context[len(earlier.context) :]
        at = added.find(earlier.output) if earlier.output else -1
        return (added[at + len(earlier.output or "") :] if at >= 0 else added), ""
    messages = turn.context_messages or ()
    known = (earlier.context_messages or ()) if earlier is not None else ()
    extends = bool(known) and tuple(messages[: len(known)]) == tuple(known)
    answers: list[str] = []
    other: list[str] = []
    for message in messages[len(known) :] if extends else messages:
        is_answer = message.get("role") in _TOOL_ROLES or message.get("type") == "function_call_output"
        (answers if is_answer and extends else other).append(_message_text(message))
    return "\n".join(answers), "\n".join(other)


def _message_text(message: Mapping[str, object]) -> str:
    content = message.get("content") or message.get("output") or message.get("arguments") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else (content,)
    return "\n".join(str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in parts)


def _with_result(call: ToolCall, result: str) -> ToolCall:
    error = result_is_error(result) if call.error is None else call.error
    return replace(call, result=result, error=error)


class _RolloutReader:
    """Reads a rollout turn by turn; `waiting` are the numbers of the calls whose answer has not come yet."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.events: list[Event] = []
        self.waiting: list[int] = []

    def environment_says(self, text: str) -> None:
        """An answer to the waiting calls, or where none waits, words that the policy merely saw. One result for each
        `<tool_response>` or `<information>` block, or the whole text; attached where as many came as calls wait.
        """
        if not text.strip():
            return
        blocks = [segment.text for segment in split_output(text) if segment.kind == "result"] or [text]
        if not self.waiting:
            self.events.append(("seen", text))
            return
        self.events += [("result", block) for block in blocks]
        if len(blocks) == len(self.waiting):
            for number, block in zip(self.waiting, blocks, strict=True):
                self.calls[number] = _with_result(self.calls[number], block)
        self.waiting = []

    def policy_says(self, turn: Turn) -> None:
        """The turn's output, and its calls. Result blocks in the output count as results only where the source states
        no answer elsewhere: a policy may write `<information>` itself.
        """
        inline = turn.observation is None and turn.tool_calls is None
        for segment in split_output(turn.output) if turn.output else ():
            if segment.kind == "result" and inline:
                self.environment_says(segment.text)
                continue
            self.events.append(("wrote", segment.text))
            if segment.call is not None and turn.tool_calls is None:
                # A text answers the call right before it, so an older one that still waits was never answered.
                self.waiting = [*(self.waiting if not inline else ()), len(self.calls)]
                self.calls.append(segment.call)
        for call in turn.tool_calls or ():
            self.events.append(("wrote", f"{call.name} {call.arguments}"))
            self.calls.append(call)
            if call.result is None:
                self.waiting.append(len(self.calls) - 1)
        self.events += [("result", call.result) for call in turn.tool_calls or () if call.result is not None]

    def read(self, turn: Turn, earlier: Turn | None) -> None:
        """One turn: what is new in its context, what the policy wrote, what came back."""
        answer, other = _context_increment(earlier, turn)
        self.environment_says(answer)
        self.events.append(("seen", other))
        self.waiting = []
        self.policy_says(turn)
        if turn.observation is not None:
            self.environment_says(turn.observation)


def read_tool_use(rollout: Rollout) -> ToolUse | None:
    """Calls and the fate of their results, or None where a turn has neither text nor calls from the source."""
    if any(turn.output is None and turn.tool_calls is None for turn in rollout.turns):
        return None
    reader = _RolloutReader()
    earlier: Turn | None = None
    for turn in rollout.turns:
        reader.read(turn, earlier)
        earlier = turn
    has_results = any(kind == "result" for kind, _ in reader.events)
    return ToolUse(calls=tuple(reader.calls), used=judge_results(reader.events) if has_results else ())
