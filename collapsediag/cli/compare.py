"""Compare runs: which diagnostics go with success across them.

    collapsediag compare runs/a runs/b runs/c ...
    collapsediag compare runs/* --outcome pass@1 --json

Each diagnostic of each run is summarised by its mean, last value, minimum and slope, and ranked against the outcome
(the mean of its last 5 measured steps): Spearman's rank correlation with a 95% interval and the number of runs. Two
runs have no ranks: their headline numbers are shown side by side.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from collapsediag.console import MATRIX_HEADLINES, ROLLOUT_HEADLINES, plain_console
from collapsediag.errors import SettingsError
from collapsediag.findings.across_runs import FEW_RUNS, FEWEST_RANKED, Comparison, Correlation, compare_runs
from collapsediag.pairs import NAMESPACES
from collapsediag.plain_text import counted, number, printable
from collapsediag.record import Record
from collapsediag.run_folder import read_records

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TOP = 20
# In fewer columns the table would cut names away; a terminal that is narrower wraps them.
LEAST_WIDTH = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--outcome", metavar="NAME", help="the number that says how a run ended (default pass@1, else reward/mean)"
    )
    parser.add_argument(
        "--top", type=int, default=TOP, metavar="N", help=f"rows to show, strongest first; 0 for all (default {TOP})"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    """Read the runs, correlate, print."""
    if args.top < 0:
        raise SettingsError(f"--top {args.top}: a number of rows, 0 for all.")
    runs = dict.fromkeys(str(Path(run)) for run in args.runs)
    if len(runs) < 2:
        raise SettingsError("one run was given; a comparison needs several, and 8 or more to say something.")
    records = {run: read_records(run) for run in runs}
    comparison = compare_runs(records, outcome=args.outcome)
    if args.json:
        print(json.dumps(comparison.to_json(), indent=2))
        return 0
    print_comparison(comparison, args.top, records)
    return 0


def print_comparison(comparison: Comparison, top: int, records: Mapping[str, Sequence[Record]]) -> None:
    """The outcome of each run, the strongest correlations, and what to know before believing them."""
    console = plain_console()
    console.width = max(console.width, LEAST_WIDTH)
    is_doubtful = comparison.n_runs < FEW_RUNS
    if is_doubtful:
        _print_warning(console, comparison)
    console.print(outcome_table(comparison))
    if comparison.n_runs < FEWEST_RANKED:
        console.print(headline_table(records))
        pages = " ".join(shlex.quote(printable(run)) for run in records)
        console.print(
            f"A rank correlation needs {FEWEST_RANKED} runs. All curves, drawn over one another: collapsediag report "
            f"{pages} -o report.html",
            markup=False,
            soft_wrap=True,
        )
    else:
        _print_correlations(console, comparison, top)
    for run in comparison.runs_left_out:
        console.print(f"left out {printable(run)}: it does not hold {printable(comparison.outcome)}", markup=False)
    if not is_doubtful:
        _print_warning(console, comparison)


def _print_correlations(console: Console, comparison: Comparison, top: int) -> None:
    rows = comparison.correlations[:top] if top else comparison.correlations
    if rows:
        console.print(correlation_table(comparison, rows))
    hidden = len(comparison.correlations) - len(rows)
    if hidden:
        console.print(f"{counted(hidden, 'more row')}: --top 0 shows all.", markup=False)
    if comparison.left_out:
        left_out = counted(len(comparison.left_out), "row")
        console.print(f"{left_out} left out: constant, or in fewer than {FEWEST_RANKED} runs.", markup=False)


def _print_warning(console: Console, comparison: Comparison) -> None:
    if comparison.warning:
        console.print(printable(comparison.warning), style="yellow", markup=False)


def outcome_table(comparison: Comparison) -> Table:
    """Runs, best first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{printable(comparison.outcome)}, {comparison.n_runs} runs"), box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("run", overflow="fold")
    table.add_column("outcome", justify="right", no_wrap=True)
    for name, value in sorted(comparison.outcomes.items(), key=lambda item: -item[1]):
        table.add_row(Text(printable(name)), number(value))
    return table


def headline_table(records: Mapping[str, Sequence[Record]]) -> Table:
    """The numbers that a person reads first, as each run measured them last."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text("last measured values"), box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("diagnostic", overflow="fold")
    for run in records:
        table.add_column(Text(printable(run)), justify="right", overflow="fold")
    matrix = [f"collapse_{namespace}_sample/{name}" for namespace in NAMESPACES for name in MATRIX_HEADLINES]
    for name in (*matrix, *ROLLOUT_HEADLINES):
        last = [_last(held, name) for held in records.values()]
        if any(value is not None for value in last):
            table.add_row(name, *("-" if value is None else number(value) for value in last))
    return table


def _last(records: Sequence[Record], name: str) -> float | None:
    return next((record.values[name] for record in reversed(records) if name in record.values), None)


def correlation_table(comparison: Comparison, rows: Sequence[Correlation]) -> Table:
    """Correlations with their intervals; those whose interval holds zero are dim."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = f"Spearman's rank correlation with {printable(comparison.outcome)}, strongest first"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("diagnostic", overflow="fold")
    table.add_column("of each run", no_wrap=True)
    for heading in ("rho", "95% interval", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(printable(row.metric)),
            row.summary,
            f"{row.rho:+.2f}",
            Text(f"[{row.low:+.2f}, {row.high:+.2f}]"),
            str(row.n),
            style=None if row.excludes_zero else "dim",
        )
    return table
