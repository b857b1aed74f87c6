"""Leave a model, and everything random, exactly as it was found."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from collapsediag.errors import ScoringError

# Buffers of helper modules (rotary frequencies) are small; cloning anything larger would cost more than it protects.
MAX_CLONED_ELEMENTS = 1 << 20
_SIMPLE = (bool, int, float, str, type(None), torch.Tensor)
_TURN = threading.Lock()
_INSIDE = threading.local()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Run the body while no other thread does: two scorings would put back each other's patches, in the wrong order.

    Raises ScoringError inside such a body, which could not wait for itself.
    """
    if getattr(_INSIDE, "scoring", False):
        raise ScoringError("this thread is scoring already; from its progress callback nothing else can be scored.")
    with _TURN:
        _INSIDE.scoring = True
        try:
            yield
        finally:
            _INSIDE.scoring = False


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the body in eval mode without gradients; afterwards every trace of that is gone.

    Put back: train/eval mode of every submodule; random states of python, numpy, torch and the devices in use;
    autocast's weight cache (a cast made without gradients would be reused by the training forward, which then gets
    none); buffers and plain attributes of modules without parameters (rotary embeddings that grow with the sequence).
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states())
        stack.enter_context(_helper_state(model))
        stack.enter_context(_eval_mode(model))
        stack.enter_context(_no_autocast_cache())
        stack.enter_context(_uncompiled())
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _random_states() -> Iterator[None]:
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    # The attribute, not eval()/train(): subclasses override those, and a frozen submodule may be in another mode.
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled modules eagerly: compiling for each of our shapes would take longer than scoring."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None:
        yield
    else:
        with set_stance("force_eager"):
            yield


@contextmanager
def _helper_state(model: nn.Module) -> Iterator[None]:
    helpers = [m for m in model.modules() if not m._modules and not m._parameters]
    saved = [(m, dict(m._buffers), _clones(m), _plain_attributes(m)) for m in helpers]
    try:
        yield
    finally:
        for module, buffers, clones, attributes in saved:
            module._buffers.clear()
            module._buffers.update(buffers)
            for tensor, clone in clones:
                if not torch.equal(tensor, clone):
                    tensor.copy_(clone)
            for name in _plain_attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if isinstance(value, _SIMPLE)}


def _clones(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensors = [*module._buffers.values(), *_plain_attributes(module).values()]
    return [
        (t, t.detach().clone())
        for t in tensors
        if isinstance(t, torch.Tensor) and t.numel() <= MAX_CLONED_ELEMENTS and t.device.type != "meta"
    ]
