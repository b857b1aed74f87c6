"""Attention by blocks: torch's FlexAttention under the same masks, leaving out blocks in which nobody sees anybody.

A step of many traces is mostly such blocks, which a masked kernel computes and throws away. The kernel is compiled for
a shape, so keys and tokens are padded to powers of two: what is padded are blocks that are left out.

Source: Dong et al. 2024, Flex Attention (arXiv 2412.05496).
Legend: B contexts; T tokens of a step; K keys, those of the prefix and the step's own; H heads; D head width.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad

from collapsediag.scoring.attention import MaskedAttention, Own, attention_implementation
from collapsediag.scoring.cache import Prefix
from collapsediag.scoring.head import UnsupportedModelError
from collapsediag.scoring.masks import step_masks

FLEX = "collapsediag_flex"
BLOCK = 128
# torch allows 8, and this many shapes may occur: by rows, tokens, keys and kinds of layers.
MAX_KERNELS = 256
# What a model may hand its attention that is no mask.
_NOT_IN_FLEX = ("position_bias", "alibi", "head_mask", "sinks")


class FlexAttention(MaskedAttention):
    """The model's attention, masks included, block by block in one compiled kernel."""

    name = "flex"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Makes the model dispatch its attention here."""
        from transformers import AttentionInterface

        AttentionInterface.register(FLEX, flex_attention_by_blocks)
        with torch._dynamo.config.patch(recompile_limit=MAX_KERNELS), attention_implementation(self.access, FLEX):
            yield

    @contextmanager
    def applied(
        self, prefix: Prefix, own: Own, position_BT: torch.Tensor
    ) -> Iterator[torch.Tensor | Mapping[str, torch.Tensor] | None]:
        """Masks of booleans, which the layers hand on: each finds the blocks of its kind by them."""
        job = _ACTIVE.job = _Job()
        valid, position = prefix.valid_BK, prefix.position_BK
        try:
            yield step_masks(self.kinds, own.mask(), position_BT, valid, position, torch.bool)
        finally:
            _ACTIVE.job = None
        if job.calls == 0:
            raise UnsupportedModelError("it does not dispatch its attention through transformers' interface")


def bucket(length: int, least: int = BLOCK) -> int:
    """The power of two, from `least` on, that a length is padded to.

    >>> [bucket(n) for n in (1, 128, 129, 1000)], bucket(5, least=1)
    ([128, 128, 256, 1024], 8)
    """
    return max(least, 1 << (length - 1).bit_length())


@dataclass(eq=False)
class _Job:
    """Of one forward pass. blocks: by mask (held, so that its id stays its own) and by whether there are sinks."""

    calls: int = 0
    blocks: dict[tuple[int, bool], tuple[torch.Tensor, Any]] = field(default_factory=dict)

    def blocks_of(self, allowed: torch.Tensor, batch: int, *, sink: bool) -> Any:
        key = id(allowed), sink
        if key not in self.blocks:
            self.blocks[key] = allowed, block_mask(allowed, batch, sink=sink)
        return self.blocks[key][1]


class _Active(threading.local):
    job: _Job | None = None


_ACTIVE = _Active()


def block_mask(allowed: torch.Tensor, batch: int, *, sink: bool = False) -> Any:
    """FlexAttention's block mask for booleans [B or 1, 1, T, K] and a batch of B, all three padded to buckets.

    sink: one more key, the last one of its bucket, which all see.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    tokens, keys = allowed.shape[-2:]
    n_rows, n_tokens, n_keys = bucket(batch, least=1), bucket(tokens), bucket(keys + sink)
    same = allowed.shape[0] == 1 and n_rows == batch
    allowed_BTK = allowed[:, 0] if same else allowed[:, 0].expand(batch, -1, -1)
    whole_BTK = pad(allowed_BTK, (0, n_keys - keys, 0, n_tokens - tokens, 0, 0 if same else n_rows - batch))
    if sink:
        whole_BTK[:batch, :tokens, -1] = True
    whole_TK = whole_BTK[0]

    def of_its_row(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return whole_BTK[b, q, k]

    def of_all_rows(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return whole_TK[q, k]

    seen, rows = (of_all_rows, None) if same else (of_its_row, n_rows)
    return create_block_mask(seen, rows, None, n_tokens, n_keys, device=allowed.device, BLOCK_SIZE=BLOCK)


def flex_attention_by_blocks(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query [B, H, T, D] to keys and values [B, heads, K, D] under booleans; returns [B, T, H, D].

    softcap: scores s become softcap tanh(s / softcap). s_aux: [H] scores of a sink, a key whose value is zero. A window
    is in the mask. Raises UnsupportedModelError for anything else that changes scores.
    """
    job = _ACTIVE.job
    odd = [name for name in _NOT_IN_FLEX if kwargs.get(name) is not None]
    boolean = attention_mask is not None and attention_mask.dtype == torch.bool
    if job is None or odd or attention_mask is None or not boolean or dropout:
        raise UnsupportedModelError(f"its attention takes more than a mask ({', '.join(odd) or 'mask or dropout'})")
    job.calls += 1
    if not query.dtype == key.dtype == value.dtype:  # under autocast
        query, key = query.to(value.dtype), key.to(value.dtype)
    groups, rest = divmod(query.shape[1], key.shape[1])
    if rest or groups & (groups - 1):  # kernels group query heads by powers of two
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    batch, tokens = query.shape[0], query.shape[-2]
    blocks = job.blocks_of(attention_mask, batch, sink=s_aux is not None)
    n_tokens, n_keys = blocks.shape[-2:]
    rows = (0, 0, 0, bucket(batch, least=1) - batch)
    with torch.compiler.set_stance("default"):  # the policy's own compiled parts run eagerly meanwhile
        out = _kernel()(
            pad(query, (0, 0, 0, n_tokens - tokens, *rows)),
            *(pad(t, (0, 0, 0, n_keys - t.shape[-2], *rows)) for t in (key, value)),
            score_mod=_scores(softcap, s_aux, n_keys - 1),
            block_mask=blocks,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return out[:batch, :, :tokens].transpose(1, 2).contiguous(), None


def _scores(softcap: float | None, sink_H: torch.Tensor | None, last: int) -> Callable[..., torch.Tensor] | None:
    """What becomes of a score, None where nothing: it is capped, and that of the last key is its head's sink."""
    if softcap is None and sink_H is None:
        return None

    def changed(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if sink_H is not None:
            score = torch.where(k == last, sink_H[h].to(score.dtype), score)
        return score

    return changed


@functools.cache
def _kernel() -> Callable[..., torch.Tensor]:
    """Compiled: without that, the scores of all tokens under all keys would be written out."""
    from torch.nn.attention.flex_attention import flex_attention

    # A function of our own, because kernels are counted by function, and the policy's training may compile this one.
    def attend(*args: Any, **options: Any) -> torch.Tensor:
        return flex_attention(*args, **options)

    # Shapes are in buckets; without them torch would compile kernels of any length, which not all of its backends can.
    compiled: Callable[..., torch.Tensor] = torch.compile(attend, fullgraph=True, dynamic=False)
    return compiled
