"""The checks of `preflight` that ask whether the batch is what it seems: groups, prompts, copies, cut-offs, pairing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from collapsediag.errors import MetricError
from collapsediag.metrics.from_matrix import matrix_metrics
from collapsediag.plain_text import counted
from collapsediag.preflight.types import SHOWN, Check, Facts, Status, percent
from collapsediag.rollouts import Turn

SMALL_GROUP = 4
FEW_PROMPTS = 8
IDENTICAL_WARNING, IDENTICAL_CRITICAL = 0.2, 0.9
# Short answers coincide by nature, and those of a word or two always may; only longer ones point to a shared seed.
SHORT_OUTPUT, TINY_OUTPUT = 12, 3
ACROSS_WARNING = 0.1
TRUNCATED_INFO, TRUNCATED_WARNING, TRUNCATED_CRITICAL = 0.01, 0.05, 0.3
SIGNIFICANCE = 0.05
MI_SATURATED = 0.9


def _one_prompt(n_rollouts: int) -> Check:
    return Check(
        name="group size",
        status="warning",
        value=float(n_rollouts),
        reading=f"the step has one prompt, with {counted(n_rollouts, 'rollout')}: no trace can be scored under another "
        "prompt, so neither retrieval nor mutual information can be measured.",
        action=f"Put at least 2 prompts in a step, better {FEW_PROMPTS}. If the file numbers its prompts as steps, "
        "name the key of the training step: --map step=KEY (key_map).",
    )


def group_size(facts: Facts) -> Check:
    """Are there several rollouts of each prompt, equally many, and enough prompts?"""
    sizes = [len(rows) for rows in facts.groups().values()]
    n, smallest, largest = len(sizes), min(sizes), max(sizes)
    counts = f"{n} prompts, {smallest if smallest == largest else f'{smallest} to {largest}'} rollouts each"
    name, value = "group size", float(sum(sizes) / n)
    if n == 1:
        return _one_prompt(largest)
    if largest == 1:
        return Check(
            name=name,
            status="warning",
            value=value,
            reading=f"each of the {n} prompts has a single rollout: nothing within a prompt can be compared, and a "
            "group-relative advantage (GRPO, RLOO) is zero or undefined.",
            action="Sample several rollouts of each prompt; if there are several, say which key is the group.",
        )
    if smallest != largest:
        usual = Counter(sizes).most_common(1)[0][0]
        odd = [rows[0] for rows in facts.groups().values() if len(rows) != usual]
        return Check(
            name=name,
            status="warning",
            value=value,
            reading=f"{counts}; {len(odd)} prompts do not have the usual {usual}. A trainer that reshapes to [prompts, "
            "group size] would mix prompts.",
            action="Find out where rollouts were lost (filters, crashes, padding) before training on them.",
            rows=tuple(odd[:SHOWN]),
        )
    if smallest < SMALL_GROUP or n < FEW_PROMPTS:
        small = "few rollouts" if smallest < SMALL_GROUP else "few prompts"
        return Check(
            name=name,
            status="info",
            value=value,
            reading=f"{counts}: {small}, so the shares below have wide intervals and groups are often equal by chance.",
            action=f"For a firm verdict check at least {FEW_PROMPTS} prompts with {SMALL_GROUP} rollouts each.",
        )
    return Check(name=name, status="ok", value=value, reading=f"{counts}.")


def contiguity(facts: Facts) -> Check:
    """Do the rollouts of a prompt stand together?"""
    groups = [rows for rows in facts.groups().values() if len(rows) > 1]
    if not groups:
        return Check(name="group order", status="skipped", reading="no prompt has two rollouts.")
    apart = [rows for rows in groups if rows[-1] - rows[0] != len(rows) - 1]
    share = 1 - len(apart) / len(groups)
    if not apart:
        return Check(name="group order", status="ok", value=share, reading="the rollouts of every prompt are adjacent.")
    return Check(
        name="group order",
        status="info",
        value=share,
        reading=f"the rollouts of {len(apart)} of {len(groups)} prompts are not adjacent. Fine where advantages are "
        "taken by group id (veRL shuffles rows to balance lengths); wrong where a trainer reshapes rows to groups.",
        action="Make sure that the trainer groups by id, not by position.",
        rows=tuple(rows[0] for rows in apart[:SHOWN]),
    )


def _prompt(turn: Turn) -> tuple[Hashable, ...]:
    """A turn's context in each form that is known: ids, text, messages (None where not)."""
    messages = turn.context_messages
    return (
        None if turn.context_ids is None else turn.context_ids.tobytes(),
        turn.context,
        None if messages is None else json.dumps([dict(m) for m in messages], sort_keys=True, default=repr),
    )


