"""What a policy does, read off its words: the truth that the diagnostics are held against.

It is counted from outputs on evaluation prompts. No likelihood of any model and no number of the library enters it.

Legend: S scored steps, E evaluation prompts with one output each, T output tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.validity.training import ANSWERS_FILE
from collapsediag.demo import task

FloatArray = NDArray[np.float64]

# What a policy that does not look at its prompt gets.
CHANCE = {"success": 1 / len(task.DOORS)}


def read_behaviour(folder: Path) -> tuple[list[int], dict[str, FloatArray]]:
    """The steps of a finished run, and each number of `behaviour` at them, [S]."""
    with np.load(folder / ANSWERS_FILE) as held:
        steps, shown, outputs = held["steps"].tolist(), held["shown"].tolist(), held["outputs"]
    found = [behaviour(shown, [_written(row) for row in outputs_ET]) for outputs_ET in outputs.tolist()]
    return steps, {name: np.array([one[name] for one in found]) for name in found[0]}


def behaviour(shown: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> dict[str, float]:
    """Shares of E outputs.

    success: names the door of the prompt's first colour (chance 1/8), whatever was thought before.
    reading: share of the prompt's colours that the reasoning names, minus the share of the next prompt's colours: 0 for
        reasoning that does not read its prompt, about 0.6 for reasoning that names all of its colours and no other.
    valid: has the whole format.
    distinct: different reasonings over all outputs, by E; near 1 where they vary, 1/E where one is written for all.
    """
    parsed = [task.parse(output) for output in outputs]
    named = [_colours(one.reasoning) for one in parsed]
    own = [len(found & set(colours)) / len(set(colours)) for found, colours in zip(named, shown, strict=True)]
    others = [*shown[1:], shown[0]]
    other = [len(found & set(colours)) / len(set(colours)) for found, colours in zip(named, others, strict=True)]
    return {
        "success": float(np.mean([one.door == colours[0] for one, colours in zip(parsed, shown, strict=True)])),
        "reading": float(np.mean(own) - np.mean(other)),
        "valid": float(np.mean([one.valid for one in parsed])),
        "distinct": len({one.reasoning for one in parsed}) / len(parsed),
    }


def _written(output: list[int]) -> list[int]:
    end = task.IDS[task.EOS]
    return output[: output.index(end) + 1] if end in output else output


def _colours(reasoning: Sequence[int] | None) -> set[int]:
    words = [task.WORDS[i] for i in reasoning or ()]
    return {task.COLOURS.index(word) for word in words if word in task.COLOURS}
