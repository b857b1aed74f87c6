"""Check one batch of rollouts before training: what would go wrong, while it is still cheap to fix."""

from __future__ import annotations

import argparse

from collapsediag.cli.rollout_arguments import add_rollout_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_rollout_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read, check, print the verdicts."""
    return 0
