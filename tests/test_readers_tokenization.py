"""Token ids for saved text: with a tokenizer whose every token is one character, and with a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collapsediag.errors import ReaderError
from collapsediag.readers import from_jsonl, from_trl, read_rollouts, tokenize_batch
from collapsediag.rollouts import Rollout, RolloutBatch, Turn

DATA = Path(__file__).parent / "data" / "rollouts"

BEGIN, END, BOS = 0xE000, 0xE001, 0xE002
SPECIAL = {"<|im_start|>": BEGIN, "<|im_end|>": END, "<s>": BOS}


class CharTokenizer:
    """One token a character, three special tokens, ChatML; what tokenize_batch may ask of a tokenizer, no more."""

    def __init__(
        self, *, bos: bool = False, template: str | None = "chatml with tool_calls", closes: bool = False
    ) -> None:
        self.chat_template = template
        self.bos_token = "<s>" if bos else None
        self.eos_token_id = END
        self.closes = closes
        self.calls: list[dict[str, Any]] = []

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [BOS] if add_special_tokens and self.bos_token else []
        while text:
            mark = next((name for name in SPECIAL if text.startswith(name)), None)
            ids.append(SPECIAL[mark] if mark else ord(text[0]))
            text = text[len(mark) if mark else 1 :]
        return {"input_ids": [*ids, END] if add_special_tokens and self.closes else ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        names = {value: name for name, value in SPECIAL.items()}
        return "".join("" if i in names and skip_special_tokens else names.get(i, chr(i)) for i in ids)

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tokenize: bool, **kwargs: Any) -> str:
        assert tokenize is False
        self.calls.append(kwargs)
        parts = []
        for i, message in enumerate(messages):
            if message["role"] == "refused":
                raise ValueError("roles must alternate")
            body = message["content"] + "".join(f"[{c['function']['name']}]" for c in message.get("tool_calls", ()))
            last = i == len(messages) - 1 and kwargs.get("continue_final_message")
            parts.append(f"<|im_start|>{message['role']}\n{body}" + ("" if last else "<|im_end|>\n"))
        return "".join(parts) + ("<|im_start|>assistant\n" if kwargs["add_generation_prompt"] else "")


def batch_of(*turns: Turn, **metadata: Any) -> RolloutBatch:
    return RolloutBatch(step=1, rollouts=(Rollout(turns=turns, group=0, metadata=metadata),))


def ids_of(ids: Any) -> str:
    return CharTokenizer().decode(ids.tolist())


def tokenized(batch: RolloutBatch, tokenizer: CharTokenizer | None = None, **options: Any) -> tuple[Turn, ...]:
    made = tokenize_batch(batch, tokenizer or CharTokenizer(), **options)
    assert made.approximate_ids
    return made.rollouts[0].turns


def test_messages_go_through_the_template_with_the_generation_prompt() -> None:
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    [turn] = tokenized(batch_of(Turn(context_messages=chat, output="a<|im_end|>")))
    assert (
        ids_of(turn.context_ids)
        == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    # The output is tokenised apart and as it stands; nothing is added to it.
    assert turn.output_ids is not None
    assert turn.output_ids.tolist() == [ord("a"), END]


def test_a_prompt_that_ends_with_the_assistant_is_left_open() -> None:
    chat = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"})
    [turn] = tokenized(batch_of(Turn(context_messages=chat, output="a")), answer_prefix="never")
    assert ids_of(turn.context_ids).endswith("<|im_start|>assistant\n<think>")


def test_the_answers_start_that_the_template_lacks_can_be_given() -> None:
    chat = ({"role": "user", "content": "q"},)
    batch = batch_of(Turn(context_messages=chat, output="hm</think>a"))
    made = tokenize_batch(batch, CharTokenizer())
    assert any("1 outputs close a </think> that nothing opened" in note for note in made.notes)
    made = tokenize_batch(batch, CharTokenizer(), answer_prefix="<think>\n")
    assert not any("nothing opened" in note for note in made.notes)
    assert ids_of(made.rollouts[0].turns[0].context_ids).endswith("assistant\n<think>\n")


def test_text_contexts_are_taken_as_they_stand_with_the_tokenizers_own_start() -> None:
    for bos, text, expected in ((False, "q", "q"), (True, "q", "<s>q"), (True, "<s>q", "<s>q")):
        [turn] = tokenized(batch_of(Turn(context=text, output="a")), CharTokenizer(bos=bos))
        assert ids_of(turn.context_ids) == expected
        assert ids_of(turn.output_ids) == "a"
    [turn] = tokenized(batch_of(Turn(context="q", output="a")), CharTokenizer(bos=True, closes=True))
    assert ids_of(turn.context_ids) == "<s>q"
    [turn] = tokenized(batch_of(Turn(context="q", output="a")), wrap_text=True)
    assert ids_of(turn.context_ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_later_turns_follow_on_output_and_observation() -> None:
    turns = (Turn(context="q", output="a", observation="o"), Turn(output="b", observation="p"), Turn(output="c"))
    first, second, third = tokenized(batch_of(*turns))
    assert ids_of(second.context_ids) == "qao"
    assert ids_of(third.context_ids) == "qaobp"
    assert [ids_of(t.output_ids) for t in (first, second, third)] == ["a", "b", "c"]


def test_each_rollout_gets_its_own_context() -> None:
    contexts: list[dict[str, Any]] = [{"context": "p"}, {"context": "q"}, {"context": "p"}]
    contexts += [{"context_messages": ({"role": "user", "content": c},)} for c in "pq"]
    rollouts = tuple(Rollout(turns=(Turn(output="a", **c),), group=i) for i, c in enumerate(contexts))
    made = tokenize_batch(RolloutBatch(step=1, rollouts=rollouts), CharTokenizer())
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [ids_of(r.turns[0].context_ids) for r in made] == ["p", "q", "p", chat.format("p"), chat.format("q")]


def test_known_ids_are_kept_and_a_batch_with_all_ids_is_untouched() -> None:
    known = Turn(context_ids=np.array([1, 2]), output_ids=np.array([3]), output="never this")
    batch = batch_of(known)
    assert tokenize_batch(batch, CharTokenizer()) is batch
    first, second = tokenized(batch_of(known, Turn(output="b")))
    assert first.output_ids is not None
    assert first.output_ids.tolist() == [3]
    assert second.context_ids is not None
    assert second.context_ids.tolist() == [1, 2, 3]


def test_tools_and_template_settings_reach_the_template() -> None:
    tokenizer = CharTokenizer()
    chat = ({"role": "user", "content": "q"},)
    batch = batch_of(Turn(context_messages=chat, output="a"), tools=[{"type": "function"}])
    tokenize_batch(batch, tokenizer, template_kwargs={"enable_thinking": False})
    assert tokenizer.calls == [
        {"add_generation_prompt": True, "tools": [{"type": "function"}], "enable_thinking": False}
    ]


def test_a_template_that_knows_no_tool_calls_gets_them_written_out() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    chat = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "t", "tool_calls": [call]})
    batch = batch_of(Turn(context_messages=(*chat, {"role": "tool", "content": "r"}), output="a"))
    [turn] = tokenized(batch, CharTokenizer(template="plain chatml"))
    assert 'assistant\nt\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in ids_of(
        turn.context_ids
    )
    [turn] = tokenized(batch)
    assert "assistant\nt[f]<|im_end|>" in ids_of(turn.context_ids)


def test_no_template_and_a_template_that_refuses() -> None:
    batch = batch_of(Turn(context_messages=({"role": "user", "content": "q"},), output="a"))
    with pytest.raises(ReaderError, match=r"no chat template.*tokenizer.chat_template.*--plain-prompts"):
        tokenize_batch(batch, CharTokenizer(template=None))
    [turn] = tokenized(batch, CharTokenizer(template=None), plain_prompts=True)
    assert ids_of(turn.context_ids) == "q"
    refused = batch_of(Turn(context_messages=({"role": "refused", "content": "q"},), output="a"))
    with pytest.raises(ReaderError, match=r"refuses its messages \(roles: refused\): roles must alternate"):
        tokenize_batch(refused, CharTokenizer())


STRIPPED = "system\ns\nuser\nq\nassistant\n"


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        (
            STRIPPED,
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
            "parsed back",
        ),
        (STRIPPED + "<think>\n", "<|im_start|>assistant\n<think>\n", "parsed back"),
        ("a plain question", "a plain question", "could not be parsed back"),
        ("user\nx\nuser\ny\nassistant\n", "user\nx\nuser\ny\nassistant\n", "could not be parsed back"),
    ],
)
def test_stripped_dumps_get_their_template_back_where_that_is_certain(
    tmp_path: Path, text: str, expected: str, note: str
) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps({"input": text, "output": "o", "score": 1.0, "step": 1}), encoding="utf-8")
    [batch] = read_rollouts(path, tokenizer=CharTokenizer())
    made = ids_of(batch.rollouts[0].turns[0].context_ids)
    assert made.endswith(expected)
    assert CharTokenizer().decode(batch.rollouts[0].turns[0].context_ids.tolist(), skip_special_tokens=True) == text  # type: ignore[union-attr]
    assert any(note in n for n in batch.notes)


def test_a_template_that_gives_another_text_is_not_believed(tmp_path: Path) -> None:
    class Llama(CharTokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
            return super().apply_chat_template(*args, **kwargs).replace("system\n", "system\nToday is Monday. ")

    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps({"input": STRIPPED, "output": "o", "score": 1.0, "step": 1}), encoding="utf-8")
    [batch] = read_rollouts(path, tokenizer=Llama())
    assert ids_of(batch.rollouts[0].turns[0].context_ids) == STRIPPED
    assert any("makes another text of its messages" in note for note in batch.notes)


def test_empty_texts_have_no_ids() -> None:
    [turn] = tokenized(batch_of(Turn(context="", output="")))
    assert turn.context_ids is not None
    assert turn.output_ids is not None
    assert (turn.context_ids.size, turn.output_ids.size) == (0, 0)
    # A turn whose context nobody knows stays without; the pairs leave it out and count it.
    [turn] = tokenized(batch_of(Turn(output="a")))
    assert turn.context_ids is None


# --- a real tokenizer -------------------------------------------------------------------------------------------------


@pytest.mark.pretrained
def test_trl_contexts_equal_the_runs_own_ids(smollm2_tokenizer: Any) -> None:
    """36 prompts as text and 36 as messages: every context is the run's own, most outputs are."""
    for name, prefix, exact in (("text", "", 36), ("conversational", "<think>", 33)):
        theirs = [r.turns[0] for b in from_jsonl(DATA / "trl_with_ids" / f"{name}.jsonl") for r in b]
        ours = [
            r.turns[0]
            for b in from_trl(DATA / "trl" / name)
            for r in tokenize_batch(b, smollm2_tokenizer, answer_prefix=prefix)
        ]
        for mine, real in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine.context_ids, real.context_ids)  # type: ignore[arg-type]
        # The file lost the end-of-turn token of outputs that were not cut off; three more were sampled as other tokens.
        end = smollm2_tokenizer.eos_token_id
        same = [
            np.array_equal(m.output_ids, r.output_ids[r.output_ids != end]) for m, r in zip(ours, theirs, strict=True)
        ]  # type: ignore[arg-type, index]
        assert sum(same) == exact


