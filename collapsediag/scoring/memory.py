"""How much fits into one forward pass, and what to do when it did not.

The formula, per forward pass of `tokens` tokens over `keys` keys (see docs/performance.md):

    keys and values     2 * layers * kv_width * itemsize                      per context token held
    activations         (8 * hidden + 3 * intermediate) * itemsize            per token
    attention           (4 * heads * head_width * itemsize) * keys            per context row (prefix | new, repeated)
    masks               (2 + kinds of layers * itemsize) * keys               per token
    logits              chunked to a fixed size, see `head`

FlexAttention repeats no heads, and its masks are of one byte, but rows, tokens and keys are padded to powers of two:
up to `PADDED` times as much of the masks, half of that of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collapsediag.scoring.access import ModelAccess
from collapsediag.scoring.masks import AttentionKinds
from collapsediag.scoring.shape import WorkModel

MIN_TOKENS = 16
# Calls that must fit before a budget that was halved is doubled again.
GROW_AFTER = 8
CPU_TOKENS = (512, 2048)
CPU_ACTIVATIONS = 1 << 20  # elements of one hidden-width activation that stay quick to reach
CPU_CONTEXT_BYTES = 512 << 20
CUDA_TOKENS = (512, 16384)
CUDA_SHARE = 0.5  # of the free memory: the rest is fragmentation, workspaces, and what the formula leaves out
PADDED = 8  # rows, tokens and keys, each up to twice as many
# Fixed cost of a layer's kernel launches, in FLOPs that could have run meanwhile.
CPU_LAUNCH = 6e6
CUDA_LAUNCH = 3e10
# Of a layer's fixed cost: one more piece to attend to.
CALL_SHARE = 0.1
# Attention under a mask reaches less of the peak than a matrix product.
ATTENTION_PENALTY = 1.5
# Matrix products that run in the time of copying a byte.
FLOPS_PER_BYTE = 8.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on any device.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(ValueError())
    (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in message or "can't allocate memory" in message or "not enough memory" in message
    )


def release_memory(device: torch.device) -> None:
    """Give cached blocks back, so that the next, smaller attempt is not stopped by fragments."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class BackOff:
    """Halves a budget when memory runs out, and tries the double again after some calls that fitted.

    What took the memory (an optimizer step, another process) may be gone; where it is not, each attempt that fails
    doubles the wait for the next one.

    >>> budget = BackOff()
    >>> budget.halve()
    >>> found = [(budget.fitted(), budget.shrink)[1] for _ in range(GROW_AFTER)]
    >>> found[:-1] == [2] * (GROW_AFTER - 1), found[-1]
    (True, 1)
    """

    def __init__(self) -> None:
        self.shrink = 1
        self._wait = GROW_AFTER
        self._fitted = 0

    def halve(self) -> None:
        """Memory ran out."""
        self.shrink *= 2
        self._fitted = 0

    def fitted(self) -> None:
        """A call ended well."""
        self._fitted += 1
        if self.shrink > 1 and self._fitted >= self._wait:
            self.shrink //= 2
            self._wait *= 2
            self._fitted = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that cost estimates need; rough where the config does not say."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_width: int
    kv_width: int
    vocabulary: int
    itemsize: int

    @classmethod
    def of(cls, access: ModelAccess) -> Shape:
        """Read from the config, under the names that transformers' models use."""
        get = access.setting
        hidden = int(get("hidden_size", get("n_embd", get("d_model", 256))))
        layers = int(get("num_hidden_layers", get("n_layer", get("n_layers", 4))))
        heads = int(get("num_attention_heads", get("n_head", get("n_heads", 4))))
        width = int(get("head_dim", max(1, hidden // heads)))
        kv_heads = get("num_key_value_heads", heads)
        intermediate = get("intermediate_size", get("ffn_dim", get("n_inner", 4 * hidden)))
        if isinstance(intermediate, (list, tuple)):  # one for each layer
            intermediate = max(intermediate)
        active = int(get("num_experts_per_tok", 1))
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=int(get("moe_intermediate_size", intermediate)) * active,
            heads=heads,
            head_width=width,
            kv_width=int(kv_heads) * width,
            vocabulary=access.vocabulary or 32000,
            itemsize=access.dtype.itemsize,
        )

    @property
    def linear_flops(self) -> float:
        """Of one token through all layers and the head, attention left out."""
        layer = 2 * self.hidden * (self.heads * self.head_width + self.kv_width) + 3 * self.hidden * self.intermediate
        return 2.0 * (self.layers * layer + self.hidden * self.vocabulary)

    @property
    def flops_per_key(self) -> float:
        """Of one (token, key) pair through all layers."""
        return 4.0 * self.layers * self.heads * self.head_width

    @property
    def context_bytes(self) -> int:
        """Keys and values of one context token."""
        return 2 * self.layers * self.kv_width * self.itemsize

    @property
    def row_key_bytes(self) -> int:
        """Copied for one key of one context row: joined to the prefix, repeated for grouped heads, in every layer."""
        return 2 * self.layers * (self.kv_width + self.heads * self.head_width) * self.itemsize

    @property
    def activation_bytes(self) -> int:
        """Of one token, at the widest point of a layer."""
        return (8 * self.hidden + 3 * self.intermediate) * self.itemsize

    @property
    def attention_bytes(self) -> int:
        """Of one key of one context row in the layer that is running."""
        return 4 * self.heads * self.head_width * self.itemsize

    @property
    def padded_attention_bytes(self) -> int:
        """The same where no head is repeated, but what was joined is copied once more, into padded rows and keys."""
        return 2 * self.kv_width * (1 + PADDED // 2) * self.itemsize


def mask_bytes(access: ModelAccess, attention: str) -> int:
    """Of one (token, key) pair: who sees whom, and what each kind of layer is given."""
    kinds = AttentionKinds.of(access)
    masks = max(1, len(kinds.kinds)) if kinds.window else 1
    return 2 + masks * (PADDED if attention == "flex" else access.dtype.itemsize)


def work_model(
    access: ModelAccess, longest_context: int, token_budget: int | None, *, shrink: int = 1, attention: str = "masked"
) -> WorkModel:
    """Tokens of a forward pass and of held contexts for this model here, divided by `shrink`.

    attention: "cascade": prefix and own tokens attend apart, without copies and masks; "flex": blocks of strangers are
        left out; "masked": everything is computed.
    """
    shape, device, cascade = Shape.of(access), access.device, attention == "cascade"
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        usable = int(free * CUDA_SHARE)
        per_token = shape.activation_bytes + mask_bytes(access, attention) * (longest_context + CUDA_TOKENS[0])
        tokens = max(CUDA_TOKENS[0], min(CUDA_TOKENS[1], usable // 2 // per_token))
        held = shape.padded_attention_bytes if attention == "flex" else shape.attention_bytes
        context_tokens = usable // 2 // (shape.context_bytes + held)
        launch = CUDA_LAUNCH
    else:
        tokens = max(CPU_TOKENS[0], min(CPU_TOKENS[1], CPU_ACTIVATIONS // shape.hidden))
        context_tokens = CPU_CONTEXT_BYTES // shape.context_bytes
        launch = CPU_LAUNCH
    return WorkModel(
        linear=shape.linear_flops,
        per_key=shape.flops_per_key * (ATTENTION_PENALTY if attention == "masked" else 1.0),
        per_row_key=0.0 if cascade else shape.row_key_bytes * FLOPS_PER_BYTE,
        own_trees_only=attention != "masked",
        per_forward=launch * shape.layers,
        per_call=launch * shape.layers * CALL_SHARE if cascade else 0.0,
        max_tokens=max(MIN_TOKENS, (token_budget or _power_of_two(tokens)) // shrink),
        max_context_tokens=max(1, context_tokens // shrink),
    )


def _power_of_two(n: int) -> int:
    return 1 << (int(n).bit_length() - 1)
