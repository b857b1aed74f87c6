"""Text and numbers as people are shown them, whoever shows them."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text of a model or a file, safe to print: control and direction-changing characters become visible escapes.

    >>> printable("a\\x1b[31mred")
    'a\\\\x1b[31mred'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def number(value: float, digits: int = 4) -> str:
    """Significant digits, without a needless exponent.

    >>> number(0.0625), number(1234.5), number(3.0)
    ('0.0625', '1234', '3')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
