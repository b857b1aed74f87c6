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
from typing import Any, TypeGuard

import torch
from torch.nn.functional import pad

from collapsediag.scoring.attention import MaskedAttention, Own, attention_implementation, tensors_beside_masks
from collapsediag.scoring.cache import Prefix
from collapsediag.scoring.head import UnsupportedModelError
from collapsediag.scoring.masks import step_masks

FLEX = "collapsediag_flex"
BLOCK = 128
# torch allows 8, and this many shapes may occur: by rows, tokens, keys and kinds of layers.
MAX_KERNELS = 256
# Masks of one forward pass whose blocks are kept: one for each kind of layer. More are copies, one for each layer.
MAX_MASKS = 4


class FlexAttention(MaskedAttention):
    """The model's attention, masks included, block by block in one compiled kernel."""

    name = "flex"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Makes the model dispatch its attention here."""
        from transformers import AttentionInterface

        AttentionInterface.register(FLEX, flex_attention_by_blocks)
        config = torch._dynamo.config
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.7
        with config.patch(**{limit: MAX_KERNELS}), attention_implementation(self.access, FLEX):
            yield

    @contextmanager
    def applied(
        self, prefix: Prefix, own: Own, position_BT: torch.Tensor
    ) -> Iterator[torch.Tensor | Mapping[str, torch.Tensor] | None]:
        """Masks of booleans, which the layers hand on: each finds the blocks of its kind by them."""
        if not hasattr(torch.compiler, "set_stance"):
            raise UnsupportedModelError(
                f"FlexAttention needs torch 2.6 or later, and this is torch {torch.__version__}"
            )
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
    """Of one forward pass. blocks: by the mask's place in memory (held, so that it stays its own), and its sinks."""

    calls: int = 0
    blocks: dict[tuple[Any, ...], tuple[torch.Tensor, Any]] = field(default_factory=dict)

    def blocks_of(self, allowed: torch.Tensor, batch: int, *, sink: bool) -> Any:
        key = allowed.data_ptr(), allowed.shape, allowed.stride(), sink
        if key not in self.blocks:
            if len(self.blocks) == MAX_MASKS:
                del self.blocks[next(iter(self.blocks))]
            self.blocks[key] = allowed, block_mask(allowed, batch, sink=sink)
        return self.blocks[key][1]


class _Active(threading.local):
    job: _Job | None = None


_ACTIVE = _Active()


def block_mask(allowed: torch.Tensor, batch: int, *, sink: bool = False) -> Any:
    """FlexAttention's block mask for booleans [B or 1, 1, T, K] and a batch of B, all three padded to buckets.

    sink: one more key, the last one of its bucket, which all see.
    """
    from torch.nn.attention.flex_attention import BlockMask

    mask_rows, _, tokens, keys = allowed.shape
    n_tokens, n_keys = bucket(tokens), bucket(keys + sink)
    n_rows = bucket(batch, least=1)
    more_rows = n_rows - batch if mask_rows == batch else 0
    whole_BTK = pad(allowed[:, 0], (0, n_keys - keys, 0, n_tokens - tokens, 0, more_rows))
    if sink:
        whole_BTK[:mask_rows, :tokens, -1] = True
    whole_TK = whole_BTK[0]

    def of_its_row(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return whole_BTK[b, q, k]

    def of_all_rows(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return whole_TK[q, k]

    # Not by torch's create_block_mask, which writes out 16 to 20 bytes for each of the mask's.
    cells = whole_BTK[:mask_rows].unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    some, full = cells.any(-1).any(2), cells.all(-1).all(2)
    partly, fully = (
        pad(blocks.expand(batch, -1, -1), (0, 0, 0, 0, 0, n_rows - batch))[:, None] for blocks in (some & ~full, full)
    )
    seen = of_all_rows if mask_rows == 1 else of_its_row
    return BlockMask.from_kv_blocks(*_in_order(partly), *_in_order(fully), BLOCK_SIZE=BLOCK, mask_mod=seen)


def _in_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(number, places: those first) of the blocks that are True in each row [..., blocks of keys]."""
    return blocks.sum(-1, dtype=torch.int32), torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()


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
    job, odd = _ACTIVE.job, tensors_beside_masks(kwargs)
    batch, tokens, keys = query.shape[0], query.shape[-2], key.shape[-2]
    if job is None or odd or dropout or not _is_step_mask(attention_mask, batch, tokens, keys):
        raise UnsupportedModelError(f"its attention takes more than a mask ({', '.join(odd) or 'mask or dropout'})")
    job.calls += 1
    if not query.dtype == key.dtype == value.dtype:  # under autocast
        query, key = query.to(value.dtype), key.to(value.dtype)
    blocks = job.blocks_of(attention_mask, batch, sink=s_aux is not None)
    n_rows, _, n_tokens, n_keys = blocks.shape
    with torch.compiler.set_stance("default"):  # the policy's own compiled parts run eagerly meanwhile
        out = _kernel()(
            _padded(query, n_rows, n_tokens),
            _padded(key, n_rows, n_keys),
            _padded(value, n_rows, n_keys),
            score_mod=_scores(softcap, s_aux, n_keys - 1),
            block_mask=blocks,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return out[:batch, :, :tokens].transpose(1, 2).contiguous(), None


def _padded(tensor: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """[rows, H, length, D], in one order: what needs no padding keeps its own, for which torch compiles once more."""
    more_rows, more = rows - tensor.shape[0], length - tensor.shape[2]
    return pad(tensor, (0, 0, 0, more, 0, 0, 0, more_rows)).contiguous()


def _is_step_mask(mask: torch.Tensor | None, batch: int, tokens: int, keys: int) -> TypeGuard[torch.Tensor]:
    """Booleans of every token and key, the same for all heads."""
    shapes = (1, 1, tokens, keys), (batch, 1, tokens, keys)
    return mask is not None and mask.dtype == torch.bool and mask.shape in shapes


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

    # A function of our own, because kernels are counted by function, and the policy's training may compile torch's.
    def attend(*args: Any, **options: Any) -> torch.Tensor:
        if not torch.compiler.is_dynamo_compiling():  # it runs as it stands
            raise UnsupportedModelError(
                "torch does not compile it (TORCHDYNAMO_DISABLE is set, or its FLOPs are being counted)"
            )
        return flex_attention(*args, **options)

    # Shapes are in buckets; without them torch would compile kernels of any length, which not all of its backends can.
    compiled: Callable[..., torch.Tensor] = torch.compile(attend, fullgraph=True, dynamic=False)
    return compiled
