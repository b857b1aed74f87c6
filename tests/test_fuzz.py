"""Hostile input: short fuzzing of what reads text and files, and time that grows with the text and no faster.

The long version, guided by coverage, is benchmarks/fuzz.py; its figures are in docs/reliability.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collapsediag.metrics.answers import final_answer, normalize_answer
from collapsediag.metrics.result_use import judge_results
from collapsediag.metrics.tool_parsers import result_is_error, split_output
from collapsediag.spans import SpanFinder, find_reasoning

from .fuzz_targets import FORMATS, FRAGMENTS, TARGETS, Characters

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {"readers": 60, "spans": 150, "formats": 150, "tools": 60, "tail": 60, "page": 25}


@pytest.fixture
def quiet() -> Iterator[None]:
    logger = logging.getLogger("collapsediag")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_anything_may_come(name: str, quiet: None) -> None:
    bytes_ = st.lists(st.one_of(st.integers(0, 255), st.integers(0x80, 0xFF)), max_size=80).map(bytes)

    @settings(max_examples=EXAMPLES[name], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bytes_)
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


# -- time ------------------------------------------------------------------------------------------------------------

PARSERS: dict[str, Callable[[str], Any]] = {
    "find_reasoning": lambda text: find_reasoning(text, context=text),
    "span_finder": lambda text: SpanFinder(Characters()).find(list(map(ord, text)), list(map(ord, text))),
    "formats": lambda text: [form.failures([text], [text]) for form in FORMATS],
    "split_output": split_output,
    "result_is_error": result_is_error,
    "judge_results": lambda text: judge_results([("seen", text), ("result", text[::-1]), ("wrote", text)]),
    "answers": lambda text: (final_answer(text), final_answer(text, "number"), normalize_answer(text)),
}
UNITS = (
    *FRAGMENTS, "a", ".", "a ", "\n ", "\n\t", "a\n", ". A", "1,", "1,111,", "-", "+", "0.", "1e", "_", "''", "Error ",
    "error", "{'error'", "<parameter=a>\n", "<function=a><parameter=a>", "</think><answer>", "<search> x ", "<|",
)  # fmt: skip
# What opens a place in which a pattern goes on; the repeated unit follows.
HEADS = ("", "<think>", "<tool_call><function=f>", "<tool_call>", "Zebra", "{'error': ", "\\boxed{")


@pytest.mark.parametrize("parser", PARSERS)
def test_time_grows_with_the_text_and_no_faster(parser: str) -> None:
    """Model text is adversarial: no repetition may cost more than its length. Four times the text, at most eight times
    the time (quadratic would be sixteen); what takes a few milliseconds for 32,000 characters cannot be quadratic.
    """

    def seconds(head: str, unit: str, characters: int) -> float:
        text = head + unit * (characters // len(unit))
        taken = []
        for _ in range(3):
            start = time.process_time()
            PARSERS[parser](text)
            taken.append(time.process_time() - start)
            if taken[-1] < 0.1:
                break
        return min(taken)

    for head in HEADS if parser in ("split_output", "formats", "judge_results") else HEADS[:1]:
        for unit in UNITS:
            short = seconds(head, unit, 8_000)
            assert short < 0.02 or seconds(head, unit, 32_000) < 8 * short, (head, unit)
