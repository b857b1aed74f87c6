"""How the tokens of a forward pass attend to their prefix and to each other: one seam, two ways.

*Masked* hands the model `[prefix | new]` keys and an additive mask: any attention the model has, windows, caps and
sinks included. *Cascade* attends to the prefix (no mask, no copy) and to the step's own tokens (a block for each
tree of the step) separately and merges by log-sum-exp: only for attention that sees everything before it.

Legend: B contexts; T tokens of a step; H heads; D head width.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.cache import Prefix
from collapsediag.scoring.head import UnsupportedModelError
from collapsediag.scoring.masks import AttentionKinds, step_masks, tree_mask

IntArray = NDArray[np.int64]

CASCADE = "collapsediag_cascade"
# Neighbouring trees are joined into blocks of at least this many tokens: a call costs as much as some masked keys.
MIN_BLOCK = 32
# What a model may hand its attention, beside tensors, that the cascade would leave out.
_NOT_IN_CASCADE = ("sliding_window", "softcap")


@dataclass(frozen=True, eq=False)
class Own:
    """Who sees whom inside a step: node q sees node k exactly if k <= q < end_T[k]."""

    end_T: IntArray
    device: torch.device

    @classmethod
    def chain(cls, tokens: int, device: torch.device) -> Own:
        """Each token sees all before it."""
        return cls(np.full(tokens, tokens, dtype=np.int64), device)

    def mask(self) -> torch.Tensor:
        """[T, T] booleans."""
        return tree_mask(self.end_T).to(self.device)

    def blocks(self, dtype: torch.dtype) -> list[tuple[int, int, torch.Tensor | None]]:
        """(start, stop, additive mask [1, 1, t, t] or None: causal) of groups of trees that do not see each other."""
        found: list[tuple[int, int, torch.Tensor | None]] = []
        start = stop = 0
        while stop < self.end_T.size:
            stop = int(self.end_T[stop])
            if stop - start >= MIN_BLOCK or stop == self.end_T.size:
                mask = None
                if not (self.end_T[start:stop] == stop).all():
                    allowed = tree_mask(self.end_T[start:stop] - start)
                    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)
                    mask = mask[None, None].to(self.device)
                found.append((start, stop, mask))
                start = stop
        return found


class Attention(Protocol):
    """One way to attend."""

    name: str
    join: bool

    def installed(self) -> Any:
        """Context in which the model's forward attends this way."""
        ...

    def applied(self, prefix: Prefix, own: Own, position_BT: torch.Tensor) -> Any:
        """Context of one forward pass; gives the attention mask to hand to it."""
        ...


class MaskedAttention:
    """The model's own attention under explicit masks."""

    name, join = "masked", True

    def __init__(self, access: ModelAccess):
        self.access = access
        self.kinds = AttentionKinds.of(access)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces kernels that take no explicit mask (flash, flex) by torch's own."""
        with torchs_own(self.access) if _named(self.access) - {"eager", "sdpa", None} else nullcontext():
            yield

    @contextmanager
    def applied(
        self, prefix: Prefix, own: Own, position_BT: torch.Tensor
    ) -> Iterator[torch.Tensor | Mapping[str, torch.Tensor] | None]:
        """No mask where nothing comes before a chain: the model makes its own, or needs none."""
        if not prefix.segments:
            yield None
        else:
            dtype = prefix.dtype or self.access.dtype
            yield step_masks(self.kinds, own.mask(), position_BT, prefix.valid_BK, prefix.position_BK, dtype)


