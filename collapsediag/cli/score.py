"""Score saved rollouts with a policy: every trace under every prompt of its step, then the collapse metrics.

    collapsediag score rollouts.jsonl --model ./policy --out runs/offline

Cost is the number of traces times the number of prompts, so at most 64 traces under 16 prompts are scored per step
unless you say otherwise. The policy must be the one that wrote the rollouts (the checkpoint of that step): another
model answers another question.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapsediag.cli.rollout_arguments import (
    add_rollout_arguments,
    batches,
    finite,
    require_tokenizer,
)
from collapsediag.cli.score_progress import ProgressScorer, StepReport
from collapsediag.console import plain_console, summary_lines
from collapsediag.errors import ScoringError, SettingsError
from collapsediag.findings import judge
from collapsediag.findings.words import verdict_lines
from collapsediag.monitor import Monitor
from collapsediag.pairs import NAMESPACES, DropReason, PairSettings
from collapsediag.plain_text import counted, printable
from collapsediag.record import Provenance, Record
from collapsediag.rollouts import RolloutBatch, Turn
from collapsediag.run_folder import METRICS_FILE, RUN_FILE, check_writable, read_records, read_run
from collapsediag.sinks import JsonlSink, Sink

if TYPE_CHECKING:
    from rich.console import Console

    from collapsediag.scoring.protocol import Scorer

DEFAULT_MAX_TRACES = 64
# Findings compare a run with its own beginning; fewer steps have no beginning and end.
STEPS_FOR_A_VERDICT = 3
DEFAULT_MAX_CONTEXTS = 16

SAMPLE_KEYS = tuple(f"collapse_{namespace}_sample" for namespace in NAMESPACES)
# What to do where every trace was left out for a reason.
CURES = {
    DropReason.NO_TOKEN_IDS: "Prompts are needed beside the completions, and a tokenizer for what is text.",
    DropReason.NO_REASONING: "Name the tags (--open-tag, --close-tag), or score whole outputs: --reasoning completion.",
    DropReason.UNCLOSED: "Whole outputs, closed or not, are scored by --reasoning completion.",
    DropReason.EMPTY: "Whole outputs are scored by --reasoning completion.",
    DropReason.CONTEXT_TOO_LONG: "The prompts leave no room within what the model can read.",
    DropReason.TRACE_TOO_LONG: "The traces leave no room within what the model can read.",
}
# Settings that a resumed run must share with its first half.
CHANGES_NUMBERS = (
    "model",
    "tokenizer",
    "gguf_file",
    "dtype",
    "temperature",
    "max_traces",
    "max_contexts",
    "max_pairs",
    "budget",
    "max_trace_tokens",
    "max_context_tokens",
    "seed",
    "reasoning",
    "open_tag",
    "close_tag",
    "definition",
    "success_threshold",
    "plain_prompts",
    "answer_prefix",
    "format",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_rollout_arguments(parser)
    parser.add_argument("--out", required=True, metavar="RUN", help="run folder to write")
    parser.add_argument(
        "--resume", action="store_true", help="go on in RUN; steps that it already holds are not redone"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help="folder, GGUF file or hub name of the policy")
    model.add_argument("--tokenizer", help="folder or hub name of its tokenizer (default: the model's own)")
    model.add_argument("--gguf-file", metavar="NAME", help="the GGUF file in the model's folder")
    model.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: the best there is)")
    model.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 (default: float32 on the CPU)")
    model.add_argument("--temperature", type=finite, default=1.0, help="score softmax(logits / T) (default 1)")
    model.add_argument(
        "--token-budget", type=int, metavar="N", help="tokens in one forward pass (default: from memory)"
    )
    cluster = parser.add_argument_group("many GPUs or machines")
    cluster.add_argument("--ray", action="store_true", help="score the steps in parallel on Ray, one model per worker")
    cluster.add_argument("--ray-workers", type=_count, metavar="N", help="default: one per GPU of the cluster")
    cluster.add_argument("--ray-address", metavar="ADDRESS", help="a running cluster (default: this machine)")
    what = parser.add_argument_group("what is scored")
    what.add_argument(
        "--max-traces", type=_limit, default=DEFAULT_MAX_TRACES, metavar="N", help="per step; 0: no limit"
    )
    what.add_argument("--max-contexts", type=_limit, default=DEFAULT_MAX_CONTEXTS, metavar="P", help="per step; 0: all")
    what.add_argument("--max-pairs", type=_limit, metavar="N", help="traces x contexts per step; 0: no limit")
    what.add_argument(
        "--budget",
        type=_count,
        metavar="K",
        help="score each trace under its own prompt and K others only (default: all; what that costs in accuracy is in "
        "docs/scoring.md)",
    )
    what.add_argument("--max-trace-tokens", type=_limit, metavar="N", help="longer traces are left out and counted")
    what.add_argument("--max-context-tokens", type=_limit, metavar="N", help="longer prompts are left out and counted")
    what.add_argument("--seed", type=int, default=0, help="of the draw of traces (default 0)")
    what.add_argument(
        "--reasoning",
        choices=("auto", "think", "completion"),
        default="auto",
        help="what a trace is: the text between think tags, or the whole completion (default: whichever is there)",
    )
    what.add_argument("--open-tag", default="<think>", help="opening tag of the reasoning (default <think>)")
    what.add_argument("--close-tag", default="</think>", help="closing tag of the reasoning (default </think>)")
    what.add_argument(
        "--definition", choices=("paper", "ragen"), default="paper", help="whose formulas (default paper)"
    )
    what.add_argument("--success-threshold", type=finite, metavar="R", help="a reward of R or more is a success")


def _limit(text: str) -> int | None:
    """A limit on the command line; 0 is no limit."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative; 0 means no limit")
    return value or None