@pytest.mark.pretrained
def test_every_verl_dump_gets_its_template_back(smollm2_tokenizer: Any) -> None:
    folders = [*sorted((DATA / "verl").glob("verl-*/*")), DATA / "verl" / "e2e-cpu-0.9.1" / "v0_step2.jsonl"]
    assert len(folders) == 8
    for folder in [*folders, DATA / "verl_dump_3_records.jsonl", DATA / "verl_layout_from_simplerl_4x8.jsonl"]:
        [batch] = read_rollouts(folder, tokenizer=smollm2_tokenizer)
        assert batch.approximate_ids
        assert any(note.startswith(f"{len(batch)} contexts: the dump's text was parsed back") for note in batch.notes)
        for rollout in batch:
            [turn] = rollout.turns
            assert turn.context_ids is not None
            text = smollm2_tokenizer.decode(turn.context_ids.tolist())
            assert text.startswith("<|im_start|>system\n")
            assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.pretrained
def test_real_files_of_every_source_get_ids(smollm2_tokenizer: Any) -> None:
    names = ["simplerl_math_first6.jsonl", "atropos_rubiks_2x4.jsonl.gz", "example_multi_step_example_rollouts.jsonl"]
    names += ["reasoning_gym_example_rollouts.jsonl", "single_step_tool_use_first3.jsonl", "tinker_chat_tool_use.json"]
    for name in [*names, "trl/tools"]:
        [batch] = read_rollouts(DATA / name, tokenizer=smollm2_tokenizer)
        assert all(turn.has_ids for rollout in batch for turn in rollout.turns), name
        for turn in (turn for rollout in batch for turn in rollout.turns):
            if turn.output and name != "atropos_rubiks_2x4.jsonl.gz":  # whose ids are another tokenizer's
                assert turn.output_ids is not None
                assert smollm2_tokenizer.decode(turn.output_ids.tolist()) == turn.output
