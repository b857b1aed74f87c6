"""What is said while steps are scored: what a step costs, how far it is, and what to know of its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from collapsediag.matrix import BoolArray, FloatArray, LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.plain_text import printable
from collapsediag.record import Record

if TYPE_CHECKING:
    from rich.console import Console


class ProgressScorer:
    """The model's scorer with its cost said beforehand and a bar while it works."""

    def __init__(self, scorer: Any, console: Console) -> None:
        self._scorer = scorer
        self._console = console

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """Score with a progress bar; see Scorer.score."""
        return self.score_with_tokens(pairs, ())[0]

    def score_with_tokens(
        self, pairs: ScoringPairs, rows: Sequence[int], scored_NP: BoolArray | None = None
    ) -> tuple[LogLikelihoodMatrix, list[FloatArray]]:
        """Score with a progress bar; see TokenScorer.score_with_tokens."""
        self._tell_cost(pairs, scored_NP)
        with self._bar() as progress:
            found: tuple[LogLikelihoodMatrix, list[FloatArray]] = self._scorer.score_with_tokens(
                pairs, rows, scored_NP, progress
            )
        return found

    def _tell_cost(self, pairs: ScoringPairs, scored_NP: BoolArray | None) -> None:
        whole = self._scorer.estimate(pairs)
        if scored_NP is None:
            self._console.print(whole.describe())
            return
        cost = self._scorer.estimate(pairs, scored_NP)
        self._console.print(f"{cost.describe()}; the whole matrix: {whole.pairs:,} pairs, {whole.tokens:,} tokens")

    def score_cells(self, pairs: ScoringPairs, scored_NP: BoolArray) -> FloatArray:
        """Score some cells with a progress bar; see CellScorer.score_cells."""
        self._tell_cost(pairs, scored_NP)
        with self._bar() as progress:
            logp_NP: FloatArray = self._scorer.score_cells(pairs, scored_NP, progress)
        return logp_NP

    @contextmanager
    def _bar(self) -> Iterator[Callable[[int, int], None]]:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("scoring"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        # Elsewhere it would leave an empty line.
        is_shown = self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not is_shown) as progress:
            task = progress.add_task("", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


class StepReport:
    """Says what a reader of a step's numbers must know; what was said of an earlier step is not said again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: set[str] = set()
        self._has_left_out = False

    def tell(self, record: Record) -> None:
        """Print what is new in the record, and every time what was not measured; that it is there where nothing is."""
        left_out = ", ".join(f"{n} {reason}" for reason, n in record.dropped.items() if n)
        # A note counts rollouts, and is the same note where the next step has one more.
        lines = {re.sub(r"\d+", "#", note): note for note in record.notes}
        if left_out:
            lines[left_out] = f"left out {left_out}"
        new = [line for topic, line in lines.items() if topic not in self._told]
        self._told |= set(lines)
        missing = {name: why for name, why in record.not_measured.items() if name.startswith("collapse_")}
        for line in new if new or missing else ["recorded"]:
            self._print(f"step {record.step}: {line}")
        for name, reason in missing.items():
            self._print(f"step {record.step}: {name} not measured: {reason}", "yellow")
        if len(new) < len(lines) and not self._has_left_out:
            self._has_left_out = True
            self._print("What was said of a step is said once; every record holds it.")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(printable(text), style=style, markup=False)
