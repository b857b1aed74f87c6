"""Command-line arguments that say what to read, shared by the commands that read rollouts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

from collapsediag.errors import SettingsError
from collapsediag.metrics.format import parsed_format
from collapsediag.readers import SOURCES, read_rollouts
from collapsediag.rollouts import RolloutBatch


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    """What to read and how."""
    parser.add_argument("rollouts", nargs="+", metavar="ROLLOUTS", help="files or folders of saved rollouts")
    group = parser.add_argument_group("reading")
    group.add_argument(
        "--source", choices=sorted(SOURCES), help="the files' format (default: detected, with the reason)"
    )
    group.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="a key by another name, e.g. --map completion=answer_text (repeatable)",
    )
    group.add_argument("--skip-bad-lines", action="store_true", help="read past unreadable lines and count them")
    group.add_argument(
        "--repeated-steps",
        choices=("auto", "last", "merge"),
        default="auto",
        help="a step that comes back is a resumed run (last) or another shard (merge) (default: ask where unclear)",
    )
    group.add_argument("--plain-prompts", action="store_true", help="take prompts as text, without the chat template")
    group.add_argument(
        "--answer-prefix", default="", metavar="TEXT", help="what the run's template put before the answer: '<think>'"
    )
    group.add_argument(
        "--format",
        type=_declared,
        metavar="FORM",
        help="what outputs should look like: tags:think,answer (the default), tags:think (any text may follow the "
        "reasoning), or regex:PATTERN (of the whole output)",
    )
    group.add_argument("--no-check-groups", action="store_true", help="let the prompts of one group differ")


def key_map(pairs: list[str]) -> dict[str, str]:
    """`OURS=THEIRS` arguments as a mapping.

    >>> key_map(["completion=answer_text"])
    {'completion': 'answer_text'}
    """
    mapping: dict[str, str] = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise SettingsError(f"--map {pair!r}: write OURS=THEIRS, for example --map completion=answer_text.")
        if ours in mapping:
            raise SettingsError(f"--map names {ours!r} twice: {mapping[ours]!r} and {theirs!r}. Keep one.")
        mapping[ours] = theirs
    return mapping


def _declared(form: str) -> str:
    """`--format` as it was written: run.json keeps it, and Ray's workers are sent it."""
    try:
        parsed_format(form)
    except SettingsError as error:
        sources = ", ".join(sorted(SOURCES))
        raise argparse.ArgumentTypeError(f"{error} (What the files are is --source: {sources}.)") from None
    return form


def finite(text: str) -> float:
    """A number on the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def require_tokenizer(batch: RolloutBatch, tokenizer: Any, model: str) -> None:
    """Raise SettingsError where the rollouts are text and there is nothing to make tokens of it."""
    if tokenizer is None and not any(turn.has_ids for rollout in batch for turn in rollout.turns):
        raise SettingsError(
            f"the rollouts are text, and no tokenizer can be read in {model} to make tokens of it. Name one: "
            "--tokenizer FOLDER, or copy its files there."
        )


def batches(args: argparse.Namespace, **options: Any) -> Iterator[RolloutBatch]:
    """The batches that the arguments name, step by step."""
    return read_rollouts(
        args.rollouts,
        source=args.source,
        key_map=key_map(args.map),
        skip_bad_lines=args.skip_bad_lines,
        repeated_steps=args.repeated_steps,
        plain_prompts=args.plain_prompts,
        answer_prefix=args.answer_prefix,
        check_groups=not args.no_check_groups,
        **options,
    )
