"""What a Monitor is told, looked at where it is told: a mistyped setting would otherwise fail step after step."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from collapsediag.arrays import whole_number
from collapsediag.errors import SettingsError
from collapsediag.metrics.format import as_format
from collapsediag.metrics.from_rollouts import rollout_report
from collapsediag.pairs import PairSettings
from collapsediag.token_tags import plain_decoder

# Those that the monitor gives itself.
OWN_OPTIONS = ("batch", "tokenizer", "seed", "on_error")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise SettingsError unless `value` is one of the choices.

    >>> check_choice("definition", "paper", ("paper", "ragen"))
    """
    if value not in choices:
        raise SettingsError(f"{name}={value!r:.80}: choose {' or '.join(map(repr, choices))}.")


def checked_count(name: str, value: Any, least: int | None = 0) -> int:
    """A whole number of any make, at least `least` where there is one. Raises SettingsError for anything else.

    >>> checked_count("traces_kept", 32.0)
    32
    """
    number = whole_number(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f", {least} or more"
        raise SettingsError(f"{name}={value!r:.80}: a whole number{bound} is needed.")
    return number


def checked_pairs(pairs: Any, default: PairSettings) -> PairSettings:
    """The pair settings, the default for None. Raises SettingsError for anything else, such as a dict."""
    if pairs is None:
        return default
    if not isinstance(pairs, PairSettings):
        raise SettingsError(f"pairs={pairs!r:.80} ({type(pairs).__name__}): pass PairSettings(max_traces=64, ...).")
    return pairs


def checked_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, None where there is none. Raises PairError for what cannot decode, such as a model's name."""
    if tokenizer is not None:
        plain_decoder(tokenizer)
    return tokenizer


def refuse_unknown(owner: str, names: Iterable[str], *takers: Callable[..., Any]) -> None:
    """Raise TypeError for an argument that none of the takers has; it says where the argument goes, or what was meant.

    >>> refuse_unknown("Monitor", ["success_threshold"])
    Traceback (most recent call last):
    TypeError: Monitor() takes success_threshold inside another argument: rollout_options={"success_threshold": ...}
    """
    known = [
        name
        for taker in takers
        for name, parameter in inspect.signature(taker).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    ways = {name: f"pairs=PairSettings({name}=...)" for name in PairSettings.__dataclass_fields__}
    ways |= {name: f'rollout_options={{"{name}": ...}}' for name in _rollout_option_names()}
    ways |= {name: f"{name}=..." for name in known}
    for name in names:
        if name in known:
            continue
        if name in ways:
            raise TypeError(f"{owner}() takes {name} inside another argument: {ways[name]}")
        close = difflib.get_close_matches(name, ways, n=1)
        way = f"did you mean {ways[close[0]]}?" if close else f"it takes {', '.join(known)}"
        raise TypeError(f"{owner}() has no argument {name!r}; {way}")


def _rollout_option_names() -> list[str]:
    return [name for name in inspect.signature(rollout_report).parameters if name not in OWN_OPTIONS]


def checked_rollout_options(options: Any) -> dict[str, Any]:
    """Keyword arguments of `rollout_report`. Raises SettingsError for one that it does not have, for a format that
    is none and a threshold that is no number.

    >>> checked_rollout_options({"success_threshold": 0.5})
    {'success_threshold': 0.5}
    """
    known = _rollout_option_names()
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not set(options) <= set(known):
        found = list(options) if isinstance(options, Mapping) else options
        raise SettingsError(f"rollout_options holds {found!r:.200}; it is a dict with some of {', '.join(known)}.")
    as_format(options.get("format"))
    threshold = options.get("success_threshold")
    if threshold is not None and (not isinstance(threshold, numbers.Real) or math.isnan(threshold)):
        raise SettingsError(f"success_threshold={threshold!r:.80}: a number is needed, the least reward of a success.")
    return dict(options)
