r"""The final answer of a completion: found, and brought to one spelling.

Every function takes time linear in the text: model text is adversarial. No number here judges whether an answer is
right; two spellings that these rules do not unite (1/2 and 0.5) count as two answers.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Literal

from collapsediag.errors import MetricError, SettingsError
from collapsediag.plain_text import error_text

Extractor = Literal["auto", "boxed", "tag", "number"] | Callable[[str], "str | None"]

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4})?", re.ASCII)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_PLAIN = re.compile(r"([-+]?)(\d*)(?:\.(\d*))?", re.ASCII)
# The last number is nearly always close to the end; only a text without one there is searched whole.
_TAIL_CHARACTERS = 2000


def boxed_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, nested braces included; None without one, or where it is not closed.

    >>> boxed_answer(r"so \boxed{1}, no: \boxed{\frac{3}{16}}.")
    '\\frac{3}{16}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for match in _BRACE.finditer(text, begin):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return text[begin : match.start()]
    return None


def tag_answer(text: str, tag: str = "answer") -> str | None:
    """Content of the last closed `<answer>...</answer>`, without surrounding space; None without one.

    >>> tag_answer("<answer> Up </answer>")
    'Up'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def last_number(text: str) -> str | None:
    """The last number of the text as it is written; None without one.

    >>> last_number("He pays 3 times $1,250.50.")
    '1,250.50'
    """
    tail = max(0, len(text) - _TAIL_CHARACTERS)
    for start in (tail, 0) if tail else (0,):
        found = collections.deque(_NUMBER.finditer(text, start), maxlen=1)
        if found:
            return found[0][0].rstrip(",")
    return None


def final_answer(text: str, how: Extractor = "auto") -> str | None:
    r"""The final answer of a completion, or None where it gives none.

    how: "auto" takes the last `<answer>` (and a box inside it), else the last `\boxed{}`, else the last number, behind
        the reasoning: a number in a thought, or in reasoning that was cut off, is no answer. "boxed", "tag" and
        "number" look for that one only, anywhere; a callable is called with the text.
    Raises SettingsError for another name, MetricError where a callable raises or returns no text.

    >>> final_answer(r"<think>2, 3</think><answer>\boxed{5}</answer>"), final_answer("It is 7.")
    ('5', '7')
    """
    if callable(how):
        try:
            found = how(text)
        except Exception as error:
            raise MetricError(
                f"the answer callable raised {type(error).__name__}: {error_text(error)} on {text!r:.80}"
            ) from error
        if found is not None and not isinstance(found, str):
            raise MetricError(f"the answer callable returned {found!r:.80}; expected text, or None for no answer.")
        return found
    if how == "boxed":
        return boxed_answer(text)
    if how == "tag":
        return tag_answer(text)
    if how == "number":
        return last_number(text)
    if how != "auto":
        raise SettingsError(f"answer is {how!r}; it is 'auto', 'boxed', 'tag', 'number' or a callable.")
    text = _behind_reasoning(text)
    tagged = tag_answer(text)
    if tagged is not None:
        inner = boxed_answer(tagged)
        return tagged if inner is None else inner
    boxed = boxed_answer(text)
    return last_number(text) if boxed is None else boxed


def _behind_reasoning(text: str) -> str:
    closing = text.rfind("</think>")
    if closing < 0:
        return "" if "<think>" in text else text
    return text[closing + len("</think>") :]


def normalize_answer(answer: str) -> str:
    r"""One spelling per answer: case folded, white space removed, `$...$` and a final full stop dropped, numbers as
    plain decimals (1,000 and 1000.0 as 1000, +.50 as 0.5). Digits are compared as text: no number is rounded.

    >>> [normalize_answer(a) for a in (" 1,000 ", "1000.", "+.50", "-0.0", "x + Y")]
    ['1000', '1000', '0.5', '0', 'x+y']
    """
    text = "".join(answer.split()).casefold().strip("$")
    text = text[:-1] if text.endswith(".") else text
    plain = text.replace(",", "") if _GROUPED.fullmatch(text) else text
    match = _PLAIN.fullmatch(plain)
    if match is None or not (match[2] or match[3]):
        return text
    whole, fraction = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number
