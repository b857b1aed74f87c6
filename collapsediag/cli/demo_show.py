"""Run a scenario of the demo with a monitor attached, and print what it sees."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

from collapsediag.console import ConsoleSink, summary_lines
from collapsediag.demo import SCENARIOS, DemoTraining
from collapsediag.findings import judge
from collapsediag.findings.words import verdict_lines
from collapsediag.monitor import Monitor
from collapsediag.pairs import PairSettings
from collapsediag.record import Provenance
from collapsediag.run_folder import read_records
from collapsediag.scoring.hf import HFScorer
from collapsediag.sinks import JsonlSink

SCORED_EVERY = 5


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The policy's matrices are too small to be worth splitting: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show(*, out: Path, scenario: str, seed: int, steps: int | None) -> None:
    """Train, watch, record to `out`, and print the story around it."""
    story = SCENARIOS[scenario]
    settings = dataclasses.replace(story.settings, seed=seed, steps=story.settings.steps if steps is None else steps)
    width = min(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 100
    print(story.title)
    print(textwrap.fill(story.story, width))
    print("\nWarming up a policy of 100,000 parameters on demonstrations ...", flush=True)
    with one_thread():
        training = DemoTraining(settings)
    provenance = Provenance.collect(
        model="demo policy",
        device="cpu",
        dtype="float32",
        settings={"scenario": scenario, **dataclasses.asdict(settings)},
    )
    monitor = Monitor(
        HFScorer(training.policy),
        every=SCORED_EVERY,
        tokenizer=training.tokenizer,
        reasoning="think",
        pairs=PairSettings(max_traces=128),
        sinks=[JsonlSink(out, provenance=provenance), ConsoleSink(sys.stdout, width=width)],
        seed=seed,
        on_error="raise",
    )
    first = last = None
    with monitor, one_thread():
        for step, batch in training.steps():
            last = monitor.observe(step, batch)
            first = first or last
    assert first is not None
    assert last is not None
    for name, record in (("first", first), ("last", last)):
        if record.traces:
            print(f"\nA trace of the {name} step, under its own prompt:")
            print(f"  {record.traces[0].context}\n  {record.traces[0].trace}")
    print(f"\nThe last step in numbers (all of them are in {out}):")
    print("\n".join(summary_lines(last, width=width)))
    print()
    print("\n".join(verdict_lines(judge(read_records(out)), width=width)))
    print(f"\nAs a page: collapsediag report {shlex.quote(str(out))}")
