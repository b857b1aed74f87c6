"""A tiny policy, data, and the command line of a veRL run of two steps on a CPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MICRO = 4


def tokenizer():
    """Byte-level pairs, as Qwen's: veRL wants a newline to be one token. <think> is an added one, not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    core.train_from_iterator(["what is 12+35? i need to add the numbers, so the answer is 47"] * 20, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    made.chat_template = (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
    )
    return made


def make(folder: Path) -> None:
    """FOLDER/policy and FOLDER/toy.parquet."""
    import pandas
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    made = tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(made),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=made.eos_token_id,
            pad_token_id=made.pad_token_id,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(8.0)  # a random policy that heeds its prompt
    model.save_pretrained(folder / "policy")
    made.save_pretrained(folder / "policy")
    draw = random.Random(0)
    rows = []
    for i in range(64):
        a, b = draw.randint(1, 60), draw.randint(1, 60)
        prompt = [{"role": "user", "content": f"what is {a}+{b}?"}]
        truth = {"style": "rule", "ground_truth": str(a + b)}
        rows.append(
            {"data_source": f"toy/{i % 2}", "prompt": prompt, "ability": "math", "reward_model": truth}
            | {"extra_info": {"index": i, "split": "train"}}
        )
    pandas.DataFrame(rows).to_parquet(folder / "toy.parquet")


def worker_overrides(folder: Path, strategy: str = "fsdp2", *more: str) -> list[str]:
    """What a worker needs, with or without a trainer around it."""
    return [
        f"actor_rollout_ref.model.path={folder / 'policy'}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO}",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf_cpu",
        "actor_rollout_ref.rollout.n=4",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        "trainer.device=cpu",
        *more,
    ]


def trainer_overrides(folder: Path, out: Path, ranks: int = 1, steps: int = 2) -> list[str]:
    """The rest of the command line."""
    data = folder / "toy.parquet"
    return [
        *worker_overrides(folder),
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=4",
        "data.dataloader_num_workers=0",
        "data.return_raw_chat=True",
        "data.shuffle=False",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "algorithm.adv_estimator=grpo",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE / 'toy_reward.py'}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "transfer_queue.backend.SimpleStorage.total_storage_size=2000",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        'trainer.logger=["console","file"]',
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=10",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={out / 'ckpt'}",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "ray_kwargs.ray_init.num_cpus=24",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"+ray_kwargs.ray_init._temp_dir={folder / 'ray'}",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
    ]


def environment(out: Path, *modules: str) -> dict[str, str]:
    """Of a process that runs veRL here, with these modules loaded by every process."""
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VERL_USE_EXTERNAL_MODULES": ",".join(["verl_cpu_platform", *modules]),
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def train(
    folder: Path,
    out: Path,
    *overrides: str,
    main: str = "verl.trainer.main_ppo",
    modules: tuple[str, ...] = (),
    ranks: int = 1,
    steps: int = 2,
    variables: dict[str, str] | None = None,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """One run of veRL's own command; its metrics are in OUT/metrics.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", main, *trainer_overrides(folder, out, ranks, steps), *overrides]
    variables = environment(out, *modules) | (variables or {})
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout, cwd=out, check=False)
