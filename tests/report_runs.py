"""Run folders for the tests of the page: a run that collapses, with whatever texts a test wants in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from collapsediag.metrics.from_matrix import matrix_metrics
from collapsediag.record import Provenance, Record, TraceSample
from collapsediag.run_folder import RunStore
from collapsediag.testing import Planted, planted, random_policy

N_HEALTHY, N_COLLAPSED, EVERY = 5, 4, 10


def write_run(
    folder: Path,
    *,
    texts: Sequence[str] = (),
    reward: float = 0.5,
    environments: Sequence[str | None] = (None,),
    draws: Sequence[str] = ("first_turn",),
    is_kept: Callable[[int, int], bool] = lambda step, row: True,
) -> Path:
    """A run of 90 steps, every tenth scored: reasoning depends on the prompt until step 40, and not from 50 on.

    texts: of the first traces of every scored step. draws: of turns; only the first of them collapses.
    is_kept: whether a row of a step is among the sampled traces.
    Step 7 failed. No step has success labels.
    """
    rng = np.random.default_rng(0)
    with RunStore(folder, provenance=Provenance(created=1.0, model="planted", dtype="float64")) as store:
        for step in range((N_HEALTHY + N_COLLAPSED - 1) * EVERY + 1):
            if step == 7:
                store.append(Record(step=step, values={}, status="failed", reason="out of <b>memory</b>"))
                continue
            values = {"reward/mean": reward + 0.1 * rng.normal(), "entropy/token_mean": 2.0 + 0.05 * rng.normal()}
            values |= {"tools/calls_per_rollout": 2.0 if step < 50 else 0.1, "length/mean": 40 + 20 * reward}
            for environment in environments:
                if environment is not None:
                    values[f"env/{environment}/reward/mean"] = reward + 0.1 * rng.normal()
            reasons = {"pass@k": "no rollout has a success label"}
            record = Record(step=step, values=values, not_measured=reasons)
            if step % EVERY == 0:
                record = _scored(record, texts, environments, draws)
                record = replace(record, traces=tuple(t for t in record.traces if is_kept(step, t.row)))
            store.append(record)
    return folder


def write_noise(folder: Path) -> Path:
    """A run of 8 scored steps that never depends on its prompt: retrieval at chance, MI within 0.01 of 0."""
    policy = random_policy(n_contexts=4, dependence=0.03, sharpness=1.0, seed=5)
    with RunStore(folder, provenance=Provenance(created=1.0, model="noise", dtype="float64")) as store:
        for step in range(8):
            matrix = policy.matrix(*policy.sample(8, seed=step))
            measured = matrix_metrics(matrix, n_resamples=200)
            values = {f"collapse_first_turn_sample/{name}": value for name, value in measured.items()}
            store.append(Record(step=step, values=values, matrices={"first_turn": matrix}))
    return folder


def _scored(record: Record, texts: Sequence[str], environments: Sequence[str | None], draws: Sequence[str]) -> Record:
    values, matrices, traces = dict(record.values), {}, []
    for draw in draws:
        is_healthy = record.step < N_HEALTHY * EVERY or draw != draws[0]
        one = planted("healthy" if is_healthy else "template", seed=record.step, step=record.step)
        measured = matrix_metrics(one.matrix, n_resamples=100)
        values |= {f"collapse_{draw}_sample/{name}": value for name, value in measured.items()}
        matrices[draw] = one.matrix
        traces += [_sample(one, draw, row, texts, environments) for row in range(one.matrix.n_traces)]
    return replace(record, values=values, matrices=matrices, traces=tuple(traces))


def _sample(one: Planted, draw: str, row: int, texts: Sequence[str], environments: Sequence[str | None]) -> TraceSample:
    logp_P = one.matrix.logp_NP[row]
    own = int(one.matrix.own_N[row])
    best = own if logp_P[own] >= logp_P.max() else int(logp_P.argmax())
    text = texts[row] if row < len(texts) else one.decode(one.pairs().traces[row])
    return TraceSample(
        namespace=draw,
        row=row,
        own=own,
        best=best,
        group=text if row < len(texts) else f"group {own}",
        length=6,
        logp_P=tuple(logp_P.tolist()),
        context=text if row < len(texts) else f"the task says: prompt number {own}, think first",
        context_best=None if best == own else f"the task says: prompt number {best}, think first",
        trace=text,
        reward=float(row % 3) / 2,
        environment=environments[row % len(environments)],
        tokens=("alpha ", "beta ", "gamma") if row == len(texts) else None,
        pmi=(1.5, -0.75, 0.0) if row == len(texts) else None,
    )
