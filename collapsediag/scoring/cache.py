"""Keys and values of a prefix that many continuations share, in the form that transformers models accept.

Legend: B contexts; K prefix keys, right-padded over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class PrefixLayer(DynamicLayer):  # type: ignore[misc]  # transformers comes without types
    """Prefix keys and values of one layer that no forward changes.

    `update` gives attention `[prefix | new]` and stores nothing, unless asked to keep: then `grown` holds what it gave.
    A prefix of one row serves a batch of any size.
    """

    def __init__(
        self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None, *, keep: bool = False
    ) -> None:
        super().__init__()
        self.keys, self.values, self.keep = keys, values, keep
        self.grown: tuple[torch.Tensor, torch.Tensor] | None = None
        if keys is not None:
            self.is_initialized, self.dtype, self.device = True, keys.dtype, keys.device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[prefix | new]` keys and values."""
        if self.keys is None or self.values is None:
            full = key_states, value_states
        else:
            batch = key_states.shape[0]
            full = (
                torch.cat([self.keys.expand(batch, -1, -1, -1), key_states], dim=-2),
                torch.cat([self.values.expand(batch, -1, -1, -1), value_states], dim=-2),
            )
        if self.keep:
            self.grown = full
        return full


def prefix_cache(prefix: KeysValues | None, *, keep: bool) -> Any:
    """A transformers cache over `prefix` (None: empty)."""
    cache = DynamicCache()
    if prefix is None:
        cache.layer_class_to_replicate = lambda: PrefixLayer(keep=keep)
    else:
        cache.layers = [PrefixLayer(keys, values, keep=keep) for keys, values in prefix]
        cache.layer_class_to_replicate = None
    return cache


def grown_of(cache: Any, length: int) -> KeysValues | None:
    """What the model put into the cache, or None where it did not use it as a plain key-value cache."""
    layers = list(cache.layers)
    if not layers or not all(isinstance(layer, PrefixLayer) and layer.grown is not None for layer in layers):
        return None
    grown = [layer.grown for layer in layers]
    return grown if all(k.shape[-2] == length and v.shape[-2] == length for k, v in grown) else None


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a forward pass continues.

    keys_values: for each layer, [B or 1, heads, K, width]; None for nothing at all.
    length_B: tokens before the continuation, without padding.
    valid_BK: keys that are not padding, None where none is. position_BK: position of each key, [B or 1, K].
    """

    keys_values: KeysValues | None
    length_B: torch.Tensor
    valid_BK: torch.Tensor | None
    position_BK: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device) -> Prefix:
        """Nothing before the first token."""
        zero = torch.zeros(1, dtype=torch.long, device=device)
        return cls(None, zero, None, zero[:, None][:, :0])

    @property
    def n_keys(self) -> int:
        """K."""
        return int(self.position_BK.shape[1])

    def continued(self, grown: KeysValues, position_BT: torch.Tensor) -> Prefix:
        """This prefix with the T tokens that `grown` has more; all of them are valid."""
        batch, tokens = position_BT.shape
        valid = self.valid_BK
        if valid is not None:
            valid = torch.cat([valid, valid.new_ones(batch, tokens)], dim=1)
        position = torch.cat([self.position_BK.expand(batch, -1), position_BT], dim=1)
        return Prefix(grown, self.length_B.expand(batch) + tokens, valid, position)


def stack(parts: list[Prefix]) -> Prefix:
    """One prefix of all rows of `parts`, in order, right-padded with zeros."""
    length = torch.cat([part.length_B for part in parts])
    longest = max(part.n_keys for part in parts)
    position = torch.arange(longest, device=length.device)[None, :]
    valid = position < length[:, None]
    everything_valid = bool(valid.all())
    if len(parts) == 1:
        keys_values = parts[0].keys_values
    else:
        keys_values = []
        for layers in zip(*(part.keys_values or [] for part in parts), strict=True):
            keys_values.append((_padded([k for k, _ in layers], longest), _padded([v for _, v in layers], longest)))
    return Prefix(keys_values, length, None if everything_valid else valid, position)


def _padded(tensors: list[torch.Tensor], longest: int) -> torch.Tensor:
    rows = sum(t.shape[0] for t in tensors)
    first = tensors[0]
    # Zeros, not empty memory: masked keys have probability 0, and 0 times a NaN that happened to be there is NaN.
    out = first.new_zeros(rows, first.shape[1], longest, first.shape[3])
    row = 0
    for t in tensors:
        out[row : row + t.shape[0], :, : t.shape[2]] = t
        row += t.shape[0]
    return out
