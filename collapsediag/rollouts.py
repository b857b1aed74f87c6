"""What the policy did in one training step: turns, rollouts, and the batch of them.

Token ids are the truth wherever they are known; text is what people read. Every field but the turns is optional,
because every source of rollouts lacks something; a metric that needs what is missing says so instead of guessing.
Instances are frozen and own read-only arrays, so that no diagnostic can change what the trainer goes on to use.

Legend: T tokens of one turn's output.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collapsediag.arrays import plain, to_numpy, whole_number
from collapsediag.errors import RolloutError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def _token_ids(values: ArrayLike | None, name: str) -> IntArray | None:
    """A read-only int64 vector, or None. A view where the input already is one: a long context is not copied."""
    if values is None:
        return None
    array = _array(values, name)
    if array.size == 0:
        array = array.reshape(-1).astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RolloutError(
            f"{name} must be a flat list of token ids (integers), found shape {array.shape} of {array.dtype}. "
            "Strip padding and pass one sequence."
        )
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise RolloutError(f"{name} holds {int(array.max())} at position {int(array.argmax())}, which is no token id.")
    if array.size and int(array.min()) < 0:
        raise RolloutError(
            f"{name} holds the negative token id {int(array.min())} at position {int(array.argmin())}. "
            "Padding such as -100 must be cut off by its mask before it comes here."
        )
    view: IntArray = array.astype(np.int64, copy=False).view()
    view.flags.writeable = False
    return view


def _array(values: ArrayLike, name: str) -> NDArray[Any]:
    try:
        return to_numpy(values)
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{name} is not one flat sequence of numbers ({error}).") from error


def _floats(values: ArrayLike, name: str) -> FloatArray:
    """A float64 copy; None becomes NaN."""
    array = _array(values, name)
    try:
        return np.array(array, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{name} must be one number a token ({error}).") from error


def _whole_characters(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _whole(step: Any) -> int:
    number = whole_number(step)
    if number is None:
        raise RolloutError(f"the step of a batch must be a whole number, found {step!r} ({type(step).__name__}).")
    return number


def _check_reward(value: Any, row: int) -> None:
    value = plain(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        cure = "a success label goes to successes" if isinstance(value, bool) else "give a number, or None if unscored"
        raise RolloutError(f"rewards[{row}] is {value!r:.80} ({type(value).__name__}), which is no reward: {cure}.")


def _per_token(values: ArrayLike | None, length: int | None, name: str) -> FloatArray | None:
    if values is None:
        return None
    array = _floats(values, name)
    if array.ndim != 1 or (length is not None and array.size != length):
        raise RolloutError(
            f"{name} has shape {array.shape} but the turn's output has {length} tokens; one value per output token is "
            "needed. Cut both by the same mask."
        )
    array.flags.writeable = False
    return array


@dataclass(frozen=True, kw_only=True, eq=False)
class ToolCall:
    """One tool call the policy made.

    name: the tool's name, "" where the call did not parse.
    arguments: the arguments as canonical JSON text (sorted keys), or the raw text where the call did not parse.
    result: what the tool returned, None where unknown.
    error: the tool reported an error. None where unknown.
    malformed: the call did not parse under its own syntax.
    """

    name: str
    arguments: str = ""
    result: str | None = None
    error: bool | None = None
    malformed: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One turn: what the policy saw, and what it wrote.

    context_ids: every token the policy saw before it wrote this turn (system, user, earlier turns, tool output,
        chat-template scaffolding), int64 [L]. The context of a later turn includes the earlier turns.
    output_ids: the tokens it wrote in this turn, int64 [T], end-of-turn token included if it was sampled.
    context, output: the same as text.
    context_messages: the context as chat messages (role, content, ...), where the source keeps those; a tokenizer's
        chat template turns them into tokens.
    logprobs: log-probability of each output token under the sampling policy, float64 [T], nats, <= 0.
    entropies: exact entropy of the policy at each output position, float64 [T], nats, >= 0.
    finish_reason: why the turn ended: "stop", "length" (cut off), "tool_calls", ...; None where unknown.
    tool_calls: the calls made in this turn; None where they must be parsed out of the output.
    observation: what the environment or the tools answered after this turn, as text.
    """

    context_ids: IntArray | None = None
    output_ids: IntArray | None = None
    context: str | None = None
    output: str | None = None
    context_messages: tuple[Mapping[str, Any], ...] | None = None
    logprobs: FloatArray | None = None
    entropies: FloatArray | None = None
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    observation: str | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "context_ids", _token_ids(self.context_ids, "context_ids"))
        set_(self, "output_ids", _token_ids(self.output_ids, "output_ids"))
        if self.output is None and self.output_ids is None:
            raise RolloutError("a turn has neither output nor output_ids; give the text, the token ids, or both.")
        for name in ("context", "output"):
            value = getattr(self, name)
            if isinstance(value, str):
                set_(self, name, _whole_characters(value))
            elif value is not None:
                raise RolloutError(
                    f"{name} must be text, found {type(value).__name__}. Token ids go to {name}_ids; message lists go "
                    "through a reader or the tokenizer's chat template first."
                )
        length = None if self.output_ids is None else int(self.output_ids.size)
        set_(self, "logprobs", _per_token(self.logprobs, length, "logprobs"))
        set_(self, "entropies", _per_token(self.entropies, length, "entropies"))

    @property
    def has_ids(self) -> bool:
        """Both context and output are known as token ids, so that the turn can be scored without re-tokenising."""
        return self.context_ids is not None and self.output_ids is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One trajectory of the policy: one turn, or several with the environment's answers in between.

    group: what prompt it was sampled for; rollouts of one group are the G samples of one prompt.
    environment: name of the task family, None where there is only one.
    reward: the total reward the trainer used; None where the trainer could not score it.
    rewards: the components of the reward by name; None for a component that gave no value.
    success: solved or not, by the environment's own word; None where nobody said.
    answer: the final answer, where the source states it; otherwise it is parsed from the last output.
    advantage: the advantage the trainer gave to the rollout's tokens.
    id: the source's own identifier, for messages.
    metadata: what the source said beside that, JSON values only.
    """

    turns: tuple[Turn, ...]
    group: str | int
    environment: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    success: bool | None = None
    answer: str | None = None
    advantage: float | None = None
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "turns", tuple(self.turns))
        # Trainers hand over numpy and torch scalars: JSON takes neither, and no two equal tensors are one group.
        for name in ("group", "reward", "success", "advantage"):
            set_(self, name, plain(getattr(self, name)))
        if self.environment is not None:
            set_(self, "environment", str(plain(self.environment)))  # a data set may number them
        set_(self, "rewards", {name: plain(value) for name, value in self.rewards.items()})
        try:
            hash(self.group)
        except TypeError:
            raise RolloutError(
                f"the group of a rollout must be text or a number, found {type(self.group).__name__}."
            ) from None
        if not self.turns:
            raise RolloutError(f"rollout {self.id or '(no id)'} of group {self.group!r} has no turn; leave it out.")

    @classmethod
    def from_trajectory(
        cls,
        *,
        token_ids: ArrayLike,
        model_mask: ArrayLike,
        group: str | int,
        logprobs: ArrayLike | None = None,
        entropies: ArrayLike | None = None,
        finish_reason: str | None = None,
        **fields: Any,
    ) -> Rollout:
        """A multi-turn rollout from one flat token sequence, as TRL, veRL and Atropos keep it.

        token_ids: the whole trajectory, prompt first, int [L].
        model_mask: 1 where the policy wrote the token, 0 for prompt, tool and environment tokens, [L]. Each run of
            ones is one turn; its context is every token before it (a view, not a copy).
        logprobs, entropies: aligned with token_ids, [L]; only the positions of the mask are read.
        finish_reason: of the last turn.
        """
        ids = _token_ids(token_ids, "token_ids")
        mask = _array(model_mask, "model_mask")
        if ids is None:
            raise RolloutError("token_ids is None; give the trajectory's token ids, prompt first.")
        if mask.shape != ids.shape:
            raise RolloutError(
                f"model_mask has shape {mask.shape} but token_ids has {ids.shape}; one entry per token is needed."
            )
        edges = np.flatnonzero(np.diff(np.concatenate([[0], (mask != 0).astype(np.int8), [0]])))
        if edges.size == 0:
            raise RolloutError("model_mask marks no token of the policy: an all-zero mask is a rollout without output.")
        spans = list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))

        logp_L = None if logprobs is None else _floats(logprobs, "logprobs")
        entropy_L = None if entropies is None else _floats(entropies, "entropies")

        def cut(values: FloatArray | None, start: int, stop: int) -> FloatArray | None:
            return None if values is None else values[start:stop]

        turns = tuple(
            Turn(
                context_ids=ids[:start],
                output_ids=ids[start:stop],
                logprobs=cut(logp_L, start, stop),
                entropies=cut(entropy_L, start, stop),
                finish_reason=finish_reason if stop == spans[-1][1] else None,
            )
            for start, stop in spans
        )
        return cls(turns=turns, group=group, **fields)


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """All rollouts of one step.

    step: the trainer's step number.
    temperature: what the rollouts were sampled at; recorded, and used by scorers that are told to.
    max_output_tokens: the sampler's limit on one turn's output, None where unknown. Truncation is judged by it.
    eos_token_ids: tokens that end a turn; an output that ends with one was not cut off.
    dropped: rows that the source left out, by reason ("padding_row": 8), counted in the record.
    approximate_ids: token ids were made by re-tokenising text, so log-likelihoods are near, not equal, to the
        trainer's own.
    source: where it came from, for messages.
    notes: what a person must know to read the numbers ("16 rollouts have no group id: grouped by identical prompt").
    """

    step: int
    rollouts: tuple[Rollout, ...]
    temperature: float = 1.0
    max_output_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    approximate_ids: bool = False
    source: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "step", _whole(self.step))
        set_(self, "rollouts", tuple(self.rollouts))
        set_(self, "notes", tuple(self.notes))
        set_(self, "dropped", {reason: int(count) for reason, count in self.dropped.items()})
        set_(self, "eos_token_ids", tuple(int(t) for t in self.eos_token_ids))

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def groups(self) -> dict[str | int, list[int]]:
        """Row numbers of each group, groups in the order of first appearance. Rows of a group need not be adjacent."""
        found: dict[str | int, list[int]] = {}
        for row, rollout in enumerate(self.rollouts):
            found.setdefault(rollout.group, []).append(row)
        return found

    def environments(self) -> dict[str, list[int]]:
        """Row numbers of each named environment; rollouts without one are in none."""
        found: dict[str, list[int]] = {}
        for row, rollout in enumerate(self.rollouts):
            if rollout.environment is not None:
                found.setdefault(rollout.environment, []).append(row)
        return found

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """The same step with only these rows, in this order. What the source dropped is not repeated."""
        return RolloutBatch(
            step=self.step,
            rollouts=tuple(self.rollouts[row] for row in rows),
            temperature=self.temperature,
            max_output_tokens=self.max_output_tokens,
            eos_token_ids=self.eos_token_ids,
            approximate_ids=self.approximate_ids,
            source=self.source,
            notes=self.notes,
        )

    @classmethod
    def from_lists(
        cls,
        *,
        step: int,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        completions: Sequence[str] | Sequence[Sequence[int]],
        groups: Sequence[str | int] | None = None,
        rewards: Sequence[float | None] | None = None,
        successes: Sequence[bool | None] | None = None,
        **fields: Any,
    ) -> RolloutBatch:
        """Single-turn rollouts from parallel lists: the three-line way for hand-written loops.

        prompts, completions: N texts each, or N token-id lists each (unpadded).
        groups: N group ids; without them equal prompts are one group.
        rewards: N numbers, None where unscored. successes: N booleans, None where unknown.

        >>> batch = RolloutBatch.from_lists(step=1, prompts=["2+2="] * 2, completions=["4", "5"], rewards=[1.0, 0.0])
        >>> len(batch), batch.groups()
        (2, {'2+2=': [0, 1]})
        """
        n = len(prompts)
        for name, values in (
            ("completions", completions),
            ("groups", groups),
            ("rewards", rewards),
            ("successes", successes),
        ):
            if values is not None and len(values) != n:
                raise RolloutError(f"{name} has {len(values)} entries but there are {n} prompts; give one for each.")
        for row, reward in enumerate(rewards if rewards is not None else ()):
            _check_reward(reward, row)
        rollouts = []
        group_of_prompt: dict[tuple[int, ...], int] = {}
        for i in range(n):
            prompt, completion = prompts[i], completions[i]
            group: str | int
            if groups is not None:
                group = groups[i]
            elif isinstance(prompt, str):
                group = prompt
            else:
                # An integer id, not the token list itself: a group id is printed and stored.
                group = group_of_prompt.setdefault(tuple(int(t) for t in prompt), len(group_of_prompt))
            is_text = isinstance(completion, str)
            turn = Turn(
                context=prompt if isinstance(prompt, str) else None,
                context_ids=None if isinstance(prompt, str) else prompt,  # type: ignore[arg-type]
                output=completion if is_text else None,  # type: ignore[arg-type]
                output_ids=None if is_text else completion,  # type: ignore[arg-type]
            )
            rollouts.append(
                Rollout(
                    turns=(turn,),
                    group=group,
                    reward=None if rewards is None else rewards[i],
                    success=None if successes is None else successes[i],
                )
            )
        return cls(step=step, rollouts=tuple(rollouts), **fields)
