"""Keys and values of a prefix that many continuations share, in the form that transformers models accept.

Legend: B contexts; K keys of a segment, right-padded over the batch; T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]

# A shared beginning this long stays one copy for all rows of a batch; a shorter one is copied into each row, because
# attending to one piece is faster than to two.
MIN_SHARED_COPY = 1024


class PrefixLayer(DynamicLayer):  # type: ignore[misc]  # transformers comes without types
    """Prefix keys and values of one layer that no forward changes.

    segments: pieces of the prefix; a piece of one row serves a batch of any size.
    join: `update` gives attention `[prefix | new]`; otherwise the new ones alone, for an attention that finds the
        prefix itself. Nothing is stored, unless `keep`: then `grown` holds the new keys and values.
    """

    def __init__(self, segments: KeysValues, length: int, *, keep: bool, join: bool) -> None:
        super().__init__()
        self.segments, self.length, self.keep, self.join = segments, length, keep, join
        self.grown: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for attention to read."""
        if self.keep:
            self.grown = key_states, value_states
        if not self.join or not self.segments:
            return key_states, value_states
        batch = key_states.shape[0]
        keys = [k.expand(batch, -1, -1, -1) for k, _ in self.segments]
        values = [v.expand(batch, -1, -1, -1) for _, v in self.segments]
        return torch.cat([*keys, key_states], dim=-2), torch.cat([*values, value_states], dim=-2)

    def get_seq_length(self) -> int:
        """Keys of the prefix."""
        return self.length


@dataclass(frozen=True, eq=False)
class Segment:
    """Keys and values of all layers, [B or 1, heads, K, width]. length_B: how many of the K are valid, None for all."""

    keys_values: KeysValues
    length_B: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a forward pass continues.

    segments: its keys and values, in order.
    length_B: tokens before the continuation, padding not counted, [B or 1].
    valid_BK: keys that are not padding, None where none is. position_BK: position of each key, [B or 1, K].
    """

    segments: tuple[Segment, ...]
    length_B: torch.Tensor
    valid_BK: torch.Tensor | None
    position_BK: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device) -> Prefix:
        """Nothing before the first token."""
        return cls((), torch.zeros(1, dtype=torch.long, device=device), None, torch.zeros(1, 0, device=device).long())

    @property
    def n_keys(self) -> int:
        """K, padding included."""
        return int(self.position_BK.shape[1])

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the keys."""
        return self.segments[0].keys_values[0][0].dtype if self.segments else None

    def cache(self, *, keep: bool, join: bool) -> Any:
        """A transformers cache over this prefix."""
        cache = DynamicCache()
        if self.segments:
            layers = zip(*(segment.keys_values for segment in self.segments), strict=True)
            cache.layers = [PrefixLayer(list(layer), self.n_keys, keep=keep, join=join) for layer in layers]
            cache.layer_class_to_replicate = None
        else:
            cache.layer_class_to_replicate = lambda: PrefixLayer([], 0, keep=keep, join=join)
        return cache

    def continued(self, new: KeysValues, position_BT: torch.Tensor) -> Prefix:
        """This prefix and T more tokens, all of them valid."""
        batch, tokens = position_BT.shape
        valid = self.valid_BK
        if valid is not None:
            valid = torch.cat([valid, valid.new_ones(batch, tokens)], dim=1)
        position = torch.cat([self.position_BK.expand(batch, -1), position_BT], dim=1)
        return Prefix((*self.segments, Segment(new)), self.length_B.expand(batch) + tokens, valid, position)


def new_keys_values(cache: Any, tokens: int) -> KeysValues | None:
    """What a forward added to a kept cache; None where the model did not use it as a plain key-value cache."""
    grown = [getattr(layer, "grown", None) for layer in cache.layers]
    if not grown or any(g is None or g[0].shape[-2] != tokens or g[1].shape[-2] != tokens for g in grown):
        return None
    return grown  # type: ignore[return-value]


def stack(parts: Sequence[tuple[Prefix, KeysValues, torch.Tensor]]) -> Prefix:
    """One prefix of all rows of `parts`: each (base of one row, keys and values of suffixes, suffix lengths [b])."""
    bases, suffixes, sizes = zip(*parts, strict=True)
    size_B = torch.cat(list(sizes))
    shared = bases[0] if all(base is bases[0] for base in bases) and bases[0].n_keys >= MIN_SHARED_COPY else None
    start_B = torch.cat([base.length_B.expand(size.shape[0]) for base, _, size in parts])
    own_B = size_B if shared else size_B + start_B
    before = [() if shared else base.segments for base in bases]
    keys_values = [
        (_joined([[s.keys_values[n][0] for s in b] for b in before], [s[n][0] for s in suffixes]),
         _joined([[s.keys_values[n][1] for s in b] for b in before], [s[n][1] for s in suffixes]))
        for n in range(len(suffixes[0]))
    ]  # fmt: skip
    longest = keys_values[0][0].shape[2]
    column = torch.arange(longest, device=size_B.device)[None, :]
    padded = bool((own_B < longest).any())
    segment = Segment(keys_values, tuple(own_B.tolist()) if padded else None)
    valid = column < own_B[:, None] if padded else None
    if shared is None:
        return Prefix((segment,), own_B, valid, column)
    if valid is not None:
        valid = torch.cat([valid.new_ones(valid.shape[0], shared.n_keys), valid], dim=1)
    position = torch.cat([shared.position_BK, column + shared.n_keys], dim=1)
    return Prefix((*shared.segments, segment), start_B + own_B, valid, position)


def _joined(before: list[list[torch.Tensor]], suffixes: list[torch.Tensor]) -> torch.Tensor:
    """Rows `[before | suffix]` below each other, right-padded with zeros."""
    if len(suffixes) == 1 and not before[0]:
        return suffixes[0]
    first = suffixes[0]
    longest = max(sum(p.shape[2] for p in b) + s.shape[2] for b, s in zip(before, suffixes, strict=True))
    # Zeros, not empty memory: masked keys have probability 0, and 0 times a NaN that happened to be there is NaN.
    out = first.new_zeros(sum(s.shape[0] for s in suffixes), first.shape[1], longest, first.shape[3])
    row = 0
    for pieces, suffix in zip(before, suffixes, strict=True):
        rows, column = slice(row, row + suffix.shape[0]), 0
        for piece in (*pieces, suffix):
            out[rows, :, column : column + piece.shape[2]] = piece
            column += piece.shape[2]
        row = rows.stop
    return out
