"""Follow a run in the browser: the page of `report`, kept up to date while the run is written.

    collapsediag dashboard runs/mine
    collapsediag dashboard runs/mine --port 0

The page is served to this machine alone. For a run on a remote one, start the command there and forward its port, with
the line that it prints. It may be started before the run and outlive it; Ctrl-C ends it and leaves the run alone.
"""

from __future__ import annotations

import argparse
import getpass
import socket
from pathlib import Path

from collapsediag.errors import RunFolderError
from collapsediag.plain_text import printable
from collapsediag.run_folder import METRICS_FILE, no_run_folder, run_folders_in

DEFAULT_PORT = 8611


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run_folder", metavar="RUN", help="run folder, which need not be there yet")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"0 takes a free one (default {DEFAULT_PORT})"
    )


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    from collapsediag.report.live import LiveRun, LiveServer

    folder = Path(args.run_folder)
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; a run folder is needed.")
    if run_folders_in(folder) and not (folder / METRICS_FILE).exists():
        raise no_run_folder(folder, METRICS_FILE)
    live = LiveRun(folder)
    with LiveServer(live, args.port) as server:
        waiting = "" if live.series() else f", which {_missing(folder)}"
        print(f"Following {printable(str(folder) + waiting)}: {server.url}")
        print("To see it on another machine, run this there and open the same address:")
        print(f"    ssh -N -L {_forward(server.server_port)}")
        try:
            print("Ctrl-C ends this and leaves the run alone.", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nno longer following")
    return 0


def _missing(folder: Path) -> str:
    """What there is to wait for: a misspelt name would be waited for as long as a run that has not begun."""
    if folder.exists():
        return "has no record yet"
    parent = folder.absolute().parent
    return "does not exist yet" + ("" if parent.exists() else f", and neither does {parent}")


def _forward(port: int) -> str:
    try:
        user = f"{getpass.getuser()}@"
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        user = ""
    return f"{port}:127.0.0.1:{port} {user}{socket.gethostname()}"
