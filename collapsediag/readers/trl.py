"""TRL's completions: the parquet files that `log_completions=True` writes, `completions/completions_<step>.parquet`.

The files hold no group id, no token ids, no total reward and no truncation flag. What is made of that:

* consecutive rows of one prompt are one group (the order is the order of generation);
* every numeric column but `step` and `advantage` is a reward function; the reward is their sum (TRL's default weights)
  unless reward_weights say otherwise; null and NaN mean that the function gave no value;
* files that hold the same rows under several steps (one generation used for several optimizer steps) are read once.

An evaluation during training overwrites the file of that training step; the file does not say which it holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import as_group, as_integer, as_number, as_text, total_reward
from collapsediag.readers._files import open_rows
from collapsediag.readers._messages import as_messages, is_rebuilt, turns_from_messages
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import BadLines, Row, kind
from collapsediag.readers._source import Parsed, Source
from collapsediag.rollouts import Rollout, RolloutBatch, Turn


def from_trl(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of TRL's completions files: one parquet file or the folder of them. Options: see ReadOptions."""
    return read_source(TrlSource, path, options)


class TrlSource(Source):
    """See the module."""

    name = "trl"
    title = "TRL completions"
    suffixes = (".parquet",)
    aliases: ClassVar = {
        "step": ("step",),
        "prompt": ("prompt",),
        "completion": ("completion",),
        "advantage": ("advantage",),
        "group": (),
        "reward": (),
        "answer": (),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reward_columns: list[str] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Groups are numbered from 0 in each step."""
        self._prompt: Any = None
        self._group = -1

    def prepare(self, files: Sequence[Path]) -> tuple[list[Path], list[str]]:
        """Find the reward columns, and leave out files whose rows, step aside, are those of an earlier file."""
        first: dict[str, Path] = {}
        repeats: dict[Path, list[str]] = {}
        kinds: dict[str, set[str]] = {}
        for path in files:
            original = first.setdefault(_digest(path, kinds), path)
            if original is not path:
                repeats.setdefault(original, []).append(path.name)
        # A reward function may give no value for any row of a file, so one file's columns do not tell.
        used = self.fields.used_keys() - self.fields.used_keys(("reward",))
        self._reward_columns = [key for key, found in kinds.items() if found == {"number"} and key not in used]
        notes = [
            f"{path.name} and {', '.join(names)} hold the same rows (one generation, several steps): read once"
            for path, names in repeats.items()
        ]
        return list(first.values()), notes

    def parse(self, row: Row) -> Parsed:
        """One rollout."""
        for key in ("prompt", "completion"):
            if self.fields.find(row, key) is None:
                raise row.missing(
                    key, "TRL's completions files have 'step', 'prompt', 'completion' and reward columns."
                )
        prompt = self.fields.find(row, "prompt")
        assert prompt is not None
        if prompt[1] != self._prompt:
            self._prompt = prompt[1]
            self._group += 1
        turns, notes = self._turns(row)
        group = self.value(row, "group", as_group)
        if group is None:
            notes.append("{n} rollouts have no group id: consecutive rows of one prompt are one group")
        rewards, metadata = self._columns(row)
        reward, reward_note = self._total(row, rewards)
        rollout = Rollout(
            turns=turns,
            group=self._group if group is None else group,
            reward=reward,
            rewards=rewards,
            advantage=self.value(row, "advantage", as_number),
            answer=self.value(row, "answer", as_text),
            metadata=metadata,
        )
        return Parsed(
            self.value(row, "step", as_integer),
            [rollout],
            notes=notes + reward_note,
            named_group=group is not None,
        )

    def _turns(self, row: Row) -> tuple[tuple[Turn, ...], list[str]]:
        prompt, completion = row.data[self._key("prompt")], row.data[self._key("completion")]
        if isinstance(prompt, str) and isinstance(completion, str):
            return (Turn(context=prompt, output=completion),), []
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise row.error(
                f"'prompt' is {kind(prompt)} and 'completion' is {kind(completion)}; both must be text, or both lists "
                "of chat messages."
            )
        messages = as_messages(row, "completion", completion)
        turns = turns_from_messages(as_messages(row, "prompt", prompt), messages)
        if not turns:
            raise row.error("'completion' holds no message of the assistant.")
        if any(is_rebuilt(message) for message in messages):
            return turns, ["{n} outputs were put together from reasoning, text and tool calls: their syntax is a guess"]
        return turns, []

    def _key(self, name: str) -> str:
        return self.options.key_map.get(name, name)

    def _columns(self, row: Row) -> tuple[dict[str, float | None], dict[str, Any]]:
        """(reward functions' values, other columns)."""
        rewards = {key: as_number(row, key, row.data[key]) for key in self._reward_columns if key in row.data}
        used = self.fields.used_keys()
        metadata = {
            key: value
            for key, value in row.data.items()
            if key not in used and key not in self._reward_columns and value is not None
        }
        return rewards, metadata

    def _total(self, row: Row, rewards: dict[str, float | None]) -> tuple[float | None, list[str]]:
        found = self.fields.find(row, "reward")
        if "reward" in self.options.key_map:
            return (None if found is None else as_number(row, *found)), []
        weights = self.options.reward_weights
        how = "the plain sum" if weights is None else "the weighted sum"
        note = f"{{n}} rewards are {how} of {', '.join(rewards) or 'nothing'} (the file holds no total)"
        return total_reward(rewards, weights), [note] if len(rewards) != 1 or weights is not None else []


def _digest(path: Path, kinds: dict[str, set[str]]) -> str:
    """What a file holds beside its step numbers; adds to `kinds` what each column was seen to hold."""
    digest = hashlib.blake2b(digest_size=16)
    for row in open_rows(path).scan(BadLines(skip=False)):
        rest = {key: value for key, value in row.data.items() if key != "step"}
        digest.update(json.dumps(rest, default=str).encode("utf-8", "surrogatepass"))
        for key, value in rest.items():
            if value is not None:
                number = isinstance(value, (bool, int, float))
                kinds.setdefault(key, set()).add("number" if number else "other")
    return digest.hexdigest()
