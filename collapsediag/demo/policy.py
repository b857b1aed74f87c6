"""The demo's policy: a two-layer language model of about 100,000 parameters, its warm-up, and sampling from it.

Legend: B sequences, T output tokens, V words.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from collapsediag.demo import task


def new_policy(seed: int) -> LlamaForCausalLM:
    """A policy with seeded random weights; torch's global generator is left as it was."""
    config = LlamaConfig(
        vocab_size=len(task.WORDS),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def output_logits(policy: LlamaForCausalLM, ids_BL: Tensor) -> Tensor:
    """Logits [B, T, V] of the output tokens that follow the prompts in `ids_BL`."""
    logits: Tensor = policy(input_ids=ids_BL, use_cache=False).logits
    return logits[:, task.PROMPT_LENGTH - 1 : -1].float()


def warm_up(policy: LlamaForCausalLM, *, steps: int, seed: int, batch: int = 64, lr: float = 3e-3) -> None:
    """Supervised steps on demonstrations, until the policy thinks aloud about the lamps it sees.

    The weight decay keeps the weights small enough for the policy gradient to move the policy in a hundred steps.
    """
    rng = np.random.default_rng([seed, 1])
    matrices = [p for name, p in policy.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in policy.named_parameters() if p.dim() != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 2.0}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for step in range(steps):
        shown = [(int(a), int(b), int(c)) for a, b, c in rng.integers(len(task.COLOURS), size=(batch, task.N_SHOWN))]
        rows = [[*task.draw_prompt(rng, s).ids, *task.demonstration(rng, s)] for s in shown]
        ids = torch.tensor(rows)  # demonstrations are all of one length
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps) + 1e-5
        logits = output_logits(policy, ids)
        targets = ids[:, task.PROMPT_LENGTH :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


def sample(policy: LlamaForCausalLM, prompt_BL: Tensor, generator: torch.Generator) -> Tensor:
    """Outputs [B, T] sampled at temperature 1; positions after the end hold the end token."""
    # transformers renamed the argument; both names take the same object.
    names = inspect.signature(policy.forward).parameters
    cache = {"cache" if "cache" in names else "past_key_values": DynamicCache(config=policy.config)}
    current = prompt_BL
    ended = torch.zeros(len(prompt_BL), dtype=torch.bool)
    steps = []
    for _ in range(task.MAX_OUTPUT):
        with torch.no_grad():
            logits = policy(input_ids=current, use_cache=True, **cache).logits[:, -1].float()
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        token = torch.where(ended, torch.zeros_like(token), token)
        steps.append(token)
        ended |= token == task.IDS[task.EOS]
        if bool(ended.all()):
            break
        current = token[:, None]
    return torch.stack(steps, dim=1)
