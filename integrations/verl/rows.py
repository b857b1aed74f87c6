"""What a veRL batch holds just before the actor update, as rollouts. Reads it, changes nothing, keeps no tensor.

Two kinds of batch: `KVBatchMeta` names rows of TransferQueue (the trainer of 0.9), `DataProto` holds padded tensors
(the trainer before it). Both become the same rows, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.rollouts import Rollout, RolloutBatch

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Fields of TransferQueue rows that are read; those that a run does not have are left out by the queue.
FIELDS = (
    *("prompts", "responses", "response_mask", "loss_mask", "rm_scores", "advantages", "old_log_probs", "entropy"),
    *("data_source", "extra_fields", "multi_modal_inputs"),
)
SUCCESS_KEY = "acc"
TOTAL_KEYS = ("score", "reward")  # a reward function's own total, which is in the token scores already


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One rollout without padding; R tokens of response.

    group: the prompt's uid, new at every step. id: the row's own name, where it has one.
    mask_R: 1 where the policy wrote the token. logp_R: veRL's `old_log_probs`. entropy_R: exact, where veRL keeps it.
    extra: what the reward function said beside the score.
    weights_from: the oldest training step whose weights wrote the row.
    """

    group: str
    prompt: IntArray
    response: IntArray
    mask_R: IntArray
    reward: float | None = None
    id: str | None = None
    logp_R: FloatArray | None = None
    entropy_R: FloatArray | None = None
    advantage: float | None = None
    environment: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    has_images: bool = False
    weights_from: int | None = None

    @property
    def sort_key(self) -> tuple[bytes, bytes]:
        """By tokens: balancing and ranks shuffle rows, and the draw of traces must not depend on them."""
        return self.prompt.astype(">u4").tobytes(), self.response.astype(">u4").tobytes()


def read_rows(batch: Any) -> tuple[list[Row], dict[str, int]]:
    """(rows sorted by their tokens, rows left out by reason) of either kind of batch."""
    rows, dropped = _from_queue(batch) if hasattr(batch, "tags") else (_from_dataproto(batch), {})
    return sorted(rows, key=lambda row: row.sort_key), dropped


# -- the two kinds of batch ------------------------------------------------------------------------------------------


def _from_queue(batch: Any) -> tuple[list[Row], dict[str, int]]:
    import transfer_queue

    kept = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    n_padding = len(batch.tags) - len(kept)
    keys = [batch.keys[i] for i in kept]
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
    # get(), because [] gives a bare value where all rows hold the same object.
    columns = {name: _column(data.get(name)) for name in FIELDS if name in data.keys()}  # noqa: SIM118
    # Rejection by importance weights blanks `response_mask` after the fact; `loss_mask` says who wrote what.
    mask = columns.get("loss_mask", columns["response_mask"])
    rows = []
    for i, key in enumerate(keys):
        values = {name: column[i] for name, column in columns.items()}
        info = values.get("extra_fields") or {}
        rows.append(
            _row(
                group=key.rsplit("_", 2)[0],
                id=key,
                prompt=values["prompts"],
                response=values["responses"],
                mask=mask[i],
                scores=values.get("rm_scores"),
                logp=values.get("old_log_probs"),
                entropy=values.get("entropy"),
                advantages=values.get("advantages"),
                environment=values.get("data_source"),
                extra=info.get("reward_extra_info") or {},
                images=values.get("multi_modal_inputs"),
                weights_from=batch.tags[kept[i]].get("min_global_steps"),
            )
        )
    return rows, {"padding_row": n_padding} if n_padding else {}


def _column(values: Any) -> list[Any]:
    """The rows of one field: tensors of a jagged one, plain objects of a stack."""
    import torch

    return list(values.unbind()) if isinstance(values, torch.Tensor) else list(values.tolist())


def _from_dataproto(batch: Any) -> list[Row]:
    tensors, objects = batch.batch, batch.non_tensor_batch
    length = tensors["prompts"].shape[1]
    attention = tensors["attention_mask"].bool()
    scores = next((tensors[name] for name in ("token_level_scores", "rm_scores") if name in tensors), None)
    mask = tensors["response_mask"] if "response_mask" in tensors else attention[:, length:]
    extra = [name for name in batch.meta_info.get("reward_extra_keys", ()) if name in objects]
    rows = []
    for i in range(len(batch)):
        # By the attention mask: the padding token may be the end token, or a real one.
        prompt_kept, kept = attention[i, :length], attention[i, length:]

        def of_response(name: str, i: int = i, kept: Any = kept) -> Any:
            return tensors[name][i][kept] if name in tensors else None

        rows.append(
            _row(
                group=str(objects["uid"][i]),
                prompt=tensors["prompts"][i][prompt_kept],
                response=tensors["responses"][i][kept],
                mask=mask[i][kept],
                scores=None if scores is None else scores[i],
                logp=of_response("old_log_probs"),
                entropy=None,  # this trainer drops it
                advantages=of_response("advantages"),
                environment=objects["data_source"][i] if "data_source" in objects else None,
                extra={name: objects[name][i] for name in extra},
                images=objects["multi_modal_inputs"][i] if "multi_modal_inputs" in objects else None,
                weights_from=objects["min_global_steps"][i] if "min_global_steps" in objects else None,
            )
        )
    return rows


