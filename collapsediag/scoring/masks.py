"""Who may look at whom: masks for packed steps, one for each kind of attention in the model.

Legend: B contexts; T tokens of a step; K keys of the prefix that they continue, right-padded over the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.scoring.access import ModelAccess

IntArray = NDArray[np.int64]
KNOWN_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class AttentionKinds:
    """kinds: the layer types that take a mask of their own, () where the model takes one mask. window: None if full."""

    kinds: tuple[str, ...]
    window: int | None

    @classmethod
    def of(cls, access: ModelAccess) -> AttentionKinds:
        """Read from the config."""
        kinds = tuple(sorted(set(access.setting("layer_types", ()))))
        window = access.setting("sliding_window")
        if kinds and not any("sliding" in kind for kind in kinds):
            window = None
        return cls(kinds, int(window) if window else None)

    @property
    def is_plain(self) -> bool:
        """Every layer sees everything before it."""
        return self.window is None


def tree_mask(end_T: IntArray) -> torch.Tensor:
    """[T, T] True where node q (row) sees node k (column): k <= q < end[k].

    >>> tree_mask(np.array([3, 2, 3])).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    node = torch.arange(end_T.size)
    return (node[None, :] <= node[:, None]) & (node[:, None] < torch.from_numpy(end_T)[None, :])


def step_masks(
    kinds: AttentionKinds,
    own_TT: torch.Tensor,
    position_BT: torch.Tensor,
    valid_BK: torch.Tensor | None,
    prefix_position_BK: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor | Mapping[str, torch.Tensor]:
    """Masks [B or 1, 1, T, K + T] in the form that transformers models take: additive, or True where one may look.

    own_TT: who sees whom inside the step. position_BT: positions of the step's tokens.
    valid_BK: prefix keys that are not padding, None where none is. prefix_position_BK: positions of the prefix keys.
    dtype: of the mask; bool for masks that are not added.
    """
    batch, tokens = position_BT.shape
    prefix_keys = prefix_position_BK.shape[1]
    rows = batch if valid_BK is not None or kinds.window is not None else 1
    allowed = own_TT.new_ones(rows, tokens, prefix_keys + tokens)
    allowed[:, :, prefix_keys:] = own_TT
    if valid_BK is not None:
        allowed[:, :, :prefix_keys] = valid_BK[:, None, :]
    if kinds.window is None:
        return _mask(allowed, dtype)
    key_position = torch.cat([prefix_position_BK.expand(batch, -1), position_BT], dim=1)
    # Compared, not subtracted: differences would take eight bytes for each of the mask's.
    near = allowed & (key_position[:, None, :] > (position_BT - kinds.window)[:, :, None])
    if len(kinds.kinds) < 2:
        return _mask(near, dtype)
    return {kind: _mask(near if "sliding" in kind else allowed, dtype) for kind in kinds.kinds}


def _mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return allowed[:, None]
    # Additive, because eager attention adds it; the smallest finite number, because a row of -inf alone would be NaN.
    least = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=allowed.device)
    return torch.where(allowed, torch.zeros_like(least), least)[:, None]
