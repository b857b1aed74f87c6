"""Atropos `process` dumps: one row a group, token ids and masks of each trajectory.

`tokens[i]` is the whole sequence, `masks[i]` is -100 where the policy did not write the token and repeats the token id
where it did, `scores[i]` the reward. In multi-turn environments a row is one step of an episode: the mask marks that
step's message alone, and the contexts of a group differ once its members went different ways.

Some environments close a row with their own answer and mark that instead of the policy's message. Where `messages` show
it, the policy's last message is taken from the text, and a note counts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from collapsediag.readers._fields import as_floats, as_ids, as_integer, as_list, as_name, as_number
from collapsediag.readers._generic_turns import with_text
from collapsediag.readers._messages import POLICY_ROLES, Message, as_messages, turns_from_messages
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row
from collapsediag.readers._source import Parsed, Source
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

_NOT_KEPT = frozenset(
    {"tokens", "masks", "scores", "messages", "token_scores", "token_weights", "advantages", "ref_logprobs"}
    | {"inference_logprobs", "overrides", "group_overrides", "images"}
)
_ENVIRONMENT_MARKED = (
    "{n} masks mark the closing message of the environment: the policy's last message is read as text instead"
)


def from_atropos(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of an Atropos dump. Options: see ReadOptions."""
    return read_source(AtroposSource, path, options)


class AtroposSource(Source):
    """See the module."""

    name = "atropos"
    title = "Atropos dump"
    aliases: ClassVar = {
        "token_ids": ("tokens",),
        "model_mask": ("masks",),
        "reward": ("scores",),
        "messages": ("messages",),
        "logprobs": ("inference_logprobs",),
        "step": ("step",),
        "environment": ("env_name", "environment"),
    }

    def parse(self, row: Row) -> Parsed:
        """One group: a rollout for each trajectory."""
        columns = self._columns(row)
        environment = self.value(row, "environment", as_name)
        metadata = {key: value for key, value in row.data.items() if key not in _NOT_KEPT and value is not None}
        rollouts = []
        notes: list[str] = []
        for i, ids in enumerate(columns["token_ids"]):
            turns, note = self._turns(row, i, ids, columns)
            notes += note
            score = columns["reward"][i]
            rollouts.append(
                Rollout(
                    turns=turns,
                    group=self.row_group(row),
                    environment=environment,
                    reward=as_number(row, f"scores[{i}]", score),
                    id=f"{row.number}/{i}",
                    metadata=metadata,
                )
            )
        return Parsed(
            self.value(row, "step", as_integer),
            rollouts,
            dropped={} if rollouts else {"empty_group": 1},
            notes=notes,
        )

    def _columns(self, row: Row) -> dict[str, list[Any]]:
        """The parallel lists by our names, all of one length; messages and log-probabilities may be missing."""
        columns: dict[str, list[Any]] = {}
        for name in ("token_ids", "model_mask", "reward", "messages", "logprobs"):
            found = self.fields.find(row, name)
            if found is not None:
                columns[name] = as_list(row, *found)
        for name in ("token_ids", "model_mask", "reward"):
            if name not in columns:
                raise row.missing(self.aliases[name][0], "An Atropos dump has 'tokens', 'masks' and 'scores'.")
        if len({len(values) for values in columns.values()}) > 1:
            lengths = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
            raise row.error(
                f"the lists of the group differ in length: {lengths}. Which score belongs to which is unknown."
            )
        return columns

    def _turns(
        self, row: Row, i: int, values: Any, columns: dict[str, list[Any]]
    ) -> tuple[tuple[Turn, ...], list[str]]:
        ids = as_ids(row, f"tokens[{i}]", values)
        mask = as_ids(row, f"masks[{i}]", columns["model_mask"][i])
        if mask.size != ids.size:
            raise row.error(f"masks[{i}] has {mask.size} entries for {ids.size} tokens; one each is needed.")
        written = _written_by_policy(mask, ids)
        if not written.any():
            raise row.error(f"masks[{i}] marks no token of the policy.")
        messages: list[Message] = []
        if "messages" in columns and isinstance(columns["messages"][i], list):
            messages = as_messages(row, f"messages[{i}]", columns["messages"][i])
        if written[-1] and messages and messages[-1]["role"] not in POLICY_ROLES:
            spoken = turns_from_messages((), messages)
            if not spoken:
                raise row.error(f"messages[{i}] holds no message of the policy.")
            return spoken[-1:], [_ENVIRONMENT_MARKED]
        logprobs = None
        if "logprobs" in columns:
            logprobs = as_floats(row, f"inference_logprobs[{i}]", columns["logprobs"][i])
        turns = Rollout.from_trajectory(token_ids=ids, model_mask=written, group="", logprobs=logprobs).turns
        texts = turns_from_messages((), messages)[-len(turns) :]
        # One run of the mask per message, from the end back: earlier messages were another row's turns.
        if len(texts) == len(turns):
            turns = tuple(with_text(turn, text) for turn, text in zip(turns, texts, strict=True))
        return turns, []


def _written_by_policy(mask: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[L] booleans from either convention: -100 and the token's own id, or 0 and 1."""
    if (mask < 0).any() or np.array_equal(mask, ids):
        return np.asarray(mask >= 0)
    return np.asarray(mask > 0)
