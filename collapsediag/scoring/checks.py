"""What the fast ways are held against: the plain path on a few pairs, the model's own logits on a few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.head import HeadTap
from collapsediag.scoring.memory import is_out_of_memory, release_memory
from collapsediag.scoring.plain import Cell, PlainSettings, forward_batch, pair_tokens, plain_logp
from collapsediag.scoring.results import Results

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

RANDOM_CHECKS = 3
HEAD_CHECK_TOKENS = 8
# How far two ways may differ in a trace's sum: nats per token, and nats per trace. They tell a wrong mask (tenths of a
# nat per token) from rounding: many float64 models take softmax, router or norms in float32, and bfloat16 rounds a
# logit of 20 to steps of an eighth.
TOLERANCE = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (1e-4, 1e-3),
    torch.float16: (1e-2, 0.1),
    torch.bfloat16: (3e-2, 1.0),
}


def working_dtype(access: ModelAccess) -> torch.dtype:
    """The precision that a forward pass runs in: autocast's, where that is on."""
    kind = access.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return access.dtype


def difference(a: float, b: float) -> float:
    """Between two sums that may be NaN or infinite: 0 where both are the same."""
    return 0.0 if np.array_equal(a, b, equal_nan=True) else abs(a - b)


def is_rounding(gap: float, tokens: int, access: ModelAccess) -> bool:
    """Whether sums over so many tokens may lie that far apart. NaN may not."""
    per_token, per_trace = TOLERANCE.get(working_dtype(access), TOLERANCE[torch.float32])
    return gap <= per_token * tokens + per_trace


@contextmanager
def chunked_head(
    access: ModelAccess, contexts: Sequence[IntArray], traces: Sequence[IntArray], settings: PlainSettings
) -> Iterator[HeadTap | None]:
    """A tapped head for the plain path, so that no forward makes all logits; None where the model's own must be used.

    That is where the head is not known, or where a few tokens show that tapping it gives other numbers.
    """
    tap = _agreeing_tap(access, (contexts[0][:HEAD_CHECK_TOKENS], traces[0][:HEAD_CHECK_TOKENS]), settings)
    with tap or nullcontext():
        yield tap


def _agreeing_tap(access: ModelAccess, row: tuple[IntArray, IntArray], settings: PlainSettings) -> HeadTap | None:
    own = forward_batch(access, [row], settings)[0][0]
    try:
        tap = HeadTap(access, settings.temperature)
        with tap:
            tapped = forward_batch(access, [row], settings, tap)[0][0]
    except Exception as error:  # in whatever words the model has for a head that gives one column
        if is_out_of_memory(error):
            raise
        return None
    return tap if is_rounding(difference(float(own.sum()), float(tapped.sum())), own.size, access) else None


def self_check(
    access: ModelAccess, results: Results, settings: PlainSettings, seed: int
) -> tuple[float | None, str | None]:
    """Largest difference of `results` from the plain path, nats per token, and what is wrong where it is too large.

    Compared are the longest pair and a few that `seed` draws. A pair that does not fit in full (the fast path ran it in
    pieces) is left out; None where none fits.
    """
    unique = results.unique
    cells = [(int(u), int(c)) for u, c in np.argwhere(unique.wanted_UC)]

    def length_of(cell: Cell) -> int:
        return pair_tokens(unique.contexts[cell[1]], unique.traces[cell[0]])

    drawn = np.random.default_rng(seed).choice(len(cells), size=min(RANDOM_CHECKS, len(cells)), replace=False)
    chosen = sorted({max(cells, key=length_of), *(cells[i] for i in drawn)}, key=length_of, reverse=True)
    worst: float | None = None
    reason: str | None = None

    def compare(cell: Cell, logp_T: FloatArray, entropy_T: FloatArray | None) -> None:
        nonlocal worst, reason
        gap, length = difference(float(results.sum_UC[cell]), float(logp_T.sum())), logp_T.size
        worst = max(worst or 0.0, gap / length)
        if not is_rounding(gap, length, access):
            reason = f"its fast scores differ from the plain ones by {gap / length:.2g} nats a token in the self-check"

    while chosen:
        try:
            with chunked_head(access, unique.contexts, unique.traces, settings) as tap:
                plain_logp(access, unique.contexts, unique.traces, chosen, settings, compare, tap)
            break
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_memory(access.device)
        chosen = chosen[1:]
    return worst, reason
