"""The plain way: `[X | Z]` forwarded in full, no cache, no trick. The oracle of the fast path, and its fallback.

Sorted by length, each distinct pair once, only the positions of Z brought to logits where the model can slice them.
The last token of Z predicts nothing, so it is not run.

Legend: B pairs of a batch; T tokens of a row; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.errors import ScoringError
from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.head import HeadJob, HeadTap

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Cell = tuple[int, int]  # (trace, context), numbers among the distinct ones


@dataclass(frozen=True)
class PlainSettings:
    """temperature: logits are divided by it. max_tokens: of a padded batch. entropies: computed too."""

    temperature: float = 1.0
    max_tokens: int = 2048
    entropies: bool = False


def batches(
    cells: Sequence[Cell], length_of: Callable[[Cell], int], max_tokens: int, *, equal: bool
) -> list[list[Cell]]:
    """Cells sorted by length, the longest first, cut so that a padded batch has at most `max_tokens` tokens.

    equal: only cells of equal length share a batch, for models in which padding changes the numbers.
    """
    found: list[list[Cell]] = []
    for cell in sorted(cells, key=lambda c: (-length_of(c), c[1], c[0])):
        last = found[-1] if found else None
        if (
            last is not None
            and (len(last) + 1) * length_of(last[0]) <= max_tokens
            and not (equal and length_of(cell) != length_of(last[0]))
        ):
            last.append(cell)
        else:
            found.append([cell])
    return found


def pair_tokens(context: IntArray, trace: IntArray) -> int:
    """Tokens that run for one pair."""
    return int(context.size + trace.size - 1)


def plain_tokens(contexts: Sequence[IntArray], traces: Sequence[IntArray], cells: Sequence[Cell]) -> int:
    """Tokens that run for these cells, padding left out."""
    return sum(pair_tokens(contexts[c], traces[u]) for u, c in cells)


def logits_of(output: Any) -> torch.Tensor:
    """The logits of whatever a forward returned: an output object, a tuple, or the tensor itself."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise ScoringError(
            f"the model's forward returned {type(output).__name__} without logits [batch, tokens, vocabulary]; scoring "
            "needs a causal language model with its head."
        )
    return logits


def forward_batch(
    access: ModelAccess,
    rows: Sequence[tuple[IntArray, IntArray]],
    settings: PlainSettings,
    tap: HeadTap | None = None,
    state: dict[str, Any] | None = None,
) -> list[tuple[FloatArray, FloatArray | None]]:
    """Per-token log-probs (and entropies) of the traces of one batch of (context, trace) rows.

    tap: of the head, which then makes a few rows of logits at a time. Without it the model makes them, all at once.
    state: arguments of the forward, of what came before the rows.
    """
    # Where rotary frequencies depend on the length of the whole, leaving out the last token would change them.
    stop = -1 if access.length_dependent_rope is None else None
    sequences = [np.concatenate([context, trace[:stop]]) for context, trace in rows]
    longest = max(s.size for s in sequences)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : sequence.size] = sequence
        # Padded with its own token: an embedding that is NaN must not come in from elsewhere.
        ids[row, sequence.size :] = sequence[-1]
    first = min(context.size for context, _ in rows) - 1  # the first position whose logits are read
    arguments: dict[str, Any] = {"input_ids": torch.from_numpy(ids).to(access.device)}
    if state is not None:
        arguments.update(state)
    elif access.config is not None:
        arguments["use_cache"] = False
    # No mask: padding follows the tokens. Under a mask, padding that outlasts a window sees nothing at all: NaN.
    if tap is not None:
        return _tapped(access, rows, settings, tap, arguments)
    if "logits_to_keep" in access.parameters:
        arguments["logits_to_keep"] = longest - first
    logits = logits_of(access.call(**arguments))
    skipped = longest - logits.shape[1]
    found = []
    for row, (context, trace) in enumerate(rows):
        start = context.size - 1 - skipped
        found.append(_read(logits[row, start : start + trace.size], trace, settings))
    return found


def _tapped(
    access: ModelAccess,
    rows: Sequence[tuple[IntArray, IntArray]],
    settings: PlainSettings,
    tap: HeadTap,
    arguments: dict[str, Any],
) -> list[tuple[FloatArray, FloatArray | None]]:
    longest = arguments["input_ids"].shape[1]
    size_B = [trace.size for _, trace in rows]
    read = [b * longest + context.size - 1 + np.arange(trace.size) for b, (context, trace) in enumerate(rows)]
    tokens = sum(size_B)
    tap.job = HeadJob(
        np.concatenate(read),
        np.arange(tokens),
        np.concatenate([trace for _, trace in rows]),
        np.ones((1, tokens), dtype=np.bool_) if settings.entropies else None,
        flat=True,
    )
    result = tap.take(getattr(access.call(**arguments), "logits", None), check=True)
    logp, entropy = (None if t is None else t[0].double().cpu().numpy() for t in (result.logp_BM, result.entropy_BR))
    cuts = np.cumsum(size_B)[:-1]
    assert logp is not None
    entropies = [None] * len(rows) if entropy is None else np.split(entropy, cuts)
    return list(zip(np.split(logp, cuts), entropies, strict=True))


def _read(logits_TV: torch.Tensor, trace: IntArray, settings: PlainSettings) -> tuple[FloatArray, FloatArray | None]:
    if logits_TV.dtype != torch.float64:
        logits_TV = logits_TV.float()
    logp_TV = (logits_TV / settings.temperature).log_softmax(-1)
    target = torch.from_numpy(trace).to(logits_TV.device)
    logp = logp_TV.gather(-1, target[:, None])[:, 0].double().cpu().numpy()
    entropy = None
    if settings.entropies:
        entropy = torch.special.entr(logp_TV.exp()).sum(-1).double().cpu().numpy()
    return logp, entropy


def plain_logp(
    access: ModelAccess,
    contexts: Sequence[IntArray],
    traces: Sequence[IntArray],
    cells: Sequence[Cell],
    settings: PlainSettings,
    on_cell: Callable[[Cell, FloatArray, FloatArray | None], None],
    tap: HeadTap | None = None,
) -> None:
    """Score `cells` and hand each to `on_cell(cell, logp_T, entropy_T)`, in batches, the longest first.

    tap: of the head, see `forward_batch`.
    """
    rope_limit = access.length_dependent_rope

    def length_of(cell: Cell) -> int:
        return pair_tokens(contexts[cell[1]], traces[cell[0]])

    equal = rope_limit is not None and any(length_of(cell) >= rope_limit for cell in cells)
    todo = batches(cells, length_of, settings.max_tokens, equal=equal)
    if equal:  # such frequencies grow with the longest sequence seen so far
        todo.reverse()
    for batch in todo:
        rows = [(contexts[c], traces[u]) for u, c in batch]
        for cell, (logp, entropy) in zip(batch, forward_batch(access, rows, settings, tap), strict=True):
            on_cell(cell, logp, entropy)
