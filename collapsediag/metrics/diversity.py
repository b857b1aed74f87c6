"""How different the outputs of a policy are on the surface: answers, tool sequences, bytes, bigrams.

Surface diversity is not diversity of reasoning: a template filled with other words is diverse here. What the text says
about its prompt is what retrieval and mutual information measure.

Legend: N rollouts, G groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import ArrayLike

from collapsediag.metrics.grouped import FloatArray, IntArray
from collapsediag.metrics.registry import MetricInfo, register


def distinct_per_group(labels_N: Sequence[Hashable | None], group_N: IntArray) -> FloatArray:
    """[G] number of distinct labels of each group; NaN for a group with fewer than two labels: one cannot differ.

    labels_N: normalised answers, tool sequences, ...; None where a rollout has none: left out.

    >>> distinct_per_group(["4", "4", "5", None, "4"], np.array([0, 0, 0, 1, 1])).tolist()
    [2.0, nan]
    """
    labels: dict[int, list[Hashable]] = {}
    for label, group in zip(labels_N, group_N.tolist(), strict=True):
        if label is not None:
            labels.setdefault(group, []).append(label)
    n_groups = int(group_N.max()) + 1 if group_N.size else 0
    several = {group: len(set(found)) for group, found in labels.items() if len(found) > 1}
    return np.array([several.get(g, np.nan) for g in range(n_groups)], dtype=np.float64)


def identical_fraction(completions_N: Sequence[Hashable], group_N: IntArray) -> float | None:
    """Share of completions that are identical to another one of their group. 1 in a group of copies.

    Groups of one rollout are left out; None where no other is left.

    >>> identical_fraction(["a", "a", "b", "b", "a"], np.array([0, 0, 0, 0, 1]))
    1.0
    """
    count = Counter(zip(group_N.tolist(), completions_N, strict=True))
    size = np.bincount(group_N)
    n = int(size[size > 1].sum())
    return sum(n for n in count.values() if n > 1) / n if n else None


def identical_across_fraction(completions_N: Sequence[Hashable], prompt_N: Sequence[Hashable]) -> float:
    """Share of completions that are identical to one that answers a different prompt.

    prompt_N: what was asked, so that two groups of one prompt are not "different prompts".

    >>> identical_across_fraction(["a", "a", "b", "b"], ["p", "q", "p", "p"])
    0.5
    """
    prompts: dict[Hashable, set[Hashable]] = {}
    for completion, prompt in zip(completions_N, prompt_N, strict=True):
        prompts.setdefault(completion, set()).add(prompt)
    return sum(len(prompts[completion]) > 1 for completion in completions_N) / len(completions_N)


def distinct_bigrams(sequences: Sequence[Sequence[str]] | Sequence[IntArray]) -> tuple[int, int]:
    """Distinct bigrams and bigrams of some token sequences together. No bigram spans two sequences.

    sequences: token ids (arrays), or words.

    >>> distinct_bigrams([["a", "b", "a", "b"], ["a", "b"]])
    (2, 4)
    >>> distinct_bigrams([np.array([7, 8, 7, 8]), np.array([7, 8])])
    (2, 4)
    """
    total = sum(max(len(sequence) - 1, 0) for sequence in sequences)
    if total == 0:
        return 0, 0
    if isinstance(sequences[0], np.ndarray):
        codes = np.concatenate([(s[:-1] << 32) | s[1:] for s in sequences])  # type: ignore[operator]
        return int(np.unique(codes).size), total
    return len(set(chain.from_iterable(pairwise(s) for s in sequences))), total


def mean_of_known(values: ArrayLike) -> float | None:
    """Mean without the NaNs, None where nothing is left."""
    array = np.asarray(values, dtype=np.float64)
    known = array[~np.isnan(array)]
    return float(known.mean()) if known.size else None


def _register(name: str, title: str, unit: str, bad: str, description: str, needs: str) -> None:
    register(
        MetricInfo(
            name=f"diversity/{name}",
            title=title,
            unit=unit,
            bad=bad,  # type: ignore[arg-type]
            bounds=(0.0, 1.0) if unit == "fraction" else (0.0, None),
            description=description,
            source="Li et al., arXiv 1510.03055" if name == "distinct_2" else "this library",
            family="diversity",
            needs=needs,
        )
    )


_ANSWERS = "answers, or output text they can be found in"
_register(
    "distinct_answers_per_group",
    "Distinct answers per prompt",
    "count",
    "down",
    "Mean over prompts (with two answers or more) of the number of distinct final answers (case, white space and the "
    "spelling of numbers unified). 1 is healthy where the prompt is solved, and collapse where it is not.",
    _ANSWERS,
)
_register(
    "unanswered_fraction",
    "Rollouts without a final answer",
    "fraction",
    "up",
    "Share of rollouts in which no final answer was found; left out of distinct_answers_per_group.",
    _ANSWERS,
)
_register(
    "distinct_tool_sequences_per_group",
    "Distinct tool sequences per prompt",
    "count",
    "down",
    "Mean over prompts (of two rollouts or more) of the number of distinct sequences of calls (tool and arguments, in "
    "order); no call at all is a sequence too. Given only where the batch has a call.",
    "tool calls",
)
_register(
    "identical_completion_fraction",
    "Identical completions within a prompt",
    "fraction",
    "up",
    "Share of completions that are byte-identical to another one of their group; groups of one are left out.",
    "outputs",
)
_register(
    "identical_completion_fraction_across_groups",
    "Identical completions across prompts",
    "fraction",
    "up",
    "Share of completions that are byte-identical to one of a different prompt: a template, or a sampler bug.",
    "outputs",
)
_register(
    "distinct_2",
    "Distinct bigrams (surface)",
    "fraction",
    "down",
    "Mean over prompts of distinct bigrams / bigrams among the prompt's completions, over token ids, or over words "
    "where ids are not known. Surface diversity only, and smaller the longer the completions are.",
    "outputs",
)
