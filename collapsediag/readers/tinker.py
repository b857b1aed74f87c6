"""tinker-cookbook chat logs: JSON with `rollouts` (the messages of one conversation, or a list of conversations),
`metrics`, `env_type` and `env_config`.

One document is one prompt's samples. `metrics` are kept as components; the total is `metrics.reward` where there is
one, else a key map says which component it is: {"reward": "metrics.public_reward"}.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import as_group, as_integer, as_list, as_name, as_number, as_object
from collapsediag.readers._messages import POLICY_ROLES, as_messages, is_rebuilt, turns_from_messages
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row
from collapsediag.readers._source import Parsed, Source, prompt_digest
from collapsediag.rollouts import Rollout, RolloutBatch

_TOTALS = ("reward", "total_reward", "reward/total")


def from_tinker(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of tinker chat logs: a file or a folder of them. Options: see ReadOptions."""
    return read_source(TinkerSource, path, options)


class TinkerSource(Source):
    """See the module."""

    name = "tinker"
    title = "tinker chat log"
    suffixes = (".json", ".jsonl")
    aliases: ClassVar = {
        "rollouts": ("rollouts", "messages"),
        "rewards": ("metrics",),
        "reward": ("reward", "total_reward"),
        "environment": ("env_type",),
        "group": ("group", "tag"),
        "step": ("step",),
    }

    def parse(self, row: Row) -> Parsed:
        """One rollout for each conversation."""
        found = self.fields.find(row, "rollouts")
        if found is None:
            raise row.missing("rollouts", "A tinker chat log has the messages of a conversation there.")
        conversations = as_list(row, *found)
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        group = self.value(row, "group", as_group)
        rewards, reward = self._rewards(row)
        notes = [] if reward is not None else [_NO_TOTAL.replace("{names}", ", ".join(rewards))]
        rollouts = []
        for i, conversation in enumerate(conversations):
            messages = as_messages(row, f"{found[0]}[{i}]", conversation)
            turns = turns_from_messages((), messages)
            if not turns:
                raise row.error(
                    f"{found[0]!r} holds no message of the policy (role {', '.join(sorted(POLICY_ROLES))})."
                )
            if any(is_rebuilt(message) for message in messages if message["role"] in POLICY_ROLES):
                notes.append(
                    "{n} outputs were put together from reasoning, text and tool calls: their syntax is a guess"
                )
            rollouts.append(
                Rollout(
                    turns=turns,
                    group=prompt_digest(turns[0]) if group is None else group,
                    environment=self.value(row, "environment", as_name),
                    reward=reward,
                    rewards=rewards,
                    metadata={"env_config": row.data["env_config"]} if "env_config" in row.data else {},
                )
            )
        return Parsed(self.value(row, "step", as_integer), rollouts, notes=notes, named_group=group is not None)

    def _rewards(self, row: Row) -> tuple[dict[str, float | None], float | None]:
        found = self.fields.find(row, "rewards")
        metrics = {} if found is None else as_object(row, *found)
        components = {
            name: as_number(row, f"metrics.{name}", value)
            for name, value in metrics.items()
            if value is None or isinstance(value, (bool, int, float))
        }
        total = self.fields.find(row, "reward")
        if total is not None:
            return components, as_number(row, *total)
        return components, next((components[name] for name in _TOTALS if name in components), None)


_NO_TOTAL = "{n} documents hold no total reward; name one of {names} in the key map (reward=metrics.NAME)"
