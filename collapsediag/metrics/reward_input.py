"""The door through which rewards and success labels enter: what is none is refused by name, never a silent number.

Legend: N rollouts, P prompts (groups), G rollouts of one prompt.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from collapsediag.errors import MetricError
from collapsediag.metrics.grouped import FloatArray, IntArray
from collapsediag.rollouts import Rollout, RolloutBatch

# Squares of larger numbers, summed over a batch, leave float64. Infinities are larger too.
LARGEST_REWARD = 1e150
# Values that a note names one by one.
MAX_NAMED = 8


def is_scored(reward: float | None) -> TypeGuard[float]:
    """Whether a rollout's reward enters numbers: it is none of None, NaN, an infinity, and a number beyond 1e150.

    >>> is_scored(1.0), is_scored(float("-inf")), is_scored(None)
    (True, False, False)
    """
    return reward is not None and abs(reward) <= LARGEST_REWARD


def rollout_name(rollout: Rollout, row: int) -> str:
    """A rollout in a message. A group is often called by its prompt, which may be long."""
    name = f", id {rollout.id!r:.80}" if rollout.id is not None else ""
    return f"rollout {row} (group {rollout.group!r:.80}{name})"


def without_overflow(batch: RolloutBatch) -> tuple[RolloutBatch, tuple[str, ...]]:
    """The batch with None for every reward, component and advantage that is infinite or beyond 1e150, and a note.

    One reward that overflowed must not cost the numbers of all other rollouts. None is what a trainer says of a rollout
    it could not score: it is left out and counted. NaN means that already.

    >>> batch = RolloutBatch.from_lists(step=0, prompts=["a", "a"], completions=["1", "2"], rewards=[1.0, float("inf")])
    >>> fit, notes = without_overflow(batch)
    >>> [rollout.reward for rollout in fit], notes[0][:45]
    ([1.0, None], 'left out as unscored: reward inf of rollout 1')
    """
    # Rewards before the advantages that came of them.
    found: tuple[list[str], list[str]] = ([], [])
    rollouts = tuple(_without_overflow(rollout, row, *found) for row, rollout in enumerate(batch))
    named = [*found[0], *found[1]]
    if not named:
        return batch, ()
    more = f", and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    note = (
        f"left out as unscored: {', '.join(named[:MAX_NAMED])}{more}. No mean or variance survives a number of that "
        "size; all others are measured. Look for an overflow in the reward function"
    )
    return replace(batch, rollouts=rollouts), (note,)


def _without_overflow(rollout: Rollout, row: int, rewards: list[str], advantages: list[str]) -> Rollout:
    changes: dict[str, Any] = {}
    if _overflows(rollout.reward):
        changes["reward"] = None
        rewards.append(f"reward {as_float(rollout.reward):g} of {rollout_name(rollout, row)}")
    too_large = {name: value for name, value in rollout.rewards.items() if _overflows(value)}
    if too_large:
        changes["rewards"] = {**rollout.rewards, **dict.fromkeys(too_large)}
        where = rollout_name(rollout, row)
        rewards += [f"reward {name!r:.80} {as_float(value):g} of {where}" for name, value in too_large.items()]
    if _overflows(rollout.advantage):
        changes["advantage"] = None
        advantages.append(f"advantage {as_float(rollout.advantage):g} of {rollout_name(rollout, row)}")
    return replace(rollout, **changes) if changes else rollout


def _overflows(value: Any) -> bool:
    # What is no number at all is refused by name further on.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and abs(value) > LARGEST_REWARD


def as_float(value: Any) -> float:
    """A number of any make as a float.

    >>> as_float(3), as_float(-(10**400))
    (3.0, -inf)
    """
    try:
        return float(value)
    except OverflowError:  # an integer of more digits than a float counts
        return math.inf if value > 0 else -math.inf


def checked_rewards(rewards: Sequence[Any], where: Callable[[int], str]) -> FloatArray:
    """[N] rewards as float64, NaN where the trainer could not score the rollout (None or NaN).

    where: names row i in an error message.
    Raises MetricError for what is no reward: an infinity, a number beyond 1e150, a string, a boolean (that is a
    success label), a dict of components, a vector.
    """
    return np.array([_reward(value, i, where) for i, value in enumerate(rewards)], dtype=np.float64)


def _reward(value: Any, row: int, where: Callable[[int], str]) -> float:
    if isinstance(value, float):
        number = value
    elif value is None:
        return math.nan
    else:
        number = _unusual_reward(value, row, where)
    if abs(number) > LARGEST_REWARD:
        raise MetricError(
            f"the reward of {where(row)} is {number}: its variance is not finite. Pass None for a rollout that could "
            "not be scored; it is left out and counted."
        )
    return number


def _unusual_reward(value: Any, row: int, where: Callable[[int], str]) -> float:
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool):
        raise MetricError(
            f"the reward of {where(row)} is the boolean {value}: that is a success label. Pass it as success, "
            "and as reward the number the trainer used."
        )
    if isinstance(value, dict):
        raise MetricError(
            f"the reward of {where(row)} is a dict of components ({', '.join(map(repr, list(value)[:5]))}). Pass the "
            "components as `rewards`, and as `reward` the total the trainer used."
        )
    if isinstance(value, numbers.Real):
        return as_float(value)
    raise MetricError(
        f"the reward of {where(row)} is {value!r:.80} ({type(value).__name__}); a reward is one number, or None where "
        "the trainer could not score the rollout."
    )


def flatten_groups(rewards_PG: Any) -> tuple[FloatArray, IntArray, int]:
    """Values [N], group numbers [N] and P of a [P, G] matrix or of P ragged lists.

    Raises MetricError where the input is no list of lists, or holds what is no reward.

    >>> values, group, p = flatten_groups([[1.0, None], [0.5]])
    >>> values.tolist(), group.tolist(), p
    ([1.0, nan, 0.5], [0, 0, 1], 2)
    """
    if isinstance(rewards_PG, (str, bytes, dict)) or not hasattr(rewards_PG, "__len__"):
        raise MetricError(
            f"rewards must be one list of numbers per prompt, found {type(rewards_PG).__name__}. For 8 samples of each "
            "of 4 prompts pass an array of shape [4, 8], or 4 lists."
        )
    groups: list[int] = []
    positions: list[tuple[int, int]] = []
    flat: list[Any] = []
    for p in range(len(rewards_PG)):
        row = rewards_PG[p]
        row = row.tolist() if hasattr(row, "tolist") else row
        if isinstance(row, (str, bytes, dict)) or not hasattr(row, "__len__"):
            raise MetricError(
                f"rewards[{p}] is {row!r:.60} ({type(row).__name__}), expected the list of rewards of prompt {p}. A "
                "flat list must be cut into groups first: reshape it to [prompts, group size]."
            )
        flat.extend(row)
        groups.extend([p] * len(row))
        positions.extend((p, g) for g in range(len(row)))
    values = checked_rewards(flat, lambda i: f"rewards[{positions[i][0]}][{positions[i][1]}]")
    return values, np.array(groups, dtype=np.int64), len(rewards_PG)


def success_by_threshold(reward_N: FloatArray, threshold: float, success_N: FloatArray | None = None) -> FloatArray:
    """[N] 1 where the reward is at or above the threshold, 0 below, NaN where unscored; labels given win.

    >>> success_by_threshold(np.array([0.2, 1.0, np.nan]), 0.5).tolist()
    [0.0, 1.0, nan]
    """
    derived = np.where(np.isnan(reward_N), np.nan, (reward_N >= threshold).astype(np.float64))
    return derived if success_N is None else np.where(np.isnan(success_N), derived, success_N)


def flat_success(success_PG: Any, n: int) -> FloatArray:
    """[N] labels of a [P, G] matrix or of P ragged lists. Raises MetricError where they are not n in all."""
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in success_PG]
    flat = [value for row in rows for value in row]
    if len(flat) != n:
        raise MetricError(f"success has {len(flat)} labels but there are {n} rewards; give one for each, or None.")
    return checked_success(flat)


def checked_success(labels: Sequence[Any], where: Callable[[int], str] = "label {}".format) -> FloatArray:
    """[N] 1, 0, or NaN for None. Raises MetricError for anything that is not True, False, 1, 0 or None."""
    return np.array([_label(label, row, where) for row, label in enumerate(labels)], dtype=np.float64)


def _label(label: Any, row: int, where: Callable[[int], str]) -> float:
    if label is None:
        return math.nan
    plain = label.item() if hasattr(label, "item") and getattr(label, "ndim", 1) == 0 else label
    if isinstance(plain, (bool, int, float)) and plain in (0, 1):
        return float(plain)
    raise MetricError(
        f"the success label of {where(row)} is {label!r:.80}; it must be True, False, or None where nobody said. A "
        "graded reward becomes a label through success_threshold."
    )
