"""Tiny models, a character tokenizer, data and rewards for tests that train with TRL for real."""

from __future__ import annotations

import hashlib
import inspect
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

disable_progress_bars()
CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz.:\nABCDEFGHIJKLMNOPQRSTUVWXYZ"
OPTIONAL_ARGUMENTS = ("peft_config", "rollout_func", "tools", "environment_factory")
QWEN3_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def tokenizer(characters: str = CHARACTERS, tags: tuple[str, ...] = ("<think>", "</think>")) -> Any:
    """One token a character; <think> is an added token that is not special, as in Qwen3. The template opens it."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        padding_side="left",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    made.model_input_names = ["input_ids", "attention_mask"]
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    made.chat_template = TEMPLATE
    return made


def qwen3_tokenizer() -> Any:
    """One token a character, Qwen3's tags, and the template for it that TRL ships; skips where it ships none."""
    import pytest
    import trl

    template = Path(str(trl.__file__)).parent / "chat_templates" / "qwen3.jinja"
    if not template.exists():
        pytest.skip("this TRL ships no chat templates")
    made = tokenizer("".join(chr(c) for c in range(32, 127)) + "\n", QWEN3_TAGS)
    made.chat_template = template.read_text()
    return made


def qwen2(tok: Any, dropout: float = 0.0, hidden: int = 32, **changes: Any) -> Any:
    set_seed(0)
    settings = {
        "vocab_size": len(tok),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "attention_dropout": dropout,
        "pad_token_id": tok.pad_token_id,
        "eos_token_id": tok.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        **changes,
    }
    return Qwen2ForCausalLM(Qwen2Config(**settings))


def gpt2(tok: Any, dropout: float = 0.1) -> Any:
    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tok),
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=512,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            pad_token_id=tok.pad_token_id,
            eos_token_id=tok.eos_token_id,
            bos_token_id=tok.eos_token_id,
        )
    )


def questions(n: int = 16, conversational: bool = False, seed: int = 0) -> Any:
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        a, b = draw.randint(1, 99), draw.randint(1, 99)
        text = f"what is {a}+{b}?"
        prompt = [{"role": "user", "content": text}] if conversational else text + "<think>"
        rows.append({"prompt": prompt, "answer": str(a + b), "family": f"sum{i % 2}"})
    return Dataset.from_list(rows)


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(m.get("content") or "" for m in completion)


def reward_vowels(completions: Any, **_: Any) -> list[float]:
    """Dense and deterministic."""
    return [sum(c in "aeiou0123456789" for c in text_of(done)) / 20 for done in completions]


def reward_some(completions: Any, **_: Any) -> list[float | None]:
    """None for every third row."""
    return [None if i % 3 == 0 else float(len(text_of(done)) % 2) for i, done in enumerate(completions)]


def skip_unless_taken(argument: str) -> None:
    """Skip the test where GRPOTrainer of the TRL installed does not take this argument yet."""
    import pytest
    import trl

    taken = argument in inspect.signature(trl.GRPOTrainer.__init__).parameters
    # The first releases with rollout_func ask it only where vLLM generates.
    if not taken or (argument == "rollout_func" and int(trl.__version__.split(".")[0]) < 1):
        pytest.skip(f"GRPOTrainer of TRL {trl.__version__} takes no {argument}")


def trainer(kind: str, out: Any, callbacks: Any = (), **changes: Any) -> Any:
    """A trainer for a run of a few steps: 2 prompts of 4 completions a step unless told otherwise."""
    import trl

    # Older releases of transformers leave a run's bf16 behind for the next.
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    tok = changes.pop("tok", None) or tokenizer()
    model = changes.pop("model", None) or qwen2(tok)
    if changes.get("beta", 0.05 if kind == "rloo" else 0.0) and "peft_config" not in changes:
        # TRL loads the reference model from where the policy came from.
        model.save_pretrained(str(out / "policy"))
        model.config._name_or_path = str(out / "policy")
    rewards = changes.pop("reward_funcs", [reward_vowels])
    conversational = changes.pop("conversational", False)
    extra = {name: changes.pop(name) for name in OPTIONAL_ARGUMENTS if name in changes}
    evaluates = "eval_steps" in changes
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "log_level": "error",
        "eval_strategy": "steps" if evaluates else "no",
        **changes,
    }
    config, cls = {"grpo": ("GRPOConfig", "GRPOTrainer"), "rloo": ("RLOOConfig", "RLOOTrainer")}[kind]
    return getattr(trl, cls)(
        model=model,
        reward_funcs=rewards,
        args=getattr(trl, config)(**settings),
        train_dataset=questions(64, conversational),
        eval_dataset=questions(3, conversational, seed=5) if evaluates else None,
        processing_class=tok,
        callbacks=list(callbacks),
        **extra,
    )


def digest(*tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def random_states() -> str:
    found = hashlib.sha256()
    kind, keys, position, *rest = np.random.get_state()
    for part in (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), keys.tobytes()):
        found.update(part)
    found.update(repr((kind, position, rest)).encode())
    return found.hexdigest()[:16]


class Fingerprint:
    """Everything about a run that diagnostics must not change. Made before training, read after it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._completions: list[str] = []
        self._rewards: list[str] = []
        generate, rewards = trainer._generate_and_score_completions, trainer._calculate_rewards

        def watched_generate(inputs: Any) -> Any:
            output = generate(inputs)
            self._completions.append(digest(output["completion_ids"], output["advantages"]))
            return output

        def watched_rewards(*args: Any) -> Any:
            found = rewards(*args)
            self._rewards.append(digest(found))
            return found

        trainer._generate_and_score_completions, trainer._calculate_rewards = watched_generate, watched_rewards

    def read(self) -> dict[str, Any]:
        trainer = self._trainer
        state = trainer.optimizer.optimizer.state_dict() if hasattr(trainer.optimizer, "optimizer") else {}
        moments = [v for entry in state["state"].values() for v in entry.values() if torch.is_tensor(v)]
        weights = [value for _, value in sorted(trainer.model.state_dict().items())]
        gone = ("runtime", "per_second", "step_time", "collapse")
        return {
            "weights": digest(*weights),
            "optimizer": digest(*moments),
            "random": random_states(),
            "completions": self._completions,
            "rewards": self._rewards,
            "log": [
                {k: v for k, v in row.items() if not any(part in k for part in gone)}
                for row in trainer.state.log_history
            ],
            "modes": [module.training for module in trainer.model.modules()],
            "gradients": [p.requires_grad for p in trainer.model.parameters()],
        }
