"""How the policy uses its tools: whether it calls them, whether the calls work, and whether it reads the answers.

Tool use collapses before the reward does: a policy that stops searching still knows part of the answers for a while.

Denominators, exactly:

* **observed rollouts**: those whose every turn has its output as text, or its calls from the source. A rollout known
  only as token ids is in no number here.
* **calls**: every attempt, malformed ones included; **well-formed calls**: those that parsed.
* a number whose denominator is empty is absent, never 0. `call_rate` is 0 where rollouts were observed and none called.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collapsediag.metrics.grouped import FloatArray, IntArray, group_numbers
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.metrics.reward_input import checked_rewards
from collapsediag.metrics.tool_parsers import canonical_arguments
from collapsediag.metrics.tool_use import ToolUse, read_tool_use
from collapsediag.rollouts import Rollout, RolloutBatch, ToolCall
from collapsediag.statistics import group_mean_interval, wilson_interval

_Read = list[tuple[int, Rollout, ToolUse]]


def tool_metrics(batch: RolloutBatch, *, seed: int = 0) -> dict[str, float]:
    """Every `tools/` number of one step; see the registry for what each divides by what.

    seed: of the bootstrap over groups that gives `call_rate`, `calls_per_rollout` and `result_use_rate` their 95%
        intervals (`/ci_low`, `/ci_high`; absent with a single group).
    Rewards that are None or NaN are left out of the two reward means. Numbers that are not defined are absent.
    Raises MetricError for a reward that is no number, naming its row.

    >>> batch = RolloutBatch.from_lists(step=1, prompts=["q"] * 2, completions=["<search>a</search>", "no idea"])
    >>> tool_metrics(batch)["tools/call_rate"]
    0.5
    """
    read: _Read = []
    for row, rollout in enumerate(batch):
        use = read_tool_use(rollout)
        if use is not None:
            read.append((row, rollout, use))
    if not read:
        return {}
    calls = [call for _, _, use in read for call in use.calls]
    known = [call.error for call in calls if not call.malformed and call.error is not None]
    values = {
        "tools/malformed_rate": _share([call.malformed for call in calls]),
        "tools/error_rate": _share(known),
        "tools/duplicate_call_fraction": _share([repeat for _, _, use in read for repeat in _repeats(use.calls)]),
        "tools/n_rollouts": float(len(read)),
        "tools/n_calls": float(len(calls)),
    }
    values |= _reward_means(batch, read)
    defined = {name: value for name, value in values.items() if value is not None}
    return defined | _rollout_means(read, seed) | _use_rate(read, seed)


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _repeats(calls: Sequence[ToolCall]) -> list[bool]:
    """For each well-formed call of one rollout: was the same tool called before with the same arguments?"""
    seen: set[tuple[str, str]] = set()
    repeats = []
    for call in calls:
        if not call.malformed:
            key = (call.name, canonical_arguments(call.arguments)[0])
            repeats.append(key in seen)
            seen.add(key)
    return repeats


def _reward_means(batch: RolloutBatch, read: _Read) -> dict[str, float | None]:
    reward_N = checked_rewards([rollout.reward for rollout in batch], lambda row: f"rollout {row}")
    means: dict[str, float | None] = {}
    for name, wanted in (("tools/reward_with_call", True), ("tools/reward_without_call", False)):
        rewards = np.array([reward_N[row] for row, _, use in read if bool(use.calls) is wanted])
        scored = rewards[~np.isnan(rewards)]
        means[name] = float(scored.mean()) if scored.size else None
    return means


def _rollout_means(read: _Read, seed: int) -> dict[str, float]:
    """Means over observed rollouts, with their intervals."""
    group_N = group_numbers(rollout.group for _, rollout, _ in read)
    count_N = np.array([len(use.calls) for _, _, use in read], dtype=np.float64)
    rates = _share_with_interval("tools/call_rate", (count_N > 0).astype(np.float64), group_N, seed)
    low, high = group_mean_interval(count_N, group_N, seed=seed, bounds=(0.0, np.inf))
    name = "tools/calls_per_rollout"
    rates[name] = float(count_N.mean())
    return rates | ({f"{name}/ci_low": low, f"{name}/ci_high": high} if np.isfinite(low) else {})


def _use_rate(read: _Read, seed: int) -> dict[str, float]:
    """The share of judged results that are used; the count is 0 where results came and none could be judged."""
    if not any(use.used for _, _, use in read):
        return {}
    judged = [(rollout.group, used) for _, rollout, use in read for used in use.used if used is not None]
    count = {"tools/n_results_judged": float(len(judged))}
    if not judged:
        return count
    used_M = np.array([used for _, used in judged], dtype=np.float64)
    return count | _share_with_interval("tools/result_use_rate", used_M, group_numbers(g for g, _ in judged), seed)


def _share_with_interval(name: str, values_N: FloatArray, group_N: IntArray, seed: int) -> dict[str, float]:
    """A share and its 95% interval over groups, because the rollouts of one prompt are not independent. Where it is 0
    or 1 a bootstrap sees no spread at all, and the Wilson interval of as many trials as groups is given.
    """
    mean, n_groups = float(values_N.mean()), int(group_N.max()) + 1
    if n_groups < 2:
        return {name: mean}
    if values_N.min() == values_N.max():
        low, high = wilson_interval(mean * n_groups, n_groups)
    else:
        low, high = group_mean_interval(values_N, group_N, seed=seed, bounds=(0.0, 1.0))
    return {name: mean, f"{name}/ci_low": low, f"{name}/ci_high": high}


_TEXT = "the outputs as text, or tool calls from the source"
_OWN = "definition of this library"

register(
    MetricInfo(
        name="tools/call_rate",
        title="Rollouts with a tool call",
        unit="fraction",
        bad="down",
        bounds=(0.0, 1.0),
        description="Share of observed rollouts with at least one tool call, malformed attempts included.",
        source=_OWN,
        family="tools",
        needs=_TEXT,
    ),
    MetricInfo(
        name="tools/calls_per_rollout",
        title="Tool calls per rollout",
        unit="count",
        bad="down",
        bounds=(0.0, None),
        description="Tool calls, malformed attempts included, divided by observed rollouts.",
        source=_OWN,
        family="tools",
        needs=_TEXT,
    ),
    MetricInfo(
        name="tools/malformed_rate",
        title="Malformed tool calls",
        unit="fraction",
        bad="up",
        bounds=(0.0, 1.0),
        description="Calls that did not parse under their own syntax, divided by all calls.",
        source=_OWN,
        family="tools",
        needs=_TEXT,
    ),
    MetricInfo(
        name="tools/error_rate",
        title="Tool calls that failed",
        unit="fraction",
        bad="up",
        bounds=(0.0, 1.0),
        description="Well-formed calls that returned an error, divided by well-formed calls whose outcome is known.",
        source=_OWN,
        family="tools",
        needs="tool results, or error flags from the source",
    ),
    MetricInfo(
        name="tools/duplicate_call_fraction",
        title="Repeated tool calls",
        unit="fraction",
        bad="up",
        bounds=(0.0, 1.0),
        description="Well-formed calls that repeat an earlier one of their rollout (same tool, same arguments), "
        "divided by all well-formed calls.",
        source=_OWN,
        family="tools",
        needs=_TEXT,
    ),
    MetricInfo(
        name="tools/result_use_rate",
        title="Tool results that are used",
        unit="fraction",
        bad="down",
        bounds=(0.0, 1.0),
        description="Tool results of which the policy later repeats a specific span (a number of 3 or more digits, a "
        "name, or 3 words in a row) that occurred nowhere before the result, divided by the results that hold such a "
        "span and are followed by words of the policy.",
        source=_OWN,
        family="tools",
        needs="tool results and the outputs after them, as text",
    ),
    MetricInfo(
        name="tools/reward_with_call",
        title="Reward with tool calls",
        unit="reward",
        bad="down",
        description="Mean finite reward of observed rollouts with at least one call.",
        source=_OWN,
        family="tools",
        needs=f"rewards, and {_TEXT}",
    ),
    MetricInfo(
        name="tools/reward_without_call",
        title="Reward without tool calls",
        unit="reward",
        bad="none",
        description="Mean finite reward of observed rollouts without any call.",
        source=_OWN,
        family="tools",
        needs=f"rewards, and {_TEXT}",
    ),
    MetricInfo(
        name="tools/n_rollouts",
        title="Rollouts observed for tool use",
        unit="count",
        bad="none",
        bounds=(0.0, None),
        description="Rollouts whose every turn has its output as text, or its calls from the source.",
        source=_OWN,
        family="tools",
        needs=_TEXT,
    ),
    MetricInfo(
        name="tools/n_calls",
        title="Tool calls",
        unit="count",
        bad="none",
        bounds=(0.0, None),
        description="Tool calls of the step, malformed attempts included.",
        source=_OWN,
        family="tools",
        needs=_TEXT,
    ),
    MetricInfo(
        name="tools/n_results_judged",
        title="Tool results judged",
        unit="count",
        bad="none",
        bounds=(0.0, None),
        description="Tool results behind result_use_rate: those that hold a specific span and are followed by words of "
        "the policy.",
        source=_OWN,
        family="tools",
        needs="tool results and the outputs after them, as text",
    ),
)