def _count(text: str) -> int:
    """A number of things on the command line, at least one."""
    value = _limit(text)
    if value is None:
        raise argparse.ArgumentTypeError("0 is too few; at least 1 is needed")
    return value


def run(args: argparse.Namespace) -> int:
    """Score, record, and print the last step's table."""
    # Lines are not wrapped: a log is searched by line, and a terminal wraps by itself.
    console = plain_console(stderr=True, soft_wrap=True)
    if args.budget is not None and args.definition == "ragen":
        raise SettingsError("--definition ragen needs every cell of the matrix; leave out --budget.")
    recorded = _recorded(args)
    done = steps_done(recorded)
    if done:
        console.print(f"{counted(len(done), 'step')} already recorded, not redone")
    # Before the model is loaded: a wrong file, or a run with nothing left to do, must not cost a minute.
    if not is_anything_open(args, done):
        return finish(args, [], console)
    if args.ray:
        from collapsediag.cli.score_on_ray import run_on_ray

        return run_on_ray(args, recorded, console)
    from collapsediag.scoring.load import load_policy

    console.print(printable(f"loading {args.model}"), markup=False)
    model, tokenizer = load_policy(
        args.model,
        tokenizer=args.tokenizer,
        gguf_file=args.gguf_file,
        device=args.device,
        dtype=args.dtype,
    )
    new: list[Record] = []
    report = StepReport(console)
    with _model_monitor(args, model, tokenizer, console) as monitor:
        monitor.continue_from(recorded)
        for batch in open_batches(args, done, tokenizer=tokenizer):
            require_tokenizer(batch, tokenizer, args.model)
            new.append(monitor.observe(batch.step, batch).without_arrays())
            report.tell(new[-1])
    return finish(args, new, console)


def open_batches(args: argparse.Namespace, done: set[int], tokenizer: Any = None) -> Iterator[RolloutBatch]:
    """The steps that are not recorded yet."""
    return (batch for batch in batches(args, tokenizer=tokenizer) if batch.step not in done)


def is_anything_open(args: argparse.Namespace, done: set[int]) -> bool:
    """Whether a step is left to score. Raises ScoringError where one prompt is all that each of them holds."""
    steps = []
    for batch in open_batches(args, done):
        if not _has_one_prompt(batch):
            return True
        steps.append(batch.step)
    if steps:
        which = f"step {steps[0]} holds" if len(steps) == 1 else f"each of {len(steps)} steps holds"
        raise ScoringError(
            f"{which} one prompt only, so there is nothing to tell apart; at least two prompts are needed. Nothing was "
            "loaded or written. What can be measured without a model: collapsediag preflight."
        )
    return False


def _has_one_prompt(batch: RolloutBatch) -> bool:
    """Whether every turn is known to have the same context."""
    contexts = (_context(turn) for rollout in batch for turn in rollout.turns)
    first = next(contexts, None)
    return bool(first) and all(context == first for context in contexts)


def _context(turn: Turn) -> Any:
    return turn.context or turn.context_messages if turn.context_ids is None else turn.context_ids.tolist()


def finish(args: argparse.Namespace, new: Sequence[Record], console: Console) -> int:
    """The last step's table, and the exit code. Raises ScoringError where no new step has a number to show for it."""
    if not new:
        console.print("nothing new to score")
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    print(f"\n{printable(args.out)}, step {new[-1].step}")
    print("\n".join(summary_lines(new[-1], width=width)))
    if not any(name.endswith("/n_traces") for record in new for name in record.values):
        raise ScoringError(_nothing_scored(args, new))
    print(f"\nEvery number is in {printable(args.out)}/{METRICS_FILE}, traces and matrices beside it.")
    print(f"As a page: collapsediag report {shlex.quote(printable(args.out))}")
    records = read_records(args.out)
    if len(records) >= STEPS_FOR_A_VERDICT:
        print()
        print("\n".join(verdict_lines(judge(records), width=width)))
    return 0


