"""Evaluation dumps with parallel lists: one row a prompt, `response[]` (or `code[]`) beside `score[]` and `pred[]`.

The row is the group. Scores may be booleans (solved or not). The question is bare, so that a chat message is made of it
(with `system` where there is one) unless wrap_questions=False.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from collapsediag.readers._fields import as_integer, as_list, as_name, as_number, as_text
from collapsediag.readers._questions import QUESTION_KEYS, SYSTEM_KEYS, WRAPPED, is_wrapped, question_context
from collapsediag.readers._read import read_source
from collapsediag.readers._rows import Row
from collapsediag.readers._source import Parsed, Source
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

# Bulky columns that say again what other columns say.
_NOT_KEPT = frozenset({"code", "response", "gt_cot", "solution", "pred_score", "report", "history", "query"})


def from_parallel(path: str | Path, **options: Any) -> Iterator[RolloutBatch]:
    """Batches of a dump with parallel lists. Options: see ReadOptions."""
    return read_source(ParallelSource, path, options)


class ParallelSource(Source):
    """See the module."""

    name = "parallel"
    title = "parallel-list dump"
    aliases: ClassVar = {
        "question": QUESTION_KEYS,
        "system": SYSTEM_KEYS,
        "completion": ("response", "responses", "completions", "generations", "outputs", "code"),
        "reward": ("score", "scores", "reward", "rewards", "correct"),
        "answer": ("pred", "preds", "prediction", "predictions"),
        "finish_reason": ("finish_reason", "finish_reasons"),
        "step": ("step", "global_step"),
        "environment": ("data_source", "environment", "env"),
        "id": ("idx", "id", "example_id"),
    }

    def parse(self, row: Row) -> Parsed:
        """One group: a rollout for each response."""
        context = question_context(row, self.fields, self.options)
        lists = self._lists(row)
        outputs = lists.pop("completion")
        environment = self.value(row, "environment", as_text)
        metadata = {key: value for key, value in row.data.items() if key not in _NOT_KEPT | self.fields.used_keys()}
        identifier = self.value(row, "id", as_name)
        rollouts = []
        for i, output in enumerate(outputs):
            here = {field: values[i] for field, values in lists.items()}
            score = here.get("reward")
            turn = Turn(output=as_text(row, f"{self._keys['completion']}[{i}]", output), **context, **_finish(here))
            rollouts.append(
                Rollout(
                    turns=(turn,),
                    group=self.row_group(row),
                    environment=environment,
                    reward=None if score is None else as_number(row, f"{self._keys['reward']}[{i}]", score),
                    success=score if isinstance(score, bool) else None,
                    answer=here["answer"] if isinstance(here.get("answer"), str) else None,
                    id=None if identifier is None else f"{identifier}/{i}",
                    metadata=metadata,
                )
            )
        return Parsed(
            self.value(row, "step", as_integer),
            rollouts,
            dropped={} if rollouts else {"empty_group": 1},
            notes=[WRAPPED] * len(rollouts) if is_wrapped(context) else [],
        )

    def _lists(self, row: Row) -> dict[str, list[Any]]:
        """The parallel lists by our names, all of one length."""
        self._keys: dict[str, str] = {}
        lists: dict[str, list[Any]] = {}
        for name in ("completion", "reward", "answer", "finish_reason"):
            found = self.fields.find(row, name)
            if found is not None:
                lists[name] = as_list(row, *found)
                self._keys[name] = found[0]
        if "completion" not in lists:
            raise row.missing("response", "A parallel-list dump has the samples of one prompt in a list.")
        if len({len(values) for values in lists.values()}) > 1:
            lengths = ", ".join(f"{self._keys[name]!r} has {len(values)}" for name, values in lists.items())
            raise row.error(
                f"the parallel lists differ in length: {lengths}. Which score belongs to which response is unknown; "
                "write the row again, or leave it out."
            )
        return lists


def _finish(here: dict[str, Any]) -> dict[str, Any]:
    reason = here.get("finish_reason")
    return {"finish_reason": reason} if isinstance(reason, str) else {}
