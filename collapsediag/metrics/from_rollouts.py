"""Every number that needs rollouts and no model, from one batch: `rollout_metrics`, and why some are missing.

The arithmetic is in the families; here a batch is turned into their columns once, and read again per environment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from collapsediag.errors import RolloutError
from collapsediag.metrics.answers import Extractor
from collapsediag.metrics.format import as_format
from collapsediag.metrics.format_regex import RegexFormat
from collapsediag.metrics.grouped import IntArray
from collapsediag.metrics.registry import MetricInfo, register
from collapsediag.metrics.reward_input import without_overflow
from collapsediag.metrics.rollout_reader import RolloutReader, Values
from collapsediag.metrics.rollout_table import RolloutTable
from collapsediag.metrics.snr_filter import DEFAULT_RHO
from collapsediag.rollouts import RolloutBatch
from collapsediag.statistics import DEFAULT_RESAMPLES

# Each environment is some fifty numbers a step, and a curve each wherever records go.
MAX_ENVIRONMENTS = 32
# Characters of an environment's name. Some trackers take 250 for a metric's whole name.
MAX_NAME = 100
_CUT_ESCAPE = re.compile(r"%.?$")


@dataclass(frozen=True, kw_only=True)
class RolloutReport:
    """The numbers of one batch, and what could not be measured.

    values: by metric name. not_measured: the reason in words, by metric or family name.
    refused: those of not_measured where the batch holds what cannot be, with the rollout that does, or where a callable
        raised.
    notes: what a person must know to read the values. overflowed: the one of them that names rewards which are infinite
        or beyond 1e150, if there are any.
    """

    values: Mapping[str, float]
    not_measured: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    overflowed: tuple[str, ...] = ()


def rollout_metrics(
    batch: RolloutBatch,
    *,
    format: Any = None,
    answer: Extractor = "auto",
    success_threshold: float | None = None,
    tokenizer: Any = None,
    rho: float = DEFAULT_RHO,
    n_resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    entropy: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Every number that needs no model: format, length, rewards, pass@k, diversity, tools, entropy; also for each of
    the 32 largest environments.

    A number that cannot be measured is absent, never 0; `rollout_report` says why. The batch is not changed.

    batch: one step. Rollouts whose reward is None, NaN, infinite or beyond 1e150 are left out of reward numbers and
        counted; the notes of `rollout_report` name those that overflowed.
    format: the declared format: `TagFormat` (default), `RegexFormat`, `JsonFormat`, `ToolFormat`, a text for one of the
        first two ("tags:think,answer", "regex:PATTERN"), a compiled regex or a callable.
    answer: how the final answer is found: "auto", "boxed", "tag", "number", or a callable.
    success_threshold: a reward at or above it is a success where the rollout has no label of its own.
    tokenizer: counts tokens of text and decodes ids, where the source has only one of the two.
    rho: share of reward variance in the filter preview.
    n_resamples, seed: of the bootstrap intervals.
    entropy: arguments of `entropy_metrics` (positions, eta, vocabulary_size). Without `positions` entropy/ reads the
        reasoning of each turn where token ids and a tokenizer show it, and every output token of the other turns.
    Raises MetricError naming the rollout whose reward is a string, a boolean or a dict, or that holds impossible
        log-probabilities or entropies.

    >>> batch = RolloutBatch.from_lists(step=1, prompts=["2+2="] * 2, completions=["4", "5"], rewards=[1.0, 0.0])
    >>> values = rollout_metrics(batch)
    >>> values["reward/mean"], values["diversity/distinct_answers_per_group"], values["length_words/mean"]
    (0.5, 2.0, 1.0)
    """
    report = rollout_report(
        batch,
        format=format,
        answer=answer,
        success_threshold=success_threshold,
        tokenizer=tokenizer,
        rho=rho,
        n_resamples=n_resamples,
        seed=seed,
        entropy=entropy,
    )
    return dict(report.values)


