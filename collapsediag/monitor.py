"""The composition root: decides when to measure, and is the only place that catches a failure.

monitor = Monitor(scorer=HFScorer(model), tokenizer=tokenizer, every=5, sinks=[JsonlSink("runs/a")])
for step in ...:
    batch = ...                       # your rollouts of this step
    monitor.observe(step, batch)      # before the weights are updated
monitor.close()
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from collapsediag.cadence import Cadence
from collapsediag.context_bank import ContextBank
from collapsediag.errors import MetricError, RolloutError
from collapsediag.metrics.from_matrix import DEFINITIONS, matrix_metrics
from collapsediag.metrics.from_rollouts import rollout_report
from collapsediag.monitor_settings import (
    check_choice,
    checked_count,
    checked_pairs,
    checked_rollout_options,
    checked_tokenizer,
    refuse_unknown,
)
from collapsediag.pairs import (
    NAMESPACES,
    PairSettings,
    ScoringPairs,
    build_pairs,
    resolve_reasoning,
)
from collapsediag.plain_text import error_text, printable
from collapsediag.record import Record
from collapsediag.resumption import REASONING_NOTE, MonitorState, Reasoning, averages_of, reasoning_of
from collapsediag.rollouts import RolloutBatch
from collapsediag.said_once import SaidOnce
from collapsediag.scoring.budget import own_logp_difference
from collapsediag.scoring.protocol import checked_scorer
from collapsediag.sink_names import resolve_sinks
from collapsediag.sinks import FanOut, Sink
from collapsediag.spans import SpanFinder
from collapsediag.statistics import EmaStd
from collapsediag.step_draft import StepDraft, settled_step
from collapsediag.time_budget import MIN_CELLS, TimeBudget
from collapsediag.trace_samples import ScoredRows, sample_traces, sampled_rows, score_keeping

if TYPE_CHECKING:
    from collapsediag.scoring.protocol import Scorer

logger = logging.getLogger("collapsediag")

# After this many failures in a row the policy is not scored any more; the cheap rollout metrics go on.
MAX_FAILURES_IN_A_ROW = 3


class Monitor:
    """Measures a training run step by step and hands one record per step to the sinks.

    scorer: scores traces under contexts with the policy (HFScorer, FunctionScorer, ...). None: rollout metrics only.
    every: the policy is scored at the first observed step and at every step divisible by this.
    sinks: where records go, one or several. JsonlSink("runs/a") keeps everything. Also a name ("wandb",
        "tensorboard:runs/tb", "jsonl:runs/a"), or a function or logger that takes (metrics, step=step). The main
        process alone writes.
    tokenizer: anything with decode(ids) -> str; needed to find reasoning tags in token ids and to store readable
        traces.
    reasoning: "think" (between tags), "completion" (the whole output), or "auto": decided at the first step by
        whether tags are there, then kept, and noted in the record.
    pairs: limits and tags for the pairs, see PairSettings. Scoring costs n_traces x n_contexts, so a limit is set.
    definition: "paper" or "ragen", see matrix_metrics.
    rollout_options: keyword arguments of rollout_metrics: {"success_threshold": 0.5, "format": "tags:think"}.
    seed: the draw of traces is a function of (seed, step).
    traces_kept: how many traces of a scored step are stored for reading.
    context_bank: how many contexts of earlier batches serve as further columns, for trainers that put one prompt into
        a batch; 0 for none. They count in P, so chance and bound follow; the record's notes say how many there were.
    time_budget: the share of the wall time that scoring may take, for example 0.02. `every` is then the closest that
        scored steps come; due steps are put off, and where a scoring is very dear fewer traces and contexts are drawn,
        so that chance and bound are those of fewer contexts. The record says which. The clock then decides which
        steps are scored: two runs of one seed may differ in that.
    on_error: "record" keeps training alive whatever happens here: a failed step becomes a record with the reason and
        no values, and after three failures in a row scoring stops. "raise" is for offline use.

    The training process is left as it was: weights, RNG states, modes, gradients, and the batch itself.
    """

    def __init__(
        self,
        scorer: Scorer | None = None,
        *,
        every: int = 10,
        sinks: Iterable[Sink | str | Any] | Sink | str = (),
        tokenizer: Any = None,
        reasoning: Reasoning = "auto",
        pairs: PairSettings | None = None,
        definition: Literal["paper", "ragen"] = "paper",
        rollout_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        traces_kept: int = 32,
        context_bank: int = 0,
        time_budget: float | None = None,
        on_error: Literal["record", "raise"] = "record",
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown("Monitor", unknown, Monitor)
        check_choice("on_error", on_error, ("record", "raise"))
        check_choice("reasoning", reasoning, ("auto", "think", "completion"))
        check_choice("definition", definition, tuple(DEFINITIONS))
        self.scorer = checked_scorer(scorer)
        self.tokenizer = checked_tokenizer(tokenizer)
        self.cadence = Cadence(every=every)
        self.pair_settings = checked_pairs(pairs, PairSettings(max_contexts=16, max_traces=64))
        limit = getattr(scorer, "max_tokens", None)
        if self.pair_settings.max_total_tokens is None and isinstance(limit, int):
            # One trace too long for the model must not cost the whole step.
            self.pair_settings = dataclasses.replace(self.pair_settings, max_total_tokens=limit)
        self.definition: Literal["paper", "ragen"] = definition
        self.rollout_options = checked_rollout_options(rollout_options)
        self.seed = checked_count("seed", seed, least=None)
        self.traces_kept = checked_count("traces_kept", traces_kept)
        self.on_error: Literal["raise", "record"] = on_error
        self._reasoning: Reasoning = reasoning
        self._finder: SpanFinder | None = None
        self._sinks = FanOut(resolve_sinks(sinks), strict=on_error == "raise")
        self._ema: dict[str, EmaStd] = {}
        n_banked = checked_count("context_bank", context_bank)
        self._bank = ContextBank(n_banked) if n_banked else None
        self._time_budget = None if time_budget is None else TimeBudget(time_budget, every)
        self._last_step: int | None = None
        self._failures = 0
        self._failures_in_a_row = 0
        self._say_once = SaidOnce()

    @property
    def last_step(self) -> int | None:
        """The step observed last, None before the first."""
        return self._last_step

    @property
    def uses_context_bank(self) -> bool:
        """Whether contexts of earlier batches serve as further columns."""
        return self._bank is not None

    def observe(self, step: int, batch: RolloutBatch, *, score: bool | None = None) -> Record:
        """Measure one step and return its record.

        step: the trainer's step number; where it is no whole number the batch's own is recorded, and a note says so.
        batch: its rollouts. score: True or False overrides the cadence.
        Never raises unless on_error="raise".
        """
        started = time.perf_counter()
        draft = self._draft(step, batch)
        if self._time_budget is not None:
            self._time_budget.begin_step(started)
        try:
            self._measure(batch, score, draft)
            draft.values["timing_s/collapse_step"] = time.perf_counter() - started
            if self._failures:
                draft.values["collapse/failures"] = float(self._failures)
            record = draft.record()
        except Exception as error:
            if self.on_error == "raise":
                raise
            record = self._failed(draft, error)
        else:
            if draft.scored or self.scorer is None:
                # Only a step that did score shows that scoring works again.
                self._failures_in_a_row = 0
            self._ema.update(draft.ema)
        self._last_step = draft.step
        self._sinks.write(record)
        return record

    def record_failure(self, step: int, error: Exception) -> Record:
        """A failed record for a step whose rollouts could not even be brought here; for adapters."""
        if self.on_error == "raise":
            raise error
        draft = self._draft(step, None)
        record = self._failed(draft, error)
        self._last_step = draft.step
        self._sinks.write(record)
        return record

    def close(self) -> None:
        """Close the sinks."""
        self._sinks.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to continue as if it had never stopped; plain JSON values."""
        state = MonitorState(
            ema=self._ema,
            reasoning=self._reasoning,
            last_step=self._last_step,
            failures=self._failures,
            failures_in_a_row=self._failures_in_a_row,
        )
        return {
            **state.to_json(),
            **({} if self._bank is None else {"context_bank": self._bank.state_dict()}),
            **({} if self._time_budget is None else {"time_budget": self._time_budget.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Raises SettingsError, and takes nothing over, where that is damaged or old."""
        loaded = MonitorState.from_json(state)
        bank, budget = copy.copy(self._bank), copy.copy(self._time_budget)
        if bank is not None:
            bank.load_state_dict(state.get("context_bank", {}))
        if budget is not None and "time_budget" in state:
            budget.load_state_dict(state["time_budget"])
        self._bank, self._time_budget = bank, budget
        self._ema, self._reasoning, self._last_step = loaded.ema, loaded.reasoning, loaded.last_step
        self._failures, self._failures_in_a_row = loaded.failures, loaded.failures_in_a_row

    def continue_from(self, records: Iterable[Record]) -> None:
        """Continue a run from what it recorded, for offline jobs that keep no checkpoint.

        The moving averages are part of every scored record, so the last one of each namespace holds them exactly. What
        a trace is was decided at the first scored step, and stands in its notes.
        """
        reasoning, emas, last_step = self._reasoning, dict(self._ema), self._last_step
        for record in records:
            if reasoning == "auto":
                reasoning = reasoning_of(record.notes)
            for namespace in NAMESPACES:
                averages = averages_of(record.values, f"collapse_{namespace}_sample/")
                if averages is not None:
                    emas[namespace] = averages
            last_step = record.step
        self._reasoning, self._ema, self._last_step = reasoning, emas, last_step

    # -- one step ----------------------------------------------------------------------------------------------------

    def _draft(self, step: Any, batch: Any) -> StepDraft:
        number, doubt = settled_step(step, batch, self._last_step)
        if doubt is None:
            return StepDraft(number)
        if self.on_error == "raise":
            raise RolloutError(doubt)
        self._say_once.doubt(doubt)
        return StepDraft(number, (doubt,))

    def _measure(self, batch: RolloutBatch, score: bool | None, draft: StepDraft) -> None:
        begun = time.perf_counter()
        report = rollout_report(
            batch, tokenizer=self.tokenizer, seed=self.seed, on_error=self.on_error, **self.rollout_options
        )
        self._say_once.unmeasured(draft.step, report)
        draft.values.update(report.values)
        draft.not_measured.update(report.not_measured)
        draft.dropped.update(batch.dropped)
        draft.notes.extend((*batch.notes, *report.notes))
        draft.values["timing_s/collapse_rollout_metrics"] = time.perf_counter() - begun
        if not self._is_scored(score, draft):
            self._fill_bank(batch)
            return
        begun = time.perf_counter()
        try:
            self._score_all(batch, draft)
        finally:
            seconds = draft.values["timing_s/collapse_score"] = time.perf_counter() - begun
            if self._time_budget is not None:
                # What failed took its time all the same.
                self._time_budget.charge(seconds, draft.n_cells)
                self._time_budget.look(begun + seconds)
                draft.values["collapse/scoring_time_share"] = self._time_budget.spent_share

    def _score_all(self, batch: RolloutBatch, draft: StepDraft) -> None:
        namespaces = self._namespaces(batch)
        cells = None if self._time_budget is None else self._time_budget.max_cells
        settings = self.pair_settings
        if cells is not None:
            cells = max(MIN_CELLS, cells // len(namespaces))
            settings = dataclasses.replace(settings, max_pairs=min(cells, settings.max_pairs or cells))
            draft.notes.append(
                f"time_budget: at most {cells} cells (traces x contexts) a draw were scored, so that scored steps come "
                "often enough; chance and bound are those of the contexts that were"
            )
        for namespace in namespaces:
            self._score(batch, namespace, draft, settings)

    def _is_scored(self, score: bool | None, draft: StepDraft) -> bool:
        due = score
        if score is None:
            due = self._last_step is None or self.cadence.is_due(draft.step, self._last_step)
        if not due or self.scorer is None:
            return False
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW and self.on_error == "record":
            draft.not_measured["scoring"] = f"switched off after {MAX_FAILURES_IN_A_ROW} failures in a row"
            return False
        if self._time_budget is not None and score is None and self._last_step is not None:
            refusal = self._time_budget.refusal()
            if refusal is not None:
                draft.not_measured["scoring"] = refusal
                return False
        return True

    def _namespaces(self, batch: RolloutBatch) -> tuple[str, ...]:
        # Single-turn data has one way to draw a turn; the other two would repeat its numbers under other names.
        multi_turn = any(len(rollout.turns) > 1 for rollout in batch)
        return NAMESPACES if multi_turn else NAMESPACES[:1]

    def _score(self, batch: RolloutBatch, namespace: str, draft: StepDraft, settings: PairSettings) -> None:
        assert self.scorer is not None
        pairs = self._pairs(batch, namespace, draft, settings)
        key = f"collapse_{namespace}_sample"
        if pairs.shortfall is not None:
            draft.not_measured[key] = pairs.shortfall
            return
        rows = sampled_rows(pairs.n_traces, self.traces_kept, self.seed, batch.step)
        scored = score_keeping(self.scorer, pairs, rows)
        matrix = scored.matrix
        draft.n_cells += matrix.logp_NP.size
        off = own_logp_difference(pairs, batch, matrix, getattr(self.scorer, "temperature", 1.0))
        if off is not None:
            name = "collapse/own_logp_difference"
            draft.values[name] = max(draft.values.get(name, 0.0), off)
        ema = draft.ema[namespace] = copy.deepcopy(self._ema.get(namespace, EmaStd()))
        try:
            values = matrix_metrics(matrix, ema=ema, definition=self.definition, seed=self.seed)
        except MetricError as error:
            draft.not_measured[key] = str(error)
            return
        draft.take(key, values)
        draft.matrices[namespace] = matrix
        self._keep_traces(batch, pairs, scored, draft)

    def _keep_traces(self, batch: RolloutBatch, pairs: ScoringPairs, scored: ScoredRows, draft: StepDraft) -> None:
        mixture = DEFINITIONS[self.definition].mixture
        try:
            draft.traces.extend(sample_traces(batch, pairs, scored, self.tokenizer, mixture))
        except Exception as error:
            if self.on_error == "raise":
                raise
            # What is kept for reading must not cost what was scored.
            reason = f"no trace was kept: {type(error).__name__}: {error_text(error)}"
            draft.not_measured[f"collapse_{pairs.namespace}_sample/traces"] = reason

    def _pairs(self, batch: RolloutBatch, namespace: str, draft: StepDraft, settings: PairSettings) -> ScoringPairs:
        finder = self._span_finder(batch)
        if self._reasoning == "auto":
            choice = resolve_reasoning(batch, settings=settings, tokenizer=finder)
            self._reasoning = choice.mode
            draft.notes.append(f"{REASONING_NOTE}{choice.mode}: {choice.reason}")
        pairs = build_pairs(
            batch,
            settings=settings.with_reasoning(self._reasoning),
            tokenizer=finder,
            namespace=namespace,
            seed=self.seed,
        )
        if self._bank is not None:
            own, pairs = pairs, self._bank.extended(pairs, settings.max_total_tokens)
            self._bank.add(own)
        for reason, count in pairs.dropped.items():
            draft.dropped[f"{namespace}/{reason.value}"] += count
        draft.notes.extend(pairs.notes)
        self._say_once.dropped(batch.step, pairs, settings)
        return pairs

    def _fill_bank(self, batch: RolloutBatch) -> None:
        # Contexts of steps that are not scored are as good; once it is full, the scored steps alone renew it.
        if self._bank is None or self.scorer is None or self._reasoning == "auto":
            return
        for namespace in self._namespaces(batch):
            if not self._bank.is_full(namespace):
                self._pairs(batch, namespace, StepDraft(batch.step), self.pair_settings)

    def _span_finder(self, batch: RolloutBatch) -> SpanFinder | None:
        # One for the run: it learns the vocabulary as it goes.
        if self._finder is None and self.tokenizer is not None:
            self._finder = SpanFinder(self.tokenizer, self.pair_settings.reasoning_tags, batch.eos_token_ids)
        return self._finder

    def _failed(self, draft: StepDraft, error: Exception) -> Record:
        self._failures += 1
        self._failures_in_a_row += 1
        record = draft.failed(error, self._failures)
        said = printable(record.reason or "")
        logger.warning("step %d: diagnostics failed, training goes on: %s", record.step, said)
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW and self.scorer is not None:
            logger.warning(
                "diagnostics failed %d times in a row: the policy is not scored any more in this run; rollout metrics "
                "go on",
                MAX_FAILURES_IN_A_ROW,
            )
        return record
