"""Scoring leaves a model, and everything random, as it was: field by field, after success and after every failure."""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

from collapsediag.errors import ScoringError
from collapsediag.scoring.hf import HFScorer

from .scoring_tiny import loop, make_model, mixed_pairs

HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]


def tensor_state(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.numpy(force=True).tobytes())
    return {
        "id": id(tensor),
        "bytes": tensor.detach().float().numpy(force=True).tobytes(),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "grad": grad,
        "inference": tensor.is_inference(),
        "version": tensor._version,
    }


def module_state(module: nn.Module) -> dict[str, Any]:
    """Everything that a module instance holds: modes, parameters, buffers, hooks, and each plain attribute."""
    state: dict[str, Any] = {"training": module.training, "class": type(module), "forward": module.forward.__func__}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            state[name] = {key: tensor_state(tensor) for key, tensor in value.items()}
        elif name == "_modules":
            state[name] = {key: id(child) for key, child in value.items()}
        elif name in HOOKS:
            state[name] = None if value is None else [id(hook) for hook in value.values()]
        elif isinstance(value, torch.Tensor):
            state[name] = tensor_state(value)
        elif isinstance(value, (bool, int, float, str, type(None), set, dict)):
            state[name] = copy.deepcopy(value) if name != "config" else None
        else:
            state[name] = id(value)
    return state


def config_state(config: Any) -> dict[str, Any]:
    return {"vars": {k: copy.deepcopy(v) for k, v in vars(config).items()}, "attn": config._attn_implementation}


def global_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": [np.asarray(part).tobytes() if i == 1 else part for i, part in enumerate(np.random.get_state())],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def state_of(model: nn.Module) -> dict[str, Any]:
    configs = {id(m.config): config_state(m.config) for m in model.modules() if hasattr(m, "config")}
    generation = getattr(model, "generation_config", None)
    return {
        "modules": {name: module_state(module) for name, module in model.named_modules()},
        "configs": configs,
        "generation": None if generation is None else generation.to_dict(),
        "global": global_state(),
    }


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Paths at which two nested states differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = [f"{path}.{key} came or went" for key in before.keys() ^ after.keys()]
        for key in before.keys() & after.keys():
            found += differences(before[key], after[key], f"{path}.{key}")
        return found
    return [] if before == after else [path]


def draw_numbers(module: nn.Module, args: Any, output: Any) -> None:
    """A forward that draws, as dropout, noisy routers and stochastic depth do."""
    random.random(), np.random.rand(), torch.rand(1)


def busy_model(model_type: str = "llama", **settings: Any) -> Any:
    """A model in the middle of training: gradients, frozen parts, mixed modes, hooks, checkpointing."""
    model = make_model(model_type, dtype=torch.float32, **settings)
    model.train()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.model.layers[1].register_forward_hook(draw_numbers)
    model.lm_head.register_forward_pre_hook(lambda module, args: None)
    model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    return model


def jobs() -> dict[str, Callable[[Any], Any]]:
    pairs = mixed_pairs()
    mask = np.eye(pairs.n_traces, pairs.n_contexts, dtype=bool)
    return {
        "score": lambda model: HFScorer(model).score(pairs),
        "small budget": lambda model: HFScorer(model, token_budget=16).score(pairs),
        "masked": lambda model: HFScorer(model, attention="masked").score(pairs),
        "plain": lambda model: HFScorer(model, attention="plain").score(pairs),
        "cells": lambda model: HFScorer(model).score_cells(pairs, mask),
        "tokens": lambda model: HFScorer(model).score_tokens(pairs, entropies=True, every_context=True),
        "estimate": lambda model: HFScorer(model).estimate(pairs),
    }


JOBS = jobs()


@pytest.fixture(autouse=True)
def _transformers_is_quiet() -> Any:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("job", JOBS)
def test_a_model_in_training_is_left_as_it_was(job: str) -> None:
    model = busy_model()
    assert any(p.grad is not None for p in model.parameters())
    assert model.is_gradient_checkpointing
    before = state_of(model)
    JOBS[job](model)
    assert differences(before, state_of(model)) == []


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral", "mixtral"])
def test_other_models_too(model_type: str) -> None:
    settings = {"mixtral": {"num_local_experts": 4, "output_router_logits": True}, "mistral": {"sliding_window": 8}}
    model = busy_model(model_type, **settings.get(model_type, {}))
    before = state_of(model)
    HFScorer(model, token_budget=32).score(mixed_pairs())
    assert differences(before, state_of(model)) == []


