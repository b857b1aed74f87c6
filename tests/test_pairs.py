"""Rollouts cut into pairs: who is in, who is out and why, which columns merge, and that draws can be repeated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapsediag.errors import PairError, SettingsError
from collapsediag.pairs import DropReason, PairSettings, ScoringPairs, build_pairs, resolve_reasoning
from collapsediag.rollouts import Rollout, RolloutBatch, Turn
from collapsediag.spans import SpanFinder
from collapsediag.token_tags import ReasoningTags

NAMESPACES = ("first_turn", "trajectory", "turn")
EOS = 3
CPU_SECONDS = 5.0  # 4,096 rollouts of 2,000 tokens


class Letters:
    """One token a character; EOS ends a turn."""

    all_special_ids = (EOS,)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


TOKENIZER = Letters()


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def text(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(list(tokens))


def turn(context: str | None, output: str) -> Turn:
    if context is None:
        return Turn(context="no ids", output=output)
    return Turn(context_ids=ids(context), output_ids=ids(output))


def batch(rows: list[tuple[Any, list[tuple[str | None, str]]]], **fields: Any) -> RolloutBatch:
    """A batch of (group, [(context, output), ...])."""
    fields = {"step": 7, "eos_token_ids": (EOS,), **fields}
    rollouts = tuple(Rollout(turns=tuple(turn(*t) for t in turns), group=group) for group, turns in rows)
    return RolloutBatch(rollouts=rollouts, **fields)


def build(rows: RolloutBatch, **options: Any) -> ScoringPairs:
    return build_pairs(rows, **{"tokenizer": TOKENIZER, "reasoning": "think", **options})


def as_text(pairs: ScoringPairs) -> list[tuple[str, str]]:
    return [(text(pairs.contexts[own]), text(z)) for own, z in zip(pairs.own_N, pairs.traces, strict=True)]


FOUR = batch(
    [
        ("a", [("A?", "<think>one</think>1")]),
        ("b", [("B?", "<think>two</think>2")]),
        ("a", [("A?", "<think>eins</think>1")]),
        ("b", [("B?<think>", "zwei</think>2")]),
    ]
)


# --- cutting ------------------------------------------------------------------------------------------------------


def test_contexts_end_with_the_opening_tag_and_traces_hold_neither() -> None:
    pairs = build(FOUR)
    assert as_text(pairs) == [
        ("A?<think>", "one"),
        ("B?<think>", "two"),
        ("A?<think>", "eins"),
        ("B?<think>", "zwei"),
    ]
    assert pairs.own_N.tolist() == [0, 1, 0, 1]
    assert pairs.group_N.tolist() == [0, 1, 0, 1]
    assert pairs.rollout_N.tolist() == [0, 1, 2, 3]
    assert pairs.turn_N.tolist() == [0, 0, 0, 0]
    assert pairs.multiplicity_P.tolist() == [1, 1]
    assert (pairs.reasoning, pairs.namespace, pairs.dropped, pairs.shortfall) == ("think", "first_turn", {}, None)


@pytest.mark.parametrize(
    ("context", "output", "options", "reason"),
    [
        (None, "<think>x</think>", {}, DropReason.NO_TOKEN_IDS),
        ("A?", "x", {}, DropReason.NO_REASONING),
        ("A?<think>\n\n</think>", "x", {}, DropReason.NO_REASONING),
        ("A?", "<think>x", {}, DropReason.UNCLOSED),
        ("A?<think>", "x\x03", {}, DropReason.UNCLOSED),
        ("A?", "<think>\n\n</think>x", {}, DropReason.EMPTY),
        ("A?", "<think></think>x", {}, DropReason.EMPTY),
        ("A?", "\x03\x03", {"reasoning": "completion"}, DropReason.EMPTY),
        ("A?", "", {"reasoning": "completion"}, DropReason.EMPTY),
        ("", "x", {"reasoning": "completion"}, DropReason.EMPTY_CONTEXT),
        ("A?", "<think>x</think>", {"max_context_tokens": 8}, DropReason.CONTEXT_TOO_LONG),
        ("A?", "<think>xx</think>", {"max_trace_tokens": 1}, DropReason.TRACE_TOO_LONG),
    ],
)
def test_each_reason_to_drop_a_turn(context: str | None, output: str, options: Any, reason: DropReason) -> None:
    pairs = build(batch([("a", [(context, output)])]), **options)
    assert pairs.dropped == {reason: 1}
    assert (pairs.n_traces, pairs.n_contexts) == (0, 0)
    assert reason.value.replace("_", " ") in str(pairs.shortfall)


def test_limits_include_their_own_value() -> None:
    pairs = build(batch([("a", [("A?", "<think>xx</think>")])]), max_context_tokens=9, max_trace_tokens=2)
    assert as_text(pairs) == [("A?<think>", "xx")]


def test_an_empty_context_is_none_where_the_output_holds_the_tag() -> None:
    assert as_text(build(batch([("a", [("", "<think>x</think>")])]))) == [("<think>", "x")]


def test_a_nested_block_is_scored_up_to_its_first_closing_tag() -> None:
    pairs = build(batch([("a", [("A?", "<think>x <think>y</think>z</think>")])]))
    assert as_text(pairs) == [("A?<think>", "x <think>y")]


def test_completion_is_the_whole_output_but_for_end_of_turn_tokens() -> None:
    rows = batch([("a", [("A?", "<think>\x03x</think> 1\x03\x03")]), ("a", [("A?", " ")])])
    pairs = build(rows, reasoning="completion", tokenizer=None)
    assert as_text(pairs) == [("A?", "<think>\x03x</think> 1"), ("A?", " ")]
    assert as_text(build(batch([("a", [("A?", "1\x03")])], eos_token_ids=()), reasoning="completion"))[0][1] == "1\x03"


def test_a_block_that_an_earlier_turn_left_open_does_not_open_the_next() -> None:
    rollout = Rollout.from_trajectory(
        token_ids=ids("A?<think>cut\x03B?<think>two</think>2"),
        model_mask=[0] * 2 + [1] * 11 + [0] * 2 + [1] * 19,
        group="a",
    )
    pairs = build(RolloutBatch(step=0, rollouts=(rollout,), eos_token_ids=(EOS,)), namespace="turn")
    assert as_text(pairs) == [("A?<think>cut\x03B?<think>", "two")]
    assert pairs.dropped == {DropReason.UNCLOSED: 1}


def test_nothing_is_copied_that_need_not_be_and_nothing_can_be_changed() -> None:
    rows = batch([("a", [("A?<think>", "one</think>1")])])
    pairs = build(rows)
    source = rows.rollouts[0].turns[0]
    assert np.shares_memory(pairs.contexts[0], source.context_ids)
    assert np.shares_memory(pairs.traces[0], source.output_ids)
    for array in (*build(FOUR).contexts, *pairs.contexts, *pairs.traces):
        assert array.dtype == np.int64
        assert not array.flags.writeable


# --- columns ------------------------------------------------------------------------------------------------------


def test_equal_contexts_of_two_groups_are_one_column() -> None:
    rows = batch([(g, [(c, "<think>x</think>")]) for g, c in [("a", "A?"), ("b", "B?"), ("c", "A?"), ("a", "A?")]])
    pairs = build(rows)
    assert pairs.own_N.tolist() == [0, 1, 0, 0]
    assert pairs.group_N.tolist() == [0, 1, 2, 0]
    assert pairs.multiplicity_P.tolist() == [2, 1]
    assert pairs.notes == ()


def test_contexts_are_compared_by_ids_wherever_the_tag_came_from() -> None:
    # The same ids, cut differently into context and output.
    rows = batch([("a", [("A?<think>", "x</think>")]), ("b", [("A?", "<think>y</think>")])])
    assert build(rows).n_contexts == 1
    # Different ids that a careless key would take for the same.
    rows = batch([("a", [("A1", "2")]), ("b", [("A12", "2")])])
    assert build(rows, reasoning="completion").n_contexts == 2


def test_one_group_with_several_contexts_has_a_column_for_each_and_a_note() -> None:
    rows = batch([(g, [(c, "<think>x</think>")]) for g, c in [("a", "A1"), ("a", "A2"), ("b", "B"), ("a", "A1")]])
    pairs = build(rows)
    assert pairs.own_N.tolist() == [0, 1, 2, 0]
    assert pairs.group_N.tolist() == [0, 0, 1, 0]
    assert pairs.notes == ("1 of 2 groups have more than one distinct context, up to 2",)


OUTPUTS = ["<think>one</think>", "<think>two</think>2", "x</think>", "y", "<think>z", "<think> </think>", ""]
TURN = st.tuples(st.sampled_from(["A?", "B?", "A?<think>", "Q\x03A?", "", None]), st.sampled_from(OUTPUTS))
ROWS = st.lists(st.tuples(st.integers(0, 3), st.lists(TURN, min_size=1, max_size=4)), max_size=12)
LIMIT = st.one_of(st.none(), st.integers(1, 20))


def contents(rows: RolloutBatch, pairs: ScoringPairs) -> Counter[Any]:
    """What the pairs hold, without the order of rows, columns and groups."""
    groups = [rows.rollouts[r].group for r in pairs.rollout_N]
    weights = pairs.multiplicity_P[pairs.own_N].tolist()
    return Counter((x, z, g, w) for (x, z), g, w in zip(as_text(pairs), groups, weights, strict=True))


@given(ROWS, st.randoms(use_true_random=False), st.sampled_from(["first_turn", "turn"]))
@settings(max_examples=200, deadline=None)
def test_the_order_of_rollouts_does_not_matter(rows: list[Any], random: Any, namespace: str) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    before, after = batch(rows), batch(shuffled)
    one, other = build(before, namespace=namespace), build(after, namespace=namespace)
    assert contents(before, one) == contents(after, other)
    assert {x.tobytes() for x in one.contexts} == {x.tobytes() for x in other.contexts}
    assert dict(one.dropped) == dict(other.dropped)


@given(ROWS, st.sampled_from(NAMESPACES), st.tuples(*[LIMIT] * 6))
@settings(max_examples=300, deadline=None)
def test_everything_is_in_or_counted_out(rows: list[Any], namespace: str, limits: tuple[int | None, ...]) -> None:
    names = [
        "max_contexts",
        "max_traces",
        "max_pairs",
        "max_context_tokens",
        "max_trace_tokens",
        "max_total_tokens",
    ]
    options = dict(zip(names, limits, strict=True))
    source = batch(rows)
    pairs = build(source, namespace=namespace, **options)
    turns = len(rows) if namespace == "first_turn" else sum(len(turns) for _, turns in rows)
    assert pairs.n_considered == turns
    assert all(count > 0 for count in pairs.dropped.values())
    # Every row is a turn of the batch, whole, and in the order of the batch.
    positions = list(zip(pairs.rollout_N.tolist(), pairs.turn_N.tolist(), strict=True))
    assert positions == sorted(set(positions))
    for (r, t), (x, z), group in zip(positions, as_text(pairs), pairs.group_N.tolist(), strict=True):
        original = source.rollouts[r].turns[t]
        assert original.context_ids is not None
        assert original.output_ids is not None
        assert (text(original.context_ids) + text(original.output_ids)).startswith(x + z + "</think>")
        assert x.endswith("<think>")
        same = [g for i, g in enumerate(pairs.group_N.tolist()) if source.rollouts[positions[i][0]].group == rows[r][0]]
        assert set(same) == {group}
    # Columns are distinct, in use, and weighted by groups.
    assert len({x.tobytes() for x in pairs.contexts}) == pairs.n_contexts
    for column, weight in enumerate(pairs.multiplicity_P.tolist()):
        assert weight == max(1, len(set(pairs.group_N[pairs.own_N == column].tolist())))
    # Limits hold for every crossed pair.
    n, p = pairs.n_traces, pairs.n_contexts
    longest_x = max((x.size for x in pairs.contexts), default=0)
    longest_z = max((z.size for z in pairs.traces), default=0)
    sizes = [p, n, n * p, longest_x, longest_z, longest_x + longest_z]
    for size, limit in zip(sizes, limits, strict=True):
        assert limit is None or size <= limit


# --- draws --------------------------------------------------------------------------------------------------------

LONG = batch(
    [
        (
            "a",
            [("A", "<think>a1</think>"), ("AB", "none"), ("ABC", "<think>a3</think>"), ("ABCD", "<think>a4</think>")],
        ),
        ("b", [("B", "<think>b1</think>")]),
        ("b", [("B", "none"), ("BC", "<think>c2")]),
        ("c", [("C", "<think> </think>"), ("CD", "<think>d2</think>"), ("CDE", "<think>d3</think>")]),
    ]
)


def test_first_turn_takes_turn_one_only() -> None:
    pairs = build(LONG)
    assert [z for _, z in as_text(pairs)] == ["a1", "b1"]
    assert pairs.dropped == {DropReason.NO_REASONING: 1, DropReason.EMPTY: 1}


def test_turn_takes_every_usable_turn() -> None:
    pairs = build(LONG, namespace="turn")
    assert [z for _, z in as_text(pairs)] == ["a1", "a3", "a4", "b1", "d2", "d3"]
    assert pairs.turn_N.tolist() == [0, 2, 3, 0, 1, 2]
    assert pairs.dropped == {DropReason.NO_REASONING: 2, DropReason.UNCLOSED: 1, DropReason.EMPTY: 1}


def test_trajectory_takes_one_usable_turn_of_each_rollout_uniformly() -> None:
    draws = 900
    finder = SpanFinder(TOKENIZER)
    seen: Counter[str] = Counter()
    for seed in range(draws):
        pairs = build(LONG, namespace="trajectory", seed=seed, tokenizer=finder)
        assert pairs.rollout_N.tolist() == [0, 1, 3]
        assert pairs.dropped[DropReason.NOT_DRAWN] == 3
        assert pairs.n_considered == 10
        seen.update(z for _, z in as_text(pairs))
    assert seen["b1"] == draws
    for traces in (["a1", "a3", "a4"], ["d2", "d3"]):
        share = 1 / len(traces)
        bound = 5 * np.sqrt(draws * share * (1 - share))  # 5 standard deviations; the seeds are fixed
        assert all(abs(seen[z] - draws * share) < bound for z in traces)


def test_a_limited_turn_sample_is_uniform_over_turns_not_over_groups() -> None:
    # Group "a" has 9 turns, group "b" has 1; two of the ten are kept.
    rows = batch([("a", [("A", f"<think>{i}</think>") for i in range(9)]), ("b", [("A", "<think>9</think>")])])
    draws = 800
    finder = SpanFinder(TOKENIZER)
    seen: Counter[str] = Counter()
    for seed in range(draws):
        pairs = build(rows, namespace="turn", max_traces=2, seed=seed, tokenizer=finder)
        seen.update(z for _, z in as_text(pairs))
    bound = 5 * np.sqrt(draws * 0.2 * 0.8)
    assert all(abs(seen[str(i)] - draws / 5) < bound for i in range(10))


def many(step: int = 7) -> RolloutBatch:
    rows: list[Any] = [
        (g, [(f"{g}:{t}", f"<think>{g} {i} {t}</think>") for t in range(4)]) for g in range(8) for i in range(4)
    ]
    return batch(rows, step=step)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_same_seed_step_and_namespace_give_the_same_pairs(namespace: str) -> None:
    state = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    options: dict[str, Any] = {"namespace": namespace, "max_contexts": 4, "max_traces": 8}
    first = build(many(), seed=1, **options)
    assert as_text(first) == as_text(build(many(), seed=1, **options))
    assert as_text(first) != as_text(build(many(), seed=2, **options))
    assert as_text(first) != as_text(build(many(step=8), seed=1, **options))
    assert state == np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]


def test_namespaces_draw_independently() -> None:
    # With one rollout a group and one turn a rollout all three choose from the same rows in the same way.
    single = batch([(g, [("A?" if g % 2 else "B?", f"<think>{g}</think>")]) for g in range(40)])
    chosen = [tuple(as_text(build(single, namespace=n, max_traces=8))) for n in NAMESPACES]
    assert len(set(chosen)) == 3


def test_steps_and_seeds_may_be_any_whole_number() -> None:
    assert build(many(step=-1), seed=-5, max_traces=3).n_traces == 3
    assert build(many(step=2**70), seed=2**70, max_traces=3).n_traces == 3


def test_a_limit_keeps_contexts_and_spreads_traces_over_the_groups() -> None:
    pairs = build(many(), max_traces=16)
    assert pairs.n_contexts == 8
    assert np.bincount(pairs.group_N).tolist() == [2] * 8
    assert pairs.dropped == {DropReason.SUBSAMPLED: 16}
    pairs = build(many(), max_pairs=2)
    assert (pairs.n_traces, pairs.n_contexts) == (1, 2)
    assert pairs.multiplicity_P.tolist() == [1, 1]


def test_the_models_limit_holds_across_pairs_and_costs_as_few_rows_as_it_can() -> None:
    rows = [(g, [("x" * (10 + g), f"<think>{'z' * (5 + i)}</think>")]) for g in range(4) for i in range(4)]
    rows += [
        ("long context", [("x" * 90, "<think>zzz</think>")]),
        ("long trace", [("x" * 9, f"<think>{'z' * 95}</think>")]),
    ]
    pairs = build(batch(rows), max_total_tokens=100)
    assert pairs.dropped == {DropReason.CONTEXT_TOO_LONG: 1, DropReason.TRACE_TOO_LONG: 1}
    exact = batch([("a", [("A", "<think>zz</think>")])])
    assert build(exact, max_total_tokens=10).n_traces == 1
    assert build(exact, max_total_tokens=9).n_traces == 0
    # Each would fit alone; only crossed they do not.
    rows = [
        ("a", [("x" * 50, "<think>zz</think>")]),
        ("b", [("x", f"<think>{'z' * 50}</think>")]),
        ("b", [("x", "<think>z</think>")]),
    ]
    pairs = build(batch(rows), max_total_tokens=60)
    assert [z for _, z in as_text(pairs)] == ["zz", "z"]
    assert pairs.dropped == {DropReason.TRACE_TOO_LONG: 1}


# --- think or completion ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "mode", "reason"),
    [
        ([("A?", "1"), ("A?", "<think>x</think>1")], "think", "1 of 2 turns open a block with <think>"),
        ([("A?", "1"), ("A?", "<think>x")], "think", "1 of 2 turns"),
        ([("A?<think>\n", "1"), ("A?", "1")], "think", "1 of 2 turns"),
        ([("A?<think>x</think>A?", "1")], "think", "none of 1 turns opens a block, but contexts show <think>"),
        ([("A? Use <think> and </think>.\x03", "1")], "think", "contexts show <think>"),
        ([("A? Answer in <think></think>, please.\x03", "1")], "think", "contexts show <think>"),
        ([("A?<think>\n\n</think>\n\n", "1")], "completion", "none of 1 turns has <think>"),
        ([("A?", "1 </think>")], "completion", "none of 1 turns has <think>"),
        ([("A?", "1")], "completion", "none of 1 turns has <think>"),
    ],
)
@pytest.mark.parametrize("as_ids", [True, False])
def test_auto_looks_at_outputs_then_at_contexts(turns: Any, mode: str, reason: str, as_ids: bool) -> None:
    if as_ids:
        rows = batch([("a", [t]) for t in turns])
    else:
        # As text, a turn marker is written out.
        marked = [(c.replace("\x03", "<|im_end|>"), o) for c, o in turns]
        rollouts = tuple(Rollout(turns=(Turn(context=c, output=o),), group="a") for c, o in marked)
        rows = RolloutBatch(step=0, rollouts=rollouts)
    choice = resolve_reasoning(rows, tokenizer=TOKENIZER if as_ids else None)
    assert choice.mode == mode
    assert reason in choice.reason
    found, why = choice
    assert (found, why) == (choice.mode, choice.reason)


def test_auto_reads_messages_where_that_is_all_there_is() -> None:
    message = {"role": "system", "content": "Think inside <think> </think>, then answer."}
    output = Turn(context_messages=(message, {"role": "user", "content": None}), output="1")
    rows = RolloutBatch(step=0, rollouts=(Rollout(turns=(output,), group="a"),))
    assert resolve_reasoning(rows).mode == "think"


def test_auto_is_noted_and_a_settled_question_is_not_asked_again() -> None:
    pairs = build(FOUR, reasoning="auto")
    assert pairs.reasoning == "think"
    assert pairs.notes == ("reasoning=think: 4 of 4 turns open a block with <think>",)
    plain = batch([("a", [("A?", "1")]), ("b", [("B?", "2")])])
    pairs = build(plain, reasoning="auto")
    assert (pairs.reasoning, as_text(pairs)) == ("completion", [("A?", "1"), ("B?", "2")])
    assert resolve_reasoning(FOUR, settings=PairSettings(reasoning="completion")) == ("completion", "as set")
    assert build(plain).dropped == {DropReason.NO_REASONING: 2}


def test_other_tags() -> None:
    rows = batch([("a", [("A?", "[r]one[/r]1")]), ("b", [("B?", "<think>two</think>2")])])
    tags = [["[r]", "[/r]"], ("<think>", "</think>")]
    assert [z for _, z in as_text(build(rows, tags=tags))] == ["one", "two"]
    assert [z for _, z in as_text(build(rows, tags=tags[:1]))] == ["one"]
    finder = SpanFinder(TOKENIZER, ReasoningTags((("[r]", "[/r]"),)))
    assert [z for _, z in as_text(build(rows, tags=tags[:1], tokenizer=finder))] == ["one"]
    with pytest.raises(SettingsError, match=r"SpanFinder looks for .*\[r\]"):
        build(rows, tokenizer=finder)


# --- settings, refusals, and what is nothing ----------------------------------------------------------------------


def test_ids_without_a_tokenizer_are_refused_with_a_way_out() -> None:
    with pytest.raises(PairError, match="Pass it, or say reasoning='completion'"):
        build(FOUR, tokenizer=None)
    with pytest.raises(PairError, match="Pass the tokenizer, or say reasoning='completion'"):
        build(FOUR, tokenizer=None, reasoning="auto")
    # Text alone cannot be scored, but it is no reason to fail.
    rows = RolloutBatch.from_lists(step=0, prompts=["A?"], completions=["<think>x</think>"])
    assert build(rows, tokenizer=None, reasoning="auto").dropped == {DropReason.NO_TOKEN_IDS: 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"reasoning": "thinking"},
        {"max_contexts": 0},
        {"max_pairs": 2.5},
        {"max_traces": True},
        {"tags": ()},
        {"tags": (("<think>", ""),)},
    ],
)
def test_settings_that_fit_nothing_are_refused(changes: Any) -> None:
    with pytest.raises(SettingsError):
        PairSettings(**changes)
    with pytest.raises(SettingsError):
        build_pairs(FOUR, tokenizer=TOKENIZER, **changes)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"unknown pair setting max_trace; there are .*max_traces"):
        build(FOUR, max_trace=3)
    with pytest.raises(SettingsError, match="namespace must be one of first_turn, trajectory, turn; found 'turns'"):
        build(FOUR, namespace="turns")


def test_settings_and_changes_go_together() -> None:
    chosen = PairSettings(max_traces=2).with_reasoning("think")
    assert build_pairs(FOUR, settings=chosen, tokenizer=TOKENIZER).n_traces == 2
    assert build_pairs(FOUR, settings=chosen, tokenizer=TOKENIZER, max_traces=3).n_traces == 3


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_nothing_and_one_prompt_are_no_error_here(namespace: str) -> None:
    empty = build(batch([]), namespace=namespace)
    assert (empty.n_traces, empty.n_contexts, empty.n_considered) == (0, 0, 0)
    assert empty.shortfall == "no reasoning to score among 0 turns (the batch is empty)"
    one = build(batch([("a", [("A?", "<think>x</think>")])] * 3), namespace=namespace, max_pairs=1)
    assert (one.n_traces, one.n_contexts) == (1, 1)
    assert "only one distinct context" in str(one.shortfall)


def test_a_large_batch_takes_seconds() -> None:
    rng = np.random.default_rng(0)
    prompts = [np.concatenate([rng.integers(200, 50_000, 500), [EOS]]) for _ in range(512)]
    rollouts = []
    for i in range(4_096):
        output = np.concatenate([ids("<think>"), rng.integers(200, 50_000, 1_900), ids("</think>"), [EOS]])
        rollouts.append(Rollout(turns=(Turn(context_ids=prompts[i // 8], output_ids=output),), group=i // 8))
    rows = RolloutBatch(step=0, rollouts=tuple(rollouts), eos_token_ids=(EOS,))
    begun = time.process_time()
    pairs = build_pairs(rows, tokenizer=TOKENIZER, max_total_tokens=4_000, max_pairs=100_000)
    assert time.process_time() - begun < CPU_SECONDS
    assert (pairs.n_contexts, pairs.n_traces) == (316, 316)  # 316 = floor(sqrt(100,000)): a trace for each column
