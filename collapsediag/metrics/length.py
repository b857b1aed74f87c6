"""Length of what the policy wrote, and whether it was cut off.

Legend: N rollouts, T turns (a rollout has one or more), G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from collapsediag.errors import MetricError
from collapsediag.metrics.grouped import FloatArray, IntArray, group_variance
from collapsediag.metrics.registry import MetricInfo, register

# What samplers call "the limit was reached": OpenAI, vLLM, SGLang and TGI say length, Anthropic max_tokens.
LENGTH_REASONS = frozenset({"length", "max_tokens", "max_length", "max_new_tokens"})
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def length_metrics(
    length_T: FloatArray, rollout_T: IntArray, group_N: IntArray, *, prefix: str = "length"
) -> dict[str, float]:
    """`length/mean`, `std` (population), `min`, `p10`, `p50`, `p90`, `max` per turn, and `within_group_std`.

    length_T: [T] tokens (or words) of each turn. rollout_T: [T] the rollout of each turn. group_N: [N] the group of
    each rollout. `within_group_std` is the mean over groups of the sample std (ddof=1) of their rollouts' total
    lengths; groups of one rollout have none and are left out.
    prefix: "length" for tokens, "length_words" for words: the two are never mixed under one name.

    >>> values = length_metrics(np.array([2.0, 4.0]), np.array([0, 1]), np.array([0, 0]))
    >>> values["length/mean"], values["length/p50"], round(values["length/within_group_std"], 3)
    (3.0, 3.0, 1.414)
    """
    length = np.asarray(length_T, dtype=np.float64)
    if length.size == 0:
        return {}
    values = {
        f"{prefix}/mean": float(length.mean()),
        f"{prefix}/std": float(length.std()),
        f"{prefix}/min": float(length.min()),
        f"{prefix}/max": float(length.max()),
    }
    for name, quantile in zip(QUANTILES, np.quantile(length, list(QUANTILES.values())), strict=True):
        values[f"{prefix}/{name}"] = float(quantile)
    total_N = np.bincount(rollout_T, weights=length, minlength=len(group_N)).astype(np.float64)
    variance = group_variance(total_N, group_N, int(group_N.max()) + 1)
    if not np.isnan(variance).all():
        values[f"{prefix}/within_group_std"] = float(np.sqrt(variance[~np.isnan(variance)]).mean())
    return values


def truncated(
    finish_reason_T: Sequence[str | None],
    n_tokens_T: FloatArray,
    last_token_T: IntArray,
    *,
    max_output_tokens: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> FloatArray:
    """[T] 1 where the turn was cut off, 0 where it was not, NaN where nobody can tell.

    The finish reason decides where it is known. Else a turn that is as long as the sampler's limit and does not end
    with an end token was cut off. Never by "as long as the longest row": in a batch without truncation there is one
    too. Without a limit a missing end token proves nothing (a stop string, a stripped end token), so that is NaN.

    n_tokens_T: [T] tokens, NaN where unknown. last_token_T: [T] last token id, -1 where unknown.

    >>> truncated(["length", "stop", None], np.array([9.0, 9.0, 9.0]), np.array([5, 5, 5])).tolist()
    [1.0, 0.0, nan]
    >>> truncated([None] * 3, np.array([9.0, 9.0, 4.0]), np.array([5, 2, 5]), max_output_tokens=9,
    ...           eos_token_ids=[2]).tolist()
    [1.0, 0.0, 0.0]
    """
    if max_output_tokens is not None and max_output_tokens < 1:
        raise MetricError(f"max_output_tokens is {max_output_tokens}; a sampler's limit is at least 1, or None.")
    by_reason = np.array([_by_reason(reason, row) for row, reason in enumerate(finish_reason_T)], dtype=np.float64)
    if max_output_tokens is None:
        return by_reason
    full = (n_tokens_T >= max_output_tokens) & ~np.isin(last_token_T, np.asarray(eos_token_ids, dtype=np.int64))
    by_length = np.where(np.isnan(n_tokens_T), np.nan, full.astype(np.float64))
    return np.where(np.isnan(by_reason), by_length, by_reason)


def _by_reason(reason: str | None, turn: int) -> float:
    if reason is None:
        return math.nan
    if not isinstance(reason, str):
        raise MetricError(
            f"the finish reason of turn {turn} is {reason!r:.80} ({type(reason).__name__}); give text such as 'stop' "
            "or 'length', or None where it is not known."
        )
    return float(reason.lower() in LENGTH_REASONS)


def truncation_metrics(truncated_T: FloatArray) -> dict[str, float]:
    """`length/truncated_fraction` over the turns of which it is known, and how many are not known.

    >>> truncation_metrics(np.array([1.0, 0.0, np.nan]))
    {'length/n_truncation_unknown': 1.0, 'length/truncated_fraction': 0.5}
    """
    known = truncated_T[~np.isnan(truncated_T)]
    values = {"length/n_truncation_unknown": float(truncated_T.size - known.size)}
    if known.size:
        values["length/truncated_fraction"] = float(known.mean())
    return values


_TITLES = {
    "mean": ("Completion length", "Mean over turns of"),
    "std": ("Completion length, std", "Population std over turns of"),
    "min": ("Completion length, shortest", "Smallest over turns of"),
    "p10": ("Completion length, 10th percentile", "10th percentile over turns of"),
    "p50": ("Completion length, median", "Median over turns of"),
    "p90": ("Completion length, 90th percentile", "90th percentile over turns of"),
    "max": ("Completion length, longest", "Largest over turns of"),
}


def _register(prefix: str, unit: str, needs: str, note: str) -> None:
    for name, (title, verb) in _TITLES.items():
        register(
            MetricInfo(
                name=f"{prefix}/{name}",
                title=f"{title} ({unit})",
                unit=unit,
                bad="none",
                bounds=(0.0, None),
                description=f"{verb} the {unit} the policy wrote in the turn, reasoning and answer together{note}.",
                source="this library",
                family="length",
                needs=needs,
            )
        )
    register(
        MetricInfo(
            name=f"{prefix}/within_group_std",
            title=f"Length spread within prompts ({unit})",
            unit=unit,
            bad="down",
            bounds=(0.0, None),
            description=f"Mean over prompts of the sample std (ddof=1) of their rollouts' {unit}, all turns{note}.",
            source="this library",
            family="length",
            needs=needs,
        )
    )


_register("length", "tokens", "output token ids, or a tokenizer", "")
_register("length_words", "words", "output text", ": white-space words, where neither ids nor a tokenizer are known")
register(
    MetricInfo(
        name="length/truncated_fraction",
        title="Turns cut off",
        unit="fraction",
        bad="up",
        bounds=(0.0, 1.0),
        description="Share of turns that were cut off: by the finish reason, else as long as max_output_tokens and "
        "without an end token at the end. Turns of which neither is known are left out and counted.",
        source="this library",
        family="length",
        needs="finish reasons, or token ids and max_output_tokens",
    ),
    MetricInfo(
        name="length/n_truncation_unknown",
        title="Turns of which truncation is unknown",
        unit="count",
        bad="none",
        bounds=(0.0, None),
        description="Turns without a finish reason and without a length to compare with the sampler's limit.",
        source="this library",
        family="length",
    ),
)
