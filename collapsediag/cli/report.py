"""One self-contained page that explains a run: the verdict in words, charts, the matrix, the traces.

    collapsediag report runs/a -o report.html
    collapsediag report runs/a runs/b runs/c -o runs.html
    collapsediag report runs/a --png figure.png

The page needs no network and no server; it can be sent, archived and opened anywhere. Several runs are drawn over one
another, with the rank correlations of their diagnostics. --png draws one run's main charts as a picture, for papers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collapsediag.errors import MetricError, RunFolderError, SettingsError
from collapsediag.findings.across_runs import compare_runs
from collapsediag.plain_text import counted, printable
from collapsediag.record import Record
from collapsediag.report import page_html, scored_payload, series_payload
from collapsediag.run_folder import read_records
from collapsediag.whole_files import clear_leftovers, replacing

# A page holds no more scored steps than anyone steps through; they are spread evenly over the run.
MAX_SCORED = 60
OUT = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("-o", "--out", metavar="FILE", help=f"page to write (default {OUT}; with --png none)")
    parser.add_argument("--png", metavar="FILE", help="PNG picture to write, of one run (needs the extra [png])")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page, say where it is."""
    runs = list(dict.fromkeys(str(Path(one)) for one in args.runs))
    for option, given, example in (("--out", args.out, OUT), ("--png", args.png, "figure.png")):
        if given is not None and os.path.isdir(given or os.curdir):
            raise SettingsError(
                f"{given or 'an empty name'} is a folder; {option} is the file to write, for example "
                f"{Path(given) / example}."
            )
    if args.png is not None:
        if Path(args.png).suffix.lower() != ".png":
            raise SettingsError(f"--png {args.png}: the picture is a PNG; give a name that ends in .png.")
        write_file(Path(args.png), _picture(runs))
        print(f"{printable(args.png)}: a PNG picture of {printable(runs[0])}")
    if args.png is None or args.out is not None:
        out, page = Path(args.out or OUT), build_page(runs)
        write_file(out, page.encode("utf-8"))
        print(f"{printable(str(out))}: {len(page) / 1e6:.1f} MB, {counted(len(runs), 'run')}")
    return 0


def _picture(runs: Sequence[str]) -> bytes:
    if len(runs) > 1:
        raise SettingsError(f"a picture is of one run and {len(runs)} were given; the page takes several.")
    from collapsediag.report.picture import picture_png

    return picture_png(series_payload(runs[0]))


def build_page(runs: Sequence[str]) -> str:
    """The page of these run folders."""
    records = [read_records(run) for run in runs]
    named = list(zip(runs, short_names(runs), records, strict=True))
    series = [series_payload(run, name=name, records=held) for run, name, held in named]
    scored = [
        [scored_payload(run, step) for step in spread(one["scored_steps"], MAX_SCORED // len(runs) or 1)]
        for run, one in zip(runs, series, strict=True)
    ]
    return page_html(series, scored, comparison=_comparison({name: held for _, name, held in named}))


def _comparison(records: Mapping[str, Sequence[Record]]) -> dict[str, Any] | None:
    if len(records) < 2:
        return None
    try:
        return compare_runs(records).to_json()
    except MetricError:
        return None  # no outcome in common: the page says so


def short_names(runs: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart.

    >>> short_names(["runs/a", "runs/b"]), short_names(["x/run", "y/run"])
    (['a', 'b'], ['x/run', 'y/run'])
    """
    parts = [Path(run).absolute().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def spread(steps: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the steps, evenly spaced, the first and the last among them.

    >>> spread([0, 5, 10, 15, 20], 3), spread([0, 5], 3)
    ([0, 10, 20], [0, 5])
    """
    if len(steps) <= limit:
        return list(steps)
    if limit == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (limit - 1))] for i in range(limit)]


def write_file(out: Path, content: bytes) -> None:
    """Replace an older file whole or not at all."""
    try:
        # Of a link, /dev/stdout for example, what it leads to is replaced.
        target = out.resolve() if out.is_file() else out
        clear_leftovers(target.parent)
        with replacing(target) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written ({error.strerror or error}).") from error
