"""What a source is: something that turns one row of a file into rollouts."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import Fields
from collapsediag.readers._options import ReadOptions
from collapsediag.readers._rows import Row
from collapsediag.rollouts import Rollout, Turn

# Metadata mark of a rollout whose context text lost its special tokens, so that a chat template must bring them back.
STRIPPED = "special_tokens_stripped"


@dataclass(slots=True)
class Parsed:
    """What one row gave.

    step: its step, None where the row does not say.
    dropped: what it held and was left out, by reason.
    notes: what a person must know, once for each rollout that it holds for; "{n}" becomes their number.
    batch: fields of the batch that the row states (temperature, ...).
    named_group: the group's id is the source's own, so all rollouts of it must have one prompt.
    """

    step: int | None
    rollouts: Sequence[Rollout] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    batch: Mapping[str, Any] = field(default_factory=dict)
    named_group: bool = False


class Source(ABC):
    """One format of saved rollouts.

    name: what the user calls it. title: what messages call it. aliases: our names -> keys the format uses for them.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json")
    aliases: ClassVar[Mapping[str, Sequence[str]]]

    def __init__(self, options: ReadOptions, *, many_files: bool = False) -> None:
        self.options = options
        self.many_files = many_files
        self.fields = Fields(self.aliases, options.key_map)

    @abstractmethod
    def parse(self, row: Row) -> Parsed:
        """The rollouts of one row. Raises ReaderError, or RolloutError where a type refuses the values."""

    def value(self, row: Row, name: str, convert: Callable[[Row, str, Any], Any]) -> Any:
        """The row's value under our `name`, converted; None where it is absent or null."""
        found = self.fields.find(row, name)
        return None if found is None else convert(row, *found)

    def begin_step(self) -> None:  # noqa: B027  (most sources have nothing to do)
        """Called before the first row of each step; for sources that remember the row before."""

    def prepare(self, files: Sequence[Path]) -> tuple[list[Path], list[str]]:
        """The files to read, and notes about those left out."""
        return list(files), []

    def row_group(self, row: Row) -> str:
        """The group of a row that is a group by itself."""
        return f"{row.path if self.many_files else Path(row.path).name}:{row.number}"


def prompt_digests(turn: Turn) -> dict[str, str]:
    """A short name for a turn's context in each form it is given in: equal contexts have equal names everywhere."""
    forms: dict[str, bytes] = {}
    if turn.context_ids is not None:
        forms["ids"] = turn.context_ids.tobytes()
    if turn.context is not None:
        forms["text"] = turn.context.encode()
    if turn.context_messages is not None:
        messages = [dict(message) for message in turn.context_messages]
        forms["chat"] = json.dumps(messages, sort_keys=True, default=str).encode()
    return {
        form: "prompt-" + hashlib.blake2b(form.encode() + data, digest_size=6).hexdigest()
        for form, data in forms.items()
    }


def prompt_digest(turn: Turn) -> str:
    """The name of a turn's context in its first form: token ids, else text, else messages."""
    return next(iter(prompt_digests(turn).values()), "prompt-unknown")


def step_from_name(path: str) -> int | None:
    """The step that a file's name or its folder states: 40.jsonl, step_40.jsonl, completions_00040.parquet, step_40/x.

    >>> step_from_name("dump/40.jsonl"), step_from_name("step_7/train_rollouts.jsonl"), step_from_name("a.jsonl")
    (40, 7, None)
    """
    place = Path(path)
    stem = place.name.split(".")[0]
    for text in (stem, place.parent.name):
        found = re.fullmatch(r"(?:global_step|step|completions)[_-]?(\d{1,15})", text) or (
            re.fullmatch(r"(\d{1,15})", text) if text is stem else None
        )
        if found:
            return int(found[1])
    return None
