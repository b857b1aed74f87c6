"""Scoring inside veRL's workers: each prompt runs once, instead of once with every trace.

The plain contract has no way to say that rows share a prompt. But every worker of veRL carries out a function that it
is sent (`execute_with_func_generator`), and inside it stands a transformers model under FSDP, which HFScorer scores by
shared prefixes; DistributedScorer keeps the ranks in step and tells a failure on one of them to all.

Legend: N traces, P contexts.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from collapsediag.errors import ScoringError
from collapsediag.integrations.verl.scorer import Limits, check_rows, last_line
from collapsediag.matrix import LogLikelihoodMatrix
from collapsediag.pairs import ScoringPairs
from collapsediag.scoring.cells import BoolArray, FloatArray, matrix_of

KEY = "collapsediag"


class InsideScorer:
    """Scores a matrix by one call to all workers. See Limits; `micro_batch_tokens` bounds a forward pass."""

    def __init__(self, worker_group: Any, limits: Limits) -> None:
        self.worker_group = worker_group
        self.limits = limits

    @property
    def temperature(self) -> float:
        """Of the distribution that is scored."""
        return self.limits.temperature

    def __repr__(self) -> str:
        return f"InsideScorer(temperature={self.temperature:g})"

    def score(self, pairs: ScoringPairs) -> LogLikelihoodMatrix:
        """Score every trace of `pairs` under every context. Raises ScoringError where the workers could not."""
        return matrix_of(pairs, self.score_cells(pairs, np.ones((pairs.n_traces, pairs.n_contexts), dtype=np.bool_)))

    def score_cells(self, pairs: ScoringPairs, scored_NP: BoolArray) -> FloatArray:
        """Log-likelihoods [N, P] of the cells marked in `scored_NP`, NaN elsewhere."""
        import torch
        from verl import DataProto

        contexts, traces = [ids.tolist() for ids in pairs.contexts], [ids.tolist() for ids in pairs.traces]
        longest = max(contexts, key=len), max(traces, key=len)
        check_rows([*((x, longest[1]) for x in contexts), *((longest[0], z) for z in traces)], 1, self.limits)
        request = DataProto.from_dict(
            {"rank": torch.arange(self.worker_group.world_size)},
            meta_info={KEY: (pairs, scored_NP, self.limits)},
        )
        try:
            found = self.worker_group.execute_with_func_generator(score_inside, request)
        except Exception as error:
            raise ScoringError(f"scoring inside the workers failed: {last_line(error)}") from error
        cells: FloatArray = found.batch["logp_NP"][0].numpy()
        return cells


def score_inside(worker: Any, request: Any) -> Any:
    """On every rank: this rank's share of the cells; all return the whole matrix."""
    import torch
    from verl import DataProto
    from verl.utils.device import get_device_name

    from collapsediag.scoring.distributed import DistributedScorer
    from collapsediag.scoring.hf import HFScorer

    pairs, scored_NP, limits = request.meta_info[KEY]
    engine = worker.actor.engine
    kept = vars(worker).get(KEY)
    if kept is None or kept[0] != limits:
        inner = HFScorer(engine.module, temperature=limits.temperature, token_budget=limits.micro_batch_tokens)
        kept = vars(worker)[KEY] = limits, DistributedScorer(inner)
    dtype = getattr(engine, "_autocast_dtype", torch.float32)
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype=dtype)
    with engine.eval_mode(), autocast:  # loads what is offloaded, as the engine's own passes do
        logp_NP = kept[1].score_cells(pairs, scored_NP)
    return DataProto.from_dict({"logp_NP": torch.from_numpy(np.asarray(logp_NP))[None]})