def rollout_report(
    batch: RolloutBatch,
    *,
    format: Any = None,
    answer: Extractor = "auto",
    success_threshold: float | None = None,
    tokenizer: Any = None,
    rho: float = DEFAULT_RHO,
    n_resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    entropy: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "record"] = "raise",
) -> RolloutReport:
    """`rollout_metrics` with the reasons for what is missing, and notes. The arguments are the same.

    on_error: "record" leaves a family that would raise MetricError out, under `refused`; the others are measured.

    >>> batch = RolloutBatch.from_lists(step=1, prompts=["2+2="] * 2, completions=["4", "5"], rewards=[1.0, 0.0])
    >>> rollout_report(batch).not_measured["pass@k"].split(";")[0]
    'no rollout has a success label'
    """
    if not isinstance(batch, RolloutBatch):
        raise RolloutError(
            f"found {type(batch).__name__} where a RolloutBatch is needed. Make one: RolloutBatch.from_lists("
            "step=step, prompts=[...], completions=[...], rewards=[...])."
        )
    if not len(batch):
        return RolloutReport(
            values={"n_rollouts": 0.0, "n_groups": 0.0}, not_measured={"rollouts": "the batch has no rollout"}
        )
    has_reward_N = np.array([rollout.reward is not None for rollout in batch])
    batch, overflowed = without_overflow(batch)
    table = RolloutTable(batch=batch, tokenizer=tokenizer, answer=answer, success_threshold=success_threshold)
    reader = RolloutReader(
        table,
        as_format(format),
        rho,
        n_resamples,
        seed,
        entropy or {},
        has_reward_N=has_reward_N,
        is_strict=on_error == "raise",
    )
    values, reasons = reader.read(np.arange(len(batch)))
    notes = (*overflowed, *_notes(table, values, format))
    environments, left_out = _environments(batch)
    for environment, rows in environments.items():
        part, part_reasons = reader.read(rows)
        prefix = f"env/{environment_name(environment)}/"
        values |= {prefix + name: value for name, value in part.items()}
        reasons |= {prefix + name: why for name, why in part_reasons.items() if name not in reasons}
    return RolloutReport(
        values=values, not_measured=reasons, refused=reader.refused, notes=notes + left_out, overflowed=overflowed
    )


def environment_name(environment: str) -> str:
    """An environment as a part of metric names: quoted, and cut where someone took a whole prompt for its name.

    >>> environment_name("math/easy")
    'math%2Feasy'
    """
    name = environment.replace("%", "%25").replace("/", "%2F")
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.blake2b(environment.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{_CUT_ESCAPE.sub('', name[:MAX_NAME])}~{digest}"


def _environments(batch: RolloutBatch) -> tuple[dict[str, IntArray], tuple[str, ...]]:
    """Rows of each named environment, where there is more than one kind of rollout, and a note of those left out.

    The largest stay, of equal ones the first by name, so that about the same ones do at every step.
    """
    named = batch.environments()
    if len(named) < 2 and sum(map(len, named.values())) in (0, len(batch)):
        return {}, ()
    largest = sorted(named, key=lambda name: (-len(named[name]), name))[:MAX_ENVIRONMENTS]
    kept = {name: np.array(named[name], dtype=np.int64) for name in named if name in largest}
    if len(kept) == len(named):
        return kept, ()
    return kept, (
        f"env/: {len(named) - len(kept)} of {len(named)} environments have no numbers of their own: those with the "
        f"fewest rollouts beyond {MAX_ENVIRONMENTS}. All are in the numbers of the whole batch",
    )


def _regex_advice(form: Any) -> str:
    if not isinstance(form, RegexFormat) or re.compile(form.pattern).flags & re.DOTALL:
        return ""
    where = "may match anywhere" if form.search else "must match the whole output"
    return f" The regular expression {where}, and its dots stop at a newline unless it begins with (?s)"


def _notes(table: RolloutTable, values: Values, declared: Any) -> tuple[str, ...]:
    notes = []
    if declared is None and values.get("format/no_think_fraction") == 1.0:
        notes.append(
            "no output has a <think> tag: format/ judges by the default <think>...</think><answer>...</answer>, which "
            "may not be what this policy was asked for; declare its format: --format, in Python format=, a monitor's "
            "rollout_options"
        )
    if declared is not None and values.get("format/valid_fraction") == 0.0:
        advice = _regex_advice(as_format(declared))
        notes.append(f"no output has the declared format: is it the one that the prompt asks for?{advice}")
    if table.length_T is not None and table.length_T[0] == "length" and np.isnan(table.n_tokens_T).any():
        notes.append("length/ counts tokens of re-tokenised text: near, not equal, to what was sampled")
    return tuple(notes)


register(
    MetricInfo(
        name="n_rollouts",
        title="Rollouts",
        unit="count",
        bad="none",
        bounds=(0.0, None),
        description="Rollouts of the step (of the environment, under env/).",
        source="this library",
        family="counts",
    ),
    MetricInfo(
        name="n_groups",
        title="Prompts",
        unit="count",
        bad="none",
        bounds=(0.0, None),
        description="Groups of rollouts of one prompt.",
        source="this library",
        family="counts",
    ),
    MetricInfo(
        name="n_single_groups",
        title="Prompts with one rollout",
        unit="count",
        bad="up",
        bounds=(0.0, None),
        description="Groups of one rollout: left out of everything that compares the rollouts of a prompt.",
        source="this library",
        family="counts",
    ),
)
