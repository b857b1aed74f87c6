"""A whole batch through `rollout_metrics`: planted numbers, real data, what is missing and why, environments, input."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import collapsediag as cd
from collapsediag.errors import MetricError, SettingsError
from collapsediag.metrics.from_rollouts import environment_name, rollout_report
from collapsediag.metrics.registry import find, unknown_names

DATA = Path(__file__).parent / "data" / "rollouts"
VALID = "<think>because</think><answer>{}</answer>"


def turn(output: str | None = None, **fields: Any) -> cd.Turn:
    return cd.Turn(output=output, **fields)


def rollout(output: str | None = None, group: str | int = "g", **fields: Any) -> cd.Rollout:
    names = ("context", "context_ids", "output_ids", "finish_reason", "tool_calls", "logprobs")
    of_turn = {name: fields.pop(name) for name in names if name in fields}
    return cd.Rollout(turns=(turn(output, **of_turn),), group=group, **fields)


def batch(*rollouts: cd.Rollout, **fields: Any) -> cd.RolloutBatch:
    return cd.RolloutBatch(step=3, rollouts=rollouts, **fields)


class Letters:
    """A tokenizer with one token a character; token 0 ends a turn."""

    eos_token_id = 0
    pad_token_id = None

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def decode(self, ids: list[int]) -> str:
        return "".join("[END]" if i == 0 else chr(i) for i in ids)


def ids(text: str, end: bool = False) -> list[int]:
    return [ord(c) for c in text] + [0] * end


PLANTED = batch(
    rollout(VALID.format("4"), "a", context="2+2=", reward=1.0, success=True, rewards={"format": 1.0, "ok": None}),
    rollout(VALID.format(" 4. "), "a", context="2+2=", reward=1.0, success=True, rewards={"format": 0.0, "ok": None}),
    rollout("<think>hm", "b", context="3+3=", reward=0.0, success=False, rewards={"format": 0.5}),
    rollout("<think>hm", "b", context="3+3=", reward=1.0, success=True),
    rollout(VALID.format("4"), "b", context="3+3=", reward=None, success=None),
)


def test_a_planted_batch() -> None:
    values = cd.rollout_metrics(PLANTED)
    assert (values["n_rollouts"], values["n_groups"]) == (5.0, 2.0)
    assert values["format/valid_fraction"] == pytest.approx(3 / 5)
    assert values["format/unclosed_think_fraction"] == pytest.approx(2 / 5)
    assert values["reward/mean"] == 0.75
    assert values["reward/n_unscored"] == 1.0
    assert values["reward/within_group_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert values["reward/all_success_fraction"] == 0.5
    assert values["reward/format/mean"] == 0.5
    assert not [name for name in values if name.startswith("reward/ok/")]  # a component that no rollout has
    assert values["pass@1"] == 0.75
    assert values["pass@2"] == 1.0
    assert values["n_unlabelled"] == 1.0
    assert values["diversity/distinct_answers_per_group"] == 1.0
    assert values["diversity/unanswered_fraction"] == pytest.approx(2 / 5)
    assert values["diversity/identical_completion_fraction"] == pytest.approx(2 / 5)
    assert values["diversity/identical_completion_fraction_across_groups"] == pytest.approx(2 / 5)
    assert values["length_words/max"] == 3.0
    assert values["tools/call_rate"] == 0.0


def test_every_name_is_registered_and_every_value_finite() -> None:
    environments = [
        cd.Rollout(turns=r.turns, group=r.group, reward=r.reward, environment=e, rewards=r.rewards)
        for r, e in zip(PLANTED, "xxyyy", strict=True)
    ]
    for values in (
        cd.rollout_metrics(PLANTED),
        cd.rollout_metrics(batch(*environments), success_threshold=0.5),
        cd.rollout_metrics(PLANTED, format=lambda text: "too_short" if len(text) < 12 else True),
        cd.rollout_metrics(batch(rollout(output_ids=[1, 2, 3]), max_output_tokens=3)),
    ):
        assert unknown_names(values) == []
        assert all(isinstance(v, float) and math.isfinite(v) for v in values.values())
        for name, value in values.items():
            info = find(name)
            assert info is not None
            low, high = info.bounds
            assert low is None or value >= low, name
            assert high is None or value <= high, name


def test_a_healthy_saturated_math_batch() -> None:
    rows = [json.loads(line) for line in (DATA / "simplerl_math_100x8_endings.jsonl").read_text().splitlines()]
    rollouts = [
        rollout(ending, row["idx"], reward=float(score), success=score)
        for row in rows
        for ending, score in zip(row["ending"], row["score"], strict=True)
    ]
    report = cd.rollout_report(batch(*rollouts), n_resamples=100)
    assert round(report.values["reward/mean"], 2) == 0.91
    assert round(report.values["reward/all_equal_fraction"], 2) == 0.90
    assert round(report.values["diversity/distinct_answers_per_group"], 2) == 1.32
    assert report.values["reward/expected_all_equal_fraction"] == pytest.approx(0.91**8 + 0.09**8)
    assert report.values["pass@8"] == 0.96
    assert "declare its format" in report.notes[0]


def test_the_order_of_rollouts_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    rollouts = [
        rollout(f"{VALID.format(i % 3)} {'x ' * int(rng.integers(5))}", i % 5, environment="ab"[i % 2], reward=i / 30)
        for i in range(30)
    ]
    values = cd.rollout_metrics(batch(*rollouts), success_threshold=0.5)
    shuffled = cd.rollout_metrics(batch(*[rollouts[i] for i in rng.permutation(30)]), success_threshold=0.5)
    assert set(values) == set(shuffled)
    for name in values:
        if "/ci_" not in name:  # the bootstrap draws by position
            assert shuffled[name] == pytest.approx(values[name], abs=1e-12), name


def test_an_environment_reads_as_if_it_were_alone() -> None:
    maze = [
        rollout(VALID.format(i), f"m{i // 2}", context=f"m{i // 2}", environment="maze", reward=float(i % 2))
        for i in range(6)
    ]
    sums = [
        rollout(f"no form {i % 2} here", f"s{i // 4}", context=f"s{i // 4}", environment="sums/easy", reward=1.0)
        for i in range(8)
    ]
    mixed = [r for pair in zip(maze, sums[:6], strict=True) for r in pair] + sums[6:]
    values = cd.rollout_metrics(batch(*mixed), success_threshold=0.5)
    for prefix, rollouts in (("env/maze/", maze), ("env/sums%2Feasy/", sums)):
        alone = cd.rollout_metrics(batch(*rollouts), success_threshold=0.5)
        assert {name[len(prefix) :] for name in values if name.startswith(prefix)} == set(alone)
        for name, value in alone.items():
            assert values[prefix + name] == value, name
    assert (values["env/maze/n_groups"], values["env/sums%2Feasy/n_groups"]) == (3.0, 2.0)
    assert not any(name.startswith("env/") for name in cd.rollout_metrics(batch(*maze)))


def test_a_reason_is_given_once_or_where_it_differs() -> None:
    rows = [rollout("a", 0, environment="x", success=True), rollout("b", 1, environment="y")]
    reasons = cd.rollout_report(batch(*rows)).not_measured
    assert "reward" in reasons
    assert [name for name in reasons if name.endswith("/pass@k")] == ["env/y/pass@k"]
    assert not [name for name in reasons if name.endswith("/reward")]


def test_rollouts_without_an_environment_are_another_kind() -> None:
    values = cd.rollout_metrics(batch(rollout("a", 0, environment="maze"), rollout("b", 1)))
    assert values["env/maze/n_rollouts"] == 1.0


def test_equal_group_numbers_of_two_environments_are_two_groups() -> None:
    values = cd.rollout_metrics(
        batch(*[rollout("a", 0, environment=e, reward=r) for e, r in (("x", 0.0), ("x", 0.0), ("y", 1.0), ("y", 1.0))])
    )
    assert values["n_groups"] == 2.0
    assert values["reward/all_equal_fraction"] == 1.0


# -- what is missing, and why ----------------------------------------------------------------------------------------


def test_everything_that_is_missing_has_a_reason() -> None:
    report = cd.rollout_report(batch(rollout(output_ids=[5, 6]), rollout(output_ids=[5, 7])))
    assert set(report.not_measured) == {
        "format",
        "length/truncated_fraction",
        "reward",
        "pass@k",
        "diversity/distinct_answers_per_group",
        "diversity/distinct_tool_sequences_per_group",
        "diversity/identical_completion_fraction_across_groups",
        "tools",
        "entropy",
    }
    assert report.values["length/mean"] == 2.0
    assert report.values["diversity/distinct_2"] == 1.0
    assert all("tokenizer" in report.not_measured[name] for name in ("format", "tools"))
    assert cd.rollout_report(batch()).not_measured == {"rollouts": "the batch has no rollout"}


def test_length_is_tokens_or_words_and_never_both() -> None:
    by_ids = cd.rollout_metrics(batch(rollout("one two", output_ids=[1, 2, 3]), rollout("one", output_ids=[4])))
    assert by_ids["length/mean"] == 2.0
    by_logprobs = cd.rollout_metrics(batch(rollout("one two", logprobs=[-1.0, -1.0, -1.0])))
    assert by_logprobs["length/mean"] == 3.0
    some_ids = batch(rollout("one two", output_ids=[1, 2, 3]), rollout("one"))
    assert cd.rollout_metrics(some_ids)["length_words/mean"] == 1.5
    counted = cd.rollout_report(some_ids, tokenizer=Letters())
    assert counted.values["length/mean"] == 3.0
    assert "re-tokenised" in counted.notes[-1]
    assert not [name for name in counted.values if name.startswith("length_words/")]
    unknown = cd.rollout_report(batch(rollout("one two"), rollout(output_ids=[1])))
    assert "length" in unknown.not_measured
    assert not [name for name in unknown.values if name.startswith(("length/m", "length_words/"))]


def test_truncation_needs_a_reason_or_sampled_ids_and_a_limit() -> None:
    cut, done = rollout(output_ids=[5, 6, 7]), rollout(output_ids=[5, 0])
    assert "length/truncated_fraction" not in cd.rollout_metrics(batch(cut, done))
    limited: dict[str, Any] = {"max_output_tokens": 3, "eos_token_ids": (0,)}
    assert cd.rollout_metrics(batch(cut, done, **limited))["length/truncated_fraction"] == 0.5
    ended = batch(rollout(output_ids=[5, 6, 0]), done, **limited)
    assert cd.rollout_metrics(ended)["length/truncated_fraction"] == 0.0
    assert "length/truncated_fraction" not in cd.rollout_metrics(batch(cut, done, approximate_ids=True, **limited))
    retokenised = cd.rollout_metrics(batch(rollout("abc"), **limited), tokenizer=Letters())
    assert "length/truncated_fraction" not in retokenised
    reasons = batch(rollout("a", finish_reason="length"), rollout("b", finish_reason="stop"))
    assert cd.rollout_metrics(reasons)["length/truncated_fraction"] == 0.5


def test_a_template_that_opens_the_tag_counts_in_text_and_in_ids() -> None:
    opened, output = "user\n2+2=\nassistant\n<think>\n", "four</think><answer>4</answer>"
    text = batch(rollout(output, context=opened), rollout(output, context=opened))
    assert cd.rollout_metrics(text)["format/valid_fraction"] == 1.0
    by_ids = batch(rollout(context_ids=ids(opened), output_ids=ids(output, end=True)))
    values = cd.rollout_metrics(by_ids, tokenizer=Letters())
    assert values["format/valid_fraction"] == 1.0
    assert values["diversity/unanswered_fraction"] == 0.0
    closed = batch(rollout(context_ids=ids("user\n2+2=\nassistant\n"), output_ids=ids(output)))
    assert cd.rollout_metrics(closed, tokenizer=Letters())["format/no_think_fraction"] == 1.0


def test_ids_with_a_tokenizer_give_what_the_text_gives() -> None:
    outputs = [VALID.format(4), VALID.format(5), "<think>no", '<tool_call>{"name": "add"}</tool_call>']
    by_text = cd.rollout_metrics(batch(*[rollout(text, i // 2) for i, text in enumerate(outputs)]))
    as_ids = batch(*[rollout(output_ids=ids(text, end=True), group=i // 2) for i, text in enumerate(outputs)])
    by_ids = cd.rollout_metrics(as_ids, tokenizer=Letters())
    families = ("format/", "tools/", "diversity/distinct_a", "diversity/distinct_t", "diversity/un", "diversity/ident")
    compared = [name for name in by_text if name.startswith(families)]
    assert len(compared) > 15
    assert {name: by_ids[name] for name in compared} == {name: by_text[name] for name in compared}


def test_entropy_reads_the_reasoning_where_ids_and_a_tokenizer_show_it() -> None:
    output = ids("<think>ab</think>c", end=True)
    logprobs = np.full(len(output), -1.0)
    logprobs[7:9] = [-2.0, -4.0]
    rows = batch(rollout(output_ids=output, logprobs=logprobs), rollout(output_ids=ids("xy"), logprobs=[-6.0, -8.0]))
    plain, found = cd.rollout_metrics(rows), cd.rollout_metrics(rows, tokenizer=Letters())
    assert plain["entropy/sampled_mean"] == pytest.approx((len(output) - 2 + 6 + 14) / (len(output) + 2))
    assert found["entropy/sampled_mean"] == pytest.approx((6 + 14) / 4)
    mine = cd.rollout_metrics(rows, entropy={"positions": lambda turn: turn.output_ids == ord("a")})
    assert mine["entropy/sampled_mean"] == 2.0
    environments = batch(
        *[cd.Rollout(turns=r.turns, group=r.group, environment=e) for r, e in zip(rows, "xy", strict=True)]
    )
    assert cd.rollout_metrics(environments)["env/y/entropy/sampled_mean"] == 7.0
    with pytest.raises(MetricError, match="log-probability"):
        cd.rollout_metrics(batch(rollout("a", logprobs=[0.5])))


def test_distinct_tool_sequences() -> None:
    def search(query: str) -> str:
        return f"<think>a</think><search>{query}</search>"

    values = cd.rollout_metrics(
        batch(rollout(search("x"), 0), rollout(search("x "), 0), rollout(search("y"), 0), *[rollout("none", 1)] * 2)
    )
    assert values["diversity/distinct_tool_sequences_per_group"] == (2 + 1) / 2
    assert values["n_single_groups"] == 0.0
    given = [cd.ToolCall(name="add", arguments='{"a":1}'), cd.ToolCall(name="add", arguments='{"a":2}')]
    rows = [rollout("", 0, tool_calls=tuple(calls)) for calls in (given, given[::-1], given[:1], given)]
    assert cd.rollout_metrics(batch(*rows))["diversity/distinct_tool_sequences_per_group"] == 3.0
    single = cd.rollout_report(batch(rollout(search("x"), 0), rollout(search("y"), 1)))
    assert single.values["n_single_groups"] == 2.0
    for name in ("distinct_tool_sequences_per_group", "identical_completion_fraction"):
        assert single.not_measured[f"diversity/{name}"] == "no group has two rollouts"
    silent = cd.rollout_report(batch(rollout("a", 0)))
    assert silent.not_measured["diversity/distinct_tool_sequences_per_group"] == "no rollout calls a tool"


def test_multi_turn_rollouts_count_turns_and_compare_whole_rollouts() -> None:
    def two(first: str, second: str) -> cd.Rollout:
        return cd.Rollout(turns=(turn(first, context="q"), turn(second, context="q " + first)), group="g")

    values = cd.rollout_metrics(batch(two("a b c", "d"), two("a b c", "d"), two("a b c", "e f 7")))
    assert values["format/n_turns"] == 6.0
    assert values["length_words/mean"] == pytest.approx((3 * 3 + 1 + 1 + 3) / 6)
    assert values["length_words/within_group_std"] == pytest.approx(np.std([4, 4, 6], ddof=1))
    assert values["diversity/identical_completion_fraction"] == pytest.approx(2 / 3)
    assert values["diversity/distinct_2"] == pytest.approx(4 / 8)  # no bigram from one turn into the next
    assert values["diversity/unanswered_fraction"] == pytest.approx(2 / 3)


def test_groups_of_one_prompt_are_not_different_prompts() -> None:
    same = batch(*[rollout("a", g, context="q") for g in (0, 1)], rollout("b", 2, context="other"))
    assert cd.rollout_metrics(same)["diversity/identical_completion_fraction_across_groups"] == 0.0
    by_group = batch(*[rollout("a", g) for g in (0, 1)])
    assert cd.rollout_metrics(by_group)["diversity/identical_completion_fraction_across_groups"] == 1.0


def test_an_answer_that_the_source_states_is_believed() -> None:
    rows = batch(rollout("so 4", answer="5"), rollout("so 5"), rollout("no", answer="5.0"))
    assert cd.rollout_metrics(rows)["diversity/distinct_answers_per_group"] == 1.0
    blank = batch(rollout("<answer> </answer>"), rollout("4"), rollout("5", answer=""), rollout("4.0"))
    assert cd.rollout_metrics(blank)["diversity/unanswered_fraction"] == 0.5
    assert cd.rollout_metrics(blank)["diversity/distinct_answers_per_group"] == 1.0
    one = cd.rollout_report(batch(rollout("4"), rollout("none")))
    assert one.not_measured["diversity/distinct_answers_per_group"].startswith("no group has two rollouts with a")
    last_word = cd.rollout_metrics(rows, answer=lambda text: text.split()[0])
    assert last_word["diversity/distinct_answers_per_group"] == 2.0


# -- settings and bad input ------------------------------------------------------------------------------------------


def test_options_reach_their_families() -> None:
    rows = batch(*[rollout(f"a{i}", i // 4, reward=float(i % 4 == 0) * (1 + i)) for i in range(12)])
    whole, half = cd.rollout_metrics(rows, rho=1.0), cd.rollout_metrics(rows, rho=0.5)
    assert (whole["reward/filter_kept_prompts"], half["reward/filter_kept_prompts"]) == (3.0, 1.0)
    strict = cd.rollout_metrics(rows, success_threshold=5.0)
    assert strict["pass@1"] == pytest.approx(2 / 12)
    other_seed = cd.rollout_metrics(rows, success_threshold=5.0, seed=1)
    assert {name for name in strict if strict[name] != other_seed[name]} <= {
        name for name in strict if name.startswith(("pass@", "tools/")) and "/ci_" in name
    }
    assert strict == cd.rollout_metrics(rows, success_threshold=5.0)
    assert cd.rollout_metrics(rows, format=cd.RegexFormat(r"a\d"))["format/valid_fraction"] == pytest.approx(10 / 12)
    with pytest.raises(SettingsError, match="format is"):
        cd.rollout_metrics(rows, format="<think>")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("1", r"rollout 1 \(group 'g', id 'r7'\) is '1'"),
        (True, "is the boolean True"),
        ({"a": 1.0}, "is a dict of components"),
    ],
)
def test_what_is_no_reward_is_refused_by_its_rollout(reward: Any, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        cd.rollout_metrics(batch(rollout("a", reward=1.0), rollout("b", id="r7", reward=reward)))
    with pytest.raises(MetricError, match="component 'x' of rollout 0"):
        cd.rollout_metrics(batch(rollout("a", rewards={"x": reward})))


@pytest.mark.fault(
    "a reward overflows: infinite, or beyond 1e150",
    "its rollout counts as unscored and a note names it with the value; everything else is measured",
)
@pytest.mark.parametrize(
    ("reward", "shown"),
    [(math.inf, "inf"), (-math.inf, "-inf"), (1e308, "1e+308"), (-(10**400), "-inf"), (np.float32("inf"), "inf")],
    ids=["inf", "-inf", "1e308", "integer", "numpy"],
)
def test_a_reward_that_overflowed_costs_no_number_of_the_others(reward: float, shown: str) -> None:
    def rows(overflowed: float | None) -> cd.RolloutBatch:
        turn = {"logprobs": [-0.5, -1.0], "output_ids": [1, 2], "context_ids": [7]}
        rewards = [1.0, 0.0, overflowed, 1.0]
        return batch(
            *[
                cd.Rollout(
                    turns=(cd.Turn(**turn),),  # type: ignore[arg-type]
                    group=f"g{i // 2}",
                    environment="maze" if i < 3 else "sums",
                    reward=r,
                    rewards={"answer": r, "format": 1.0},
                    advantage=r,
                    success=i % 2 == 0,
                )
                for i, r in enumerate(rewards)
            ]
        )

    found, unscored = cd.rollout_report(rows(reward)), cd.rollout_report(rows(None))
    assert dict(found.values) == dict(unscored.values)
    assert dict(found.not_measured) == dict(unscored.not_measured)
    assert found.values["reward/mean"] == pytest.approx(2 / 3)
    assert found.values["reward/n_unscored"] == found.values["reward/answer/n_unscored"] == 1.0
    assert found.values["reward/format/n_unscored"] == 0.0
    assert found.values["entropy/n_covariance"] == 6.0
    (note,) = set(found.notes) - set(unscored.notes)
    assert note.startswith(
        f"left out as unscored: reward {shown} of rollout 2 (group 'g1'), reward 'answer' {shown} of rollout 2 (group "
        f"'g1'), advantage {shown} of rollout 2 (group 'g1'). No mean or variance"
    )


def test_many_rewards_that_overflowed_are_counted_and_the_batch_is_as_it_was() -> None:
    rows = batch(*[rollout("a", "q" * 500, reward=math.inf, advantage=math.nan) for _ in range(20)])
    report = cd.rollout_report(rows)
    assert report.values["reward/n_unscored"] == 20.0
    assert "reward/mean" not in report.values
    assert report.not_measured["reward"] == (
        "no rollout has a usable reward: 20 of 20 are NaN, infinite or beyond 1e150"
    )
    assert report.overflowed == report.notes[:1]
    assert report.notes[0].count("reward inf of rollout") == 8
    assert ", and 12 more. No mean" in report.notes[0]
    assert len(report.notes[0]) < 1200
    assert [r.reward for r in rows] == [math.inf] * 20


def test_many_environments_leave_the_smallest_without_numbers_of_their_own() -> None:
    sizes = {f"e{i:03d}": 3 if i in (7, 250) else 1 + i % 2 for i in range(300)}
    rows = batch(*[rollout("a", name, environment=name, reward=1.0) for name, n in sizes.items() for _ in range(n)])
    report = cd.rollout_report(rows)
    kept = {name.split("/")[1] for name in report.values if name.startswith("env/")}
    # The two of three rollouts, then the first thirty of those with two.
    assert kept == {"e007", "e250", *[name for name, n in sizes.items() if n == 2][:30]}
    assert {name.split("/")[1] for name in report.not_measured if name.startswith("env/")} <= kept
    assert report.values["n_rollouts"] == sum(sizes.values())
    assert "env/: 268 of 300 environments have no numbers of their own" in report.notes[-1]
    few = cd.rollout_report(batch(*[rollout("a", 0, environment=name) for name in list(sizes)[:32]]))
    assert {name.split("/")[1] for name in few.values if name.startswith("env/")} == set(list(sizes)[:32])
    assert not [note for note in few.notes if note.startswith("env/")]


def test_names_of_environments_stay_apart_and_short() -> None:
    names = ["a/b", "a%2Fb", "100%", "x" * 5000, "x" * 4999 + "y", "\ud800" * 200]
    values = cd.rollout_metrics(batch(*[rollout("a", 0, environment=n, reward=float(i)) for i, n in enumerate(names)]))
    means = {name: value for name, value in values.items() if re.fullmatch("env/[^/]+/reward/mean", name)}
    assert sorted(means.values()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert max(map(len, means)) < 130
    shown = {unquote(name.split("/")[1]): value for name, value in means.items()}
    assert [shown[name] for name in names[:3]] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("length", "kept"), [(97, "%2F"), (98, ""), (99, ""), (100, "")])
def test_the_name_of_an_environment_is_not_cut_inside_of_an_escape(length: int, kept: str) -> None:
    assert re.fullmatch(f"x{{{length}}}{kept}~[0-9a-f]{{8}}", environment_name("x" * length + "/" + "y" * 20))


def test_a_graded_success_label_is_refused_by_its_rollout() -> None:
    with pytest.raises(MetricError, match=r"success label of rollout 1 \(group 'g'\) is 0.7"):
        cd.rollout_metrics(batch(rollout("a", success=True), rollout("b", success=0.7)))  # type: ignore[arg-type]


def test_rewards_that_the_trainer_could_not_score_are_left_out_and_counted() -> None:
    values = cd.rollout_metrics(
        batch(*[rollout("a", i // 2, reward=r) for i, r in enumerate([None, 1.0, math.nan, 0.0])])
    )
    assert values["reward/n_unscored"] == 2.0
    assert values["reward/mean"] == 0.5
    report = cd.rollout_report(batch(rollout("a", 0, reward=1.0), rollout("a", 1, reward=1.0)))
    assert report.not_measured["reward/within_group_std"] == "no group has two scored rollouts"
    assert report.values["reward/n_single_groups"] == 2.0


def test_a_regex_out_of_time_leaves_a_gap_and_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapsediag.metrics.format_regex.BUDGET_SECONDS", 1)
    rows = batch(*[rollout("a" * 64) for _ in range(20)])
    report = cd.rollout_report(rows, format=cd.RegexFormat(r"(a+)+b", seconds=0.5))
    assert "backtracks" in report.not_measured["format"]
    assert not [name for name in report.values if name.startswith("format/")]


def test_a_tokenizer_that_only_decodes_counts_no_tokens_of_text() -> None:
    class Decodes:
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(chr, ids))

    rows = batch(rollout("two words", 0), rollout(output_ids=ids("abc"), group=1))
    report = cd.rollout_report(rows, tokenizer=Decodes())
    assert report.values["length_words/mean"] == 2.5
    assert report.values["reward/n_unscored"] == 2.0


def test_the_batch_is_not_changed() -> None:
    before = [(r.turns, r.reward, dict(r.rewards), r.success) for r in PLANTED]
    state = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    cd.rollout_metrics(PLANTED, tokenizer=Letters())
    assert before == [(r.turns, r.reward, dict(r.rewards), r.success) for r in PLANTED]
    assert state == np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    "unit",
    ["<think>", "</think><answer>", "<search>", "</search>", "<tool_call>{", "\\boxed{", "7,", "a ", "<information>"],
)
def test_a_long_line_of_anything_goes_through_in_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    start = time.process_time()
    cd.rollout_metrics(batch(rollout(text, context=text), rollout("<think>" + text, context=text)))
    assert time.process_time() - start < 10.0  # quadratic time would be minutes


def test_environments_may_be_numbers() -> None:
    """Of a data set's own, also out of numpy; in a record they are text as any name."""
    rollouts = tuple(
        cd.Rollout(turns=(cd.Turn(context_ids=[1], output_ids=[2]),), group=0, reward=float(i), environment=name)
        for i, name in enumerate((7, np.int64(8)))  # type: ignore[arg-type]
    )
    values = cd.rollout_metrics(cd.RolloutBatch(step=0, rollouts=rollouts))
    assert (values["env/7/reward/mean"], values["env/8/reward/mean"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (r"regex:.*<answer>\d+</answer>", ["whole output", "(?s)"]),
        (cd.RegexFormat(r"<answer>.+\n", search=True), ["(?s)"]),
        (r"regex:(?s).*<answer>[a-z]</answer>", []),
        ("tags:think,answer", []),
        (r"regex:(?s).*<answer>\d+</answer>", None),
        (re.compile(r".*<answer>\d</answer>", re.DOTALL), None),
    ],
)
def test_a_declared_format_that_no_output_has_is_told(form: Any, said: list[str] | None) -> None:
    """said: the advice that the note ends with; None where one of the two outputs has the format."""
    outputs = batch(rollout("2+2=4\nso\n<answer>4</answer>"), rollout("or\n<answer>x"))
    report = rollout_report(outputs, format=form)
    assert report.values["format/valid_fraction"] == (0.0 if said is not None else 0.5)
    notes = [note for note in report.notes if "no output has the declared format" in note]
    assert len(notes) == (said is not None)
    if notes and said is not None:
        assert [word for word in ("whole output", "(?s)") if word in notes[0]] == said
