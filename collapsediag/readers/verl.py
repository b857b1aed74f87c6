"""veRL's rollout dumps: trainer.rollout_data_dir and validation_data_dir, every version from 0.4 to 0.9, V0 and V1.

One file a step, `<step>.jsonl`, one row a rollout. What is special:

* special tokens are stripped on both sides: a chat prompt reads "system\\n...\\nuser\\n...\\nassistant\\n". Where that
  can be parsed back into messages without doubt, the chat template is applied again when token ids are made.
* V0 rows have no group id and are shuffled: rows of equal `input` are one group. V1 rows have
  `uid = {prompt}_{session}_{index}`, whose first part is the group.
* V1 dumps hold synthetic padding rows (uid begins with "pad", no text): dropped and counted as "padding_row".
* other columns are reward extras: numbers are kept as components, text as metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import as_boolean, as_integer, as_number, as_text
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row
from collapsediag.readers._source import STRIPPED, Parsed, Source, prompt_digest
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

_UID = re.compile(r"(?P<prompt>.+)_(?P<session>\d+)_(?P<index>\d+)", re.DOTALL)
_ROLE_LINES = frozenset({"system", "user", "assistant", "tool"})
_BY_PROMPT = "{n} rollouts have no group id (a V0 dump): grouped by identical prompt text"
_FURTHER = "{n} rows are further outputs of a session (uid index above 0): each counts as a rollout of its own"
_TEXT_EXTRAS = ("gts", "request_id", "uid", "data_source")


def from_verl(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of a veRL dump: a `<step>.jsonl` file or the folder of them. Options: see ReadOptions."""
    return read_source(VerlSource, path, options)


class VerlSource(Source):
    """See the module."""

    name = "verl"
    title = "veRL dump"
    aliases: ClassVar = {
        "prompt": ("input",),
        "completion": ("output",),
        "reward": ("score",),
        "step": ("step",),
        "group": ("uid",),
        "answer": ("pred",),
        "success": ("acc",),
        "environment": ("data_source",),
        "id": ("request_id",),
    }

    def parse(self, row: Row) -> Parsed:
        """One rollout, or none where the row is padding."""
        step = self.value(row, "step", as_integer)
        prompt, output = self._texts(row)
        uid = self.value(row, "group", as_text)
        if uid is not None and uid.startswith("pad") and not prompt and not output:
            return Parsed(step, dropped={"padding_row": 1})
        turn = Turn(context=prompt, output=output, context_messages=messages_from_stripped(prompt))
        parts = None if uid is None else _UID.fullmatch(uid)
        further = parts is not None and int(parts["index"]) > 0
        notes = [_FURTHER] if further else [_BY_PROMPT] if uid is None else []
        success, extras, metadata = self._extras(row)
        metadata[STRIPPED] = True
        rollout = Rollout(
            turns=(turn,),
            group=parts["prompt"] if parts else uid or prompt_digest(turn),
            environment=self.value(row, "environment", as_text),
            reward=self.value(row, "reward", as_number),
            rewards=extras,
            success=success,
            answer=self._answer(row),
            id=uid or self.value(row, "id", as_text),
            metadata=metadata,
        )
        return Parsed(step, [rollout], notes=notes, named_group=uid is not None and not further)

    def _texts(self, row: Row) -> tuple[str, str]:
        texts = []
        for name in ("prompt", "completion"):
            found = self.fields.find(row, name)
            if found is None:
                key = self.options.key_map.get(name, self.aliases[name][0])
                raise row.missing(key, "A veRL dump has 'input', 'output', 'score' and 'step' in every row.")
            texts.append(as_text(row, *found))
        return texts[0], texts[1]

    def _answer(self, row: Row) -> str | None:
        found = self.fields.find(row, "answer")
        return found[1] if found is not None and isinstance(found[1], str) else None

    def _extras(self, row: Row) -> tuple[bool | None, dict[str, float | None], dict[str, Any]]:
        """(solved or not by the reward function's `acc`, numeric extras, the rest)."""
        used = self.fields.used_keys(("prompt", "completion", "reward", "step"))
        components: dict[str, float | None] = {}
        metadata: dict[str, Any] = {}
        for key, value in row.data.items():
            if key in used:
                continue
            if isinstance(value, (bool, int, float)) and key not in _TEXT_EXTRAS:
                components[key] = as_number(row, key, value)
            else:
                metadata[key] = value
        found = self.fields.find(row, "success")
        if found is None:
            return None, components, metadata
        value = {"True": True, "False": False}.get(found[1], found[1]) if isinstance(found[1], str) else found[1]
        return (as_boolean(row, found[0], value) if value in (0, 1) else None), components, metadata


def messages_from_stripped(text: str) -> tuple[Mapping[str, Any], ...] | None:
    """The chat messages of a prompt whose special tokens were stripped, or None where there is any doubt.

    Accepted: [system,] user, then (assistant, user) any number of times, and a last "assistant" line, each role alone
    on its line and nowhere else. What follows the last role line is the start of the answer and belongs to no message.

    >>> messages_from_stripped("system\\nBe brief.\\nuser\\n1+1?\\nassistant\\n")
    ({'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1+1?'})
    >>> messages_from_stripped("user\\nwrite\\nassistant\\nin the log\\nassistant\\n") is None
    True
    """
    lines = text.split("\n")
    places = [i for i, line in enumerate(lines) if line in _ROLE_LINES]
    roles = [lines[i] for i in places]
    body = roles[1:] if roles[:1] == ["system"] else roles
    expected = ["user", "assistant"] * (len(body) // 2)
    if not body or body != expected or places[0] != 0 or places[-1] == len(lines) - 1:
        return None
    return tuple(
        {"role": role, "content": "\n".join(lines[start + 1 : stop])}
        for role, start, stop in zip(roles, places, places[1:], strict=False)
    )
