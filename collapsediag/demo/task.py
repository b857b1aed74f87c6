"""The task of the demo: its words, prompts, demonstrations and rewards. Pure Python and numpy.

A prompt shows three colours among six lamps. The policy answers

    <think> okay see red next find gold also mark blue </think> <answer> north </answer> <eos>

with the colours of its prompt and filler words drawn freely, so that reasoning on one prompt has entropy of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COLOURS = ("red", "blue", "green", "gold", "white", "black", "pink", "grey")
DOORS = ("north", "south", "east", "west", "up", "down", "left", "right")
OPENERS = ("so", "well", "now", "first", "okay", "hmm", "look", "here", "sure", "fine", "good", "there")
VERBS = ("see", "note", "find", "read", "spot", "meet", "have", "mark", "get", "take", "hold", "count")
LINKS = ("and", "next", "also", "after", "plus", "beside", "while", "with", "again", "besides", "further", "that")
EOS, THINK, END_THINK, ANSWER, END_ANSWER = "<eos>", "<think>", "</think>", "<answer>", "</answer>"
SCENE = ("lamps", "dark", ".", "which", "door", "opens", "?")
WORDS = (EOS, THINK, END_THINK, ANSWER, END_ANSWER, *COLOURS, *DOORS, *OPENERS, *VERBS, *LINKS, *SCENE)
IDS = {word: number for number, word in enumerate(WORDS)}

N_LAMPS = 6
N_SHOWN = 3
PROMPT_LENGTH = N_LAMPS + 6
MAX_OUTPUT = 32
# A reasoning block shorter than this earns nothing, or the cheapest way to a reward would be to say nothing.
MIN_REASONING = 6

Shown = tuple[int, int, int]


class Prompt(NamedTuple):
    """shown: the three colours, in order. ids: the prompt's tokens."""

    shown: Shown
    ids: tuple[int, ...]


class WordTokenizer:
    """The least of a tokenizer: one token a word."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """The words, with spaces between them."""
        return " ".join(WORDS[int(i)] for i in ids)


class Parsed(NamedTuple):
    """An output taken apart. valid: it has the whole format. reasoning, door: None where they are not there."""

    valid: bool
    reasoning: tuple[int, ...] | None
    door: int | None


def draw_prompts(rng: np.random.Generator, n: int) -> list[Prompt]:
    """n prompts with different colours."""
    seen: dict[Shown, None] = {}
    while len(seen) < n:
        a, b, c = (int(x) for x in rng.integers(len(COLOURS), size=N_SHOWN))
        seen[(a, b, c)] = None
    return [draw_prompt(rng, shown) for shown in seen]


def draw_prompt(rng: np.random.Generator, shown: Shown) -> Prompt:
    """Three colours, at lamps drawn at random: the policy must find them, not copy three positions."""
    lamps = [IDS["dark"]] * N_LAMPS
    for lamp, colour in zip(sorted(rng.choice(N_LAMPS, N_SHOWN, replace=False)), shown, strict=True):
        lamps[int(lamp)] = IDS[COLOURS[colour]]
    return Prompt(shown, (IDS["lamps"], *lamps, *(IDS[word] for word in SCENE[2:])))


def demonstration(rng: np.random.Generator, shown: Shown) -> list[int]:
    """An output as the warm-up shows it: reasoning that names the colours; a door that is right half of the time."""
    words = [str(rng.choice(OPENERS))]
    for i, colour in enumerate(shown):
        words += [str(rng.choice(VERBS)), COLOURS[colour]]
        if i + 1 < N_SHOWN:
            words.append(str(rng.choice(LINKS)))
    door = shown[0] if rng.random() < 0.5 else int(rng.integers(len(DOORS)))
    return [IDS[word] for word in (THINK, *words, END_THINK, ANSWER, DOORS[door], END_ANSWER, EOS)]


def parse(output: Sequence[int]) -> Parsed:
    """Take an output apart; it has its format if it is think block, one door, end, and nothing else."""
    words = [WORDS[i] for i in output]
    reasoning = None
    if words and words[0] == THINK and END_THINK in words:
        reasoning = tuple(output[1 : words.index(END_THINK)])
    inside = [WORDS[i] for i in reasoning or ()]
    valid = (
        reasoning is not None
        and len(reasoning) >= MIN_REASONING
        and not any(word.startswith("<") for word in inside)
        and len(words) == len(reasoning) + 6
        and words[-4] == ANSWER
        and words[-3] in DOORS
        and words[-2:] == [END_ANSWER, EOS]
    )
    return Parsed(valid, reasoning, DOORS.index(words[-3]) if valid else None)


def solves_hard(parsed: Parsed, prompt: Prompt) -> bool:
    """The door that a checksum of the prompt names: right one time in eight, whatever is thought before."""
    return parsed.door == zlib.crc32(bytes(prompt.ids)) % len(DOORS)


def solves_readable(parsed: Parsed, prompt: Prompt) -> bool:
    """The door that belongs to the first colour, behind reasoning that names the colours in order: it can be learnt."""
    named = [WORDS[i] for i in parsed.reasoning or () if WORDS[i] in COLOURS]
    return parsed.door == prompt.shown[0] and named == [COLOURS[colour] for colour in prompt.shown]