def _row(
    *,
    prompt: Any,
    response: Any,
    mask: Any,
    scores: Any,
    logp: Any,
    entropy: Any,
    advantages: Any,
    environment: Any,
    images: Any,
    weights_from: Any,
    **named: Any,
) -> Row:
    mask_R = mask.cpu().numpy().astype(np.int64)
    written = mask_R != 0
    logp_R, entropy_R, advantage_R = (_floats(values) for values in (logp, entropy, advantages))
    return Row(
        prompt=prompt.cpu().numpy().astype(np.int64),
        response=response.cpu().numpy().astype(np.int64),
        mask_R=mask_R,
        reward=None if scores is None else float(scores.detach().float().sum()),
        # Float noise of a certain token may lie on the wrong side of zero.
        logp_R=None if logp_R is None else np.minimum(logp_R, 0.0),
        entropy_R=None if entropy_R is None else np.maximum(entropy_R, 0.0),
        advantage=None if advantage_R is None or not written.any() else float(advantage_R[written].mean()),
        environment=None if environment is None else str(environment),
        has_images=bool(images),
        weights_from=None if weights_from is None else int(weights_from),
        **named,
    )


def _floats(values: Any) -> FloatArray | None:
    """A float64 copy on the CPU; None where nothing is there, or something of it is not finite."""
    if values is None:
        return None
    array: FloatArray = values.detach().float().cpu().numpy().astype(np.float64)
    return array if np.isfinite(array).all() else None


# -- rows as rollouts ------------------------------------------------------------------------------------------------


def rollout_of(row: Row, *, end_tokens: Sequence[int], limit: int | None) -> Rollout | None:
    """The rollout of a row, each run of the policy's own tokens being one turn; None where there are none.

    end_tokens: tokens that end a response. limit: tokens of the longest response that the sampler allows.
    """
    if not row.mask_R.any():
        return None
    success, rewards = _judgement(row.extra)
    n = row.prompt.size

    def whole(values: FloatArray | None) -> FloatArray | None:
        return None if values is None else np.concatenate([np.zeros(n), values])

    return Rollout.from_trajectory(
        token_ids=np.concatenate([row.prompt, row.response]),
        model_mask=np.concatenate([np.zeros(n, dtype=np.int64), row.mask_R]),
        logprobs=whole(row.logp_R),
        entropies=whole(row.entropy_R),
        finish_reason=_finish_reason(row.response, end_tokens, limit),
        group=row.group,
        id=row.id,
        environment=row.environment,
        reward=None if row.reward is None or math.isnan(row.reward) else row.reward,
        rewards=rewards,
        success=success,
        advantage=row.advantage,
    )


def _finish_reason(response: IntArray, end_tokens: Sequence[int], limit: int | None) -> str | None:
    if response.size and int(response[-1]) in end_tokens:
        return "stop"
    return "length" if limit is not None and response.size >= limit else None


def _judgement(extra: Mapping[str, Any]) -> tuple[bool | None, dict[str, float | None]]:
    """(solved or not by the reward function's `acc`, its other numbers)."""
    rewards: dict[str, float | None] = {}
    success = None
    for name, value in extra.items():
        if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)) or name in TOTAL_KEYS:
            continue
        if name == SUCCESS_KEY and value in (0, 1):
            success = bool(value)
        else:
            rewards[name] = None if math.isnan(float(value)) else float(value)
    return success, rewards


def batch_of(
    rows: Sequence[Row],
    *,
    step: int,
    end_tokens: Sequence[int],
    limit: int | None,
    temperature: float,
    dropped: Mapping[str, int],
    notes: Sequence[str] = (),
) -> RolloutBatch:
    """One step's rollouts as the monitor takes them. Rows without a token of the policy are counted as dropped."""
    found = [rollout_of(row, end_tokens=end_tokens, limit=limit) for row in rows]
    rollouts = tuple(rollout for rollout in found if rollout is not None)
    counts = dict(dropped)
    if len(rollouts) < len(found):
        counts["no_policy_tokens"] = len(found) - len(rollouts)
    multi_turn = any(len(rollout.turns) > 1 for rollout in rollouts)
    return RolloutBatch(
        step=step,
        rollouts=rollouts,
        temperature=temperature,
        # veRL's limit holds for the whole trajectory, the batch's for one turn.
        max_output_tokens=None if multi_turn else limit,
        eos_token_ids=tuple(end_tokens),
        dropped=counts,
        source="verl",
        notes=tuple(notes),
    )
