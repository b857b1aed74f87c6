"""Twenty seeds of the demo's healthy scenario are silent, twenty of its template collapse are found.

The numbers that the checks read, as the validity study recorded them. Its runs took a quarter of an hour to train.
"""

from __future__ import annotations

import gzip
import json

import pytest

import collapsediag as cd
from collapsediag.record import Record

from .conftest import DATA

FILE = DATA / "histories" / "demo_scenarios_20_seeds.json.gz"


def recorded(family: str) -> dict[str, list[Record]]:
    held = json.loads(gzip.decompress(FILE.read_bytes()))
    return {
        name: [
            Record(step=step, values={k: v for k, v in zip(held["names"], row, strict=True) if v is not None})
            for step, row in zip(run["steps"], run["values"], strict=True)
        ]
        for name, run in held["runs"].items()
        if name.startswith(family)
    }


def test_twenty_healthy_seeds_are_silent_at_every_step() -> None:
    runs = recorded("healthy")
    assert len(runs) == 20
    for name, records in runs.items():
        for n in range(1, len(records) + 1):
            assert cd.judge(records[:n]).alarms == (), (name, records[n - 1].step)


def test_twenty_template_collapses_are_found() -> None:
    runs = recorded("template")
    assert len(runs) == 20
    for name, records in runs.items():
        verdict = cd.judge(records)
        assert verdict["template_collapse"].is_alarm, (name, verdict.headline)
        assert {finding.check for finding in verdict.alarms} == {"template_collapse"}, name


@pytest.mark.parametrize("silent", ["entropy/token_mean", "reward/mean"])
def test_entropy_and_reward_alone_say_nothing_of_it(silent: str) -> None:
    for name, records in recorded("template").items():
        alone = [Record(step=r.step, values={silent: r.values[silent]}) for r in records]
        assert cd.judge(alone).alarms == (), name
