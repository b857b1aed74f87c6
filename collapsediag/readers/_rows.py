"""Files as rows: one JSON object a line, one JSON document, or one parquet table, read in pieces.

A row knows where it came from, so that every complaint names file and line. Nothing here knows what a rollout is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from collapsediag.errors import ReaderError

SKIP_HINT = "To read on and count such lines as dropped: skip_bad_lines=True (--skip-bad-lines)."
_KEYS_SHOWN = 12
_VALUE_SHOWN = 60


def shown(value: Any) -> str:
    """A value as a short Python literal for a message; a huge value is cut.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...'"
    """
    if isinstance(value, str):
        return repr(value if len(value) <= _VALUE_SHOWN else value[:_VALUE_SHOWN] + "...")
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def kind(value: Any) -> str:
    """What a JSON value is, in words.

    >>> kind(True), kind(None), kind([1])
    ('a boolean', 'null', 'a list')
    """
    for types, word in (
        (bool, "a boolean"),
        (str, "text"),
        ((int, float), "a number"),
        (list, "a list"),
        (dict, "an object"),
        (type(None), "null"),
    ):
        if isinstance(value, types):
            return word
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: its values, and where they stand (1-based line, row or element; byte or row offset)."""

    data: Mapping[str, Any]
    path: str
    number: int
    unit: str = "line"
    offset: int = 0
    n_bytes: int = 0

    @property
    def where(self) -> str:
        """File and line, as messages begin."""
        return f"{self.path}, {self.unit} {self.number}"

    def error(self, what: str) -> ReaderError:
        """An error that names this row."""
        return ReaderError(f"{self.where}: {what}")

    def keys_found(self) -> str:
        """The row's keys for a message; a row with thousands of them is cut."""
        names = [shown(key) for key in list(self.data)[:_KEYS_SHOWN]]
        more = len(self.data) - len(names)
        return (", ".join(names) or "none") + (f" and {more} more" if more > 0 else "")

    def missing(self, key: str, do: str) -> ReaderError:
        """An error about a key that is not there, with the keys that are."""
        return self.error(f"field {key!r} is missing (found: {self.keys_found()}). {do}")


class BadLines:
    """Decides what a row that cannot be read means: stop, or count and read on."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.first: ReaderError | None = None
        self._open = 0
        self.total = 0

    def meet(self, error: ReaderError) -> None:
        """Raise `error` with the way out, or count it."""
        if not self.skip:
            raise ReaderError(f"{error}\n{SKIP_HINT}") from error
        self.first = self.first or error
        self._open += 1
        self.total += 1

    def take(self) -> int:
        """How many were met since the last call."""
        count, self._open = self._open, 0
        return count


class RowFile(Protocol):
    """A file whose rows can be read from any of their offsets on."""

    path: str

    def scan(self, bad: BadLines, *, start: int = 0, number: int = 1, stop: int | None = None) -> Iterator[Row]:
        """Rows from offset `start` (whose number is `number`) to before offset `stop`, in file order."""
        ...


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return made


class _DuplicateKeyError(ValueError):
    """A JSON object names a key twice."""


def _without_surrogates(value: Any) -> Any:
    """The same JSON value with lone surrogates, which no encoder takes, replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


def decode_json(raw: bytes, *, where: str, offset: int, torn: bool) -> Any:
    """One JSON text from bytes, or a ReaderError that says what is wrong with it and where.

    torn: these are the last bytes of the file and no newline follows, so a cut is a likely cause.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReaderError(
            f"{where}: byte {offset + error.start} of the file is 0x{raw[error.start]:02x}, which is not UTF-8 "
            f"({error.reason}). Convert the file, for example: iconv -f latin1 -t utf-8 FILE > FILE.utf8"
        ) from error
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise ReaderError(
            f"{where}: the key {shown(str(error))} stands twice in one object, and which value counts is unknown. "
            "Write each key once."
        ) from error
    except RecursionError as error:
        raise ReaderError(f"{where}: the JSON is nested too deeply to be read. Flatten it.") from error
    except json.JSONDecodeError as error:
        raise ReaderError(_json_complaint(error, text, where, torn)) from error
    except ValueError as error:  # an integer of thousands of digits
        raise ReaderError(f"{where}: {error}. Write such numbers as text.") from error
    # Only a text that spells a surrogate can hold one; the walk is paid there alone.
    spelled = b"\\u" in raw and (b"\\ud" in raw or b"\\uD" in raw)
    return _without_surrogates(value) if spelled else value


def _json_complaint(error: json.JSONDecodeError, text: str, where: str, torn: bool) -> str:
    if torn:
        return (
            f"{where}: the last line is cut off after {len(text)} characters ({error.msg}), and no newline follows. "
            "The writer was stopped in the middle of it, or still writes."
        )
    near = shown(text[max(0, error.pos - 20) : error.pos + 20])
    if "\x00" in text:
        return f"{where}: holds NUL bytes, as a file does after a crash of the machine. Cut them off."
    return f"{where}: not valid JSON: {error.msg} at character {error.pos + 1}, near {near}."
