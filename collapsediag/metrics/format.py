"""Does an output have the declared form, and if not, in which way does it fail?

A format is an object with a list of failure names and one method that judges outputs. Every output that fails does so
under exactly one name, the first that applies in the order of that list, so valid and failing shares add up to 1.
`TagFormat` is here; `RegexFormat`, `JsonFormat` and `ToolFormat` are in their own modules; a callable will do too.
All of them take time linear in the text (the regex: bounded time), because model text is adversarial.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from collapsediag.errors import MetricError, SettingsError
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.plain_text import error_text
from collapsediag.spans import SpanStatus, find_reasoning
from collapsediag.token_tags import ReasoningTags

# What templates put behind a turn. Sources differ in whether they keep it, and it is no text of the policy's answer.
END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_THINK_FAILURES = {
    SpanStatus.ABSENT: "no_think",
    SpanStatus.UNCLOSED: "unclosed_think",
    SpanStatus.EMPTY: "empty_think",
}


@runtime_checkable
class Format(Protocol):
    """What the outputs of a policy should look like.

    failure_names: every way to fail, in the order in which they are tested.
    """

    @property
    def failure_names(self) -> tuple[str, ...]:
        """Every way to fail, in the order in which they are tested."""
        ...

    def failures(self, outputs: Sequence[str], contexts: Sequence[str | None]) -> list[str | None]:
        """For each output None where it has the form, else the name of its failure.

        contexts: what the policy saw before each output, None where unknown. Only its end matters: whether the chat
        template has opened a tag already.
        """
        ...


@dataclass(frozen=True)
class TagFormat:
    """`<think>...</think><answer>...</answer>`: one reasoning block, then one action block, and nothing else.

    reasoning: tag of the reasoning. `collapsediag.spans` says where it begins: where the context has opened the tag
        (templates that start it for the policy) the output is inside already; where the context is unknown, a closing
        tag that comes before any opening one shows the same.
    actions: tags of which exactly one block must follow, for example ("search", "answer"); empty allows any text
        after the reasoning, none included.
    White space around and between blocks is allowed, and end-of-turn tokens at the end.

    >>> TagFormat().failures(["<think>2+2</think><answer>4</answer>", "<think>hm", "4"], [None] * 3)
    [None, 'unclosed_think', 'no_think']
    """

    reasoning: str = "think"
    actions: tuple[str, ...] | str = ("answer",)

    failure_names = (
        "no_think",
        "unclosed_think",
        "empty_think",
        "leading_text",
        "repeated_think",
        "no_answer",
        "unclosed_answer",
        "empty_answer",
        "text_between",
        "repeated_answer",
        "trailing_text",
    )

    def __post_init__(self) -> None:
        # One tag may be given as text; its letters are not tags.
        object.__setattr__(self, "actions", self._actions)
        for tag in (self.reasoning, *self._actions):
            if not re.fullmatch(r"[^\s<>/]+", tag):
                raise SettingsError(f"{tag!r} is no tag name; give it without brackets, for example 'think'.")

    @property
    def _actions(self) -> tuple[str, ...]:
        return tuple([self.actions] if isinstance(self.actions, str) else self.actions)

    @cached_property
    def _tags(self) -> ReasoningTags:
        return ReasoningTags(((f"<{self.reasoning}>", f"</{self.reasoning}>"),))

    def failures(self, outputs: Sequence[str], contexts: Sequence[str | None]) -> list[str | None]:
        """The failure of each output, None for a valid one."""
        return [self._failure(output, context) for output, context in zip(outputs, contexts, strict=True)]

    def _failure(self, output: str, context: str | None) -> str | None:
        text = strip_end_of_turn(output)
        span = find_reasoning(text, context=context, tags=self._tags)
        if span.status in _THINK_FAILURES:
            return _THINK_FAILURES[span.status]
        if not span.opened_in_context and text[: text.find(self._tags.texts[0])].strip():
            return "leading_text"
        if span.repeated or span.status is SpanStatus.NESTED:
            return "repeated_think"
        rest = text[span.stop + len(self._tags.texts[1]) :]
        if self._tags.texts[1] in rest:
            return "repeated_think"
        return self._action_failure(rest) if self._actions else None

    def _action_failure(self, rest: str) -> str | None:
        starts = {tag: rest.find(f"<{tag}>") for tag in self._actions}
        found = {tag: at for tag, at in starts.items() if at >= 0}
        if not found:
            return "no_answer"
        tag = min(found, key=lambda name: found[name])
        begin = found[tag] + len(tag) + 2
        end = rest.find(f"</{tag}>", begin)
        if end < 0:
            return "unclosed_answer"
        if not rest[begin:end].strip():
            return "empty_answer"
        if rest[: found[tag]].strip():
            return "text_between"
        after = rest[end + len(tag) + 3 :]
        if rest.find(f"<{tag}>", begin, end) >= 0 or any(f"<{other}>" in after for other in self._actions):
            return "repeated_answer"
        return "trailing_text" if after.strip() else None


@dataclass(frozen=True)
class CallableFormat:
    """A format from a function of the output text.

    judge: returns True (valid), False (fails as "invalid"), or the name of the failure: lower-case letters, digits and
        underscores. `names` lists the names it may return, so that a way of failing that did not occur is a 0 and not
        a gap. Anything else, None above all, is an error: a forgotten `return` must not count as valid.

    >>> CallableFormat(lambda text: text.startswith("Move:")).failures(["Move: up", "up"], [None, None])
    [None, 'invalid']
    """

    judge: Callable[[str], bool | str]
    names: tuple[str, ...] = ()

    @property
    def failure_names(self) -> tuple[str, ...]:
        """The declared names, else "invalid"."""
        return self.names or ("invalid",)

    def failures(self, outputs: Sequence[str], contexts: Sequence[str | None]) -> list[str | None]:
        """The failure of each output, None for a valid one."""
        return [self._failure(output) for output in outputs]

    def _failure(self, output: str) -> str | None:
        try:
            verdict = self.judge(output)
        except Exception as error:
            raise MetricError(
                f"the format callable raised {type(error).__name__}: {error_text(error)} on {output!r:.80}"
            ) from error
        if isinstance(verdict, str) and _NAME.fullmatch(verdict):
            return verdict
        if isinstance(verdict, bool):
            return None if verdict else "invalid"
        raise MetricError(
            f"the format callable returned {verdict!r:.60} for {output!r:.60}; expected True, False, or the name of "
            "the failure in lower case with underscores."
        )


def strip_end_of_turn(output: str) -> str:
    """The output without the end-of-turn tokens and white space at its end.

    >>> strip_end_of_turn("<answer>4</answer><|im_end|> ")
    '<answer>4</answer>'
    """
    end = len(output)
    while True:
        # Positions, not slices: a megabyte of end tokens must not be copied once for each of them.
        before = end
        while end and output[end - 1].isspace():
            end -= 1
        for token in END_OF_TURN:
            if output.endswith(token, 0, end):
                end -= len(token)
        if end == before:
            return output[:end]


def parsed_format(form: str) -> Format:
    """The format that a text declares: `tags:REASONING,ACTION,...` or `regex:PATTERN`.

    Raises SettingsError for any other text.

    >>> parsed_format("tags:think,search,answer")
    TagFormat(reasoning='think', actions=('search', 'answer'))
    """
    kind, _, rest = form.partition(":")
    if kind == "regex" and rest:
        from collapsediag.metrics.format_regex import RegexFormat

        return RegexFormat(rest)
    if kind == "tags" and rest:
        reasoning, *actions = rest.split(",")
        return TagFormat(reasoning, tuple(actions))
    raise SettingsError(f"{form!r:.80} is no form of outputs: write tags:REASONING,ACTION,... or regex:PATTERN.")


def as_format(declared: Any) -> Format:
    """The format object of what a user may pass: None (the default tags), a format, its text as for `parsed_format`, a
    compiled regex, a callable.

    Raises SettingsError for anything else.
    """
    if declared is None:
        return TagFormat()
    if isinstance(declared, str) and declared.partition(":")[0] in ("tags", "regex"):
        return parsed_format(declared)
    if isinstance(declared, re.Pattern):
        from collapsediag.metrics.format_regex import RegexFormat

        return RegexFormat(declared)
    if isinstance(declared, Format) and not isinstance(declared, type):
        return declared
    if callable(declared) and not isinstance(declared, type):
        return CallableFormat(declared)
    raise SettingsError(
        f"format is {declared!r:.80}; pass 'tags:think,answer', 'regex:PATTERN', TagFormat(...), RegexFormat(...), "
        "JsonFormat(...), ToolFormat(...), a compiled regex, or a callable from text to True, False or the name of a "
        "failure."
    )


def format_metrics(failures_T: Sequence[str | None], failure_names: Sequence[str]) -> dict[str, float]:
    """`format/valid_fraction`, `format/<failure>_fraction` for every name, and `format/n_turns`.

    failures_T: [T] verdict per turn. Names that are not among the library's own go under `format/custom/`.

    >>> format_metrics([None, "no_think"], ["no_think", "unclosed_think"])["format/no_think_fraction"]
    0.5
    """
    n = len(failures_T)
    values = {"format/n_turns": float(n)}
    if n == 0:
        return values
    counts = Counter(failures_T)
    values["format/valid_fraction"] = counts.pop(None, 0) / n
    for name in [*failure_names, *(str(name) for name in counts if name not in failure_names)]:
        place = "format" if name in FAILURES else "format/custom"
        values[f"{place}/{name}_fraction"] = counts[name] / n
    return values


FAILURES = {
    "no_think": "that hold no opening reasoning tag, and whose template opened none",
    "unclosed_think": "whose reasoning tag is never closed: cut off, or the form forgotten",
    "empty_think": "whose reasoning is only white space",
    "leading_text": "with text before the reasoning tag",
    "repeated_think": "with a second reasoning tag, nested or after the first",
    "no_answer": "with reasoning but without an action tag",
    "unclosed_answer": "whose action tag is never closed",
    "empty_answer": "whose action is only white space",
    "text_between": "with text between the reasoning and the action",
    "repeated_answer": "with more than one action",
    "trailing_text": "with text after the action",
    "no_match": "that the declared regular expression does not match",
    "regex_timeout": "on which the declared regular expression ran out of time",
    "no_json": "that hold no JSON where the format wants it",
    "malformed_json": "whose JSON does not parse",
    "schema_mismatch": "whose JSON parses but does not fit the declared schema",
    "unknown_tool": "that call a tool which was not declared",
    "invalid": "that the declared callable refused",
}


def _register(name: str, title: str, bad: Any, description: str, unit: str = "fraction") -> None:
    register(
        MetricInfo(
            name=f"format/{name}",
            title=title,
            unit=unit,
            bad=bad,
            bounds=(0.0, 1.0) if unit == "fraction" else (0.0, None),
            description=description,
            source="this library",
            family="format",
            needs="output text, or token ids and a tokenizer",
        )
    )


_register(
    "valid_fraction", "Outputs in the declared format", "down", "Share of turns whose output has the declared form."
)
for _name, _what in FAILURES.items():
    _register(f"{_name}_fraction", f"Format: {_name.replace('_', ' ')}", "up", f"Share of turns {_what}.")
_register("custom/<failure>_fraction", "Format: a failure of your own", "up", "Share of turns your callable named so.")
_register("n_turns", "Turns judged for format", "none", "Turns whose output text is known.", unit="count")
