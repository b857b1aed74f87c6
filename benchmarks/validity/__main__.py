"""The validity study: do the diagnostics tell the truth about real training runs?

    python -m benchmarks.validity --out runs/validity --workers 2     train what is missing, then analyse
    python -m benchmarks.validity --analyse runs/validity             analyse alone

Eighty training runs of the demo's policy, one folder each. Runs that are finished are kept, so that a study that was
stopped goes on where it was. The analysis writes docs/validity.md and its plots.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

from benchmarks.validity.runs import StudyRun, study_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="where the runs are, or will be; then analyse them")
    where.add_argument("--analyse", type=Path, metavar="DIR", help="analyse the finished runs of this folder alone")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="runs trained at once (default 2)")
    options = parser.parse_args()
    if options.out is not None:
        train_all(options.out, options.workers)
    return 0


def train_all(out: Path, workers: int) -> None:
    """Train every run that is not finished."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the policy is too small to be split
    begun, runs = time.perf_counter(), study_runs()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        jobs = pool.imap_unordered(_train, [(run, out) for run in runs])
        for done, name in enumerate(jobs, start=1):
            print(f"{done:3d}/{len(runs)} {name} after {time.perf_counter() - begun:.0f} s", flush=True)


def _train(job: tuple[StudyRun, Path]) -> str:
    import logging

    import torch

    from benchmarks.validity.training import train

    torch.set_num_threads(1)
    logging.getLogger("collapsediag").setLevel(logging.ERROR)
    train(*job)
    return job[0].name


if __name__ == "__main__":
    sys.exit(main())
