"""Tool calls: parsing in every syntax, and what each rate divides by what."""

from __future__ import annotations

import json
import time
import timeit
from pathlib import Path

import numpy as np
import pytest

from collapsediag.errors import MetricError
from collapsediag.metrics.registry import find
from collapsediag.metrics.tool_parsers import (
    calls_from_message,
    calls_from_response_items,
    canonical_arguments,
    result_is_error,
    split_output,
)
from collapsediag.metrics.tool_use import read_tool_use
from collapsediag.metrics.tools import tool_metrics
from collapsediag.rollouts import Rollout, RolloutBatch, ToolCall, Turn

DATA = Path(__file__).parent / "data"


def calls_of(text: str) -> list[ToolCall]:
    return [segment.call for segment in split_output(text) if segment.call is not None]


def shape(text: str) -> list[tuple[str, bool]]:
    return [(call.name, call.malformed) for call in calls_of(text)]


# --- parsers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [("add", False)]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", False)]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", False)]),
        ('<tool_call>{"name": "now"}</tool_call>', [("now", False)]),
        # The end-of-turn token stood where the closing tag was.
        ('<tool_call>{"name": "add", "arguments": {}}', [("add", False)]),
        ('<tool_call>{"name": "add", "arguments": {"a": ', [("", True)]),
        ("<tool_call>add(1, 2)</tool_call>", [("", True)]),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', [("", True)]),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', [("add", True)]),
        ('<tool_call>[{"name": "add"}]</tool_call>', [("", True)]),
        ('<tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b"}</tool_call>', [("a", False), ("b", False)]),
        ('<tool_call>{"name": "a"} <tool_call>{"name": "b"}</tool_call>', [("a", False), ("b", False)]),
        ("<tool_call><function=add>\n<parameter=a>\n1\n</parameter>\n</function></tool_call>", [("add", False)]),
        ("<search> who was first </search>", [("search", False)]),
        ("<search></search>", [("search", True)]),
        ("<search> cut off", [("search", True)]),
        ("<think>perhaps <search>q</search></think>", [("search", False)]),
        ("no call at all, x < y > z", []),
        ("", []),
    ],
)
def test_calls_in_text(text: str, expected: list[tuple[str, bool]]) -> None:
    assert shape(text) == expected


def test_arguments_are_canonical_in_every_syntax() -> None:
    canonical = '{"a":1,"b":"x"}'
    hermes = calls_of('<tool_call>{"name": "f", "arguments": {"b": "x", "a": 1}}</tool_call>')[0]
    openai = calls_from_message(
        {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"b":"x", "a":1}'}}]}
    )
    as_dict = calls_from_message({"tool_calls": [{"function": {"name": "f", "arguments": {"b": "x", "a": 1}}}]})
    old = calls_from_message({"function_call": {"name": "f", "arguments": '{"a":1,"b":"x"}'}})
    parts = calls_from_message(
        {"content": [{"type": "tool_call", "tool_call": {"function": {"name": "f", "arguments": '{"a":1,"b":"x"}'}}}]}
    )
    items = calls_from_response_items([{"type": "function_call", "name": "f", "arguments": '{"b":"x","a":1}'}])
    for call in (hermes, *openai, *as_dict, *old, *parts, *items):
        assert (call.name, call.arguments, call.malformed) == ("f", canonical, False)
    assert len(openai) == len(as_dict) == len(old) == len(parts) == len(items) == 1
    assert calls_from_message({"role": "assistant", "content": "just words", "tool_calls": None}) == ()


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1, 2]", "3", [1], 3, float("nan"), {1: {2}}])
def test_arguments_that_do_not_parse_are_malformed(arguments: object) -> None:
    assert canonical_arguments(arguments)[1] is False
    assert calls_from_message({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})[0].malformed


@pytest.mark.parametrize("entry", [{"function": {"arguments": "{}"}}, {"function": None}, "add(1)", {}, {"name": 3}])
def test_a_call_without_a_name_is_malformed(entry: object) -> None:
    assert [call.malformed for call in calls_from_message({"tool_calls": [entry]})] == [True]