def test_training_goes_on_bit_by_bit() -> None:
    """The one that matters: a step after scoring is the step without it, dropout masks included."""

    def train(score: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = make_model(dtype=torch.float32, attention_dropout=0.3)
        model.train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.tensor([[3, 4, 5, 6, 7]])
        for _ in range(3):
            optimiser.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            if score:  # between backward and step, where gradients are precious
                HFScorer(model).score(mixed_pairs())
            optimiser.step()
        return [*(p.detach().clone() for p in model.parameters()), torch.rand(3)]

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with_scores, without = train(True), train(False)
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
    for a, b in zip(with_scores, without, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["auto", "masked", "plain"])
def test_dropout_is_off_while_scoring_in_train_mode(way: str) -> None:
    settings = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model, pairs = make_model("gpt2", **settings), mixed_pairs()
    truth = loop(model, pairs.contexts, pairs.traces)
    model.train()
    noisy = loop(model, pairs.contexts, pairs.traces)
    assert np.abs(noisy - truth).max() > 0.1, "dropout does nothing here; this model tests nothing"
    np.testing.assert_allclose(HFScorer(model, attention=way).score(pairs).logp_NP, truth, rtol=0, atol=1e-8)
    assert all(module.training for module in model.modules())


def test_frequencies_that_grow_with_the_sequence_shrink_again() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    pairs = mixed_pairs()  # up to 53 tokens

    def fresh() -> Any:
        return make_model(max_position_embeddings=32, rope_parameters=rope)

    model = fresh()
    before = state_of(model)
    scorer = HFScorer(model, max_tokens=128)
    found = scorer.score(pairs).logp_NP
    assert differences(before, state_of(model)) == []
    assert scorer.info is not None
    assert scorer.info.path == "plain"
    # The oracle: a fresh model for every pair, so that no longer sequence came before it.
    for i, trace in enumerate(pairs.traces):
        for j, context in enumerate(pairs.contexts):
            assert found[i, j] == pytest.approx(loop(fresh(), [context], [trace])[0, 0], abs=1e-7)
    # And forwards do change it, so that the comparison above is one.
    loop(model, pairs.contexts, pairs.traces)
    assert any("inv_freq" in path for path in differences(before, state_of(model)))


class KernelError(Exception):
    """What a broken kernel raises."""


@pytest.mark.fault(
    "the forward pass raises in the middle",
    "weights, modes, caches, hooks, gradients and random states are as before",
)
@pytest.mark.parametrize("error", [KernelError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("where", ["model.layers.1.mlp", "model.norm"])
def test_the_same_after_an_exception_inside_the_forward(error: type[BaseException], at: int, where: str) -> None:
    model = busy_model()
    calls = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > at:
            raise error("broken on purpose")

    model.get_submodule(where).register_forward_pre_hook(fail)
    before = state_of(model)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else ScoringError
    with pytest.raises(expected, match="broken on purpose"):
        HFScorer(model).score(mixed_pairs())
    assert calls > at
    assert differences(before, state_of(model)) == []


def test_the_same_after_an_exception_in_the_progress_callback() -> None:
    model = busy_model()
    before = state_of(model)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HFScorer(model).score(mixed_pairs(), progress=interrupt)
    assert differences(before, state_of(model)) == []


def test_scores_are_no_inference_tensors_and_need_no_gradient() -> None:
    """Gradients flow after scoring, also where scoring was called inside `inference_mode` or `no_grad`."""
    model = make_model(dtype=torch.float32)
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with context():
            HFScorer(model).score(mixed_pairs())
        model.zero_grad()
        model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
        assert model.lm_head.weight.grad is not None
        assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))


def test_autocast_around_scoring_is_used_and_left_alone() -> None:
    model, pairs = make_model(dtype=torch.float32), mixed_pairs()
    precise = HFScorer(model).score(pairs).logp_NP
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = state_of(model)
        scorer = HFScorer(model)
        found = scorer.score(pairs).logp_NP
        assert differences(before, state_of(model)) == []
        truth = loop(model, pairs.contexts, pairs.traces)
        # A cast that was cached without gradients would cut the training forward's gradient.
        model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert scorer.info is not None
    assert scorer.info.path == "prefix", scorer.info
    assert np.abs(truth - precise).max() > 1e-3, "autocast changes nothing here"
    length_N = np.array([t.size for t in pairs.traces])[:, None]
    # Both round to bfloat16 (3 digits), in different places.
    assert np.sqrt((((found - truth) / length_N) ** 2).mean()) < 0.03


def test_autocast_caches_no_weight_while_scoring() -> None:
    """Some versions of torch hand a cast made without gradients to the training forward, which then gets none."""
    model = make_model(dtype=torch.float32)
    cached: set[bool] = set()
    model.register_forward_pre_hook(lambda module, args: cached.add(torch.is_autocast_cache_enabled()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_cache_enabled()
        HFScorer(model).score(mixed_pairs())
        assert torch.is_autocast_cache_enabled()
    assert cached == {False}


class Counting(nn.Module):
    """An activation that counts its calls: in place, in a new tensor, in an attribute, in one that was not there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("renewed", torch.zeros(2), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.in_place.add_(1)
        self.renewed = self.renewed + 1
        self.calls += 1
        self.seen = True
        return nn.functional.silu(x)


@pytest.mark.parametrize("way", ["auto", "plain"])
def test_helpers_that_count_their_calls_do_not_count_ours(way: str) -> None:
    model = make_model(dtype=torch.float32)
    counting = model.model.layers[0].mlp.act_fn = Counting()
    in_place, renewed = counting.in_place, counting.renewed
    HFScorer(model, attention=way).score(mixed_pairs())
    assert counting.in_place is in_place
    assert counting.renewed is renewed
    assert [*in_place.tolist(), *renewed.tolist(), counting.calls] == [0.0] * 4 + [0]
    assert not hasattr(counting, "seen")
    model(input_ids=torch.tensor([[3, 4]]))
    assert [*in_place.tolist(), *counting.renewed.tolist(), counting.calls] == [1.0] * 4 + [1]


def test_a_head_whose_forward_somebody_patched_keeps_the_patch() -> None:
    model, pairs = make_model(), mixed_pairs()
    truth = loop(model, pairs.contexts, pairs.traces, temperature=2.0)
    original = model.lm_head.forward

    def halved(hidden: torch.Tensor) -> torch.Tensor:  # as accelerate's offloading does
        return original(hidden) / 2

    model.lm_head.forward = halved
    found = HFScorer(model).score(pairs).logp_NP
    assert vars(model.lm_head)["forward"] is halved
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-8)


def test_hooks_fire_on_every_module_that_computes() -> None:
    """FSDP, ZeRO-3 and PEFT gather weights in hooks: a module that is passed by would run on empty ones."""
    model = make_model()
    fired: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: fired.add(name))
    scorer = HFScorer(model, check_every=0)
    scorer.score(mixed_pairs())
    assert scorer.info is not None
    assert scorer.info.path == "prefix"
    expected = {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}
    assert expected - fired == set()


def test_logging_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    levels = {name: logging.getLogger(name).level for name in ("", "collapsediag", "transformers", "torch")}
    with caplog.at_level(logging.WARNING, logger="collapsediag"):
        HFScorer(make_model()).score(mixed_pairs())
    assert [record for record in caplog.records if record.name.startswith("collapsediag")] == []
    assert {name: logging.getLogger(name).level for name in levels} == levels


# -- at once ---------------------------------------------------------------------------------------------------------


def test_two_threads_over_one_model_take_turns() -> None:
    model, pairs = make_model(), mixed_pairs()
    model.train()
    before = model.config._attn_implementation
    truth = HFScorer(model).score(pairs).logp_NP
    found: list[Any] = []
    # Each lets the other go on in the middle of its work.
    scorers = [HFScorer(model, token_budget=16) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda s=s: found.append(s.score(pairs, progress=lambda *_: time.sleep(0.002)).logp_NP))
        for s in scorers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for logp_NP in found:
        np.testing.assert_allclose(logp_NP, truth, rtol=0, atol=1e-8)
    assert all(module.training for module in model.modules())
    assert "forward" not in model.get_output_embeddings().__dict__
    assert model.config._attn_implementation == before


def test_scoring_inside_scoring_is_refused_and_leaves_the_model_as_it_was() -> None:
    model, pairs = make_model(), mixed_pairs()
    scorer = HFScorer(model)
    truth = scorer.score(pairs).logp_NP
    with pytest.raises(ScoringError, match="this thread is scoring already"):
        scorer.score(pairs, progress=lambda *_: HFScorer(model).score(pairs))
    np.testing.assert_allclose(scorer.score(pairs).logp_NP, truth, rtol=0, atol=1e-8)
