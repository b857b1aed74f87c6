"""The validity study: do the diagnostics tell the truth about real training runs?

    python -m benchmarks.validity --out runs/validity --workers 2     train what is missing, then analyse
    python -m benchmarks.validity --analyse runs/validity             analyse alone

Training runs of the demo's policy, one folder each (`runs.study_runs` lists them). Runs that are finished are kept, so
that a study that was stopped goes on where it was. The analysis writes docs/validity.md and its plots.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.validity.pool import train_all

PAGE = Path(__file__).parents[2] / "docs" / "validity.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="where the runs are, or will be; then analyse them")
    where.add_argument("--analyse", type=Path, metavar="DIR", help="analyse the finished runs of this folder alone")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="runs trained at once (default 2)")
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help="the page to write (default %(default)s)"
    )
    options = parser.parse_args()
    if options.out is not None:
        train_all(options.out, options.workers)
    # After training: the workers must not pay for what the analysis imports.
    from benchmarks.validity.page import write
    from benchmarks.validity.study import analyse

    write(analyse(options.out or options.analyse), options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
