"""A trainer's own log of scalars as records, so that the checks that need no matrix can read any run.

One concept has many names; `ALIASES` says which are the same number as ours. A name whose meaning is not the same in
all releases that write it (TRL's `reward_std`) is left out rather than guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from collapsediag.errors import ReaderError
from collapsediag.metrics.registry import find
from collapsediag.record import Record

# Foreign name -> ours. The comments say who writes it.
ALIASES: dict[str, str] = {
    "entropy": "entropy/token_mean",  # TRL
    "actor/entropy": "entropy/token_mean",  # veRL
    "actor/entropy_loss": "entropy/token_mean",  # veRL before 0.4
    "policy/entropy_avg": "entropy/token_mean",  # SkyRL
    "entropy/all/mean": "entropy/token_mean",  # prime-rl
    "rollout/entropy": "entropy/token_mean",  # slime
    "policy/entropy": "entropy/sampled_mean",  # tinker
    "optim/entropy": "entropy/sampled_mean",  # tinker-cookbook
    "approx_entropy": "entropy/sampled_mean",  # NeMo-RL
    "reward": "reward/mean",  # TRL
    "critic/rewards/mean": "reward/mean",  # veRL
    "critic/score/mean": "reward/mean",  # veRL
    "env/all/reward/total": "reward/mean",  # tinker-cookbook
    "rollout/in_group_reward_std": "reward/within_group_std",  # RAGEN
    "frac_reward_zero_std": "reward/all_equal_fraction",  # TRL, ms-swift
    "degenerate_frac": "reward/all_equal_fraction",
    "by_group/frac_all_good": "reward/all_success_fraction",  # tinker
    "by_group/frac_all_bad": "reward/all_fail_fraction",
    "env/all/by_group/frac_all_good": "reward/all_success_fraction",
    "env/all/by_group/frac_all_bad": "reward/all_fail_fraction",
    "solved_all": "reward/all_success_fraction",  # prime-rl
    "solved_none": "reward/all_fail_fraction",
    "rejection_sample/solve_all": "reward/all_success_fraction",  # rllm
    "rejection_sample/solve_none": "reward/all_fail_fraction",
    "baseline_reward/pct_1": "reward/all_success_fraction",  # NeMo-RL
    "baseline_reward/pct_0": "reward/all_fail_fraction",
    "completions/mean_length": "length/mean",  # TRL
    "completion_length": "length/mean",  # TRL before 0.18
    "response_length/mean": "length/mean",  # veRL
    "completions/clipped_ratio": "length/truncated_fraction",  # TRL
    "response_length/clip_ratio": "length/truncated_fraction",  # veRL
    "tools/call_frequency": "tools/calls_per_rollout",  # TRL
    "tools/failure_frequency": "tools/error_rate",  # TRL
    "avg_tool_calls": "tools/calls_per_rollout",
    "mean_tool_calls": "tools/calls_per_rollout",
    "collapse/valid_thinking_rate": "format/valid_fraction",  # RAGEN
    "eval/pass_at_1": "pass@1",  # SkyRL
    "em": "pass@1",
    "exact_match": "pass@1",
    "accuracy": "pass@1",
}
STEP_NAMES = ("step", "progress/step", "global_step", "training/global_step", "train/global_step", "_step")
_COMPONENT = re.compile(r"^rewards?/([^/]+)(?:/mean)?$")
_OWN_REWARD_NAMES = ("mean", "std", "total")


def from_history(
    history: Mapping[Any, Mapping[str, Any]] | Iterable[Mapping[Any, Any]], *, aliases: Mapping[str, str] | None = None
) -> list[Record]:
    """Records of a trainer's own history of scalars.

    history: {step: {name: value}}, or rows of it, or rows that name their step ("step", "progress/step", ...), as in a
        metrics.jsonl or the log_history of a trainer_state.json.
    aliases: further names, {theirs: ours}; they win over `ALIASES`.

    Rows of one step are merged, and of a number given twice the last one holds (a resumed run). Numbers of names nobody
    knows are left out; so are texts and NaN. A share above 1 is no share: it is left out, and `not_measured` says so.
    Raises ReaderError for a row without a step.

    >>> rows = [{"step": 0, "policy/entropy": 2.9, "reward/mean": 0.2}, {"step": 1, "policy/entropy": 2.8}]
    >>> [dict(record.values) for record in from_history(rows)]
    [{'entropy/sampled_mean': 2.9, 'reward/mean': 0.2}, {'entropy/sampled_mean': 2.8}]
    """
    known = {**ALIASES, **(aliases or {})}
    merged: dict[int, dict[str, float]] = {}
    for step, row in _rows(history):
        values = merged.setdefault(step, {})
        for name, value in row.items():
            own, number = _own_name(str(name), known), _number(value)
            if own is not None and number is not None:
                values[own] = number
            elif name == "dynamic_filtering_pass_rate" and number is not None:  # OpenRLHF
                values["reward/all_equal_fraction"] = 1.0 - number
    return [_record(step, merged[step]) for step in sorted(merged)]


def _rows(
    history: Mapping[Any, Mapping[str, Any]] | Iterable[Mapping[Any, Any]],
) -> Iterable[tuple[int, Mapping[str, Any]]]:
    rows: Iterable[Mapping[Any, Any]] = [history] if isinstance(history, Mapping) else history
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ReaderError(f"history row {index} is {type(row).__name__}; it must map names to numbers.")
        step_name = next((name for name in STEP_NAMES if _step(row.get(name)) is not None), None)
        if step_name is not None:
            yield _step(row[step_name]) or 0, row
        elif row and all(isinstance(value, Mapping) and _step(key) is not None for key, value in row.items()):
            yield from ((_step(key) or 0, value) for key, value in row.items())
        else:
            found = ", ".join(map(repr, list(row)[:5])) or "nothing"
            raise ReaderError(
                f"history row {index} names no step (found: {found}). Give rows with one of "
                f"{', '.join(STEP_NAMES)}, or {{step: {{name: value}}}}."
            )


def _step(value: Any) -> int | None:
    """A step number: an int, or text or a float that is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return int(value) if float(value).is_integer() else None
    except (ValueError, OverflowError):
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, str)) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _own_name(name: str, known: Mapping[str, str]) -> str | None:
    plain = name if name in known else name.removeprefix("train/")
    if plain in known:
        return known[plain]
    if find(plain) is not None:
        return plain
    component = _COMPONENT.match(plain)
    if component and component[1] not in _OWN_REWARD_NAMES:
        return f"reward/{component[1]}/mean"
    return None


def _record(step: int, values: Mapping[str, float]) -> Record:
    halves = [values.get(f"reward/all_{end}_fraction") for end in ("success", "fail")]
    if "reward/all_equal_fraction" not in values and halves[0] is not None and halves[1] is not None:
        values = {**values, "reward/all_equal_fraction": halves[0] + halves[1]}  # trainers that log the two halves
    not_measured = {}
    for name, value in values.items():
        info = find(name)
        if info is not None and info.unit == "fraction" and not -1e-9 <= value <= 1 + 1e-9:
            not_measured[name] = (
                f"logged as {value:g}, and a share lies in 0 to 1: a count or a percentage, by the look"
            )
    kept = {name: value for name, value in values.items() if name not in not_measured}
    return Record(step=step, values=kept, not_measured=not_measured)