def test_response_items_join_calls_and_results_by_id() -> None:
    items = [
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "a", "arguments": "{}", "call_id": "1"},
        {"type": "function_call", "name": "b", "arguments": "{}", "call_id": "2"},
        {"type": "function_call_output", "call_id": "2", "output": '{"error": "no"}'},
        {"type": "function_call_output", "call_id": "1", "output": "fine"},
        {"type": "function_call", "name": "c", "arguments": "{}", "call_id": "3"},
    ]
    calls = calls_from_response_items(items)
    assert [(c.name, c.result, c.error) for c in calls] == [
        ("a", "fine", False),
        ("b", '{"error": "no"}', True),
        ("c", None, None),
    ]


@pytest.mark.parametrize(
    ("text", "is_error"),
    [
        ('{"error": "no such city"}', True),
        ('{"error": null, "value": 3}', False),
        ('{"error": false}', False),
        ('{"is_error": true}', True),
        ('{"status": "failed"}', True),
        ('{"success": true}', False),
        ("{'error': 'python repr'}", True),
        ("{'error': None}", False),
        ("Error: timed out", True),
        ("Error executing tool add: bad", True),
        ("ValueError: invalid literal", True),
        ("Traceback (most recent call last):\n  ...", True),
        ("\nMy previous action is invalid. If I want to search, ...", True),
        ("Invalid arguments for add", True),
        ("Error analysis is the study of kind and quantity of error.", False),
        ("Exception handling in Python", False),
        ("The error: a short history", False),
        ("[]", False),
        ("", False),
        ("711", False),
    ],
)
def test_what_counts_as_an_error(text: str, is_error: bool) -> None:
    assert result_is_error(text) is is_error


def test_splitting_keeps_order_and_loses_no_words() -> None:
    text = "One <search>two</search> three <information>four</information> five <search>six"
    assert [(s.kind, s.text.strip()) for s in split_output(text)] == [
        ("text", "One"),
        ("call", "two"),
        ("text", "three"),
        ("result", "four"),
        ("text", "five"),
        ("call", "six"),
    ]


def test_a_result_may_quote_call_tags() -> None:
    segments = split_output("<information>use <search> like this</information> Fine.")
    assert [(s.kind, s.text) for s in segments] == [("result", "use <search> like this"), ("text", " Fine.")]


def test_splitting_a_collapsed_output_stays_linear() -> None:
    """A collapsed policy repeats an opening tag thousands of times."""

    def seconds(n: int) -> float:  # of this process, the best of five: others share the machine
        text = "<search> again " * n
        assert len(split_output(text)) == n
        # timeit stops garbage collection, which goes through all that other tests have left.
        return min(timeit.repeat(lambda: split_output(text), timer=time.process_time, number=1, repeat=5))

    seconds(1000)
    assert seconds(32_000) < 64 * seconds(2_000)  # linear is 16, quadratic 256


# --- rates ---------------------------------------------------------------------------------------------------------


def call(name: str = "f", arguments: str = "{}", **fields: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, **fields)  # type: ignore[arg-type]


def rollout(*calls: ToolCall, group: int = 0, reward: object = None) -> Rollout:
    turn = Turn(output="words", tool_calls=calls)
    return Rollout(turns=(turn,), group=group, reward=reward)  # type: ignore[arg-type]


def batch(*rollouts: Rollout) -> RolloutBatch:
    return RolloutBatch(step=1, rollouts=rollouts)


