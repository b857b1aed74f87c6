"""One veRL trainer under observation.

The seam is just before the actor update: the weights are still those that made `old_log_probs`, rewards and masks are
there, and the rollout engines sleep. It has one name in all trainers since 0.7 (`_update_actor`); before, the workers'
`update_actor` is wrapped, which the trainer calls at the same place.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Literal, cast

from collapsediag.errors import SettingsError
from collapsediag.integrations.verl import SECTION, tracking
from collapsediag.integrations.verl.dump import dump
from collapsediag.integrations.verl.facts import (
    REFUSALS,
    ModelFacts,
    check_config,
    contract_of,
    first_of_note,
    has_engine_workers,
    lasting_notes,
    lasting_refusal,
    limits_of,
    model_facts,
    response_limit,
    staleness_note,
    training_row_tokens,
)
from collapsediag.integrations.verl.inside import InsideScorer
from collapsediag.integrations.verl.rows import Row, batch_of, read_rows
from collapsediag.integrations.verl.scorer import Limits, WorkerScorer
from collapsediag.integrations.verl.settings import VerlSettings, settings_of
from collapsediag.monitor import Monitor
from collapsediag.pairs import PairSettings
from collapsediag.plain_text import error_text, printable
from collapsediag.record import Provenance, Record
from collapsediag.rollouts import RolloutBatch
from collapsediag.run_folder import METRICS_FILE, read_records
from collapsediag.scoring.budget import BudgetScorer
from collapsediag.sinks import JsonlSink
from collapsediag.training.log_window import Logged, LogWindow
from collapsediag.training.patches import InstancePatches

logger = logging.getLogger("collapsediag")

OWN_LOGP = "collapse/own_logp_difference"
# Nats per token. Float32 gives 1e-6, bfloat16 up to about 1e-2; more is another policy, temperature or text.
OWN_LOGP_WARNING = 5e-2
UNSUPPORTED = (
    "{name} has no {missing}, so it is no PPO trainer of veRL 0.6 to 0.9 whose workers stand. Attach after init() or "
    "init_workers() and before fit(); in a loop of another kind call Monitor.observe(step, batch)."
)


class CollapseHook:
    """Measures every training batch just before its update, scores the policy every few steps, logs with the trainer.

    Training is left bit-identical. Whatever fails in measuring is counted, named and logged, and training goes on.
    """

    def __init__(self, settings: VerlSettings | None = None) -> None:
        self.settings = settings = settings or VerlSettings()
        sinks = settings.sink_list
        if settings.out is not None:
            provenance = Provenance.collect(settings=_plain(settings))
            # A run that is resumed goes on in its folder; bind() refuses one that is none of its own.
            sinks.append(JsonlSink(settings.out, resume=True, provenance=provenance))
        self.monitor = Monitor(
            every=settings.every,
            sinks=sinks,
            pairs=settings.pair_settings(),
            reasoning=cast(Literal["auto", "think", "completion"], settings.reasoning),
            definition=cast(Literal["paper", "ragen"], settings.definition),
            rollout_options={"success_threshold": settings.success_threshold},
            seed=settings.seed,
            traces_kept=settings.traces_kept,
            context_bank=settings.context_bank,
            time_budget=settings.time_budget,
        )
        self.close = weakref.finalize(self, self.monitor.close)
        self._window = LogWindow(cast(Logged, settings.logged))
        self._more: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._trainer: weakref.ref[Any] | None = None
        self._seam: weakref.ref[Any] | None = None
        self._patches = InstancePatches()
        self._facts = ModelFacts()
        self._step: int | None = None
        self._warned = False

    @property
    def trainer(self) -> Any:
        """The trainer, None where not attached or gone."""
        return None if self._trainer is None else self._trainer()

    # -- attach and detach -------------------------------------------------------------------------------------------

    def bind(self, trainer: Any) -> None:
        """Observe a trainer whose workers stand. Raises SettingsError for what cannot be observed, or is already."""
        group = getattr(trainer, "actor_rollout_wg", None)
        seam, name = (trainer, "_update_actor") if hasattr(trainer, "_update_actor") else (group, "update_actor")
        for owner, needed in ((trainer, "actor_rollout_wg"), (seam, name), (trainer, "tokenizer")):
            if getattr(owner, needed, None) is None:
                raise SettingsError(UNSUPPORTED.format(name=type(trainer).__name__, missing=needed))
        if SECTION in vars(trainer) or self.trainer is not None:
            raise SettingsError(f"{type(trainer).__name__} or this hook is attached already; detach() it first.")
        check_config(self.settings, trainer.config)
        self._facts = model_facts(trainer)
        limits = limits_of(trainer.config, self._facts)
        self._make_scorer(trainer, limits)
        self._trainer, self._seam = weakref.ref(trainer), weakref.ref(seam)
        vars(trainer)[SECTION] = self
        self._patches.wrap(seam, name, self._on_update)
        tracking.add(self)
        print(f"[collapsediag] {self._announcement(trainer)}", flush=True)

    def detach(self) -> None:
        """Leave the trainer as it was."""
        trainer, self._trainer = self.trainer, None
        seam = None if self._seam is None else self._seam()
        if seam is not None:
            self._patches.undo(seam)
        if trainer is not None:
            vars(trainer).pop(SECTION, None)
        tracking.remove(self)

    def _make_scorer(self, trainer: Any, limits: Limits) -> None:
        settings, monitor = self.settings, self.monitor
        group = trainer.actor_rollout_wg
        scorer: InsideScorer | WorkerScorer
        if settings.share_prefixes:
            if not has_engine_workers(trainer.config):
                raise SettingsError(
                    f"{SECTION}.share_prefixes=true needs the engine workers, which veRL has from 0.8 on."
                )
            scorer = InsideScorer(group, limits)
        else:
            scorer = WorkerScorer(group, contract_of(trainer), limits, call_tokens=settings.call_tokens)
        monitor.scorer = scorer if settings.budget is None else BudgetScorer(scorer, settings.budget, seed=monitor.seed)
        monitor.tokenizer = trainer.tokenizer
        pairs = dataclasses.replace(monitor.pair_settings, max_total_tokens=limits.row_tokens)
        if settings.token_budget is not None:
            # A crossed row of one turn is no longer than training's longest: prompt and trace are part of one each.
            most = max(1, settings.token_budget // training_row_tokens(trainer.config))
            pairs = dataclasses.replace(
                pairs, max_pairs=most if pairs.max_pairs is None else min(most, pairs.max_pairs)
            )
        monitor.pair_settings = pairs

    def _announcement(self, trainer: Any) -> str:
        import verl

        refusal = lasting_refusal(trainer.config)
        cost = _cost(trainer.config, self.monitor.pair_settings, self.settings.every)
        cost = cost if refusal is None else REFUSALS[refusal]
        return f"attached to {type(trainer).__name__} (verl {verl.__version__}): {cost}"

    # -- the seam: the original runs exactly once, and what it returns or raises goes through ------------------------

    def _on_update(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        self._guarded("measuring", self._observe, batch)
        name = "timing_s/collapsediag"
        self._more[name] = self._more.get(name, 0.0) + time.perf_counter() - started
        return original(batch, *args, **kwargs)

    def _guarded(self, stage: str, body: Callable[..., None], *args: Any) -> None:
        """The last line of defence: the monitor catches what fails in measuring, this what fails around it."""
        try:
            body(*args)
        except Exception as error:
            self._failures[stage] += 1
            logger.warning(
                "%s failed, training goes on: %s: %s", stage, type(error).__name__, printable(error_text(error))
            )

    def _observe(self, batch: Any) -> None:
        step = int(self.trainer.global_steps)
        if step == self._step:
            return  # a later mini-batch of an asynchronous trainer: the policy has moved since the first
        begins, self._step = self._step is None, step
        if begins:
            self._guarded("resuming", self._continue, step)
        try:
            rows, dropped = read_rows(batch)
            rollouts, refusal = self._rollouts(rows, dropped, step)
        except Exception as error:
            self._failures["reading the batch"] += 1
            self._window.add(self.monitor.record_failure(step, error))
            return
        if refusal is not None:
            self._more[f"collapse/not_scored_{refusal}"] = 1.0
        record = self.monitor.observe(step, rollouts, score=False if refusal is not None else None)
        self._window.add(record)
        self._check(record)
        if self.settings.dump and any(name.endswith("/n_traces") for name in record.values):
            assert self.settings.out is not None
            self._guarded("dumping rollouts", self._dump, rows, rollouts)

    def _rollouts(self, rows: list[Row], dropped: dict[str, int], step: int) -> tuple[RolloutBatch, str | None]:
        config = self.trainer.config
        refusal = lasting_refusal(config) if self.settings.score else "switched_off"
        if refusal is None and any(row.has_images for row in rows):
            refusal = "images"
        notes = [*lasting_notes(config), first_of_note(self.trainer), staleness_note(rows, step)]
        notes.append(REFUSALS.get(refusal or ""))
        rollouts = batch_of(
            rows,
            step=step,
            end_tokens=self._facts.end_tokens,
            limit=response_limit(config),
            temperature=float(config.actor_rollout_ref.rollout.temperature),
            dropped=dropped,
            notes=[note for note in notes if note is not None],
        )
        return rollouts, refusal

    def _continue(self, step: int) -> None:
        """Take up the moving averages of the run that is resumed."""
        out = self.settings.out
        if out is not None and (Path(out) / METRICS_FILE).exists():
            self.monitor.continue_from(record for record in read_records(out) if record.step < step)

    def _check(self, record: Record) -> None:
        if record.status == "failed":
            self._failures["measuring"] += 1
        off = record.values.get(OWN_LOGP, 0.0)
        if off > OWN_LOGP_WARNING and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: scores of own prompts are %.2g nats a token away from veRL's old_log_probs; float32 gives "
                "1e-6, bfloat16 1e-2. Said once; %s has it at every scored step.",
                *(record.step, off, OWN_LOGP),
            )

    def _dump(self, rows: list[Row], rollouts: RolloutBatch) -> None:
        assert self.settings.out is not None
        dump(Path(self.settings.out) / "rollouts", rows, rollouts)

    # -- the trainer's log -------------------------------------------------------------------------------------------

    def merge_into(self, data: MutableMapping[str, Any]) -> None:
        """Add what waits for the line of this step. Never raises, never replaces a key."""
        self._guarded("logging", self._window.merge_into, data)
        for stage, count in self._failures.items():
            data.setdefault(f"collapse/failed_{stage.replace(' ', '_')}", float(count))
        for name, value in self._more.items():
            data.setdefault(name, value)
        self._more.clear()


def attach(trainer: Any, **changes: Any) -> CollapseHook:
    """Observe a veRL trainer after `init()` or `init_workers()` and before `fit()`; its `detach()` undoes it.

    Settings are those of the config's `collapsediag` section where there is one, and `changes` on top, see
    VerlSettings. A trainer that the plug-in observes already is left to it; with changes that is a SettingsError.
    """
    observed = vars(trainer).get(SECTION)
    if isinstance(observed, CollapseHook) and not changes:
        return observed
    hook = CollapseHook(settings_of(trainer.config, **changes))
    hook.bind(trainer)
    return hook


def _cost(config: Any, pairs: PairSettings, every: int) -> str:
    """What scoring costs at most, in words."""
    prompts = config.data.train_batch_size
    rows = prompts * config.actor_rollout_ref.rollout.n
    cells = min(pairs.max_traces or rows, rows) * min(pairs.max_contexts or prompts, prompts)
    return (
        f"every {every} steps up to {min(cells, pairs.max_pairs or cells):,} rows of up to "
        f"{training_row_tokens(config):,} tokens are scored; a step's own log-prob pass has {rows:,} rows"
    )


def _plain(settings: VerlSettings) -> dict[str, Any]:
    """As run.json keeps it."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {**values, "sinks": [str(sink) for sink in settings.sink_list]}
