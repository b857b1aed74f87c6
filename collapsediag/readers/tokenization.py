"""Token ids for turns that were saved as text: near what the policy saw and wrote, not equal to it, and marked so.

Re-tokenised text is not the sampled tokens (measured on a small model: 11 of 16 traces come out the same), so a batch
that went through here has approximate_ids=True.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapsediag.errors import ReaderError
from collapsediag.readers._messages import written_out
from collapsediag.readers._source import STRIPPED
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

Ids = NDArray[np.int64]

_TEMPLATED = "{n} contexts were made by the tokenizer's chat template from messages"
_VERIFIED = (
    "{n} contexts: the dump's text was parsed back into messages and put through the chat template; with its special "
    "tokens stripped the result is the dump's text again"
)
_PLAIN = "{n} contexts were tokenised as the text stands, without a chat template"
_NOT_PARSED = (
    "{n} contexts are scored as the dump's plain text: it could not be parsed back into messages without doubt"
)
_DIFFERS = (
    "{n} contexts are scored as the dump's plain text: the chat template makes another text of its messages (is this "
    "the tokenizer of the run?)"
)
_CALLS_WRITTEN_OUT = (
    "{n} contexts hold tool calls that the chat template does not know: they were written out in Hermes style"
)
_UNOPENED = (
    "{n} outputs close a </think> that nothing opened: the run's chat template probably opened it in the prompt "
    "(answer_prefix='<think>' adds it)"
)
_OUTPUTS = "{n} outputs were re-tokenised from text: their log-likelihoods are near, not equal to, the run's own"


def tokenize_batch(
    batch: RolloutBatch,
    tokenizer: Any,
    *,
    plain_prompts: bool = False,
    wrap_text: bool = False,
    answer_prefix: str = "",
    template_kwargs: Mapping[str, Any] | None = None,
) -> RolloutBatch:
    """The batch with token ids on every turn; turns that have them keep theirs.

    Contexts given as messages go through the tokenizer's chat template with the generation prompt (or, where the last
    message is the assistant's, are left open for it to go on). Contexts given as text are tokenised as they stand, with
    the special tokens that the tokenizer adds by itself unless the text begins with them. Dumps whose special tokens
    were stripped are put through the template where that gives the dump's text back, else taken as text. A later turn
    without a context of its own follows on what came before it: context, output, observation. Outputs are tokenised
    apart from their context and without special tokens. `notes` say what was done to how many.

    tokenizer: a transformers tokenizer, or anything with its `__call__(text, add_special_tokens=)`,
        `apply_chat_template`, `decode`, `chat_template` and `bos_token`.
    plain_prompts: take prompts as text and leave the chat template aside (a base model has none).
    wrap_text: make a user's chat message of a context that is text only, such as a bare question.
    answer_prefix: text that the run's template put after the generation prompt and this one does not ("<think>\\n").
    template_kwargs: what the run passed to its chat template (enable_thinking=False, ...).

    Raises ReaderError where messages meet a tokenizer without chat template, or a template that refuses them.
    """
    if all(turn.has_ids for rollout in batch for turn in rollout.turns):
        return batch
    encoder = _Encoder(tokenizer, plain_prompts, wrap_text, answer_prefix, dict(template_kwargs or {}))
    rollouts = tuple(encoder.rollout(rollout) for rollout in batch)
    notes = tuple(note.replace("{n}", str(count)) for note, count in encoder.done.items())
    return replace(batch, rollouts=rollouts, approximate_ids=True, notes=(*batch.notes, *notes))


class _Encoder:
    """Tokenises turn by turn; equal contexts are made once."""

    def __init__(self, tokenizer: Any, plain: bool, wrap: bool, prefix: str, kwargs: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.plain = plain
        self.wrap = wrap
        self.prefix = prefix
        self.kwargs = kwargs
        self.done: Counter[str] = Counter()
        self._cache: dict[tuple[str, str], tuple[Ids, str]] = {}

    def rollout(self, rollout: Rollout) -> Rollout:
        """The rollout with ids on all its turns."""
        turns: list[Turn] = []
        for turn in rollout.turns:
            context = turn.context_ids
            if context is None:
                context = self._context(rollout, turn, turns[-1] if turns else None)
            output = turn.output_ids
            if output is None:
                output = self._encode(turn.output or "")
                self.done[_OUTPUTS] += 1
                self._look_for_unopened(context, turn.output or "")
            turns.append(replace(turn, context_ids=context, output_ids=output))
        return replace(rollout, turns=tuple(turns))

    def _look_for_unopened(self, context: Ids | None, output: str) -> None:
        before, closed, _ = output.partition("</think>")
        if closed and "<think>" not in before:
            end = "" if context is None else self.tokenizer.decode(context[-8:].tolist())
            if "<think>" not in end:
                self.done[_UNOPENED] += 1

    def _context(self, rollout: Rollout, turn: Turn, before: Turn | None) -> Ids | None:
        messages = turn.context_messages
        if self.wrap and messages is None and turn.context is not None and STRIPPED not in rollout.metadata:
            messages = ({"role": "user", "content": turn.context},)
        if messages is None and turn.context is None:
            return None if before is None else self._following(before)
        key = (json.dumps([dict(m) for m in messages or ()], default=str), turn.context or "")
        if key not in self._cache:
            self._cache[key] = self._make_context(rollout, messages, turn.context)
        ids, how = self._cache[key]
        self.done[how] += 1
        return ids

    def _following(self, before: Turn) -> Ids | None:
        if before.context_ids is None or before.output_ids is None:
            return None
        answer = self._encode(before.observation or "")
        return np.concatenate([before.context_ids, before.output_ids, answer])

    def _make_context(
        self, rollout: Rollout, messages: Sequence[Mapping[str, Any]] | None, text: str | None
    ) -> tuple[Ids, str]:
        if self.plain:
            if text is None:
                text = "\n\n".join(str(message.get("content", "")) for message in messages or ())
            return self._encode_context(text), _PLAIN
        if STRIPPED not in rollout.metadata:
            if messages is None:
                return self._encode_context(text or ""), _PLAIN
            return self._templated(rollout, messages), _TEMPLATED
        if messages is None:
            return self._encode_context(text or ""), _NOT_PARSED
        ids = self._templated(rollout, messages, prefix="")
        again = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # What the template did not make is the start that the run gave to the answer ("<think>\n").
        if (text or "").startswith(again):
            return np.concatenate([ids, self._encode((text or "")[len(again) :])]), _VERIFIED
        return self._encode_context(text or ""), _DIFFERS

    def _encode(self, text: str) -> Ids:
        if not text:
            return np.zeros(0, dtype=np.int64)
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def _encode_context(self, text: str) -> Ids:
        """A context as text: with the tokenizer's own leading token, as at sampling, unless the text spells it out."""
        begin = getattr(self.tokenizer, "bos_token", None)
        if begin and text.startswith(begin):
            return self._encode(text)
        ids = list(self.tokenizer(text, add_special_tokens=True)["input_ids"])
        end = getattr(self.tokenizer, "eos_token_id", None)
        # Some tokenizers also close the text; the policy was to go on with it.
        if ids and ids[-1] == end:
            bare = self._encode(text)
            while len(ids) > bare.size and ids[-1] == end:
                ids.pop()
        return np.asarray(ids, dtype=np.int64)

    def _templated(self, rollout: Rollout, messages: Sequence[Mapping[str, Any]], prefix: str | None = None) -> Ids:
        who = f"rollout {rollout.id or '(no id)'} of group {rollout.group!r}"
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ReaderError(
                f"{who}: its prompt is a list of chat messages, and the tokenizer has no chat template to make tokens "
                "of them. Name the tokenizer of the trained (instruct) model, set tokenizer.chat_template to the "
                "run's, or take prompts as plain text: plain_prompts=True (--plain-prompts)."
            )
        goes_on = bool(messages) and messages[-1].get("role") == "assistant"
        chat = [dict(message) for message in messages]
        if any("tool_calls" in message for message in chat) and "tool_calls" not in str(self.tokenizer.chat_template):
            chat = [written_out(message) for message in chat]
            self.done[_CALLS_WRITTEN_OUT] += 1
        try:
            text = self.tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                add_generation_prompt=not goes_on,
                **({"continue_final_message": True} if goes_on else {}),
                **({"tools": rollout.metadata["tools"]} if rollout.metadata.get("tools") else {}),
                **self.kwargs,
            )
        except Exception as error:  # templates raise whatever their author chose
            roles = ", ".join(str(message.get("role")) for message in messages[:8])
            raise ReaderError(
                f"{who}: the tokenizer's chat template refuses its messages (roles: {roles}): {error}. Use the run's "
                "own template, or plain_prompts=True (--plain-prompts)."
            ) from error
        return self._encode(text if goes_on else text + (self.prefix if prefix is None else prefix))