def test_every_rate_divides_by_what_it_says() -> None:
    values = tool_metrics(
        batch(
            rollout(call(error=False), call(error=True), call("g", error=None), group=0, reward=1.0),
            rollout(
                call(malformed=True, error=True), call("f", '{"a": 1}'), call("f", '{ "a":1 }'), group=1, reward=0.5
            ),
            rollout(group=2, reward=0.25),
            rollout(group=3, reward=None),
        )
    )
    assert values["tools/call_rate"] == 2 / 4
    assert values["tools/calls_per_rollout"] == 6 / 4
    assert values["tools/malformed_rate"] == 1 / 6
    assert values["tools/error_rate"] == 1 / 2  # the malformed call is not counted a second time here
    assert values["tools/duplicate_call_fraction"] == 2 / 5  # f({}) again, and f({"a":1}) again in other spacing
    assert values["tools/reward_with_call"] == 0.75
    assert values["tools/reward_without_call"] == 0.25
    assert (values["tools/n_rollouts"], values["tools/n_calls"]) == (4.0, 6.0)
    assert "tools/result_use_rate" not in values
    assert "tools/n_results_judged" not in values


def test_the_same_call_in_two_rollouts_is_no_repeat() -> None:
    values = tool_metrics(batch(rollout(call(), group=0), rollout(call(), group=1)))
    assert values["tools/duplicate_call_fraction"] == 0.0


def test_no_calls_means_a_rate_of_zero_and_nothing_else() -> None:
    values = tool_metrics(batch(rollout(group=0, reward=1.0), rollout(group=1, reward=0.0)))
    assert {name: v for name, v in values.items() if "/ci_" not in name} == {
        "tools/call_rate": 0.0,
        "tools/calls_per_rollout": 0.0,
        "tools/n_rollouts": 2.0,
        "tools/n_calls": 0.0,
        "tools/reward_without_call": 0.5,
    }


def test_rollouts_known_only_as_ids_are_in_no_number() -> None:
    ids_only = Rollout(turns=(Turn(context_ids=[1], output_ids=[2]),), group=0, reward=5.0)
    assert tool_metrics(batch(ids_only)) == {}
    values = tool_metrics(batch(ids_only, rollout(call(), reward=1.0)))
    assert (values["tools/n_rollouts"], values["tools/call_rate"]) == (1.0, 1.0)
    assert "tools/reward_without_call" not in values


def test_an_empty_batch_has_no_numbers() -> None:
    assert tool_metrics(batch()) == {}


@pytest.mark.parametrize("reward", ["1.0", True, float("inf"), {"a": 1.0}])
def test_a_reward_that_is_no_number_is_refused_by_row(reward: object) -> None:
    with pytest.raises(MetricError, match="rollout 1"):
        tool_metrics(batch(rollout(reward=0.0), rollout(reward=reward)))


def test_unscored_rewards_are_left_out() -> None:
    values = tool_metrics(
        batch(rollout(call(), reward=float("nan")), rollout(call(), reward=2.0), rollout(reward=None))
    )
    assert values["tools/reward_with_call"] == 2.0
    assert "tools/reward_without_call" not in values


def test_every_name_is_registered_and_within_bounds() -> None:
    results = [call(result="The answer is 711.", error=False)]
    turns = (Turn(output="", tool_calls=tuple(results)), Turn(output="So 711."))
    used = [Rollout(turns=turns, group=g, reward=1.0) for g in range(3)]
    values = tool_metrics(batch(*used, rollout(group=3, reward=0.0)))
    assert values["tools/result_use_rate"] == 1.0
    for name, value in values.items():
        info = find(name)
        assert info is not None, name
        low, high = info.bounds
        assert low is None or value >= low, (name, value)
        assert high is None or value <= high, (name, value)


def test_intervals_resample_prompts_not_rollouts() -> None:
    """All rollouts of a prompt agree, so the interval must be that of 4 draws, not of 32."""
    rows = [rollout(*([call()] if g < 2 else []), group=g) for g in range(4) for _ in range(8)]
    values = tool_metrics(batch(*rows))
    low, high = values["tools/call_rate/ci_low"], values["tools/call_rate/ci_high"]
    assert values["tools/call_rate"] == 0.5
    assert low <= 0.05
    assert high >= 0.95
    assert "tools/call_rate/ci_low" not in tool_metrics(batch(*rows[:8]))


