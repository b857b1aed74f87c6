"""Values of a row under the names we know them by, checked for their type; every complaint names row, key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import SettingsError
from collapsediag.readers._rows import Row, kind, shown

_ABSENT = object()


def _at(data: Mapping[str, Any], key: str) -> Any:
    """data[key]; "a.b" also reads data["a"]["b"] where no key is spelled with the dot."""
    if key in data:
        return data[key]
    value: Any = data
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


class Fields:
    """Looks names up in rows: first as the user's key map says, else under the names that sources use for them."""

    def __init__(self, aliases: Mapping[str, Sequence[str]], key_map: Mapping[str, str]) -> None:
        for name in key_map:
            if name not in aliases:
                raise SettingsError(
                    f"key map: {name!r} is not a name that this source reads; it reads {', '.join(sorted(aliases))}."
                )
        self.aliases = aliases
        self.key_map = key_map
        self._used: dict[tuple[str, ...], frozenset[str]] = {}

    def find(self, row: Row, name: str, data: Mapping[str, Any] | None = None) -> tuple[str, Any] | None:
        """(key in the file, value) of `name`; None where it is absent or null.

        A name that the key map renames must be there as a key, so that a typing error cannot read as "unknown".
        """
        data = row.data if data is None else data
        if name in self.key_map:
            key = self.key_map[name]
            value = _at(data, key)
            if value is _ABSENT:
                if data is row.data:
                    raise row.missing(key, f"The key map says that it holds the {name!r}; correct the map.")
                return None
            return None if value is None else (key, value)
        for key in self.aliases[name]:
            if data.get(key) is not None:
                return key, data[key]
        return None

    def used_keys(self, names: Sequence[str] | None = None) -> frozenset[str]:
        """Every key of a file that is read under one of the names, or under any."""
        wanted = tuple(self.aliases) if names is None else tuple(names)
        if wanted not in self._used:
            found: set[str] = set()
            for name in wanted:
                found.update((self.key_map[name].split(".")[0],) if name in self.key_map else self.aliases[name])
            self._used[wanted] = frozenset(found)
        return self._used[wanted]


def as_text(row: Row, key: str, value: Any) -> str:
    """A text, or an error."""
    if not isinstance(value, str):
        raise row.error(f"field {key!r} must be text, found {kind(value)} ({shown(value)}).")
    return value


def as_name(row: Row, key: str, value: Any) -> str:
    """An identifier or an answer as text; a number is spelled out."""
    if isinstance(value, (str, int, float)):
        return str(value)
    raise row.error(f"field {key!r} must be text or a number, found {kind(value)} ({shown(value)}).")


def as_integer(row: Row, key: str, value: Any) -> int:
    """A whole number below 2^53 in size; 40.0 counts as 40."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**53:
        raise row.error(f"field {key!r} must be a whole number, found {kind(value)} ({shown(value)}).")
    return value


def as_number(row: Row, key: str, value: Any) -> float | None:
    """A reward or the like: a finite number, a boolean as 1 or 0, None for null and NaN (the trainer could not score).

    Text is an error: "1.0" may be a reward and "72" an answer, and guessing would decide what is measured. Infinity is
    one too: no mean or variance survives it.
    """
    if value is None:
        return None
    if isinstance(value, (bool, int, float)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isnan(number):
            return None
        if not math.isinf(number):
            return number
        raise row.error(f"field {key!r} is {shown(value)}; a reward must be finite. Leave the row out, or write null.")
    raise row.error(
        f"field {key!r} must be a number, found {kind(value)} ({shown(value)}). Convert it where the file is made, or "
        "name the right key in the key map (--map OURS=THEIRS)."
    )


def as_boolean(row: Row, key: str, value: Any) -> bool:
    """True or false, also written 1 or 0 (1.0, 0.0)."""
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise row.error(f"field {key!r} must be true or false, found {kind(value)} ({shown(value)}).")


def as_list(row: Row, key: str, value: Any) -> list[Any]:
    """A list, or an error."""
    if not isinstance(value, list):
        raise row.error(f"field {key!r} must be a list, found {kind(value)} ({shown(value)}).")
    return value


def as_object(row: Row, key: str, value: Any) -> dict[str, Any]:
    """An object (a dict with text keys), or an error."""
    if not isinstance(value, dict):
        raise row.error(f"field {key!r} must be an object, found {kind(value)} ({shown(value)}).")
    return value


def as_rewards(row: Row, key: str, value: Any) -> dict[str, float | None]:
    """Reward components by name."""
    return {name: as_number(row, f"{key}.{name}", part) for name, part in as_object(row, key, value).items()}


def as_group(row: Row, key: str, value: Any) -> str | int:
    """A group id: text or a whole number."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return as_integer(row, key, value)
    raise row.error(f"field {key!r} must name a group by text or a whole number, found {kind(value)} ({shown(value)}).")


def as_ids(row: Row, key: str, value: Any) -> NDArray[np.int64]:
    """A flat list of token ids. Negative ones are left to the rollout types, which know what to say about padding."""
    values = as_list(row, key, value)
    for position, item in enumerate(values):
        if isinstance(item, bool) or not isinstance(item, int) or abs(item) >= 2**63:
            raise row.error(
                f"field {key!r} must be a flat list of token ids, found {kind(item)} ({shown(item)}) at position "
                f"{position}."
            )
    return np.array(values, dtype=np.int64)


def as_floats(row: Row, key: str, value: Any) -> NDArray[np.float64]:
    """A flat list of numbers, one per token."""
    values = as_list(row, key, value)
    for position, item in enumerate(values):
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            raise row.error(
                f"field {key!r} must be a flat list of numbers, found {kind(item)} ({shown(item)}) at position "
                f"{position}."
            )
    return np.array(values, dtype=np.float64)


def total_reward(rewards: Mapping[str, float | None], weights: Mapping[str, float] | None) -> float | None:
    """The total of reward components: their (weighted) sum over those that gave a value, None where none did.

    >>> total_reward({"correct": 1.0, "format": 0.5, "judge": None}, None)
    1.5
    """
    known = {name: value for name, value in rewards.items() if value is not None}
    if weights is not None:
        missing = [name for name in weights if name not in rewards]
        if missing:
            raise SettingsError(f"reward_weights name {missing}, but the components are {sorted(rewards)}.")
        known = {name: value * weights.get(name, 0.0) for name, value in known.items()}
    return sum(known.values()) if known else None
