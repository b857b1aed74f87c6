"""The families of rollout metrics, read from one table for any of its rows: for the batch, and per environment.

Legend: N rollouts, T turns, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from collapsediag.errors import MetricError
from collapsediag.metrics import diversity
from collapsediag.metrics.entropy_batch import entropy_metrics
from collapsediag.metrics.format import Format, format_metrics
from collapsediag.metrics.format_regex import RegexBudgetError
from collapsediag.metrics.grouped import BoolArray, IntArray
from collapsediag.metrics.length import length_metrics, truncation_metrics
from collapsediag.metrics.pass_at_k import pass_at_k_metrics
from collapsediag.metrics.rewards import component_metrics, grouped_reward_metrics
from collapsediag.metrics.rollout_table import RolloutTable
from collapsediag.metrics.tools import tool_metrics
from collapsediag.rollouts import RolloutBatch

Values = dict[str, float]
Reasons = dict[str, str]

_NO_TEXT = "the outputs are token ids only; a tokenizer makes text of them (tokenizer=, preflight --model)"
_MIXED = "some outputs are ids only, others text only; a tokenizer makes them alike (tokenizer=, preflight --model)"
_SINGLE = "no group has two rollouts"
_NO_SUCCESS = (
    "no rollout has a success label; --success-threshold makes labels of rewards "
    "(in Python success_threshold=, a monitor's rollout_options)"
)


class RolloutReader:
    """Reads the families for any subset of rows. What costs time per token is computed once, for all of them."""

    def __init__(
        self,
        table: RolloutTable,
        form: Format,
        rho: float,
        n_resamples: int,
        seed: int,
        entropy: Mapping[str, Any],
        *,
        has_reward_N: BoolArray,
        is_strict: bool = True,
    ) -> None:
        self.table = table
        self.form = form
        self.rho = rho
        self.n_resamples = n_resamples
        self.seed = seed
        self.has_reward_N = has_reward_N
        self.is_strict = is_strict
        self.refused: Reasons = {}
        self.entropy = {"positions": table.reasoning_mask, **entropy}
        self.failures_T, self.format_reason = self._judge()
        self.distinct_2_G = self._distinct_2()

    def read(self, rows: IntArray) -> tuple[Values, Reasons]:
        """Values and reasons of these rollouts."""
        group_N = np.unique(self.table.group_N[rows], return_inverse=True)[1].reshape(-1)
        values: Values = {"n_rollouts": float(rows.size), "n_groups": float(group_N.max() + 1)}
        values["n_single_groups"] = float((np.bincount(group_N) == 1).sum())
        reasons: Reasons = {}
        families: dict[str, Callable[[IntArray, IntArray], tuple[Values, Reasons]]] = {
            "format": self._format,
            "length": self._length,
            "reward": self._rewards,
            "pass@k": self._pass_at_k,
            "diversity": self._diversity,
            "tools": self._tools,
            "entropy": self._entropy,
        }
        for name, family in families.items():
            try:
                more, why = family(rows, group_N)
            except MetricError as error:
                if self.is_strict:
                    raise
                # One impossible number must not cost the others.
                more, why = {}, {name: str(error)}
                self.refused = why | self.refused  # the whole batch is read first, and counts its rows as the user does
            values |= more
            reasons |= why
        return values, reasons

    def _turns(self, rows: IntArray) -> IntArray:
        return np.flatnonzero(np.isin(self.table.rollout_T, rows))

    def _judge(self) -> tuple[dict[int, str | None], str]:
        """Verdict of each turn whose text is known, and why there is none."""
        known = [t for t, text in enumerate(self.table.output_T) if text is not None]
        if not known:
            return {}, _NO_TEXT
        outputs = [text for text in self.table.output_T if text is not None]
        try:
            verdicts = self.form.failures(outputs, [self.table.context_T[t] for t in known])
        except RegexBudgetError as error:
            return {}, str(error)
        except MetricError as error:  # of a callable
            if self.is_strict:
                raise
            self.refused["format"] = str(error)
            return {}, str(error)
        return dict(zip(known, verdicts, strict=True)), _NO_TEXT

    def _format(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        verdicts = [self.failures_T[t] for t in self._turns(rows).tolist() if t in self.failures_T]
        if not verdicts:
            return {}, {"format": self.format_reason}
        return format_metrics(verdicts, self.form.failure_names), {}

    def _length(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        turns = self._turns(rows)
        values = truncation_metrics(self.table.truncated_T[turns])
        reasons: Reasons = {}
        if "length/truncated_fraction" not in values:
            reasons["length/truncated_fraction"] = (
                "no turn has a finish reason, and without the sampled token ids and max_output_tokens a cut-off output "
                "cannot be told from a finished one"
            )
        if self.table.length_T is None:
            return values, reasons | {"length": _MIXED}
        prefix, length_T = self.table.length_T
        rollout_T = np.searchsorted(rows, self.table.rollout_T[turns])
        return values | length_metrics(length_T[turns], rollout_T, group_N, prefix=prefix), reasons

    def _rewards(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        table = self.table
        values = grouped_reward_metrics(table.reward_N[rows], group_N, success_N=table.success_N[rows], rho=self.rho)
        reasons: Reasons = {}
        if "reward/mean" not in values:
            reasons["reward"] = _no_reward(self.has_reward_N[rows])
        elif "reward/within_group_std" not in values:
            reasons["reward/within_group_std"] = "no group has two scored rollouts"
        elif "reward/variance_spread" not in values:
            reasons["reward/variance_spread"] = "every group's rewards are all equal: no variance to compare"
        if "reward/all_equal_fraction" in values and "reward/all_success_fraction" not in values:
            reasons["reward/all_success_fraction"] = _NO_SUCCESS
        columns = {name: column[rows] for name, column in table.components.items()}
        present = {name: column for name, column in columns.items() if not np.isnan(column).all()}
        return values | component_metrics(present), reasons

    def _pass_at_k(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        success = self.table.success_N[rows]
        labelled = ~np.isnan(success)
        if not labelled.any():
            return {}, {"pass@k": _NO_SUCCESS}
        n_P = np.bincount(group_N[labelled])
        c_P = np.bincount(group_N[labelled], weights=success[labelled]).astype(np.int64)
        values = pass_at_k_metrics(n_P, c_P, n_resamples=self.n_resamples, seed=self.seed)
        return values | {"n_unlabelled": float((~labelled).sum())}, {}

    def _diversity(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        values: Values = {}
        reasons: Reasons = {}
        for part in (self._answers, self._tool_sequences, self._identical, self._bigrams):
            more, why = part(rows, group_N)
            values |= {f"diversity/{name}": value for name, value in more.items()}
            reasons |= {f"diversity/{name}": text for name, text in why.items()}
        return values, reasons

    def _answers(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        name = "distinct_answers_per_group"
        if self.table.answer_N is None:
            return {}, {name: _NO_TEXT}
        answers = [self.table.answer_N[row] for row in rows.tolist()]
        mean = diversity.mean_of_known(diversity.distinct_per_group(answers, group_N))
        unanswered: Values = {"unanswered_fraction": answers.count(None) / len(answers)}
        if mean is None:
            found = "no group has two rollouts with a final answer"
            nothing = (
                "no final answer was found in any output; say where it stands: --map answer=KEY, from Python answer="
            )
            return unanswered, {name: found if any(answers) else nothing}
        return unanswered | {name: mean}, {}

    def _tool_sequences(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        name = "distinct_tool_sequences_per_group"
        sequences = [self.table.tools_N[row] for row in rows.tolist()]
        if not any(sequences):
            return {}, {name: _NO_TEXT if all(s is None for s in sequences) else "no rollout calls a tool"}
        mean = diversity.mean_of_known(diversity.distinct_per_group(sequences, group_N))
        return ({}, {name: _SINGLE}) if mean is None else ({name: mean}, {})

    def _identical(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        name, across = "identical_completion_fraction", "identical_completion_fraction_across_groups"
        if self.table.completion_N is None:
            return {}, {name: _MIXED}
        completions = [self.table.completion_N[row] for row in rows.tolist()]
        within = diversity.identical_fraction(completions, group_N)
        values, reasons = ({}, {name: _SINGLE}) if within is None else ({name: within}, {})
        prompts = [self.table.prompt_N[row] for row in rows.tolist()]
        if len(set(prompts)) < 2:
            return values, reasons | {across: "the batch has one prompt"}
        return values | {across: diversity.identical_across_fraction(completions, prompts)}, reasons

    def _distinct_2(self) -> IntArray | None:
        """[G, 2] distinct bigrams and bigrams of each group of the batch."""
        table = self.table
        if not table.all_ids and None in table.output_T:
            return None
        group_T = table.group_N[table.rollout_T].tolist()
        by_group: dict[int, list[Any]] = {}
        for t, group in enumerate(group_T):
            words = table.turns[t].output_ids if table.all_ids else (table.output_T[t] or "").split()
            by_group.setdefault(group, []).append(words)
        return np.array([diversity.distinct_bigrams(by_group[g]) for g in range(len(by_group))], dtype=np.int64)

    def _bigrams(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        if self.distinct_2_G is None:
            return {}, {"distinct_2": _MIXED}
        # Groups never span environments, so a group's bigrams are those of the whole batch.
        counts = self.distinct_2_G[np.unique(self.table.group_N[rows])]
        some = counts[counts[:, 1] > 0]
        if not some.size:
            return {}, {"distinct_2": "no output has two tokens"}
        return {"distinct_2": float((some[:, 0] / some[:, 1]).mean())}, {}

    def _part(self, rows: IntArray) -> RolloutBatch:
        batch = self.table.text_batch
        return batch if rows.size == len(batch) else batch.select(rows.tolist())

    def _tools(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        values = tool_metrics(self._part(rows), seed=self.seed)
        return values, {} if values else {"tools": _NO_TEXT}

    def _entropy(self, rows: IntArray, group_N: IntArray) -> tuple[Values, Reasons]:
        values = entropy_metrics(self._part(rows), seed=self.seed, **self.entropy)
        return values, {} if values else {"entropy": "no turn has the entropies or log-probabilities of its tokens"}


def _no_reward(has_reward_N: BoolArray) -> str:
    """Why there is no number of any reward. has_reward_N: whether one was given, be it one that cannot be used."""
    n = int(has_reward_N.sum())
    if not n:
        return "no rollout has a reward"
    return f"no rollout has a usable reward: {n} of {has_reward_N.size} are NaN, infinite or beyond 1e150"
