"""Room: demo. The small live training run behind `collapsediag demo`.

A tiny language model sees lamps ("lamps dark red dark gold dark blue . which door opens ?"), thinks aloud which
colours it sees, and names a door. It is warmed up on demonstrations, then trained by a group-relative policy gradient.
Nothing is scripted: whether its reasoning goes on depending on the lamps is decided by the training alone.
"""

from __future__ import annotations

from collapsediag.demo.scenarios import SCENARIOS, Scenario
from collapsediag.demo.training import DemoTraining, TrainingSettings

__all__ = ["SCENARIOS", "DemoTraining", "Scenario", "TrainingSettings"]
