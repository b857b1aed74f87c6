"""The runs of the study: two scenarios of the demo over twenty seeds each, a grid of settings, and a few squeezed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from collapsediag.demo import SCENARIOS, TrainingSettings

SCORED_EVERY = 3


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """name: of its folder. family: "healthy" or "template" (scenarios of the demo), "grid", or "squeezed"."""

    name: str
    family: str
    settings: TrainingSettings


N_SEEDS = 20
N_GRID = 40
STEPS = {"healthy": 60, "template": 42, "grid": 48, "squeezed": 60}
N_SQUEEZED = 8
# Almost no signal, a penalty on entropy, and enough pay for the format to keep it: ends in one trace for everything.
SQUEEZED = TrainingSettings(
    reward="hard", entropy_bonus=-0.05, lr=2e-3, format_share=0.3, group_size=8, steps=STEPS["squeezed"]
)
# Reward and the noise on it: from a clear signal through a drowned one to none at all.
SIGNALS: tuple[dict[str, Any], ...] = (
    {"reward": "readable"},
    {"reward": "readable", "reward_noise": 1.0},
    {"reward": "readable", "reward_noise": 3.0},
    {"reward": "hard"},
)
# Each level is used equally often; which levels meet is drawn. A negative bonus is a penalty on entropy.
FACTORS: dict[str, tuple[Any, ...]] = {
    "lr": (3e-4, 1e-3, 2e-3),
    "entropy_bonus": (-0.2, 0.0, 0.005, 0.05),
    "kl": (0.0, 0.1),
    "group_size": (4, 8),
    "filter_rho": (None, 0.9),
}


def study_runs() -> list[StudyRun]:
    """All runs, in an order in which any beginning holds a fair share of each family."""
    scenarios = {"healthy": "healthy", "template": "template-collapse"}
    grid = grid_runs()
    per_seed = len(grid) // N_SEEDS
    ordered: list[StudyRun] = []
    for seed in range(N_SEEDS):
        for family, scenario in scenarios.items():
            settings = dataclasses.replace(SCENARIOS[scenario].settings, seed=seed, steps=STEPS[family])
            ordered.append(StudyRun(name=f"{family}-{seed:02d}", family=family, settings=settings))
        ordered += grid[seed * per_seed : (seed + 1) * per_seed]
        if seed < N_SQUEEZED:
            settings = dataclasses.replace(SQUEEZED, seed=seed)
            ordered.append(StudyRun(name=f"squeezed-{seed:02d}", family="squeezed", settings=settings))
    return ordered


def grid_runs(n: int = N_GRID) -> list[StudyRun]:
    """Runs over all factors at once: their levels are dealt out like cards, with a fixed seed."""
    rng = np.random.default_rng(0)
    signals = [SIGNALS[i] for i in rng.permutation(np.resize(np.arange(len(SIGNALS)), n))]
    dealt = {
        name: [levels[i] for i in rng.permutation(np.resize(np.arange(len(levels)), n))]
        for name, levels in FACTORS.items()
    }
    runs = []
    for i, signal in enumerate(signals):
        chosen = {name: levels[i] for name, levels in dealt.items()}
        settings = TrainingSettings(steps=STEPS["grid"], seed=i * N_SEEDS // n, **signal, **chosen)
        runs.append(StudyRun(name=f"grid-{i:02d}", family="grid", settings=settings))
    return runs
