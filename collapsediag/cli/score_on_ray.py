"""`collapsediag score --ray`: workers score whole steps, this process cuts, records and writes, in order."""

from __future__ import annotations

import argparse
import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collapsediag.cli.rollout_arguments import require_tokenizer
from collapsediag.cli.score import budgeted, finish, monitor_of, open_batches, provenance_of, steps_done
from collapsediag.cli.score_progress import StepReport
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.monitor import Monitor
from collapsediag.pairs import PairSettings, resolve_reasoning
from collapsediag.record import Record
from collapsediag.rollouts import RolloutBatch
from collapsediag.scoring.load import load_tokenizer
from collapsediag.scoring.ray_jobs import KeptScorer, ordered_map
from collapsediag.sinks import JsonlSink

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """What a worker sends back: the matrices of one step by the tokens they are of, and facts of its model."""

    matrices: dict[str, LogLikelihoodMatrix]
    max_tokens: int | None
    device: str
    dtype: str


def run_on_ray(args: argparse.Namespace, recorded: list[Record], console: Console) -> int:
    """Score on Ray, record, and print the last step's table."""
    tokenizer = load_tokenizer(args.model, tokenizer=args.tokenizer, gguf_file=args.gguf_file)
    steps = open_batches(args, steps_done(recorded), tokenizer)
    first = next(steps)
    require_tokenizer(first, tokenizer, args.model)
    waiting: deque[RolloutBatch] = deque()

    def handed_out() -> Iterator[RolloutBatch]:
        for batch in _chain(first, steps):
            waiting.append(batch)
            yield batch

    scores = ordered_map(
        worker_maker(args, _reasoning(args, first, tokenizer)),
        handed_out(),
        workers=args.ray_workers,
        address=args.ray_address,
    )
    kept = KeptScorer()
    new: list[Record] = []
    report = StepReport(console)
    monitor: Monitor | None = None
    try:
        for found in scores:
            if monitor is None:
                monitor = _recording_monitor(args, kept, tokenizer, found, recorded)
            batch, kept.matrices = waiting.popleft(), found.matrices
            new.append(monitor.observe(batch.step, batch).without_arrays())
            report.tell(new[-1])
    finally:
        if monitor is not None:
            monitor.close()
    return finish(args, new, console)


def _chain(first: RolloutBatch, rest: Iterator[RolloutBatch]) -> Iterator[RolloutBatch]:
    yield first
    yield from rest


def _reasoning(args: argparse.Namespace, batch: RolloutBatch, tokenizer: Any) -> str:
    """What a trace is, decided once by the first step: each worker would decide by its own first step."""
    settings = PairSettings(tags=((args.open_tag, args.close_tag),), reasoning=args.reasoning)
    return resolve_reasoning(batch, settings=settings, tokenizer=tokenizer).mode


def _recording_monitor(
    args: argparse.Namespace, kept: KeptScorer, tokenizer: Any, found: StepScores, recorded: list[Record]
) -> Monitor:
    provenance = provenance_of(args, found)
    sink = JsonlSink(args.out, resume=args.resume, provenance=provenance)
    monitor = monitor_of(args, kept, tokenizer, found.max_tokens, [sink])
    monitor.continue_from(recorded)
    return monitor


def worker_maker(args: argparse.Namespace, reasoning: str) -> Callable[[], Callable[[RolloutBatch], StepScores]]:
    """What runs on a worker: load the policy once, then score one step after the other."""
    settings = copy.copy(args)
    settings.reasoning = reasoning
    settings.run = None  # the command's function need not travel

    def make_worker() -> Callable[[RolloutBatch], StepScores]:
        from collapsediag.scoring.hf import HFScorer
        from collapsediag.scoring.load import load_policy
        from collapsediag.scoring.ray_jobs import KeepingScorer

        model, tokenizer = load_policy(
            settings.model,
            tokenizer=settings.tokenizer,
            gguf_file=settings.gguf_file,
            device=settings.device,
            dtype=settings.dtype,
        )
        scorer = HFScorer(model, temperature=settings.temperature, token_budget=settings.token_budget)
        keeping = KeepingScorer(budgeted(settings, scorer))
        monitor = monitor_of(settings, keeping, tokenizer, scorer.max_tokens, [])
        parameter = next(model.parameters())

        def score_step(batch: RolloutBatch) -> StepScores:
            monitor.observe(batch.step, batch)
            return StepScores(
                matrices=keeping.take(),
                max_tokens=scorer.max_tokens,
                device=str(parameter.device),
                dtype=str(parameter.dtype),
            )

        return score_step

    return make_worker
