"""Check one batch of rollouts before training: what would go wrong, while it is still cheap to fix.

    collapsediag preflight rollouts.jsonl
    collapsediag preflight rollouts.jsonl --model ./policy      # also: do traces fit their own prompt?

Exit code 1 where a check is as bad as --fail-on says or worse.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from collapsediag.cli.rollout_arguments import (
    add_rollout_arguments,
    batches,
    finite,
    require_tokenizer,
)
from collapsediag.console import plain_console
from collapsediag.errors import ReaderError
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.plain_text import counted, number, printable
from collapsediag.preflight import PreflightReport, preflight
from collapsediag.rollouts import RolloutBatch

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "critical": "bold red", "skipped": "dim"}
WORDS = {"ok": "ok", "info": "info", "warning": "WARNING", "critical": "CRITICAL", "skipped": "skipped"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_rollout_arguments(parser)
    parser.add_argument("--step", type=int, metavar="N", help="which step to check (default: the first)")
    parser.add_argument("--model", help="the policy: also score traces under each other's prompts")
    parser.add_argument("--gguf-file", metavar="NAME", help="the GGUF file in the model's folder")
    parser.add_argument("--success-threshold", type=finite, metavar="R", help="a reward of R or more is a success")
    parser.add_argument("--seed", type=int, default=0, help="of intervals and of the draw of traces (default 0)")
    parser.add_argument(
        "--fail-on",
        choices=("info", "warning", "critical"),
        default="critical",
        help="exit with 1 where a check is this bad or worse (default critical)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, check, print the verdicts."""
    # Once without the model: a wrong file must not cost a minute.
    batch, tokenizer, matrix, unscored = _batch(args, None), None, None, None
    if args.model is not None:
        from collapsediag.scoring.load import load_policy

        print(f"loading {printable(args.model)}", file=sys.stderr)
        model, tokenizer = load_policy(args.model, gguf_file=args.gguf_file)
        batch = _batch(args, tokenizer)
        require_tokenizer(batch, tokenizer, args.model)
        matrix, unscored = _matrix(batch, model, tokenizer, args.seed)
    report = preflight(
        batch,
        matrix=matrix,
        unscored=unscored,
        format=args.format,
        success_threshold=args.success_threshold,
        tokenizer=tokenizer,
        seed=args.seed,
    )
    print_report(plain_console(), report)
    return 1 if report.reaches(args.fail_on) else 0


def _batch(args: argparse.Namespace, tokenizer: Any) -> RolloutBatch:
    steps = []
    for batch in batches(args, tokenizer=tokenizer):
        if args.step is None or batch.step == args.step:
            return batch
        steps.append(batch.step)
    found = f"steps {steps[0]} to {steps[-1]}" if steps else "no step at all"
    raise ReaderError(f"{' '.join(args.rollouts)}: step {args.step} is not there; found {found}.")


def _matrix(
    batch: RolloutBatch, model: Any, tokenizer: Any, seed: int
) -> tuple[LogLikelihoodMatrix | None, str | None]:
    """The matrix, or why there is none."""
    from collapsediag.pairs import build_pairs
    from collapsediag.scoring.hf import HFScorer

    scorer = HFScorer(model)
    pairs = build_pairs(
        batch, tokenizer=tokenizer, max_contexts=8, max_traces=16, max_total_tokens=scorer.max_tokens, seed=seed
    )
    return (scorer.score(pairs), None) if pairs.shortfall is None else (None, pairs.shortfall)


def print_report(console: Console, report: PreflightReport) -> None:
    """The verdicts, gravest words first to the eye: status, what was found, what to do."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(f"step {report.step}: {counted(report.n_rollouts, 'rollout')} in {counted(report.n_groups, 'group')}")
    console.print(Text(printable(report.headline), style="bold"))
    for note in report.notes:
        console.print(Text(f"note: {printable(note)}", style="dim"))
    console.print()
    for check in report.checks:
        line = Text(f"{WORDS[check.status]:>8}  ", style=STYLES[check.status])
        line.append(check.name, style="bold")
        if check.value is not None:
            line.append(f"  {number(check.value)}")
        if check.interval is not None:
            line.append(f" [{number(check.interval[0])}, {number(check.interval[1])}]", style="dim")
        console.print(line)
        said = printable(check.reading) + (f" {printable(check.action)}" if check.action else "")
        console.print(Padding(Text(said, style="dim" if check.status == "skipped" else ""), (0, 0, 0, 10)))
