"""Save a W&B workspace that shows these diagnostics in the order in which they are read.

    collapsediag wandb-workspace my-team my-project
    collapsediag wandb-workspace my-team my-project --dry-run > workspace.json

Each call saves a new view named "Collapse diagnostics" in the project; nobody's own view is changed.
"""

from __future__ import annotations

import argparse
import json

from collapsediag.plain_text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("entity", metavar="ENTITY", help="the user or team that owns the project")
    parser.add_argument("project", metavar="PROJECT", help="the project; it must exist")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be sent as JSON; needs the extra [wandb], no network"
    )


def run(args: argparse.Namespace) -> int:
    """Build, and save or print."""
    from collapsediag.integrations import wandb_workspace as board

    workspace = board.build_workspace(args.entity, args.project)
    if args.dry_run:
        sent = {
            "entity": args.entity,
            "project": args.project,
            "name": board.NAME,
            "spec": board.workspace_spec(workspace),
            "custom_chart": {"name": board.CHART_NAME, "spec": board.regime_map()},
        }
        print(json.dumps(sent, indent=2))
        return 0
    url, refused = board.save_workspace(workspace)
    print(f"saved: {printable(url)}")
    if refused is not None:
        print(
            f"The preset of the chart {board.MAP_TITLE!r} was not accepted: {printable(refused)}\n"
            "If it says that the preset exists already, all is well; otherwise that one chart stays empty."
        )
    return 0
