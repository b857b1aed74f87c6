"""Diagnostics inside TRL's GRPOTrainer and RLOOTrainer.

trainer = GRPOTrainer(..., callbacks=[CollapseCallback(every=5)])
trainer.train()
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from collapsediag._optional import require
from collapsediag.integrations.trl_session import TrlSession
from collapsediag.monitor import Monitor
from collapsediag.monitor_settings import refuse_unknown
from collapsediag.training.log_window import Logged
from collapsediag.training.owner import trainer_of

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = require("transformers", extra="trl", feature="the TRL callback").TrainerCallback

logger = logging.getLogger("collapsediag")


class CollapseCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
    """Measures every generation batch, scores the policy every few steps, and logs through the trainer.

    every: the policy is scored at the first step and then every so many; the other numbers come at every step.
    sinks: where records go beside the trainer's own log, see Monitor. The main process alone writes.
    eval_sinks: the same for evaluations, which otherwise are in the trainer's log only (`eval_collapse_...`).
    logged: what goes into the trainer's log: "charts" (about 25 numbers), "all" (hundreds) or "none". Sinks get all.
    evaluate: measure evaluations: all their rollouts together, once.
    budget: score each trace under its own and so many other contexts (BudgetScorer); None: under all.
    context_bank: so many contexts of earlier batches serve as further columns, for one prompt per batch.
    environment: name of the dataset column that holds the task family.
    temperature: of the scored distribution; the trainer's own where not given.
    token_budget: tokens of one scoring pass, see HFScorer.
    monitor_options: all else that Monitor takes (reasoning, pairs, definition, rollout_options, seed, tokenizer,
        traces_kept, on_error).

    Training is left bit-identical. Raises SettingsError, while the trainer is being built, for one that cannot be
    observed, and for a second callback.
    """

    def __init__(
        self,
        *,
        every: int = 10,
        sinks: Iterable[Any] | str = (),
        eval_sinks: Iterable[Any] | str = (),
        logged: Logged = "charts",
        evaluate: bool = True,
        budget: int | None = None,
        context_bank: int = 0,
        environment: str | None = None,
        temperature: float | None = None,
        token_budget: int | None = None,
        **monitor_options: Any,
    ) -> None:
        refuse_unknown("CollapseCallback", monitor_options, CollapseCallback, Monitor)
        self.session = TrlSession(
            every=every,
            sinks=sinks,
            eval_sinks=eval_sinks,
            logged=logged,
            evaluate=evaluate,
            budget=budget,
            environment=environment,
            temperature=temperature,
            token_budget=token_budget,
            monitor_options={"context_bank": context_bank, **monitor_options},
        )

    @property
    def monitor(self) -> Monitor:
        """The monitor of training."""
        return self.session.monitor()

    def detach(self) -> None:
        """Take the diagnostics off the trainer, which is then as it was without them; this callback does no more."""
        trainer = self.session.trainer
        self.session.detach()
        if trainer is not None:
            trainer.remove_callback(self)

    def close(self) -> None:
        """Close the sinks."""
        self.session.close()

    # -- events of transformers.Trainer ------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer's constructor is almost through: wrap its methods."""
        self.session.bind(trainer_of(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up the state of a checkpoint, if there is one."""
        if self.session.trainer is None:
            self.session.bind(trainer_of(self))
        self.session.begin(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A callback that was added later learns of its trainer only now; what it missed is said, once."""
        if self.session.trainer is None:
            self.session.bind(trainer_of(self))
            logger.warning("this evaluation was not measured: use attach(trainer) instead of trainer.add_callback")

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Predictions are no evaluation: forget their rollouts."""
        self.session.forget_evaluation()


def attach(trainer: Any, **settings: Any) -> CollapseCallback:
    """Observe a trainer that exists already; settings as for CollapseCallback. Its `detach()` undoes it."""
    callback = CollapseCallback(**settings)
    callback.session.bind(trainer)
    trainer.add_callback(callback)
    return callback
