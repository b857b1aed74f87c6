"""A sink for whatever logs already: any object with log_metrics(metrics, step) or log(metrics, step), or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from collapsediag.errors import SettingsError
from collapsediag.main_process import MainProcess
from collapsediag.record import Record
from collapsediag.tracker_values import tracker_values

# Looked for in this order: an object that has both means by log_metrics what we mean.
METHODS = ("log_metrics", "log")


class CallableSink:
    """Hands each step's numbers to `target`, called as `target(metrics, step=step)`.

    target: an object with `log_metrics` or `log` (a Lightning logger, an Accelerate tracker, veRL's Tracking), or a
        function. It belongs to you and is never closed.
    rename: what a metric is called there, given its tracker name; see tracker_name.

    Raises SettingsError for a coroutine function, and for W&B, where an explicit step would cost you rows.

    >>> sink = CallableSink(lambda metrics, step: print(step, metrics))
    >>> sink.write(Record(step=3, values={"reward/mean": 0.5}))
    3 {'collapse/reward/mean': 0.5}
    """

    # The trainer's own calls come from there, and what hangs there hangs for the trainer too.
    in_caller_thread = True

    def __init__(self, target: Any, *, rename: Callable[[str], str] | None = None) -> None:
        if is_wandb(target):
            raise SettingsError(
                "W&B drops rows whose step is behind its own counter, so it must not be called with a step. Use "
                "WandbSink(run), or sinks=['wandb']."
            )
        self._call = _bound(target)
        self._rename = rename
        self._process = MainProcess()

    def write(self, record: Record) -> None:
        """Log the numbers of the record."""
        if not self._process.is_here():
            return
        values = tracker_values(record)
        if self._rename is not None:
            values = {self._rename(name): value for name, value in values.items()}
        if values:
            self._call(values, step=record.step)

    def close(self) -> None:
        """Nothing to close: the target belongs to its owner."""


def is_wandb(target: Any) -> bool:
    """Whether `target` is the wandb module or one of its runs; wandb is not imported for it."""
    name = target.__name__ if inspect.ismodule(target) else type(target).__module__
    return name.split(".")[0] == "wandb"


def _bound(target: Any) -> Callable[..., Any]:
    methods = (getattr(target, method, None) for method in METHODS)
    call = next((method for method in methods if callable(method)), target)
    if not callable(call):
        raise TypeError(
            f"{type(target).__name__} cannot be logged to: it has no log_metrics(metrics, step) or log(metrics, step) "
            "and is not callable."
        )
    if inspect.iscoroutinefunction(call):
        raise SettingsError(
            f"{getattr(call, '__qualname__', call)} is a coroutine function, and records are written from synchronous "
            "code. Pass a function that schedules it on your event loop."
        )
    return call  # type: ignore[no-any-return]  # callable, as just checked
