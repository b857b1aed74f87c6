"""Our own JSON lines, one rollout a row; the schema is in docs/formats.md. Unknown key names go through a key map.

A row needs what the policy wrote (`completion`, `completion_ids`, `turns` or `messages`) and what it saw (`prompt`,
`prompt_ids`, or a `group` at least). Everything else is optional.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import (
    as_boolean,
    as_group,
    as_ids,
    as_integer,
    as_name,
    as_number,
    as_object,
    as_rewards,
    as_text,
    total_reward,
)
from collapsediag.readers._generic_turns import TURN_ALIASES, turns_of
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row
from collapsediag.readers._source import Parsed, Source, prompt_digest
from collapsediag.rollouts import Rollout, RolloutBatch


def from_jsonl(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of JSON lines in the documented schema, or near it. Options: see ReadOptions."""
    return read_source(GenericSource, path, options)


class GenericSource(Source):
    """See the module."""

    name = "jsonl"
    title = "rollout JSONL"
    aliases: ClassVar = {
        **TURN_ALIASES,
        "step": ("step", "global_step", "iteration"),
        "group": ("group", "group_id", "prompt_id", "uid", "example_id", "problem_id"),
        "environment": ("environment", "env", "env_name", "data_source"),
        "reward": ("reward", "score", "total_reward"),
        "rewards": ("rewards", "reward_components"),
        "success": ("success", "correct", "is_correct", "solved"),
        "answer": ("answer", "pred", "parsed_answer", "extracted_answer"),
        "advantage": ("advantage",),
        "id": ("id", "rollout_id", "request_id"),
        "temperature": ("temperature",),
        "max_output_tokens": ("max_output_tokens", "max_completion_length", "max_tokens"),
        "eos_token_ids": ("eos_token_ids",),
        "mode": ("mode", "split"),
        "tools": ("tools",),
        "metadata": ("metadata",),
    }

    def parse(self, row: Row) -> Parsed:
        """One rollout."""
        turns, notes = turns_of(row, self.fields, self.options)
        group = self.value(row, "group", as_group)
        named = group is not None
        if group is None:
            group = self._group_by_prompt(row, turns)
            notes.append("{n} rollouts have no group id: grouped by identical prompt")
        reward, rewards, note = self._rewards(row)
        rollout = Rollout(
            turns=turns,
            group=group,
            environment=self.value(row, "environment", as_text),
            reward=reward,
            rewards=rewards,
            success=self.value(row, "success", as_boolean),
            answer=self.value(row, "answer", as_name),
            advantage=self.value(row, "advantage", as_number),
            id=self.value(row, "id", as_name),
            metadata=self._metadata(row),
        )
        return Parsed(
            self.value(row, "step", as_integer),
            [rollout],
            notes=notes + note,
            batch=self._batch(row),
            named_group=named,
        )

    def _group_by_prompt(self, row: Row, turns: Any) -> str:
        first = turns[0]
        if first.context_ids is None and first.context is None and first.context_messages is None:
            raise row.missing(
                "prompt",
                "Which rollouts share a prompt must be known: give 'prompt', 'prompt_ids' or 'group' (by other names: "
                "key map).",
            )
        return prompt_digest(first)

    def _rewards(self, row: Row) -> tuple[float | None, dict[str, float | None], list[str]]:
        found = self.fields.find(row, "rewards")
        rewards: dict[str, float | None] = {}
        if found is not None and not isinstance(found[1], dict):
            raise row.error(
                f"field {found[0]!r} must be an object of components ({{'correct': 1.0}}); one number goes to 'reward'."
            )
        if found is not None:
            rewards = as_rewards(row, *found)
        total = self.fields.find(row, "reward")
        if total is not None:
            return as_number(row, *total), rewards, []
        if not rewards:
            return None, rewards, []
        how = "the plain sum" if self.options.reward_weights is None else "the weighted sum"
        note = f"{{n}} rewards are {how} of {', '.join(rewards)} (the file holds no total)"
        return total_reward(rewards, self.options.reward_weights), rewards, [note]

    def _batch(self, row: Row) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        temperature = self.value(row, "temperature", as_number)
        if temperature is not None:
            batch["temperature"] = temperature
        limit = self.value(row, "max_output_tokens", as_integer)
        if limit is not None:
            batch["max_output_tokens"] = limit
        eos = self.value(row, "eos_token_ids", as_ids)
        if eos is not None:
            batch["eos_token_ids"] = tuple(eos.tolist())
        return batch

    def _metadata(self, row: Row) -> dict[str, Any]:
        used = self.fields.used_keys()
        metadata = {key: value for key, value in row.data.items() if key not in used}
        metadata.update(self.value(row, "metadata", as_object) or {})
        for name in ("mode", "tools"):
            found = self.fields.find(row, name)
            if found is not None:
                metadata[name] = found[1]
        return metadata
