"""verifiers and prime-rl results: `results.jsonl`, `rollouts/step_<N>/train_rollouts.jsonl`.

One row a rollout: `prompt` and `completion` are lists of chat messages (or text, for completion models), `example_id`
is the group, `reward` the total, `metrics` (or number columns) its components. `answer` is the reference answer, not
the policy's. Written from the projects' schema: no public file was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import as_boolean, as_group, as_integer, as_name, as_number, as_rewards, as_text
from collapsediag.readers._messages import as_messages, is_rebuilt, turns_from_messages
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row
from collapsediag.readers._source import Parsed, Source, prompt_digest
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

_NOT_REWARDS = frozenset({"example_id", "generation_ms", "scoring_ms", "total_ms", "is_completed", "is_truncated"})
_KEPT = ("answer", "info", "error", "stop_condition", "metadata")


def from_verifiers(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of verifiers or prime-rl results. Options: see ReadOptions."""
    return read_source(VerifiersSource, path, options)


class VerifiersSource(Source):
    """See the module."""

    name = "verifiers"
    title = "verifiers results"
    aliases: ClassVar = {
        "prompt": ("prompt",),
        "completion": ("completion",),
        "group": ("example_id", "id"),
        "reward": ("reward",),
        "rewards": ("metrics",),
        "environment": ("task", "env_id", "env_name"),
        "truncated": ("is_truncated",),
        "advantage": ("advantage",),
        "step": ("step",),
    }

    def parse(self, row: Row) -> Parsed:
        """One rollout; none where the environment failed before the policy wrote anything."""
        step = self.value(row, "step", as_integer)
        for name in ("prompt", "completion"):
            if self.fields.find(row, name) is None:
                if row.data.get("error"):
                    return Parsed(step, dropped={"failed_rollout": 1})
                raise row.missing(name, "A verifiers row has 'prompt', 'completion', 'example_id' and 'reward'.")
        turns, rebuilt = self._turns(row)
        if not turns and row.data.get("error"):
            return Parsed(step, dropped={"failed_rollout": 1})
        if not turns:
            raise row.error("'completion' holds no message of the assistant.")
        group = self.value(row, "group", as_group)
        notes = ["{n} outputs were put together from reasoning, text and tool calls: their syntax is a guess"] * rebuilt
        if group is None:
            notes.append("{n} rollouts have no example_id: grouped by identical prompt")
        environment = self.value(row, "environment", as_name)
        rollout = Rollout(
            turns=turns,
            # Example ids count from 0 in every environment, so that two environments may share one.
            group=prompt_digest(turns[0]) if group is None else (f"{environment}/{group}" if environment else group),
            environment=environment,
            reward=self.value(row, "reward", as_number),
            rewards=self._components(row),
            advantage=self.value(row, "advantage", as_number),
            metadata=self._metadata(row),
        )
        return Parsed(step, [rollout], notes=notes, named_group=group is not None)

    def _turns(self, row: Row) -> tuple[tuple[Turn, ...], bool]:
        prompt, completion = self.fields.find(row, "prompt"), self.fields.find(row, "completion")
        assert prompt is not None
        assert completion is not None
        cut = self.value(row, "truncated", as_boolean)
        ending: dict[str, Any] = {} if cut is None else {"finish_reason": "length" if cut else "stop"}
        if isinstance(completion[1], str):
            context: dict[str, Any] = (
                {"context": prompt[1]}
                if isinstance(prompt[1], str)
                else {"context_messages": tuple(as_messages(row, *prompt))}
            )
            return (Turn(output=completion[1], **context, **ending),), False
        if isinstance(prompt[1], str):
            before = [{"role": "user", "content": as_text(row, *prompt)}]
        else:
            before = as_messages(row, *prompt)
        said = as_messages(row, *completion)
        return turns_from_messages(before, said, **ending), any(is_rebuilt(message) for message in said)

    def _components(self, row: Row) -> dict[str, float | None]:
        """`metrics` where it is, else the number columns that are not timings."""
        metrics = self.value(row, "rewards", as_rewards)
        if metrics is not None:
            return dict(metrics)
        used = self.fields.used_keys() | _NOT_REWARDS
        return {
            key: as_number(row, key, value)
            for key, value in row.data.items()
            if key not in used and isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def _metadata(self, row: Row) -> dict[str, Any]:
        kept = {key: row.data[key] for key in _KEPT if row.data.get(key) is not None}
        tools = row.data.get("tool_defs") or row.data.get("oai_tools")
        return {**kept, "tools": tools} if isinstance(tools, list) and tools else kept