def _nothing_scored(args: argparse.Namespace, new: Sequence[Record]) -> str:
    first = new[0]
    reasons = [reason for name, reason in first.not_measured.items() if name in SAMPLE_KEYS]
    steps = f"step {first.step}" if len(new) == 1 else f"none of {len(new)} steps"
    verb = "could not be scored" if len(new) == 1 else f"could be scored; step {first.step}"
    left_out = {name.rpartition("/")[2] for name in first.dropped}
    cures = [cure for reason, cure in CURES.items() if reason.value in left_out]
    if any("non-finite" in reason for reason in reasons):
        cures.append("The model gives no finite log-probabilities: are its weights NaN, or is --dtype too narrow?")
    told = "; ".join(dict.fromkeys(reasons)).rstrip(".") or "no reason was given"
    return " ".join([f"{steps} {verb}: {told}.", *cures, f"What was measured without the model is in {args.out}."])


def _recorded(args: argparse.Namespace) -> list[Record]:
    check_writable(args.out)
    if not (Path(args.out) / METRICS_FILE).exists():
        return []
    if not args.resume:
        raise SettingsError(
            f"--out {args.out} already holds a run. Choose another folder, or add --resume to go on in it."
        )
    if (Path(args.out) / RUN_FILE).exists():
        _refuse_other_settings(args, read_run(args.out).get("settings"))
    return read_records(args.out)


def _refuse_other_settings(args: argparse.Namespace, before: Any) -> None:
    """A curve whose first half was measured otherwise than its second cannot be read."""
    settings = _settings(args)
    if not isinstance(before, dict):
        return
    changed = [
        f"--{name.replace('_', '-')} was {before[name]!r} and now is {settings[name]!r}"
        for name in CHANGES_NUMBERS
        if name in before and before[name] != settings[name]
    ]
    if changed:
        raise SettingsError(
            f"--resume: the run in {args.out} has other settings: {'; '.join(changed)}. Give the same, or choose "
            "another --out."
        )


def steps_done(recorded: Iterable[Record]) -> set[int]:
    """Steps that need not be scored again."""
    return {record.step for record in recorded if record.status == "ok"}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in ("run", "command")}


def _model_monitor(args: argparse.Namespace, model: Any, tokenizer: Any, console: Console) -> Monitor:
    from collapsediag.scoring.hf import HFScorer

    scorer = HFScorer(model, temperature=args.temperature, token_budget=args.token_budget)
    provenance = provenance_of(args, next(model.parameters()))
    sinks = [JsonlSink(args.out, resume=args.resume, provenance=provenance)]
    return monitor_of(args, budgeted(args, ProgressScorer(scorer, console)), tokenizer, scorer.max_tokens, sinks)


def budgeted(args: argparse.Namespace, scorer: Any) -> Scorer:
    """The scorer, asked for as many prompts per trace as the command line says."""
    from collapsediag.scoring.budget import BudgetScorer

    return scorer if args.budget is None else BudgetScorer(scorer, args.budget, seed=args.seed)


def provenance_of(args: argparse.Namespace, parameter: Any) -> Provenance:
    """What run.json says; the parameter's device and dtype stand for the model's."""
    return Provenance.collect(
        model=str(args.model),
        tokenizer=str(args.tokenizer or args.model),
        device=str(parameter.device),
        dtype=str(parameter.dtype).removeprefix("torch."),
        settings=_settings(args),
    )


def monitor_of(
    args: argparse.Namespace, scorer: Scorer, tokenizer: Any, max_tokens: int | None, sinks: Iterable[Sink]
) -> Monitor:
    """A monitor with the settings of the command line."""
    return Monitor(
        scorer,
        every=1,
        sinks=sinks,
        tokenizer=tokenizer,
        reasoning=args.reasoning,
        pairs=PairSettings(
            tags=((args.open_tag, args.close_tag),),
            max_contexts=args.max_contexts,
            max_traces=args.max_traces,
            max_pairs=args.max_pairs,
            max_context_tokens=args.max_context_tokens,
            max_trace_tokens=args.max_trace_tokens,
            max_total_tokens=max_tokens,
        ),
        definition=args.definition,
        rollout_options={"format": args.format, "success_threshold": args.success_threshold},
        seed=args.seed,
        on_error="raise",
    )
