"""Nested dumps: one row a prompt, its samples as objects in a list: {"question": ..., "rollouts": [{"text": ...}]}.

The row is the group. Names vary from project to project; a key map names them: completion=answer_text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import (
    as_boolean,
    as_integer,
    as_list,
    as_name,
    as_number,
    as_object,
    as_rewards,
    as_text,
)
from collapsediag.readers._questions import QUESTION_KEYS, SYSTEM_KEYS, WRAPPED, is_wrapped, question_context
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row
from collapsediag.readers._source import Parsed, Source
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

LIST_KEYS = ("rollouts", "responses", "completions", "samples", "generations", "outputs", "traces")
TEXT_KEYS = ("text", "completion", "response", "output", "generation", "content", "solution")


def from_nested(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of a nested dump. Options: see ReadOptions."""
    return read_source(NestedSource, path, options)


class NestedSource(Source):
    """See the module."""

    name = "nested"
    title = "nested dump"
    aliases: ClassVar = {
        "question": QUESTION_KEYS,
        "system": SYSTEM_KEYS,
        "rollouts": LIST_KEYS,
        "completion": TEXT_KEYS,
        "reward": ("reward", "score"),
        "rewards": ("rewards", "reward_components"),
        "success": ("correct", "is_correct", "success", "solved"),
        "answer": ("pred", "prediction", "extracted_answer", "parsed_answer"),
        "finish_reason": ("finish_reason", "stop_reason"),
        "step": ("step", "global_step"),
        "environment": ("data_source", "environment", "env"),
        "id": ("id", "idx", "example_id"),
    }

    def parse(self, row: Row) -> Parsed:
        """One group: a rollout for each object of the list."""
        found = self.fields.find(row, "rollouts")
        if found is None:
            raise row.missing("rollouts", "Name the list of samples in the key map (--map rollouts=...).")
        context = question_context(row, self.fields, self.options)
        rollouts = []
        for i, sample in enumerate(as_list(row, *found)):
            where = f"{found[0]}[{i}]"
            rollouts.append(self._rollout(row, where, as_object(row, where, sample), context))
        return Parsed(
            self.value(row, "step", as_integer),
            rollouts,
            dropped={} if rollouts else {"empty_group": 1},
            notes=[WRAPPED] * len(rollouts) if is_wrapped(context) else [],
        )

    def _rollout(self, row: Row, where: str, sample: Mapping[str, Any], context: Mapping[str, Any]) -> Rollout:
        def value(name: str, convert: Any) -> Any:
            found = self.fields.find(row, name, sample)
            return None if found is None else convert(row, f"{where}.{found[0]}", found[1])

        output = value("completion", as_text)
        if output is None:
            raise row.error(
                f"{where} has none of {', '.join(map(repr, TEXT_KEYS))} (found: {', '.join(map(repr, sample))[:200]}). "
                "Name the text of a sample in the key map: --map completion=..."
            )
        rewards = value("rewards", as_rewards) or {}
        success = value("success", as_boolean)
        reward = value("reward", as_number)
        return Rollout(
            turns=(Turn(output=output, finish_reason=value("finish_reason", as_text), **context),),
            group=self.row_group(row),
            environment=self.value(row, "environment", as_text),
            reward=float(success) if reward is None and success is not None else reward,
            rewards=rewards,
            success=success,
            answer=value("answer", as_name),
            id=value("id", as_name),
            metadata={key: item for key, item in sample.items() if key not in self.fields.used_keys()},
        )