def prompts_agree(facts: Facts) -> Check:
    """Is the first context the same for all rollouts of a group?"""
    name = "prompts within a group"
    prompts = [_prompt(rollout.turns[0]) for rollout in facts.batch]
    # Compared in one form that every row has; ids before text, because ids are what the policy saw.
    form = next((i for i in range(3) if all(prompt[i] is not None for prompt in prompts)), None)
    if form is None:
        return Check(name=name, status="skipped", reading="not every rollout's context is known in the same form.")
    groups = facts.groups()
    if len(groups) == len(prompts):
        return Check(name=name, status="skipped", reading="no prompt has two rollouts.")
    mixed = [rows for rows in groups.values() if len({prompts[row][form] for row in rows}) > 1]
    if mixed:
        return Check(
            name=name,
            status="critical",
            value=len(mixed) / len(groups),
            reading=f"{len(mixed)} of {len(groups)} groups hold rollouts of different prompts: their rewards are "
            "compared as if they had answered the same question.",
            action="Groups were assembled out of order, or the wrong key was read as the group. Fix this first; every "
            "other number depends on it.",
            rows=tuple(mixed[0][:SHOWN]),
        )
    distinct = len({prompts[rows[0]][form] for rows in groups.values()})
    if distinct < len(groups):
        return Check(
            name=name,
            status="info",
            value=0.0,
            reading=f"the same within every group; {len(groups)} groups have {distinct} distinct prompts, so some "
            "prompts are sampled as several groups.",
        )
    return Check(name=name, status="ok", value=0.0, reading="the same within every group.")


def identical_completions(facts: Facts) -> Check:
    """Byte-identical outputs: a seed shared by the samples, greedy decoding, or a template."""
    name, key = "identical completions", "diversity/identical_completion_fraction"
    within, across = facts.values.get(key), facts.values.get(f"{key}_across_groups", 0.0)
    if within is None:
        return facts.skipped(name, key, "diversity")
    length = facts.values.get("length/p50", facts.values.get("length_words/p50", math.inf))
    suspicious = within >= (IDENTICAL_WARNING if length > SHORT_OUTPUT else IDENTICAL_CRITICAL)
    if suspicious and length > TINY_OUTPUT:
        return Check(
            name=name,
            status="critical" if within >= IDENTICAL_CRITICAL and length > SHORT_OUTPUT else "warning",
            value=within,
            reading=f"{percent(within)} of the outputs are byte for byte equal to another sample of their prompt.",
            action="Check that the samples do not share a seed and that the temperature is not near 0: copies carry no "
            "signal, and look like collapse where there is none.",
        )
    if across >= ACROSS_WARNING and length > SHORT_OUTPUT:
        return Check(
            name=name,
            status="warning",
            value=across,
            reading=f"{percent(across)} of the outputs are byte for byte equal to an output for a different prompt.",
            action="Read a few: a template that ignores the prompt, an empty or refused output, or prompts and outputs "
            "that were mixed up.",
        )
    if within >= IDENTICAL_WARNING or across >= ACROSS_WARNING:
        return Check(
            name=name,
            status="info",
            value=max(within, across),
            reading=f"{percent(within)} within and {percent(across)} across prompts, as expected of outputs this "
            f"short (median {length:.0f}).",
        )
    return Check(
        name=name,
        status="ok",
        value=within,
        reading=f"{percent(within)} of the outputs equal another one of their prompt, {percent(across)} one of "
        "another prompt.",
    )


