"""The way between: each context runs once, and every trace continues a copy of whatever state the model keeps of it.

For layers whose state no tree of traces can share (linear attention, short convolutions, hybrids) and attention that
takes no tree mask (ALiBi, chunks). Whether a model continues its state exactly is tried out on a few tokens: Mamba and
Jamba do not where more than one token follows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.checks import HEAD_CHECK_TOKENS, chunked_head, difference, is_rounding
from collapsediag.scoring.head import HeadJob, HeadTap
from collapsediag.scoring.memory import is_out_of_memory
from collapsediag.scoring.plain import (
    Cell,
    PlainSettings,
    batches,
    forward_batch,
    pair_tokens,
    plain_logp,
    plain_tokens,
)
from collapsediag.scoring.results import Progress, Results

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NOTHING = np.zeros(0, dtype=np.int64)


def continues(
    access: ModelAccess, contexts: Sequence[IntArray], traces: Sequence[IntArray], settings: PlainSettings
) -> bool:
    """Whether a few tokens score the same on a copied state as in full."""
    if access.cache_name is None:
        return False
    # Repeated where they are shorter: a single token tells nothing of a state that more than one must continue.
    context = np.resize(max(contexts, key=len), 2 * HEAD_CHECK_TOKENS)
    trace = np.resize(max(traces, key=len), HEAD_CHECK_TOKENS)
    found: list[float] = []
    try:
        # Two different traces, so that copies which are not independent show.
        few = [trace, context[: trace.size]]
        continued_logp(
            access, [context], few, [(0, 0), (1, 0)], settings, lambda cell, logp, entropy: found.append(logp.sum())
        )
        full = [forward_batch(access, [(context, z)], settings)[0][0].sum() for z in few]
    except Exception as error:  # in whatever words the model has for a state that it does not take
        if is_out_of_memory(error):
            raise
        return False
    return all(is_rounding(difference(a, b), trace.size, access) for a, b in zip(found, full, strict=True))


def state_tokens(contexts: Sequence[IntArray], traces: Sequence[IntArray], cells: Sequence[Cell]) -> int:
    """Tokens that run for these cells, padding left out."""
    begun = sum(contexts[c].size - 1 for c in {c for _, c in cells})
    return int(begun + sum(traces[u].size for u, _ in cells))


def continued_logp(
    access: ModelAccess,
    contexts: Sequence[IntArray],
    traces: Sequence[IntArray],
    cells: Sequence[Cell],
    settings: PlainSettings,
    on_cell: Callable[[Cell, FloatArray, FloatArray | None], None],
    tap: HeadTap | None = None,
) -> None:
    """What `plain_logp` does, each context but its last token running once."""

    def length_of(cell: Cell) -> int:
        return pair_tokens(contexts[cell[1]], traces[cell[0]])

    for c in sorted({c for _, c in cells}, key=lambda c: -contexts[c].size):
        context = contexts[c]
        begun = _begun(access, context[:-1], tap) if context.size > 1 else None
        for batch in batches([cell for cell in cells if cell[1] == c], length_of, settings.max_tokens, equal=False):
            rows = [(context[-1:], traces[u]) for u, _ in batch]
            state = None if begun is None else _copies(begun, len(rows), access.device)
            scores = forward_batch(access, rows, settings, tap, state)
            for cell, (logp, entropy) in zip(batch, scores, strict=True):
                on_cell(cell, logp, entropy)


def fill_pair_by_pair(
    access: ModelAccess, results: Results, settings: PlainSettings, progress: Progress, *, continued: bool
) -> None:
    """Score the open cells one by one, on copies of each context's state or in full."""
    unique = results.unique
    score, tokens_of = (continued_logp, state_tokens) if continued else (plain_logp, plain_tokens)
    cells = [(int(u), int(c)) for u, c in np.argwhere(results.open_UC)]
    progress.plan(tokens_of(unique.contexts, unique.traces, cells))

    def store(cell: Cell, logp_T: FloatArray, entropy_T: FloatArray | None) -> None:
        results.add_cell(cell, logp_T, entropy_T)
        context, trace = unique.contexts[cell[1]], unique.traces[cell[0]]
        progress.add(trace.size if continued else pair_tokens(context, trace))

    with chunked_head(access, unique.contexts, unique.traces, settings) as tap:
        score(access, unique.contexts, unique.traces, cells, settings, store, tap)
    progress.finish()


def _begun(access: ModelAccess, tokens: IntArray, tap: HeadTap | None) -> dict[str, Any]:
    """The state after these tokens, as arguments of the next forward."""
    name = str(access.cache_name)
    arguments: dict[str, Any] = {"input_ids": torch.from_numpy(tokens.copy())[None].to(access.device)}
    if tap is not None:
        tap.job = HeadJob(NOTHING, NOTHING, NOTHING, flat=True)
    elif "logits_to_keep" in access.parameters:
        arguments["logits_to_keep"] = 1
    output = access.call(use_cache=True, **arguments)
    if tap is not None:
        tap.take(output.logits, check=False)
    return {name: getattr(output, name), "use_cache": True}


def _copies(begun: dict[str, Any], rows: int, device: torch.device) -> dict[str, Any]:
    """The same state for so many rows; a forward may change it as it likes."""
    copied = copy.deepcopy(begun)
    for state in copied.values():
        if state is not True:
            state.reorder_cache(torch.zeros(rows, dtype=torch.long, device=device))
    return copied