def test_a_rate_of_zero_still_has_an_interval() -> None:
    values = tool_metrics(batch(*[rollout(group=g) for g in range(20)]))
    assert values["tools/call_rate/ci_low"] == 0.0
    np.testing.assert_allclose(values["tools/call_rate/ci_high"], 0.1611, atol=1e-4)  # Wilson, 0 of 20


# --- where the answers are -----------------------------------------------------------------------------------------


def test_answers_are_attached_only_where_it_is_certain_whose_they_are() -> None:
    two = '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>'
    apart = Turn(output=two, observation="<tool_response>Error: x</tool_response><tool_response>1</tool_response>")
    together = Turn(output=two, observation="Error: x")
    single = Turn(output='<tool_call>{"name": "a"}</tool_call>', observation="Error: x")
    for turn, errors in ((apart, [True, False]), (together, [None, None]), (single, [True])):
        use = read_tool_use(Rollout(turns=(turn,), group=0))
        assert use is not None
        assert [c.error for c in use.calls] == errors


def test_answers_are_found_in_the_next_context() -> None:
    first = Turn(context="Q?", output="<search>q</search>")
    context = "Q?<search>q</search><information>Error: down</information>"
    by_text = Rollout(turns=(first, Turn(context=context, output="Hm.")), group=0)
    ask = {"role": "user", "content": "Q?"}
    reply = ({"role": "assistant", "content": "..."}, {"role": "tool", "content": "Error: down"})
    by_message = Rollout(
        turns=(
            Turn(context_messages=(ask,), output="<search>q</search>"),
            Turn(context_messages=(ask, *reply), output="Hm."),
        ),
        group=0,
    )
    for found in (read_tool_use(by_text), read_tool_use(by_message)):
        assert found is not None
        assert [(c.result, c.error) for c in found.calls] == [("Error: down", True)]
        assert len(found.used) == 1


def test_a_policy_that_writes_results_itself_gets_no_credit_for_them() -> None:
    """The source states what the environment answered, so the block in the output is the policy's invention."""
    output = "<search>q</search><information>It is 711.</information> So 711."
    invented = Rollout(
        turns=(Turn(output=output, observation="Nothing among 998 pages."), Turn(output="711 then.")), group=0
    )
    pasted = Rollout(turns=(Turn(output=output),), group=0)
    use_invented, use_pasted = read_tool_use(invented), read_tool_use(pasted)
    assert use_invented is not None
    assert use_pasted is not None
    assert use_invented.used == (False,)
    assert use_pasted.used == (True,)


# --- a real collapse -----------------------------------------------------------------------------------------------


def test_a_real_run_stops_calling_before_its_accuracy_falls() -> None:
    """Five evaluations of 20 rollouts: calls per rollout fall at step 200, exact match only at step 250."""
    steps = [100, 150, 200, 250, 300]
    logged = [json.loads((DATA / f"histories/eval_e5b_collapse_step{s}.json").read_text())[str(s)] for s in steps]
    series = []
    for entry in logged:
        n = int(entry["n_samples"])
        made = np.arange(round(entry["avg_tool_calls"] * n)) % n  # as many calls as logged, spread over the rollouts
        rows = [rollout(*[call("f", f'{{"i":{i}}}') for i in np.flatnonzero(made == r)], group=r) for r in range(n)]
        series.append(tool_metrics(batch(*rows)))
    calls = np.array([values["tools/calls_per_rollout"] for values in series])
    exact_match = np.array([entry["em"] for entry in logged])
    np.testing.assert_allclose(calls, [2.2, 2.1, 0.15, 0.0, 0.0])
    np.testing.assert_allclose(exact_match, [0.45, 0.35, 0.35, 0.0, 0.0])
    half_lost = [int(steps[np.argmax(curve < 0.5 * curve[0])]) for curve in (calls, exact_match)]
    assert half_lost == [200, 250]
    # And not by chance: the intervals of step 150 and of step 200 are apart.
    assert series[2]["tools/call_rate/ci_high"] < series[1]["tools/call_rate/ci_low"]
