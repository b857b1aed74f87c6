"""A policy of a few thousand random weights with a byte tokenizer, as a folder, and rollouts to score with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIMIT = 256  # positions of the model, tokens of a context and a trace together


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_policy(folder: Path, *, vocabulary: int = 272, nan: bool = False) -> Path:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LIMIT,
        bos_token_id=min(256, vocabulary - 1),
        eos_token_id=min(257, vocabulary - 1),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    if nan:
        model.lm_head.weight.data[5, 0] = float("nan")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def copied(folder: Path, to: Path, **texts: bytes | None) -> Path:
    """A copy of the folder with files replaced ("config_json" is config.json), or removed where None."""
    shutil.copytree(folder, to)
    for name, content in texts.items():
        file = to / ".".join(name.rsplit("_", 1))
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
    return to


def rows(*, steps: Iterable[int] = (1,), prompts: int = 3, group: int = 2, **fields: Any) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt": f"What is {p}+{step}?",
            "completion": f"<think>well {p} {g} {step}</think> {p + g}",
            "reward": float(g),
            **fields,
        }
        for step in steps
        for p in range(prompts)
        for g in range(group)
    ]


def dump(file: Path, lines: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
