"""The `collapsediag` section of a veRL config, checked before anything is loaded.

python -m verl.trainer.main_ppo ... +collapsediag.every=5 +collapsediag.out=runs/mine
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from collapsediag.cadence import Cadence
from collapsediag.errors import SettingsError
from collapsediag.integrations.verl import SECTION
from collapsediag.pairs import PairSettings
from collapsediag.time_budget import TimeBudget
from collapsediag.training.log_window import Logged

Definition = Literal["paper", "ragen"]
ReasoningMode = Literal["auto", "think", "completion"]

# What a setting may be, in words and as types; bool is no number here although Python says so.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "int | None": ((int, type(None)), "a whole number or null"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text or null"),
}


@dataclass(frozen=True, kw_only=True)
class VerlSettings:
    """Everything that can be set; names are those of the config section.

    every: the policy is scored at the first step and at every step divisible by this; the rest comes at every step.
    score: false: rollouts are measured, the policy is never asked.
    out: run folder for whole records; without it the numbers are in the trainer's log alone.
    dump: write the token ids of the rollouts of scored steps to OUT/rollouts, for `collapsediag score`.
    sinks: further sinks by name, "wandb" or "tensorboard:runs/tb"; also sink objects where set in Python.
    logged: what goes into the trainer's log: "charts" (about 25 numbers), "all" or "none".
    reasoning, open_tag, close_tag, definition, seed, traces_kept, context_bank, time_budget: as for
        Monitor.
    success_threshold: a reward from here on is a success, where the reward function gives no `acc`.
    max_traces, max_contexts, max_pairs, max_trace_tokens, max_context_tokens: see PairSettings.
    token_budget: tokens that one scored step may cost at most; fewer traces are drawn to keep it.
    budget: score each trace under its own and so many other prompts (BudgetScorer).
    share_prefixes: run each prompt once instead of once with every trace, inside the workers (FSDP, veRL 0.8 on).
    call_tokens: tokens of one call to the workers; what is more goes in several calls. Bounds memory on the driver.

    Raises SettingsError for values that fit nothing.
    """

    every: int = 10
    score: bool = True
    out: str | None = None
    dump: bool = False
    sinks: Any = ()
    logged: str = "charts"
    reasoning: str = "auto"
    open_tag: str = "<think>"
    close_tag: str = "</think>"
    definition: str = "paper"
    seed: int = 0
    traces_kept: int = 32
    context_bank: int = 0
    time_budget: float | None = None
    success_threshold: float | None = None
    max_traces: int | None = 64
    max_contexts: int | None = 16
    max_pairs: int | None = None
    max_trace_tokens: int | None = None
    max_context_tokens: int | None = None
    token_budget: int | None = None
    budget: int | None = None
    share_prefixes: bool = False
    call_tokens: int = 2_000_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "sinks":
                _check_kind(field.name, str(field.type), getattr(self, field.name))
        for name, choices in (("logged", Logged), ("definition", Definition)):
            if getattr(self, name) not in get_args(choices):
                raise SettingsError(
                    f"{SECTION}.{name}={getattr(self, name)!r}: choose one of {', '.join(get_args(choices))}."
                )
        for name in ("budget", "token_budget", "call_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{SECTION}.{name}={value}: a whole number from 1 on is needed.")
        for name in ("traces_kept", "context_bank"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{SECTION}.{name}={getattr(self, name)}: a whole number from 0 on is needed.")
        if self.dump and self.out is None:
            raise SettingsError(f"{SECTION}.dump=true needs {SECTION}.out=FOLDER, where the rollouts are to go.")
        Cadence(every=self.every)
        if self.time_budget is not None:
            TimeBudget(self.time_budget, self.every)
        self.pair_settings()

    @property
    def sink_list(self) -> list[Any]:
        """The sinks as a list, where one alone was given too."""
        return [self.sinks] if isinstance(self.sinks, str) or not isinstance(self.sinks, Iterable) else [*self.sinks]

    def pair_settings(self) -> PairSettings:
        """The limits and tags, as the monitor takes them. Raises SettingsError for values that do not fit."""
        return PairSettings(
            reasoning=cast(ReasoningMode, self.reasoning),
            tags=((self.open_tag, self.close_tag),),
            max_traces=self.max_traces,
            max_contexts=self.max_contexts,
            max_pairs=self.max_pairs,
            max_trace_tokens=self.max_trace_tokens,
            max_context_tokens=self.max_context_tokens,
        )


def _check_kind(name: str, kind: str, value: Any) -> None:
    types, words = _KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise SettingsError(f"{SECTION}.{name}={value!r}: {words} is needed.")


def settings_of(config: Any, **changes: Any) -> VerlSettings:
    """The settings of a veRL config (OmegaConf or plain), and changes on top. Raises SettingsError naming the key.

    >>> settings_of({"collapsediag": {"every": 5}}, seed=1).every
    5
    """
    section = config.get(SECTION)
    section = {} if section is None else section
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(section):
        section = omegaconf.OmegaConf.to_container(section, resolve=True)
    if not isinstance(section, Mapping):
        raise SettingsError(f"{SECTION}={section!r}: a section is needed, as in +{SECTION}.every=5.")
    values = {**section, **changes}
    known = [field.name for field in dataclasses.fields(VerlSettings)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise SettingsError(f"{SECTION}.{name} is no setting; {hint}There are: {', '.join(known)}.")
    return VerlSettings(**values)
