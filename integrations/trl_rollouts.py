"""What one TRL generation batch holds, as rollouts. Reads the trainer, changes nothing, keeps no tensor."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collapsediag.rollouts import Rollout, RolloutBatch, Turn

# Keys that say the batch holds images: a prompt's tokens alone are then not its context.
IMAGE_KEYS = ("pixel_values", "num_images", "image_grid_thw", "pixel_attention_mask", "image_sizes")
# What TRL may know about its own tokens, best first: the policy that trains, then the engine that sampled.
LOGP_KEYS = ("old_per_token_logps", "sampling_per_token_logps")


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What passed through `_calculate_rewards`: this rank's completions without padding, all ranks' rewards.

    rewards_BF: None where a function gave no value.
    """

    completion_ids: tuple[tuple[int, ...], ...]
    rewards_BF: tuple[tuple[float | None, ...], ...]

    @classmethod
    def of(cls, completion_ids: Sequence[Sequence[int]], rewards: Any) -> Captured:
        """A copy on the CPU; nothing keeps the trainer's tensors alive."""
        rows = rewards.detach().float().tolist()
        return cls(
            completion_ids=tuple(tuple(int(t) for t in ids) for ids in completion_ids),
            rewards_BF=tuple(tuple(None if math.isnan(v) else v for v in row) for row in rows),
        )


@dataclass
class Part:
    """This rank's rollouts of one or several generation batches, and the place of each in the whole."""

    rollouts: list[Rollout] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    rows_seen: int = 0
    groups_seen: int = 0
    has_images: bool = False

    def batch(self, trainer: Any, step: int, notes: Sequence[str] = ()) -> RolloutBatch:
        """As the monitor takes it."""
        multi_turn = any(len(rollout.turns) > 1 for rollout in self.rollouts)
        return RolloutBatch(
            step=step,
            rollouts=tuple(self.rollouts),
            temperature=float(trainer.temperature),
            # TRL's limit holds for the whole trajectory, the batch's for one turn.
            max_output_tokens=None if multi_turn else trainer.max_completion_length,
            eos_token_ids=end_tokens(trainer),
            dropped=self.dropped,
            source="trl",
            notes=tuple(notes),
        )


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer, also where the trainer holds a processor around it."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def end_tokens(trainer: Any) -> tuple[int, ...]:
    """Every token that ends a completion for this trainer."""
    found = getattr(trainer, "eos_token_ids", None) or [getattr(trainer, "eos_token_id", None)]
    return tuple(dict.fromkeys(int(t) for t in [*found, tokenizer_of(trainer).eos_token_id] if t is not None))


