"""Write what the docs say of the code out of the code: `python docs/generate.py`. A test checks that it is current.

docs/metrics.md is made of the metric registry, the fault table in docs/reliability.md of the tests that are marked
`@pytest.mark.fault("what", "what happens")`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from collapsediag.metrics.registry import MetricInfo, families

TARGET = Path(__file__).parent / "metrics.md"
RELIABILITY = Path(__file__).parent / "reliability.md"
TESTS = Path(__file__).parent.parent / "tests"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"

HEAD = """# Metrics

Generated from the registry (`python docs/generate.py`); the definitions are the code's own.

`bad` says which direction is bad news; `-` where it depends. Units are nats where a logarithm is involved, per token
or per trace as said. A share of groups, and every headline number, comes with `<name>/ci_low` and `<name>/ci_high`, a
95% interval. Numbers from the matrix are logged as `collapse_<draw>_sample/<name>`, where the draw of turns is
`first_turn`, `trajectory` or `turn`. Rollout metrics are repeated as `env/<environment>/<name>` where a step holds
several environments (of more than 32 for the largest; a note of the record counts the rest), with `%2F` for a `/` and
`%25` for a `%` in the environment's name. What cannot be measured is absent, and the record says why.
"""


def bounds(info: MetricInfo) -> str:
    """The possible range in words."""
    low, high = (("" if b is None else f"{b:g}") for b in info.bounds)
    return f"{low} to {high}" if low and high else (f"from {low}" if low else (f"up to {high}" if high else "any"))


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for family, infos in sorted(families().items()):
        parts.append(f"\n## {family[0].upper()}{family[1:]}\n")
        for info in sorted(infos, key=lambda i: i.name):
            needs = f" Needs {info.needs}." if info.needs else ""
            bad = "-" if info.bad == "none" else info.bad
            parts.append(f"\n### `{info.name}`\n\n{info.title}. {info.description}{needs}\n")
            parts.append(f"\nUnit: {info.unit}. Range: {bounds(info)}. Bad: {bad}. Source: {info.source}.\n")
    return "".join(parts)


def faults() -> list[tuple[str, str, str]]:
    """(fault, what happens, test) of every marked test."""
    found = []
    for file in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found += [(*texts, f"{file.name}::{node.name}") for texts in _fault_marks(node)]
    return sorted(found, key=lambda row: row[0].lower())


def _fault_marks(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
            what, happens = (ast.literal_eval(argument) for argument in mark.args)
            yield what, happens


def with_fault_table(page: str) -> str:
    """The page with its table as the tests have it."""
    head, _, rest = page.partition(BEGIN)
    rows = ["| fault | what happens | test |\n|---|---|---|\n"]
    rows += [f"| {what} | {happens} | `{test}` |\n" for what, happens, test in faults()]
    return "".join((head, BEGIN, *rows, END, rest.partition(END)[2]))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    RELIABILITY.write_text(with_fault_table(RELIABILITY.read_text(encoding="utf-8")), encoding="utf-8")
