"""Train a small policy on this computer until its reasoning stops depending on the prompt, and watch it happen.

Nothing is scripted: a tiny language model is warmed up, then trained with a group-relative policy gradient, and every
number comes from scoring its traces with the policy itself. Reward and entropy look harmless throughout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from collapsediag.errors import SettingsError
from collapsediag.run_folder import METRICS_FILE, check_writable

MAX_SEED = 2**63 - 1  # of torch's generators


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--scenario",
        choices=("template-collapse", "healthy", "entropy-bonus"),
        default="template-collapse",
        help="which story to run (default template-collapse)",
    )
    parser.add_argument("--out", metavar="RUN", help="run folder to write (default runs/demo-SCENARIO)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same run (default 0)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: the scenario's own)")


def run(args: argparse.Namespace) -> int:
    """Train, watch, and print what happened."""
    if not 0 <= args.seed <= MAX_SEED:
        raise SettingsError(f"--seed {args.seed}: a whole number from 0 to {MAX_SEED}.")
    if args.steps is not None and args.steps < 1:
        raise SettingsError(f"--steps {args.steps}: at least one step is trained.")
    out = Path(args.out or f"runs/demo-{args.scenario}")
    check_writable(out)
    if (out / METRICS_FILE).exists():
        raise SettingsError(f"{out} already holds a run. Choose another folder with --out, or delete that one.")
    from collapsediag.cli.demo_show import show

    show(out=out, scenario=args.scenario, seed=args.seed, steps=args.steps)
    return 0