def add_generation(
    part: Part,
    trainer: Any,
    inputs: Sequence[Mapping[str, Any]],
    output: Mapping[str, Any],
    captured: Captured,
    *,
    group_size: int,
    rank: int,
    ranks: int,
    environment: str | None,
) -> None:
    """Add this rank's rows of one generation batch to `part`.

    Rows of all ranks stand rank after rank in TRL, and `group_size` neighbours share a prompt; a group may span ranks.
    environment: the dataset column that names the task family.
    """
    rows = _Rows.of(trainer, output, captured)
    n = len(captured.completion_ids)
    for i in range(n):
        place = rank * n + i
        rollout = rows.rollout(
            i,
            group=part.groups_seen + place // group_size,
            rewards=captured.rewards_BF[place],
            environment=None if environment is None else str(inputs[i][environment]),
        )
        if rollout is None:
            part.dropped["turns_unknown"] = part.dropped.get("turns_unknown", 0) + 1
        else:
            part.rollouts.append(rollout)
            part.order.append(part.rows_seen + place)
    part.rows_seen += n * ranks
    part.groups_seen += math.ceil(n * ranks / group_size)
    part.has_images |= any(output.get(key) is not None for key in IMAGE_KEYS)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of one batch, on the CPU and without padding."""

    prompt_ids: list[list[int]]
    completion_ids: tuple[tuple[int, ...], ...]
    advantages: list[float]
    tool_mask: list[list[int]] | None
    logps: list[list[float]] | None
    limit: int | None
    end: frozenset[int]
    tokenizer: Any
    names: list[str]
    weights: list[float]

    @classmethod
    def of(cls, trainer: Any, output: Mapping[str, Any], captured: Captured) -> _Rows:
        tokenizer = tokenizer_of(trainer)
        ids, mask = output["prompt_ids"].tolist(), output["prompt_mask"].tolist()
        logps = next((output[key] for key in LOGP_KEYS if output.get(key) is not None), None)
        tool_mask = output.get("tool_mask")
        pad = () if tokenizer.pad_token_id is None else (int(tokenizer.pad_token_id),)
        return cls(
            # By the mask: the padding token is often the end token as well.
            prompt_ids=[[t for t, m in zip(*row, strict=True) if m] for row in zip(ids, mask, strict=True)],
            completion_ids=captured.completion_ids,
            advantages=output["advantages"].float().tolist(),
            tool_mask=None if tool_mask is None else tool_mask.tolist(),
            logps=None if logps is None else logps.float().tolist(),
            limit=trainer.max_completion_length,
            end=frozenset((*end_tokens(trainer), *pad)),
            tokenizer=tokenizer,
            names=_distinct(list(trainer.reward_func_names)),
            weights=[float(w) for w in trainer.reward_weights],
        )

    def rollout(self, i: int, *, rewards: tuple[float | None, ...], **fields: Any) -> Rollout | None:
        """Row i; None where its turns cannot be told apart."""
        completion = list(self.completion_ids[i])
        given = [w * r for w, r in zip(self.weights, rewards, strict=True) if r is not None]
        fields.update(
            reward=sum(given) if given else None,
            rewards=dict(zip(self.names, rewards, strict=True)),
            advantage=self.advantages[i],
        )
        logprobs = self._logprobs(i, len(completion))
        mask = [1] * len(completion) if self.tool_mask is None else self.tool_mask[i][: len(completion)]
        if all(mask):
            turn = Turn(
                context_ids=np.array(self.prompt_ids[i], dtype=np.int64),
                output_ids=np.array(completion, dtype=np.int64),
                logprobs=logprobs,
                finish_reason=self._finish_reason(completion),
            )
            return Rollout(turns=(turn,), **fields)
        if not any(mask):
            return None  # TRL blanks the mask of truncated rows where it is told to leave them out of the loss
        prompt = self.prompt_ids[i]
        rollout = Rollout.from_trajectory(
            token_ids=np.array([*prompt, *completion], dtype=np.int64),
            model_mask=[0] * len(prompt) + mask,
            logprobs=None if logprobs is None else np.concatenate([np.zeros(len(prompt)), logprobs]),
            finish_reason=self._finish_reason(completion),
            **fields,
        )
        return self._with_observations(rollout)

    def _finish_reason(self, completion: list[int]) -> str | None:
        if completion and completion[-1] in self.end:
            return "stop"
        return "length" if self.limit is not None and len(completion) >= self.limit else None

    def _logprobs(self, i: int, length: int) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        if self.logps is None or len(self.logps[i]) < length:
            return None
        logp = np.array(self.logps[i][:length])
        # The engine that sampled leaves gaps; float noise of a certain token may lie above zero.
        return np.minimum(logp, 0.0) if np.isfinite(logp).all() else None

    def _with_observations(self, rollout: Rollout) -> Rollout:
        turns = list(rollout.turns)
        for t, (turn, following) in enumerate(itertools.pairwise(turns)):
            assert turn.context_ids is not None
            assert turn.output_ids is not None
            assert following.context_ids is not None
            seen = following.context_ids[turn.context_ids.size + turn.output_ids.size :]
            turns[t] = dataclasses.replace(turn, observation=self.tokenizer.decode(seen.tolist()))
        return dataclasses.replace(rollout, turns=tuple(turns))


def _distinct(names: list[str]) -> list[str]:
    """Names of reward functions, numbered where two are called the same."""
    return [name if names.count(name) == 1 else f"{name}_{names[:i].count(name)}" for i, name in enumerate(names)]