class CascadeAttention:
    """Prefix and own tokens apart, merged by log-sum-exp."""

    name, join = "cascade", False

    def __init__(self, access: ModelAccess):
        self.access = access

    @staticmethod
    def suits(access: ModelAccess) -> bool:
        """Whether it is worth trying. On a GPU the fused masked kernels have not been measured against it yet."""
        return (
            AttentionKinds.of(access).is_plain
            and access.device.type == "cpu"
            and bool(getattr(access.inner, "_supports_attention_backend", False))
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Makes the model dispatch its attention here."""
        from transformers import AttentionInterface

        AttentionInterface.register(CASCADE, cascade_attention)
        with attention_implementation(self.access, CASCADE):
            yield

    @contextmanager
    def applied(self, prefix: Prefix, own: Own, position_BT: torch.Tensor) -> Iterator[None]:
        """Tells the attention function what the forward pass continues."""
        job = _Job(prefix, own)
        _ACTIVE.job = job
        try:
            yield None
        finally:
            _ACTIVE.job = None
        if job.calls == 0:
            raise UnsupportedModelError("it does not dispatch its attention through transformers' interface")


def without_flex_attention(access: ModelAccess) -> AbstractContextManager[None]:
    """Replaces transformers' FlexAttention by torch's own: uncompiled it would write out all scores, and warn of it."""
    return torchs_own(access) if "flex_attention" in _named(access) else nullcontext()


def torchs_own(access: ModelAccess) -> AbstractContextManager[None]:
    """The model attends by what torch has, or by its own code where that does not suit it."""
    return attention_implementation(access, "sdpa" if getattr(access.inner, "_supports_sdpa", False) else "eager")


def _named(access: ModelAccess) -> set[str | None]:
    return {getattr(config, "_attn_implementation", None) for config in access.configs()}


@contextmanager
def attention_implementation(access: ModelAccess, name: str) -> Iterator[None]:
    """All configs of the model name this attention; the former ones come back."""
    # The setter of a config would also write to sub-configs that no module of this model uses.
    attribute = "_attn_implementation_internal"
    saved = [(c, attribute if hasattr(c, attribute) else "_attn_implementation") for c in access.configs()]
    before = [getattr(config, slot) for config, slot in saved]
    try:
        for config, slot in saved:
            setattr(config, slot, name)
        yield
    finally:
        for (config, slot), value in zip(saved, before, strict=True):
            setattr(config, slot, value)


@dataclass(eq=False)
class _Job:
    prefix: Prefix
    own: Own
    calls: int = 0
    blocks: dict[torch.dtype, list[tuple[int, int, torch.Tensor | None]]] = field(default_factory=dict)


class _Active(threading.local):
    job: _Job | None = None


_ACTIVE = _Active()


def cascade_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query [B, H, T, D] to the active prefix and to its own step; returns [B, T, H, D].

    Raises UnsupportedModelError for anything that plain attention does not have.
    """
    job = _ACTIVE.job
    odd = [*tensors_beside_masks(kwargs), *(name for name in _NOT_IN_CASCADE if kwargs.get(name) is not None)]
    if job is None or odd or attention_mask is not None or dropout or query.shape[-1] != value.shape[-1]:
        raise UnsupportedModelError(f"its attention is not plain ({', '.join(odd) or 'mask, dropout or widths'})")
    job.calls += 1
    if not query.dtype == key.dtype == value.dtype:  # under autocast
        query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.dtype not in job.blocks:
        job.blocks[query.dtype] = job.own.blocks(query.dtype)
    out, lse = _own_part(query, key, value, job.blocks[query.dtype], scale)
    for number, segment in enumerate(job.prefix.segments):
        keys, values = segment.keys_values[module.layer_idx]
        last = number == len(job.prefix.segments) - 1
        if segment.length_B is None:
            _merge_(out, lse, *attend(query, keys, values, scale), last=last)
        else:  # row by row, so that nothing is computed for padding
            for row, length in enumerate(segment.length_B):
                one = slice(row, row + 1)
                part = attend(query[one], keys[one, :, :length], values[one, :, :length], scale)
                _merge_(out[one], lse[one], *part, last=last)
    return out, None


def tensors_beside_masks(options: Mapping[str, Any]) -> list[str]:
    """Names of tensors that a model hands its attention and that may change scores: biases, sinks, chosen keys."""
    return [name for name, value in options.items() if isinstance(value, torch.Tensor) and name != "position_ids"]


def _own_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: list[tuple[int, int, torch.Tensor | None]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, T, H, D], log-sum-exp [B, T, H]) of attention inside the step."""
    out: list[torch.Tensor] = []
    lse: list[torch.Tensor] = []
    for start, stop, mask in blocks:
        q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
        block_out, block_lse = attend(q, k, v, scale, mask=mask, causal=mask is None)
        out.append(block_out.transpose(1, 2))
        lse.append(block_lse.transpose(1, 2))
    if len(out) == 1:
        return out[0].contiguous(), lse[0].contiguous()
    return torch.cat(out, dim=1), torch.cat(lse, dim=1)


def _merge_(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor, *, last: bool) -> None:
    """Fold attention to more keys into `out` and `lse`, in place: the weight of a part is its share of exp(lse).

    last: nothing follows, so that `lse` need not be kept up.
    """
    more_lse = more_lse.transpose(1, 2)
    weight = torch.sigmoid(more_lse - lse)[..., None].to(out.dtype)
    out.lerp_(more.transpose(1, 2), weight)
    if not last:
        torch.logaddexp(lse, more_lse, out=lse)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, H, T, D], log-sum-exp of the scaled scores [B, H, T]); a key head serves a group of query heads."""
    if query.device.type == "cpu":
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]
    return attend_by_definition(query, key, value, scale, mask=mask, causal=causal)


def attend_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` computes, written out: for devices without a kernel that gives the log-sum-exp, and for tests."""
    batch, heads, tokens, _ = query.shape
    key, value = (t.expand(batch, -1, -1, -1).repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(tokens, key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return (torch.exp(scores - lse[..., None]).to(value.dtype) @ value), lse
