"""A scorer that says beforehand what a step costs, and shows how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from collapsediag.matrix import BoolArray, FloatArray, LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs

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
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