def truncation(facts: Facts) -> Check:
    """Were outputs cut off by the length limit?"""
    name, key = "truncation", "length/truncated_fraction"
    share = facts.values.get(key)
    if share is None:
        return facts.skipped(name, key, "length")
    status: Status = "ok"
    for threshold, worse in (
        (TRUNCATED_INFO, "info"),
        (TRUNCATED_WARNING, "warning"),
        (TRUNCATED_CRITICAL, "critical"),
    ):
        if share > threshold:
            status = worse  # type: ignore[assignment]
    return Check(
        name=name,
        status=status,
        value=share,
        reading=f"{percent(share)} of the turns were cut off by the length limit.",
        action=""
        if status == "ok"
        else "Raise the limit or shorten the task: a cut-off output gets no answer, no reward, and a gradient against "
        "long reasoning.",
    )


def retrieval(facts: Facts) -> Check:
    """Does the untrained policy's reasoning say which prompt it belongs to?"""
    name = "retrieval"
    if facts.matrix is None:
        why = facts.unscored or "no policy was given to score the outputs with"
        return Check(name=name, status="skipped", reading=f"{why}.")
    if facts.matrix.n_traces and facts.matrix.nonfinite_N.all():
        return Check(
            name=name,
            status="critical",
            reading="the policy gives no finite log-probability to any of the outputs.",
            action="Its weights are NaN or infinite, or its precision is too narrow: load it in float32.",
        )
    try:
        values = matrix_metrics(facts.matrix)
    except MetricError as error:
        return Check(name=name, status="skipped", reading=str(error))
    accuracy, chance = values.get("retrieval_accuracy"), values.get("retrieval_chance_level")
    if accuracy is None or chance is None:
        return Check(name=name, status="skipped", reading="fewer than two distinct prompts, or no usable trace.")
    if 1 / math.factorial(min(facts.matrix.n_contexts, 20)) > SIGNIFICANCE:
        return Check(
            name=name,
            status="skipped",
            value=accuracy,
            reading=f"{facts.matrix.n_contexts} distinct prompts are too few to tell any accuracy from chance.",
            action="Score at least 4 distinct prompts.",
        )
    p = values.get("retrieval_p_value", 1.0)
    low = values.get("retrieval_accuracy/ci_low", -math.inf)
    interval = (low, values["retrieval_accuracy/ci_high"]) if math.isfinite(low) else None
    facts_in_words = (
        f"{percent(accuracy)} of the outputs are likeliest under their own prompt (chance {percent(chance)})"
    )
    if p > SIGNIFICANCE or low <= chance:
        return Check(
            name=name,
            status="critical",
            value=accuracy,
            interval=interval,
            reading=f"{facts_in_words}: no better than chance, before any training.",
            action="Prompts and outputs are mis-paired, the wrong model or chat template scored them, or the outputs "
            "say nothing of their prompt. Read one pair side by side.",
        )
    if values.get("mi_saturation", 0.0) >= MI_SATURATED:
        return Check(
            name=name,
            status="info",
            value=accuracy,
            interval=interval,
            reading=f"{facts_in_words}; mutual information is at the most that {facts.matrix.n_contexts} prompts can "
            "show.",
            action="Score more prompts in training, or a fall will show late.",
        )
    return Check(name=name, status="ok", value=accuracy, interval=interval, reading=f"{facts_in_words}.")


DATA_CHECKS: Sequence[Callable[[Facts], Check]] = (
    group_size,
    contiguity,
    prompts_agree,
    identical_completions,
    truncation,
)
