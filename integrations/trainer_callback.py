"""Diagnostics for trainers that make no rollouts of their own: transformers.Trainer and Lightning, given a function.

def rollouts(step, model):            # your sampler: a RolloutBatch, or None for nothing this time
    return RolloutBatch.from_lists(step=step, prompts=..., completions=..., rewards=...)

trainer = Trainer(..., callbacks=[RolloutCallback(rollouts, tokenizer=tokenizer, every=50)])
trainer = lightning.Trainer(..., callbacks=[lightning_callback(rollouts, tokenizer=tokenizer, every=50)])
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from collapsediag._optional import require
from collapsediag.errors import MissingExtraError, SettingsError
from collapsediag.monitor import Monitor
from collapsediag.monitor_settings import refuse_unknown
from collapsediag.plain_text import error_text, printable
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.guard import undisturbed
from collapsediag.scoring.hf import HFScorer
from collapsediag.training.checkpoints import take_up
from collapsediag.training.log_window import Logged, LogWindow
from collapsediag.training.owner import trainer_of
from collapsediag.training.patches import InstancePatches
from collapsediag.training.ranks import JobMonitor, close_all

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = require("transformers", extra="hf", feature="the transformers callback").TrainerCallback

logger = logging.getLogger("collapsediag")

KEY = "collapsediag_rollouts"
RolloutFunction = Callable[[int, Any], "RolloutBatch | None"]


class RolloutHook:
    """Asks for rollouts every few steps and measures them; knows no trainer.

    rollouts: called with (step, model) before the step's update, on every rank, and returns this rank's rollouts. It
        runs in eval mode without gradients, and the random states are put back after it: sampling for diagnostics
        changes nothing in training.
        Where one rank returns None, all must.
    every: how often, in optimizer steps. A batch is made in order to be scored, so there is no other cadence.
    budget, temperature, token_budget, monitor_options: as for CollapseCallback of trl_callback.
    """

    def __init__(
        self,
        rollouts: RolloutFunction,
        *,
        every: int = 50,
        sinks: Iterable[Any] | str = (),
        logged: Logged = "charts",
        budget: int | None = None,
        temperature: float = 1.0,
        token_budget: int | None = None,
        **monitor_options: Any,
    ) -> None:
        if not callable(rollouts):
            raise SettingsError(f"rollouts must be a function of (step, model), found {type(rollouts).__name__}.")
        refuse_unknown("RolloutCallback", monitor_options, RolloutHook, Monitor)
        self._rollouts = rollouts
        self._temperature = temperature
        self._token_budget = token_budget
        self._scorer: HFScorer | None = None
        self.job = JobMonitor(Monitor(every=every, sinks=sinks, **monitor_options), budget=budget)
        self.window = LogWindow(logged)
        # A callback in a trainer's arguments leaves nobody to close the sinks: done with the hook, or at exit.
        self.close = weakref.finalize(self, close_all, [self.job.monitor])

    @property
    def monitor(self) -> Monitor:
        """What measures."""
        return self.job.monitor

    def before_step(self, step: int, model: Any) -> bool:
        """Measure where it is due; whether it was."""
        monitor = self.monitor
        if monitor.last_step == step:
            return False  # another micro-batch of the same step
        if not (monitor.last_step is None or monitor.cadence.is_due(step, monitor.last_step)):
            return False
        batch = self._made(step, model)
        if batch is None:
            return False
        try:
            self._attach(model)
            record = self.job.observe(step, batch, score=True)
            self.window.add(record)
        except Exception as error:
            if monitor.on_error == "raise":
                raise
            logger.warning(
                "diagnostics failed, training goes on: %s: %s", type(error).__name__, printable(error_text(error))
            )
        finally:
            if self._scorer is not None:
                self._scorer.model = None
        return True

    def _made(self, step: int, model: Any) -> RolloutBatch | Exception | None:
        try:
            with undisturbed(model):
                return self._rollouts(step, model)
        except Exception as error:
            return error

    def _attach(self, model: Any) -> None:
        if self._scorer is None:
            self._scorer = HFScorer(model, temperature=self._temperature, token_budget=self._token_budget)
            self.job.scorer = self._scorer
        self._scorer.model = model

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"monitor": self.monitor.state_dict(), "window": self.window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.monitor.load_state_dict(state["monitor"])
        self.window.load_state_dict(state["window"])


class RolloutCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
    """For transformers.Trainer and its subclasses: settings as for RolloutHook.

    Numbers go to the sinks and into the trainer's own log line, so that all it reports to get them. Its checkpoints
    keep the state.
    """

    def __init__(self, rollouts: RolloutFunction, **settings: Any) -> None:
        self.hook = RolloutHook(rollouts, **settings)
        self._patches = InstancePatches()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up a checkpoint's state, and stand at the entry of the trainer's log."""
        saved = getattr(state, "stateful_callbacks", {}).get(KEY)
        if saved is not None:
            take_up(lambda: self.hook.load_state_dict(saved["attributes"]))
        trainer = trainer_of(self)
        self._patches.undo(trainer)
        self._patches.wrap(trainer, "log", self._on_log)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The weights are those before the step's update, and all ranks are here."""
        self.hook.before_step(int(state.global_step), model)
        self._publish(state)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was waiting has been logged."""
        self._publish(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the trainer as it was."""
        self._patches.undo(trainer_of(self))

    def _on_log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        is_evaluation = any(key.endswith("_runtime") and key != "train_runtime" for key in logs)
        if not is_evaluation:
            self.hook.window.merge_into(logs)
        return original(logs, *args, **kwargs)

    def _publish(self, state: Any) -> None:
        kept = getattr(state, "stateful_callbacks", None)
        if isinstance(kept, dict):
            kept[KEY] = {"args": {}, "attributes": self.hook.state_dict()}


def lightning_callback(
    rollouts: RolloutFunction, *, model_of: Callable[[Any], Any] | None = None, **settings: Any
) -> Any:
    """A callback for Lightning's Trainer; settings as for RolloutHook.

    model_of: the causal language model inside the LightningModule; `module.model` where that is one, else the module.
    Numbers go to the sinks and to the trainer's loggers; state is kept in its checkpoints. Raises MissingExtraError
    without Lightning.
    """
    base = _lightning_callback_class()
    find = model_of or _language_model

    class CollapseLightningCallback(base):  # type: ignore[misc, valid-type]
        """Measures rollouts before the batches at which they are due."""

        def __init__(self) -> None:
            self.hook = RolloutHook(rollouts, **settings)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            step = int(trainer.global_step)
            if self.hook.before_step(step, find(pl_module)):
                values: dict[str, float] = {}
                self.hook.window.merge_into(values)
                for tracker in trainer.loggers:
                    tracker.log_metrics(values, step=step)

        def state_dict(self) -> dict[str, Any]:
            return self.hook.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            take_up(lambda: self.hook.load_state_dict(state_dict))

    return CollapseLightningCallback()


def _lightning_callback_class() -> Any:
    """Of the package that the user's trainer comes from: the two names are the same code and do not mix."""
    names = ("lightning.pytorch", "pytorch_lightning")
    name = next((n for n in names if n in sys.modules), None) or next((n for n in names if _is_there(n)), None)
    if name is None:
        raise MissingExtraError(
            "the Lightning callback needs Lightning, which is not installed.\n  pip install lightning", name="lightning"
        )
    return importlib.import_module(name).Callback


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _language_model(module: Any) -> Any:
    inner = getattr(module, "model", None)
    return inner if hasattr(inner, "get_output_embeddings") else module
