"""Many training runs, a few at once."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

from benchmarks.validity.runs import StudyRun, study_runs


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
