"""One TRL trainer under observation: three of its methods wrapped, one monitor, and the state that checkpoints keep.

`_generate_and_score_completions`: rollouts are measured right after it returns. It is the only point where the weights
are those that generated (also under FSDP and DeepSpeed), all ranks are in step, and groups are not yet shuffled.
`_calculate_rewards`: completions without padding, and the reward functions one by one, pass through here only.
`log` (public): numbers go into the trainer's own log line on the way in, so that every logger gets them, once.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from collapsediag.errors import SettingsError
from collapsediag.integrations.trl_rollouts import Captured, Part, add_generation, tokenizer_of
from collapsediag.monitor import Monitor
from collapsediag.plain_text import error_text, printable
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.hf import HFScorer
from collapsediag.training.checkpoints import take_up
from collapsediag.training.log_window import Logged, LogWindow
from collapsediag.training.patches import InstancePatches
from collapsediag.training.ranks import JobMonitor, close_all

logger = logging.getLogger("collapsediag")

KEY = "collapsediag"
METHODS = ("_generate_and_score_completions", "_calculate_rewards", "log")
UNSUPPORTED = (
    "{name} has no {missing}, so its rollouts cannot be seen from outside. GRPOTrainer and RLOOTrainer of trl>=0.20 "
    "and their subclasses can be observed. With another transformers.Trainer use RolloutCallback, which is given a "
    "function that makes rollouts (docs/adapters/transformers-trainer.md); in other loops call "
    "Monitor.observe(step, batch) (docs/adapters/own-loop.md); or save the rollouts and run `collapsediag score`."
)
ONE_PROMPT = (
    "this generation batch holds one prompt only: raise per_device_train_batch_size, gradient_accumulation_steps or "
    "the number of processes, lower num_generations, or pass context_bank=8"
)


class TrlSession:
    """Everything between one trainer and its monitors. The trainer is held weakly. See CollapseCallback."""

    def __init__(
        self,
        *,
        every: int,
        sinks: Iterable[Any] | str,
        eval_sinks: Iterable[Any] | str,
        logged: Logged,
        evaluate: bool,
        budget: int | None,
        environment: str | None,
        temperature: float | None,
        token_budget: int | None,
        monitor_options: dict[str, Any],
    ) -> None:
        self._trainer: weakref.ref[Any] | None = None
        self._patches = InstancePatches()
        self._evaluate = evaluate
        self._environment = environment
        self._temperature = temperature
        self._token_budget = token_budget
        self._jobs = {
            "train": JobMonitor(Monitor(every=every, sinks=sinks, **monitor_options), budget=budget),
            "eval": JobMonitor(Monitor(every=1, sinks=eval_sinks, **monitor_options), budget=budget),
        }
        # One line in a trainer's arguments leaves nobody to close the sinks: done with the session, or at exit.
        self.close = weakref.finalize(self, close_all, [job.monitor for job in self._jobs.values()])
        self._windows = {"train": LogWindow(logged), "eval": LogWindow(logged)}
        self._scorer: HFScorer | None = None
        self._captured: Captured | None = None
        self._eval_part: Part | Exception | None = None
        self._step: int | None = None
        self._warned_one_prompt = False

    @property
    def trainer(self) -> Any:
        """The trainer, None where not attached or gone."""
        return None if self._trainer is None else self._trainer()

    def monitor(self, mode: str = "train") -> Monitor:
        """The monitor of training ("train") or of evaluations ("eval")."""
        return self._jobs[mode].monitor

    # -- attach and detach -------------------------------------------------------------------------------------------

    def bind(self, trainer: Any) -> None:
        """Wrap the trainer's methods. Raises SettingsError for a trainer that has none, or is observed already."""
        missing = [name for name in METHODS if not hasattr(trainer, name)]
        if missing:
            raise SettingsError(UNSUPPORTED.format(name=type(trainer).__name__, missing=missing[0]))
        if KEY in vars(trainer) or self.trainer is not None:
            raise SettingsError(
                f"{type(trainer).__name__} or this callback is attached already. One callback observes one trainer; "
                "detach() it first, or give it more sinks instead of attaching a second."
            )
        self._trainer = weakref.ref(trainer)
        vars(trainer)[KEY] = self
        for name, around in zip(METHODS, (self._on_generate, self._on_rewards, self._on_log), strict=True):
            self._patches.wrap(trainer, name, around)

    def detach(self) -> None:
        """Leave the trainer as it was."""
        trainer, self._trainer = self.trainer, None
        if trainer is not None:
            self._patches.undo(trainer)
            vars(trainer).pop(KEY, None)

    # -- the three wrappers: the original runs exactly once, and what it returns or raises goes through ---------------

    def _on_generate(self, original: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._captured = None
        output = original(inputs, *args, **kwargs)
        self._guarded(self._observe, inputs, output)
        self._captured = None
        return output

    def _on_rewards(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rewards = original(*args, **kwargs)
        self._guarded(self._capture, rewards, *args, **kwargs)
        return rewards

    def _on_log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._merge, logs)
        return original(logs, *args, **kwargs)

    def _guarded(self, body: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The last line of defence: the monitors catch what fails in measuring, this what fails around them."""
        try:
            body(*args, **kwargs)
        except Exception as error:
            if self.monitor().on_error == "raise":
                raise
            logger.warning(
                "diagnostics failed, training goes on: %s: %s", type(error).__name__, printable(error_text(error))
            )

    # -- what they do ------------------------------------------------------------------------------------------------

    def _capture(
        self, rewards: Any, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any, *_: Any, **__: Any
    ) -> None:
        self._captured = Captured.of(completion_ids_list, rewards)

    def _observe(self, inputs: Any, output: Any) -> None:
        trainer = self.trainer
        if trainer.model.training:
            self._measure("train", self._added(Part(), inputs, output, trainer.num_generations))
            self.publish()
        elif self._evaluate:
            group_size = getattr(trainer, "num_generations_eval", None) or trainer.num_generations
            self._eval_part = self._added(self._eval_part or Part(), inputs, output, group_size)

    def _added(self, part: Part | Exception, inputs: Any, output: Any, group_size: int) -> Part | Exception:
        """`part` with this rank's rows, or the failure: it must be told to the other ranks, not raised here."""
        if isinstance(part, Exception):
            return part
        trainer = self.trainer
        try:
            if self._captured is None:
                raise SettingsError("no completions passed through _calculate_rewards in this generation batch.")
            add_generation(
                part,
                trainer,
                inputs,
                output,
                self._captured,
                group_size=int(group_size),
                rank=trainer.accelerator.process_index,
                ranks=trainer.accelerator.num_processes,
                environment=self._environment,
            )
        except Exception as error:
            return error
        return part

    def _measure(self, mode: str, part: Part | Exception) -> None:
        trainer = self.trainer
        job, step = self._jobs[mode], int(trainer.state.global_step)
        if mode == "train":
            if step == self._step:
                return  # several generation batches in one step: the first speaks for it
            self._step = step
        batch, order, images = self._prepared(job, mode, part, step)
        score = False if images else (True if mode == "eval" else None)
        try:
            record = job.observe(step, batch, order=order, score=score, around=trainer.accelerator.autocast)
        finally:
            if self._scorer is not None:
                self._scorer.model = None  # the model is the trainer's to free
        self._windows[mode].add(record)

    def _prepared(
        self, job: JobMonitor, mode: str, part: Part | Exception, step: int
    ) -> tuple[RolloutBatch | Exception, list[int] | None, bool]:
        if isinstance(part, Exception):
            return part, None, False
        try:
            self._ready(job)
            return part.batch(self.trainer, step, self._notes(mode, part)), part.order, part.has_images
        except Exception as error:
            return error, None, False

    def _ready(self, job: JobMonitor) -> None:
        """Give the monitor what only a trainer that is complete can tell."""
        trainer, monitor = self.trainer, job.monitor
        if self._scorer is None:
            self._scorer = HFScorer(
                trainer.model,
                temperature=self._temperature or trainer.temperature,
                token_budget=self._token_budget,
            )
        self._scorer.model = trainer.model
        if job.scorer is None:
            job.scorer = self._scorer
            monitor.tokenizer = monitor.tokenizer or tokenizer_of(trainer)
            limit = monitor.pair_settings.max_total_tokens or self._scorer.max_tokens
            monitor.pair_settings = dataclasses.replace(monitor.pair_settings, max_total_tokens=limit)

    def _notes(self, mode: str, part: Part) -> list[str]:
        notes = []
        args = self.trainer.args
        in_a_step = args.gradient_accumulation_steps // (args.steps_per_generation * self.trainer.num_iterations)
        if mode == "train" and in_a_step > 1:
            notes.append(f"measured on the first of {in_a_step} generation batches of this step")
        if part.has_images:
            notes.append("not scored: the prompts hold images, which no other prompt's tokens can stand in for")
        if part.groups_seen == 1 and not self.monitor(mode).uses_context_bank:
            notes.append(ONE_PROMPT)
            if mode == "train" and not self._warned_one_prompt:
                self._warned_one_prompt = True
                logger.warning("retrieval and mutual information are not measured: %s", ONE_PROMPT)
        return notes

    def _merge(self, logs: dict[str, float]) -> None:
        prefix = next(
            (key[: -len("runtime")] for key in logs if key.endswith("_runtime") and key[:6] != "train_"), None
        )
        if prefix is not None:
            # Evaluation comes in small batches; together they are one measurement.
            part, self._eval_part = self._eval_part, None
            if part is not None:
                self._measure("eval", part)
            self._windows["eval"].merge_into(logs, prefix)
        elif self.trainer.model.training or "train_runtime" in logs:
            self._windows["train"].merge_into(logs)
        self.publish()

    # -- state -------------------------------------------------------------------------------------------------------

    def begin(self, state: Any) -> None:
        """A training run begins, maybe from a checkpoint, maybe from one of a run that was not observed."""
        self._step, self._eval_part = None, None
        saved = getattr(state, "stateful_callbacks", {}).get(KEY)
        if saved is not None:
            take_up(lambda: self.load_state_dict(saved["attributes"]))
        self.publish()

    def forget_evaluation(self) -> None:
        """Drop the rollouts of an evaluation that no log line will follow."""
        self._eval_part = None

    def publish(self) -> None:
        """Put the state where the trainer's next checkpoint saves it: plain JSON values in trainer_state.json."""
        kept = getattr(self.trainer.state, "stateful_callbacks", None)
        if isinstance(kept, dict):
            kept[KEY] = {"args": {}, "attributes": self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Monitors, and numbers that were not logged yet."""
        return {
            **{mode: job.monitor.state_dict() for mode, job in self._jobs.items()},
            "windows": {mode: window.state_dict() for mode, window in self._windows.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for mode, job in self._jobs.items():
            job.monitor.load_state_dict(state[mode])
        for mode, window in self._windows.items():
            window.load_state_dict(state["windows"][mode])
