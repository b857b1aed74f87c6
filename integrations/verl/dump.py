"""Rollouts with their token ids, one file a scored step, in the schema that `collapsediag score` reads exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collapsediag.integrations.verl.rows import Row
from collapsediag.rollouts import RolloutBatch
from collapsediag.whole_files import clear_leftovers, replacing


def dump(folder: str | os.PathLike[str], rows: list[Row], batch: RolloutBatch) -> Path:
    """Write FOLDER/<step>.jsonl, one row a rollout in the order of the batch; a step that is there is replaced.

    rows: those that `batch` was made of.
    """
    path = Path(folder) / f"{batch.step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path.parent)
    with replacing(path) as temporary, temporary.open("w", encoding="ascii") as stream:
        for line in _lines([row for row in rows if row.mask_R.any()], batch):
            stream.write(json.dumps(line, separators=(",", ":")) + "\n")
    return path


def _lines(rows: list[Row], batch: RolloutBatch) -> Iterator[dict[str, Any]]:
    for row, rollout in zip(rows, batch, strict=True):
        line = {
            "step": batch.step,
            "group": rollout.group,
            "id": rollout.id,
            "environment": rollout.environment,
            "prompt_ids": row.prompt.tolist(),
            "completion_ids": row.response.tolist(),
            "model_mask": row.mask_R.tolist(),
            "logprobs": None if row.logp_R is None else row.logp_R.tolist(),
            "entropies": None if row.entropy_R is None else row.entropy_R.tolist(),
            "finish_reason": rollout.turns[-1].finish_reason,
            "reward": rollout.reward,
            # Readers take the sum of the components for a reward that is missing.
            "rewards": None if rollout.reward is None else dict(rollout.rewards) or None,
            "success": rollout.success,
            "advantage": rollout.advantage,
            "temperature": batch.temperature,
            "max_output_tokens": batch.max_output_tokens,
            "eos_token_ids": list(batch.eos_token_ids),
        }
        yield {name: value for name, value in line.items() if value is not None}
