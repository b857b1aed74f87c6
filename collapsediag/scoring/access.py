"""What must be known about a model before it can be scored: its parts, its limits, what its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from collapsediag.errors import ScoringError

IntArray = NDArray[np.int64]

# Names under which configs keep the longest sequence that the model knows positions for.
_LIMIT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelAccess:
    """The parts of a model that scoring uses.

    outer: what is called, so that hooks of FSDP, ZeRO and PEFT fire.
    inner: the transformers model inside, whose signature and head are read.
    config: its text config, or None for a model of another make.
    parameters: names that `inner.forward` takes.
    """

    outer: nn.Module
    inner: nn.Module
    config: Any
    parameters: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> ModelAccess:
        """Look into `model`. Raises ScoringError for an encoder-decoder model, or one that reads both ways."""
        if not isinstance(model, nn.Module):
            raise ScoringError(
                f"a model must be a torch module, found {type(model).__name__}. Load one with collapsediag.load_policy."
            )
        outer = _without_replication(model)
        inner = outer
        while not hasattr(inner, "get_output_embeddings") and isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        if hasattr(inner, "get_base_model"):  # PEFT: the adapter's forward takes anything and passes it on
            inner = inner.get_base_model()
        config = getattr(inner, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise ScoringError(
                f"{type(inner).__name__} is an encoder-decoder model; scoring needs a causal language model, which "
                "reads context and trace as one sequence."
            )
        ways = {module.is_causal for module in inner.modules() if isinstance(getattr(module, "is_causal", None), bool)}
        if ways == {False}:
            raise ScoringError(
                f"{type(inner).__name__} reads text in both directions: it sees the token that it is asked to predict, "
                "so its scores are no log-likelihoods. Scoring needs a causal language model."
            )
        if config is not None and hasattr(config, "get_text_config"):
            config = config.get_text_config()
        return cls(outer, inner, config, frozenset(inspect.signature(inner.forward).parameters))

    def setting(self, name: str, default: Any = None) -> Any:
        """A value of the config, the largest where layers differ, `default` where there is none."""
        value = max(self.layer_settings(name), default=None)
        return default if value is None else value

    def layer_settings(self, name: str) -> list[Any]:
        """The values of the config that are not None: one, or each layer's where the config says that they differ."""
        try:
            values = [getattr(self.config, name, None)]
        except RuntimeError:  # transformers gives no value for all layers then
            values = [getattr(layer, name, None) for layer in self.config.per_layer_config]
        return [value for value in values if value is not None]

    @property
    def embeddings(self) -> nn.Module | None:
        """The input embeddings, where the model says which they are."""
        try:
            found = self.inner.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            return None
        return found if isinstance(found, nn.Module) else None

    @property
    def head(self) -> nn.Module | None:
        """The module that turns hidden states into logits, where the model says which it is."""
        try:
            found = self.inner.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return None
        return found if isinstance(found, nn.Module) else None

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        embeddings = self.embeddings
        for module in (embeddings, self.inner):
            parameter = None if module is None else next(module.parameters(), None)
            if parameter is not None and parameter.device.type != "meta":
                return parameter.device
        device = getattr(self.inner, "device", None)
        return device if isinstance(device, torch.device) and device.type != "meta" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' floating-point type."""
        return next((p.dtype for p in self.inner.parameters() if p.is_floating_point()), torch.float32)

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids the model knows, padding of its embeddings included; None where unknown."""
        size = getattr(self.embeddings, "num_embeddings", None) or self.setting("vocab_size")
        return int(size) if isinstance(size, int) else None

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence the model has positions for; None where it has no such limit."""
        if self.config is None or self.setting("alibi", False):
            return None
        for name in _LIMIT_NAMES:
            value = getattr(self.config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        return None

    @property
    def cache_name(self) -> str | None:
        """What its forward calls the state that it continues; None where it takes none."""
        names = [name for name in ("cache", "past_key_values", "cache_params") if name in self.parameters]
        return names[0] if names and self.config is not None else None

    @property
    def length_dependent_rope(self) -> int | None:
        """Length beyond which rotary frequencies depend on the sequence's length; None where they never do."""
        rope = self.setting("rope_parameters") or self.setting("rope_scaling") or {}
        settings = [rope, *(v for v in rope.values() if isinstance(v, dict))] if isinstance(rope, dict) else []
        for one in settings:
            if (one.get("rope_type") or one.get("type")) in _LENGTH_DEPENDENT_ROPE:
                original = one.get("original_max_position_embeddings") or self.setting(
                    "original_max_position_embeddings", self.setting("max_position_embeddings", 0)
                )
                return int(original)
        return None

    def configs(self) -> Iterator[Any]:
        """Every distinct config object in the model that names an attention implementation."""
        seen: set[int] = set()
        for module in self.inner.modules():
            config = getattr(module, "config", None)
            if config is not None and id(config) not in seen and hasattr(config, "_attn_implementation"):
                seen.add(id(config))
                yield config

    def call(self, **arguments: Any) -> Any:
        """One forward pass of the outer model, without what would only cost: router losses, tuples."""
        if "output_router_logits" in self.parameters:
            arguments["output_router_logits"] = False
        return self.outer(**arguments)


def _without_replication(model: nn.Module) -> nn.Module:
    """`model` without wrappers that only replicate or compile.

    DistributedDataParallel syncs buffers in every forward: ranks that run different numbers of forwards would hang.
    A compiled model would be compiled anew for each of our shapes.
    """
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model


def check_ids(
    access: ModelAccess, contexts: Sequence[IntArray], traces: Sequence[IntArray], max_tokens: int | None
) -> None:
    """Raise ScoringError for what no forward pass could score: empty contexts, unknown ids, too many tokens."""
    for column, context in enumerate(contexts):
        if context.size == 0:
            raise ScoringError(
                f"context {column} is empty: the first token of a trace is predicted from the context's last token. "
                "Give the prompt as the policy saw it, or put a begin-of-sequence token there."
            )
    vocabulary = access.vocabulary
    if vocabulary is not None:
        for what, sequences in (("context", contexts), ("trace", traces)):
            for number, ids in enumerate(sequences):
                # A negative id would be looked up from the end of the vocabulary.
                unknown = (ids < 0) | (ids >= vocabulary)
                if unknown.any():
                    place = int(unknown.argmax())
                    raise ScoringError(
                        f"{what} {number} holds token id {int(ids[place])} at position {place}, but the model's "
                        f"vocabulary has {vocabulary} entries (0 to {vocabulary - 1}). The ids come from another "
                        "tokenizer: use the policy that wrote the rollouts, or its own tokenizer."
                    )
    if max_tokens is not None and traces:
        trace = max(range(len(traces)), key=lambda i: traces[i].size)
        column = max(range(len(contexts)), key=lambda j: contexts[j].size)
        total = contexts[column].size + traces[trace].size
        if total > max_tokens:
            raise ScoringError(
                f"context {column} ({contexts[column].size} tokens) and trace {trace} ({traces[trace].size} tokens) "
                f"are {total} tokens together, but the model's limit is {max_tokens}. Every trace is scored under "
                "every context: leave out the longest (max_context_tokens, max_trace_tokens)."
            )
