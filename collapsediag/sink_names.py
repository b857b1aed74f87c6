"""Sinks by name: `sinks=["wandb", "tensorboard:runs/tb"]`.

The one place where the core knows that adapters exist, and it knows them as dotted names: nothing of them is imported
until someone asks for one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from collapsediag.callable_sink import METHODS, CallableSink
from collapsediag.errors import SettingsError
from collapsediag.sinks import Sink


@dataclass(frozen=True)
class _Named:
    """A sink by name. argument: what may follow the colon, in words; None where nothing may."""

    module: str
    attribute: str
    argument: str | None = None
    keyword: str | None = None
    is_required: bool = False


_NAMED = {
    "jsonl": _Named("collapsediag.sinks", "JsonlSink", "RUN_FOLDER", "path", is_required=True),
    "console": _Named("collapsediag.console", "ConsoleSink"),
    "wandb": _Named("collapsediag.integrations.wandb_sink", "WandbSink", "join or own_run", "mode"),
    "tensorboard": _Named("collapsediag.integrations.tensorboard_sink", "TensorBoardSink", "LOGDIR", "target"),
    "mlflow": _Named("collapsediag.integrations.mlflow_sink", "MlflowSink", "RUN_ID", "run_id"),
    "trackio": _Named("collapsediag.integrations.trackio_sink", "TrackioSink"),
}


def known_sinks() -> str:
    """What a sink string may be, in words.

    >>> known_sinks()
    'jsonl:RUN_FOLDER, console, wandb[:join or own_run], tensorboard[:LOGDIR], mlflow[:RUN_ID], trackio'
    """
    return ", ".join(_usage(name) for name in _NAMED)


def _usage(name: str) -> str:
    entry = _NAMED[name]
    if entry.argument is None:
        return name
    return f"{name}:{entry.argument}" if entry.is_required else f"{name}[:{entry.argument}]"


def named_sink(text: str) -> Sink:
    """The sink a string stands for: NAME, or NAME:ARGUMENT. Raises SettingsError listing the known ones.

    A package that is missing is said here, before training begins, with the line that installs it.
    """
    name, colon, argument = text.partition(":")
    entry = _NAMED.get(name)
    if entry is None:
        raise SettingsError(f"no sink is called {name!r}; the known ones are {known_sinks()}.")
    if (colon and (entry.keyword is None or not argument)) or (entry.is_required and not colon):
        raise SettingsError(f"the sink string {text!r} does not fit; write {_usage(name)}.")
    make = getattr(importlib.import_module(entry.module), entry.attribute)
    return cast(Sink, make(**{entry.keyword: argument}) if colon and entry.keyword else make())


def resolve_sinks(sinks: Iterable[Any] | Sink | str) -> list[Sink]:
    """Sinks of what a user may pass: a name, a sink, a function, an object that logs, or several of these.

    >>> from collapsediag.sinks import JsonlSink
    >>> [type(sink).__name__ for sink in resolve_sinks(["jsonl:runs/a", JsonlSink("runs/b"), lambda m, step: None])]
    ['JsonlSink', 'JsonlSink', 'CallableSink']
    """
    listed = list(sinks) if isinstance(sinks, Iterable) and not _is_one(sinks) else [sinks]
    # What is given twice is written to once; each function or name would be made a sink of its own.
    distinct = {sink if isinstance(sink, str) else id(sink): sink for sink in listed}.values()
    return [named_sink(sink) if isinstance(sink, str) else _as_sink(sink) for sink in distinct]


def _is_one(sink: Any) -> bool:
    return isinstance(sink, (str, type)) or _is_sink(sink) or _logs(sink)


def _is_sink(sink: Any) -> bool:
    return callable(getattr(sink, "write", None)) and callable(getattr(sink, "close", None))


def _logs(sink: Any) -> bool:
    return callable(sink) or any(callable(getattr(sink, method, None)) for method in METHODS)


def _as_sink(sink: Any) -> Sink:
    if isinstance(sink, type):
        raise TypeError(f"{sink.__name__} is a class; pass an instance of it, as in sinks=[{sink.__name__}(...)].")
    # Neither: the fan-out says what a sink needs.
    return cast(Sink, CallableSink(sink) if _logs(sink) and not _is_sink(sink) else sink)
