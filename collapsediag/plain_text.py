"""Text and numbers as people are shown them, whoever shows them."""

from __future__ import annotations

# From here on a float has no digits to show for all its places.
LONG_NUMBER = 1e15


def printable(text: str) -> str:
    """Text of a model or a file, safe to print: control and direction-changing characters become visible escapes.

    >>> printable("a\\x1b[31mred")
    'a\\\\x1b[31mred'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def number(value: float, digits: int = 4) -> str:
    """Significant digits, without a needless exponent.

    >>> number(0.0625), number(1234.5), number(3.0), number(1.5e300)
    ('0.0625', '1234', '3', '1.5e+300')
    """
    return f"{value:.0f}" if 1000 <= abs(value) < LONG_NUMBER else f"{value:.{digits}g}"


def counted(n: float, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "row"), counted(3, "more row")
    ('1 row', '3 more rows')
    """
    return f"{n:.0f} {noun}{'' if n == 1 else 's'}"


def error_text(error: BaseException) -> str:
    """What an error says, also where its author did not test its text.

    >>> error_text(ValueError("no ids"))
    'no ids'
    """
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"
